# SPDX-License-Identifier: Apache-2.0
"""Labels that were read from a dataset once, kept in a file beside it.

A file is written under a name of its own and then renamed, so that readers see all of it or none,
and of two processes that write at once the later one's, which is the same, stays. It holds arrays
and a text, never a pickle: reading it runs nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.fingerprint import fingerprint_of
from penstock.data.labels.of_sample import ReadLabels
from penstock.data.labels.search import length_of
from penstock.data.ragged import RaggedArray

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LabelCache"]

_FORMAT: Final = 1
_DEEPEST: Final = 32  # datasets made of datasets
_PLACES: Final = ("root", "path")
_SPLITS: Final = ("split", "train", "image_set", "subset", "fold", "mode", "year")


class LabelCache:
    """The file for the labels of one dataset, as one rule reads them.

    Attributes:
        path: Of the file; None if there is no place for it.
        is_certain: Whether what is in the file needs no comparison with samples: the dataset has a
            fingerprint, and nothing that the user's own function depends on may have changed.
    """

    def __init__(
        self,
        dataset: Any,  # noqa: ANN401
        get_label: Callable[[Any], Any] | None,
        column: str | int | None,
        place: bool | str | os.PathLike[str],
    ) -> None:
        """Find the place; nothing is read or written yet.

        Args:
            dataset: With a length.
            get_label: How the user reads a label from a sample.
            column: The name that the user gave.
            place: True for beside the dataset, False for nowhere; a folder, or a file `*.npz`.
        """
        fingerprint = fingerprint_of(dataset)
        self.is_certain = _is_fingerprinted(dataset) and get_label is None
        self._length = len(dataset)
        description = {
            "format": _FORMAT,
            "dataset": _shape_of(dataset, 0),
            "fingerprint": fingerprint,
            "get_label": _named(get_label),
            "column": column,
        }
        self._description = json.dumps(description, sort_keys=True)
        key = hashlib.blake2b(self._description.encode(), digest_size=8).hexdigest()
        self._is_asked_for = not isinstance(place, bool)
        self.path = _path(dataset, place, f".penstock-labels-{key}.npz")

    def load(self) -> ReadLabels | None:
        """Return the labels in the file; None if there is none, or it is another's, or damaged."""
        if self.path is None or not self.path.is_file():
            return None
        try:
            # Opened here: numpy leaves the closing of a file that is no zip to the collector.
            with self.path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                if str(file["description"]) != self._description:
                    return None
                values = file["values"]
                labels = RaggedArray(values, file["offsets"]) if "offsets" in file else values
                names = file.get("names")
        except Exception:  # of a zip, of numpy, of the arrays: whatever it is, it is read anew
            return None
        kept = ReadLabels(labels, names)
        return kept if _is_whole(kept, self._length) else None

    def save(self, read: ReadLabels) -> None:
        """Write the file, or leave it where that is not possible.

        Warns:
            UserWarning: the user named the place, and it cannot be written to.
        """
        if self.path is None:
            return
        arrays: dict[str, Any] = {"description": np.array(self._description)}
        labels = read.labels
        if isinstance(labels, RaggedArray):
            arrays |= {"values": labels.values, "offsets": labels.offsets}
        else:
            arrays["values"] = labels
        if read.names is not None:
            arrays["names"] = read.names
        try:
            self._write(arrays)
        except OSError as error:
            if self._is_asked_for:
                warnings.warn(
                    f"labels_of could not keep the labels in {self.path}: {error}. They will be "
                    "read from the samples again next time; name another place by `cache=`.",
                    stacklevel=3,
                )

    def _write(self, arrays: dict[str, Any]) -> None:
        assert self.path is not None
        if self._is_asked_for:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(f".penstock-labels-{uuid.uuid4().hex}.partial")
        try:
            with new.open("xb") as file:
                np.savez(file, allow_pickle=False, **arrays)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.path)
        finally:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)


def _is_whole(kept: ReadLabels, length: int) -> bool:
    """Whether the arrays of a file are what is written to one."""
    labels, names = kept
    values = labels.values if isinstance(labels, RaggedArray) else labels
    if values.dtype != np.int64 or values.ndim != 1 or len(labels) != length:
        return False
    if names is None or not len(values):
        return True
    return names.ndim == 1 and values.min() >= 0 and bool(values.max() < len(names))


