# SPDX-License-Identifier: Apache-2.0
"""`lengths_of`: how many tokens each document of a dataset has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.data.labels.known import has_columns
from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError
from penstock.summary import kind_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


def lengths_of(dataset: Any) -> NDArray[np.int32] | NDArray[np.int64]:  # noqa: ANN401
    """Return the number of tokens of each document, where possible without reading a token.

    Args:
        dataset: One of these:

            - a dataset with an attribute `lengths`, such as `TokenFile`
            - a Hugging Face dataset with a column "length", or else "input_ids", of which only
              the offsets are read
            - a list of documents: token IDs, or dicts with "input_ids"
            - a subset or a concatenation of these
            - the lengths themselves: an array or a list of integers

    Returns:
        int32 or int64, shape (len(dataset),); it may be the dataset's own array.

    Raises:
        ConfigError: the lengths are not known, or are not integers of 0 or more.

    Example:
        >>> from penstock.data import Subset
        >>> documents = [[1, 2, 3], [4], [5, 6]]
        >>> lengths_of(documents), lengths_of(Subset(documents, [2, 0]))
        (array([3, 1, 2]), array([2, 3]))
    """
    found = _found(dataset)
    if found is None:
        raise ConfigError(
            f"lengths_of does not know how many tokens the samples of {kind_of(dataset)} have. "
            "Give the dataset an attribute `lengths`, one integer per sample; or give an array of "
            "them, as np.fromiter(map(len, documents), int) makes it."
        )
    lengths = np.asarray(found)
    if lengths.ndim != 1 or (len(lengths) and lengths.dtype.kind not in "iu"):
        raise ConfigError(
            f"the lengths of {kind_of(dataset)} should be integers, one per document; got "
            f"{lengths.dtype} of shape {lengths.shape}."
        )
    if len(lengths) and lengths.min() < 0:
        place = int(lengths.argmin())
        raise ConfigError(
            f"document {place} of {kind_of(dataset)} has {lengths[place]} tokens: a length is 0 or "
            "more."
        )
    return lengths if lengths.dtype == np.int32 else lengths.astype(np.int64, copy=False)


def _found(dataset: Any) -> Any:  # noqa: ANN401
    if has_columns(dataset):
        return _of_columns(dataset)
    if (lengths := getattr(dataset, "lengths", None)) is not None and not callable(lengths):
        return lengths
    if isinstance(dataset, np.ndarray):
        return dataset
    if isinstance(dataset, RaggedArray):
        return np.diff(dataset.offsets)
    if isinstance(dataset, Sequence) and not isinstance(dataset, (str, bytes)):
        return [_length(number, sample) for number, sample in enumerate(dataset)]
    parts = getattr(dataset, "datasets", None)
    if isinstance(parts, (list, tuple)) and hasattr(dataset, "cumulative_sizes"):
        return np.concatenate([lengths_of(part) for part in parts])
    inner, indices = getattr(dataset, "dataset", None), getattr(dataset, "indices", None)
    if inner is not None and indices is not None:
        return lengths_of(inner)[np.asarray(indices, np.int64)]
    return None


def _length(number: int, sample: Any) -> int:  # noqa: ANN401
    if isinstance(sample, (int, np.integer)):
        return int(sample)
    try:
        return len(sample["input_ids"] if isinstance(sample, Mapping) else sample)
    except (TypeError, KeyError) as error:
        raise ConfigError(
            f"document {number} is a {type(sample).__name__}. It should be a list of token IDs, or "
            "a dict with 'input_ids'."
        ) from error


def _of_columns(dataset: Any) -> Any:  # noqa: ANN401
    """Return the lengths of a Hugging Face dataset's rows."""
    if dataset.format["type"] == "custom":
        raise ConfigError(
            "lengths_of cannot see how many tokens a transform makes (set_transform, "
            "with_transform). Tokenize with dataset.map, or give an array of lengths."
        )
    table = dataset.data.table
    name = next((name for name in ("length", "input_ids") if name in table.column_names), None)
    if name is None:
        raise ConfigError(
            "lengths_of looks for a column 'length' or 'input_ids', and the dataset has "
            f"{table.column_names}. Rename one of them, or give an array of lengths."
        )
    column = table.column(name)
    if column.null_count:
        raise ConfigError(f"{column.null_count} rows have no {name!r}: fill or filter them.")
    if name == "input_ids":
        import pyarrow.compute as pc  # type: ignore[import-untyped]  # it has no annotations

        column = pc.list_value_length(column)
    lengths = column.to_numpy()
    # Which rows `select`, `shuffle` and the like have left; not public, and there is no other way.
    mapping = dataset._indices
    return lengths if mapping is None else lengths[mapping.table.column(0).to_numpy()]
