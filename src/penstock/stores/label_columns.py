# SPDX-License-Identifier: Apache-2.0
"""Fields of annotations as labels, from a store's metadata, without reading a record."""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.stores.index import Index

COLUMNS: Final = "object_columns"
_NAME: Final = "name"  # as VOC's files call the class of an object
_MOST_CLASSES: Final = 1000  # a field of more texts numbers its objects, and has no classes


def packed_columns(columns: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Return the class of each object by each field, as JSON: about 100 bytes for 1,000 objects."""
    packed = {
        name: packed_numbers(values)
        for name, values in columns.items()
        if not len(values) or values.max() < _MOST_CLASSES
    }
    num_objects = max(map(len, columns.values()), default=0)
    return {"num_objects": num_objects, "zlib_base64_u32": packed}


def column_of(index: Index, name: str) -> NDArray[np.int64] | RaggedArray:
    """Return the classes of the records of an index by a field of their objects."""
    labels = index.labels
    nothing = {"num_objects": 0, "zlib_base64_u32": {}}
    said = from_metadata(index.metadata, COLUMNS, _are_columns, nothing)
    packed = said["zlib_base64_u32"]
    if labels is None or name not in (_NAME, *packed):
        columns = [] if labels is None else [_NAME, *sorted(packed)]
        raise ConfigError(
            f"there is no column {name!r}; there are {', '.join(map(repr, columns)) or 'none'}. "
            f"If objects have it, make the dataset with attributes=[{name!r}] or classes=[…], or "
            f"pack it by `penstock pack SRC DST --objects --attributes {name}`."
        )
    if isinstance(labels, np.ndarray):
        labels = RaggedArray(labels, np.arange(len(labels) + 1))
    if name == _NAME:
        values = labels.values
    elif said["num_objects"] != len(labels.values):
        raise ConfigError(
            f"column {name!r} is that of {said['num_objects']:,} objects, and the store has "
            f"{len(labels.values):,}: samples were left out when it was packed. labels_of(dataset, "
            f"get_label=...) reads every sample."
        )
    else:
        try:
            values = unpacked_numbers(packed[name], len(labels.values))
        except ValueError as error:
            raise StoreError(
                f"the column {name!r} in the metadata of the store is damaged: {error}."
            ) from error
    is_one_each = len(values) == len(labels) and bool((np.diff(labels.offsets) == 1).all())
    return values if is_one_each else RaggedArray(values, labels.offsets)


def attribute_names(metadata: Mapping[str, Any]) -> Mapping[str, Sequence[str]]:
    """Return the texts of the numbers of each attribute; raises as `from_metadata` does."""

    def is_good(said: Any) -> bool:  # noqa: ANN401
        return isinstance(said, dict) and all(map(are_names, said.values()))

    names: Mapping[str, Sequence[str]] = from_metadata(metadata, "attribute_names", is_good, {})
    return names


def from_metadata(
    metadata: Mapping[str, Any],
    name: str,
    is_good: Callable[[Any], bool],
    default: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Return what the metadata of a store say by a name of ours."""
    said = metadata.get(name, default)
    if not is_good(said):
        raise StoreError(f"the metadata {name!r} of the store are damaged: {said!r:.60}.")
    return said


def are_names(said: Any) -> bool:  # noqa: ANN401
    """Return whether it is a list of texts."""
    return isinstance(said, (list, tuple)) and all(isinstance(name, str) for name in said)


def _are_columns(said: Any) -> bool:  # noqa: ANN401
    match said:
        case {"num_objects": int(), "zlib_base64_u32": {}}:
            return not isinstance(said["num_objects"], bool)
    return False


def packed_numbers(numbers: NDArray[np.int64]) -> str:
    """Return numbers from 0 to 2**32 - 1, compressed."""
    data = zlib.compress(np.ascontiguousarray(numbers, "<u4").tobytes())
    return base64.b64encode(data).decode()


def unpacked_numbers(text: str, count: int) -> NDArray[np.int64]:
    """Return the numbers, in new memory."""
    try:
        data = base64.b64decode(text, validate=True)
        raw = zlib.decompressobj().decompress(data, 4 * count + 1)
    except (TypeError, binascii.Error, zlib.error) as error:
        raise ValueError(str(error)) from error
    if len(raw) != 4 * count:
        raise ValueError(f"they are not of {count} numbers")
    return np.frombuffer(raw, "<u4").astype(np.int64)