def _is_fingerprinted(dataset: Any) -> bool:  # noqa: ANN401
    """Whether a fingerprint speaks for the labels: the dataset's own, or of what it is a subset of.

    Anything else around a dataset may give its samples other labels.
    """
    for _ in range(_DEEPEST):
        if isinstance(getattr(dataset, "fingerprint", None), str):
            return True
        if _digest(getattr(dataset, "indices", None)) is None:
            return False
        dataset = getattr(dataset, "dataset", None)
    return False


def _path(dataset: Any, place: bool | str | os.PathLike[str], name: str) -> Path | None:  # noqa: ANN401
    if isinstance(place, bool):
        folder = _folder_of(dataset, 0) if place else None
        return None if folder is None else folder / name
    asked = Path(place)
    return asked if asked.suffix == ".npz" else asked / name


def _folder_of(dataset: Any, depth: int) -> Path | None:  # noqa: ANN401
    """Return the folder that a dataset, or the first of those within that has one, lies in."""
    if dataset is None or depth > _DEEPEST:
        return None
    for name in _PLACES:
        if (folder := _existing(getattr(dataset, name, None))) is not None:
            return folder
    # A store's folder is its own: what lies in there is the store's.
    store = _existing(getattr(getattr(dataset, "store", None), "path", None))
    if store is not None:
        return store.parent
    parts = getattr(dataset, "datasets", None)
    if isinstance(parts, (list, tuple, dict)):
        within = list(parts.values()) if isinstance(parts, dict) else list(parts)
    else:
        within = [getattr(dataset, "dataset", None)]
    return next((found for part in within if (found := _folder_of(part, depth + 1))), None)


def _existing(place: Any) -> Path | None:  # noqa: ANN401
    """A folder, or the one that a file is in; None for what is not there, as a database's name."""
    if not isinstance(place, (str, os.PathLike)) or not place:
        return None
    path = Path(os.fsdecode(place))
    try:
        return path if path.is_dir() else path.parent if path.is_file() else None
    except (OSError, ValueError):
        return None


def _shape_of(dataset: Any, depth: int) -> Any:  # noqa: ANN401
    """Return what a dataset is made of, as JSON: classes, lengths, and which samples of which."""
    if dataset is None or depth > _DEEPEST:
        return None
    kind = type(dataset)
    shape: dict[str, Any] = {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "length": length_of(dataset),
    }
    for name in _SPLITS:  # of one folder and length there may be several
        if isinstance(value := getattr(dataset, name, None), (str, int)):
            shape[name] = value
    shape["indices"] = _digest(getattr(dataset, "indices", None))
    parts = getattr(dataset, "datasets", None)
    if isinstance(parts, (Mapping, list, tuple)):
        within = list(parts.values()) if isinstance(parts, Mapping) else parts
        shape["parts"] = [_shape_of(part, depth + 1) for part in within]
    if (inner := getattr(dataset, "dataset", None)) is not None:
        shape["of"] = _shape_of(inner, depth + 1)
    return shape


def _digest(values: Any) -> str | None:  # noqa: ANN401
    if values is None:
        return None
    try:
        array = np.ascontiguousarray(np.asarray(values))
        return hashlib.blake2b(array.astype(np.int64).data, digest_size=8).hexdigest()
    except Exception:  # not numbers: keys of another kind
        try:
            return hashlib.blake2b(repr(list(values)).encode(), digest_size=8).hexdigest()
        except Exception:
            return None


def _named(function: Callable[[Any], Any] | None) -> str | None:
    """Return a function's name, with what tells it from others of that name, as all lambdas are."""
    if function is None:
        return None
    named = function if hasattr(function, "__qualname__") else type(function)
    code = getattr(function, "__code__", None)
    text = "" if code is None else f"{code.co_code.hex()} {code.co_names} {_constants(code)}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"{named.__module__}.{named.__qualname__} {digest}"


def _constants(code: Any) -> list[Any]:  # noqa: ANN401
    # A function within prints its address, which is another one in every process.
    return [
        (_constants(constant), constant.co_code.hex()) if hasattr(constant, "co_code") else constant
        for constant in code.co_consts
    ]
