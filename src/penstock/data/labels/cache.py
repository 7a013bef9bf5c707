# SPDX-License-Identifier: Apache-2.0
"""Labels that were read from a dataset once, kept in a file beside its folder.

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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.fingerprint import fingerprint_of
from penstock.data.labels.cache_key import (
    UntoldError,
    dataset_key,
    is_plain_subset,
    is_unchanged,
    value_key,
)
from penstock.data.labels.of_sample import ReadLabels
from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError
from penstock.opening import open_file
from penstock.whole_file import refuse_special

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LabelCache"]

_FORMAT: Final = 2
_DEEPEST: Final = 32  # datasets made of datasets
_PLACES: Final = ("root", "path")


class LabelCache:
    """The file for the labels of one dataset, as one rule reads them.

    Attributes:
        path: Of the file; None if there is no place for it.
        is_certain: Whether what is in the file needs no comparison with samples: the dataset has a
            fingerprint, nothing changes its samples, and no function of the user's reads them.
        why_not: Why there is no file, if the user wanted one.
    """

    def __init__(
        self,
        dataset: Any,  # noqa: ANN401
        get_label: Callable[[Any], Any] | None,
        column: str | int | None,
        place: bool | str | os.PathLike[str],
    ) -> None:
        """Find the place; nothing is written yet.

        Args:
            dataset: With a length.
            get_label: How the user reads a label from a sample.
            column: The name that the user gave.
            place: True for beside the dataset, False for nowhere; a folder, or a file `*.npz`.

        Raises:
            ConfigError: `place` is none of these, or a file that holds something else.
        """
        if not isinstance(place, (bool, str, os.PathLike)):
            raise ConfigError(f"cache is True, False, a folder or a file *.npz; got {place!r}.")
        self.is_certain = is_unchanged(dataset) and get_label is None
        self._dataset, self._length = dataset, len(dataset)
        self._asked = (get_label, column, place)
        self.why_not = ""
        try:
            rule = None if get_label is None else value_key(get_label)
        except UntoldError as error:  # another function of that name would be given its labels
            place, rule = False, None
            self.why_not = f"what get_label depends on cannot be told ({error})"
        description = {
            "format": _FORMAT,
            "dataset": dataset_key(dataset),
            "fingerprint": fingerprint_of(dataset),
            "get_label": rule,
            "column": column,
        }
        self._description = json.dumps(description, sort_keys=True)
        key = hashlib.blake2b(self._description.encode(), digest_size=8).hexdigest()
        self._is_asked_for = not isinstance(place, bool)
        self.path = _path(dataset, place, key)
        if self.path is None and not self.why_not and place:
            self.why_not = "no folder of the dataset is known: give cache='folder'"
        if self._is_asked_for:
            _check_ours(self.path)

    def load(self) -> ReadLabels | None:
        """Return the labels in the file, or for a subset those of the whole dataset's file.

        None if there is no file, or it is another's, or damaged.
        """
        return self._own() or self._of_whole()

    def _own(self) -> ReadLabels | None:
        if self.path is None:
            return None
        try:
            # Opened here: numpy leaves the closing of a file that is no zip to the collector.
            with open_file(self.path) as raw, np.load(raw, allow_pickle=False) as file:
                if str(file["description"]) != self._description:
                    return None
                values = file["values"]
                labels = RaggedArray(values, file["offsets"]) if "offsets" in file else values
                names = file.get("names")
        except Exception:  # no file, or of a zip, of numpy, of the arrays: it is read anew
            return None
        kept = ReadLabels(labels, names)
        return kept if _is_whole(kept, self._length) else None

    def _of_whole(self) -> ReadLabels | None:
        if self.path is None or not is_plain_subset(self._dataset):
            return None
        try:
            indices = np.asarray(self._dataset.indices)
            whole = LabelCache(self._dataset.dataset, *self._asked).load()
            is_of_integers = indices.ndim == 1 and indices.dtype.kind in "iu"
            return whole.chosen(indices) if whole is not None and is_of_integers else None
        except Exception:  # indices that do not fit: reading says it
            return None

    def save(self, read: ReadLabels) -> bool:
        """Write the file, or leave it where that is not possible; return whether it is there.

        Warns:
            UserWarning: the user named the place, and it cannot be written to.
        """
        if self.path is None:
            return False
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
            self.why_not = f"{self.path} cannot be written to ({error}): give cache='folder'"
            if self._is_asked_for:
                warnings.warn(
                    f"labels_of could not keep the labels in {self.path}: {error}. They will be "
                    "read from the samples again next time; name another place by `cache=`.",
                    stacklevel=3,
                )
            return False
        return True

    def _write(self, arrays: dict[str, Any]) -> None:
        assert self.path is not None
        if self._is_asked_for:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        refuse_special(self.path)
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


def _check_ours(path: Path | None) -> None:
    """Raise unless a file is one of labels, or there is none: it would be overwritten."""
    if path is None or path.name.startswith(".penstock-labels-"):
        return
    try:
        with open_file(path) as raw, np.load(raw, allow_pickle=False) as file:
            if '"fingerprint"' in str(file["description"]):
                return
    except OSError:  # none there, or none that could be overwritten either
        return
    except Exception as error:
        reason: Exception | None = error
    else:
        reason = None
    raise ConfigError(
        f"{path} holds something else than labels that labels_of kept, and would be overwritten: "
        "name another file by `cache=`, or delete this one."
    ) from reason


def _path(dataset: Any, place: bool | str | os.PathLike[str], key: str) -> Path | None:  # noqa: ANN401
    if isinstance(place, bool):
        data = _data_of(dataset, 0) if place else None
        # Beside the folder, not within: what is in there is listed by datasets.
        return None if data is None else data.with_name(f".penstock-labels-{data.name}-{key}.npz")
    asked = Path(os.fsdecode(place))
    return asked if asked.suffix == ".npz" else asked / f".penstock-labels-{key}.npz"


def _data_of(dataset: Any, depth: int) -> Path | None:  # noqa: ANN401
    """Return the folder or file of a dataset, or of the first of those within that has one."""
    if dataset is None or depth > _DEEPEST:
        return None
    kept = [getattr(dataset, name, None) for name in _PLACES]
    kept.append(getattr(getattr(dataset, "store", None), "path", None))
    for place in kept:
        if (data := _existing(place)) is not None:
            return data
    parts = getattr(dataset, "datasets", None)
    if isinstance(parts, (list, tuple, dict)):
        within = list(parts.values()) if isinstance(parts, dict) else list(parts)
    else:
        within = [getattr(dataset, "dataset", None)]
    return next((found for part in within if (found := _data_of(part, depth + 1))), None)


def _existing(place: Any) -> Path | None:  # noqa: ANN401
    """A path with a name; None for what is not there, as a database's, and for a whole disk."""
    if not isinstance(place, (str, os.PathLike)) or not place:
        return None
    try:
        path = Path(os.path.abspath(os.fsdecode(place)))  # `.` has no name, `..` not its own
        return path if path.name and path.exists() else None
    except (OSError, ValueError):
        return None
