# SPDX-License-Identifier: Apache-2.0
"""`PackedCollate`: packs documents into rows of a fixed number of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np

from penstock.collate import Collator
from penstock.data.ragged import RaggedArray
from penstock.errors import CollateError, ConfigError
from penstock.faults import annotate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.collate import BatchMemory

_TOKENS: Final = "input_ids"
_PER_TOKEN: Final = ("input_ids", "labels")


class PackedCollate:
    """Collate function that packs documents into rows; several documents share a row.

    A sample is a document: a list or 1-D array of token IDs, or a dict with "input_ids". Documents
    keep their order. A row takes as many of them as fit into `max_tokens`, then the next row
    begins. With the batches of a `PackingSampler`, these are the rows that it planned. If a loader's
    `on_error` leaves bad documents out, a batch may have fewer rows; with "replace" also more, as
    others may be longer. The batch is a dict:

    - `input_ids`: int64, (rows, max_tokens): the documents of a row, then `pad_id`.
    - `labels`: int64, same shape: what is to be predicted. These are the tokens, or the "labels" of
      samples that are dicts, one per token. The first token of each document cannot be predicted:
      it has `ignore_index`, as padding has.
    - `position_ids`: int64, same shape: from 0 in each document.
    - `document_ids`: int32, same shape: 0 for the first document of a row, 1 for the second; -1 in
      padding.
    - `cu_seqlens`: int32, (sequences + 1,): where each document begins in the flattened batch, and
      where the last one ends, as flash-attention takes it. The padding of a row is a sequence, too.
    - `max_seqlen`: int, the length of the longest sequence.
    - `num_tokens`: int, how many labels are not `ignore_index`. Divide a sum of losses by it.

    Other values of samples that are dicts go through the default collate: one value per document.

    In a loader of Penstock, the arrays are made in the slot that goes to the main process; a loader
    of tensors gives tensors. Called directly, or by torch's own loader, it returns arrays.

    Example:
        >>> batch = PackedCollate(max_tokens=6)([[5, 6, 7], [8, 9], [3, 4]])
        >>> batch["input_ids"]
        array([[5, 6, 7, 8, 9, 0],
               [3, 4, 0, 0, 0, 0]])
        >>> batch["labels"][0], batch["position_ids"][0]
        (array([-100,    6,    7, -100,    9, -100]), array([0, 1, 2, 0, 1, 0]))
        >>> batch["document_ids"][0], batch["cu_seqlens"], batch["num_tokens"]
        (array([ 0,  0,  0,  1,  1, -1], dtype=int32), array([ 0,  3,  5,  6,  8, 12], dtype=int32), 4)
    """  # noqa: E501 - what Python prints

    def __init__(
        self,
        max_tokens: int,
        *,
        layout: Literal["rows", "flat"] = "rows",
        shift_labels: bool = False,
        pad_id: int = 0,
        ignore_index: int = -100,
    ) -> None:
        """Choose the form of the batch.

        Args:
            max_tokens: Tokens of a row. A longer document is an error: give the same number to
                `TokenFile(max_tokens=)` or `PackingSampler`.
            layout: "rows" is as above. "flat" puts all documents into one row without padding,
                arrays of shape (1, tokens). It is for models that find the documents by
                `cu_seqlens` or `position_ids` alone; Hugging Face calls it padding-free.
            shift_labels: False: the label at a place is the token there, for models that shift
                labels themselves, as Hugging Face's do. True: the label is the next token, to be
                compared with the logits at the same place; then the last token of each document,
                not the first, has `ignore_index`.
            pad_id: Token in padding.
            ignore_index: Label of what is not predicted; torch's cross_entropy leaves out -100.

        Raises:
            ConfigError: `max_tokens` is less than 1, or the layout is unknown.
        """
        if max_tokens < 1:
            raise ConfigError(f"{max_tokens=}: a row has 1 token or more.")
        if layout not in ("rows", "flat"):
            raise ConfigError(f"layout is 'rows' or 'flat', not {layout!r}.")
        self.max_tokens = max_tokens
        self.layout = layout
        self.shift_labels = shift_labels
        self.pad_id = pad_id
        self.ignore_index = ignore_index

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Return the batch in memory of its own.

        Raises:
            CollateError: a document has more than `max_tokens` tokens; other values of the samples
                differ in shape; or a sample has more or fewer labels than tokens.
            TypeError: a sample is not a document.
        """
        return self.collate_into(samples, Collator(np.empty))

    def collate_into(self, samples: Sequence[Any], out: BatchMemory) -> dict[str, Any]:
        """Return the same batch in memory from `out`."""
        documents = _documents(samples)
        rows = self._rows(documents.lengths)
        shape = len(rows.num_documents), rows.width
        ids, labels, positions = (out.empty(shape, np.int64) for _ in range(3))
        document_ids = out.empty(shape, np.int32)
        rows.fill(ids, documents.tokens, self.pad_id)

        # Sequences: the documents of a row, then its padding.
        padding = rows.width - rows.num_tokens
        behind = np.cumsum(rows.num_documents)[padding > 0]
        lengths = np.insert(documents.lengths, behind, padding[padding > 0])
        cu_seqlens = out.empty((len(lengths) + 1,), np.int32)
        cu_seqlens[0] = 0
        np.cumsum(lengths, out=cu_seqlens[1:])
        starts = cu_seqlens[:-1]
        np.subtract(np.arange(ids.size), np.repeat(starts, lengths), out=positions.reshape(-1))
        first = np.cumsum(rows.num_documents) - rows.num_documents
        numbers = np.arange(len(documents.lengths)) - np.repeat(first, rows.num_documents)
        numbers = np.insert(numbers, behind, -1).astype(np.int32)
        document_ids.reshape(-1)[:] = np.repeat(numbers, lengths)

        wanted = documents.tokens if documents.labels is None else documents.labels
        rows.fill(labels, wanted, self.ignore_index)
        self._mask(labels.reshape(-1), cu_seqlens[np.append(True, lengths > 0)])
        made = {
            "input_ids": ids,
            "labels": labels,
            "position_ids": positions,
            "document_ids": document_ids,
            "cu_seqlens": cu_seqlens,
        }
        return {
            **{key: out.leaf(array) for key, array in made.items()},
            "max_seqlen": int(lengths.max()),
            "num_tokens": int(np.count_nonzero(labels != self.ignore_index)),
            **_beside(samples, out),
        }

    def _rows(self, lengths: NDArray[np.int64]) -> _Rows:
        """Return how many documents each row takes; CollateError if one is longer than a row."""
        if len(lengths) and lengths.max() > self.max_tokens:
            place = int(lengths.argmax())
            raise CollateError(
                f"{{first}} has {lengths[place]} tokens, and a row takes max_tokens="
                f"{self.max_tokens}. Cut long documents: TokenFile(path, max_tokens="
                f"{self.max_tokens}). Or leave them out: PackingSampler(..., too_long='drop').",
                (place, place),
            )
        if self.layout == "flat":
            total = lengths.sum(keepdims=True)
            return _Rows(int(total[0]), np.array([len(lengths)]), total)
        ends = np.append(0, np.cumsum(lengths))
        stops = [0]
        while stops[-1] < len(lengths):
            end = ends[stops[-1]] + self.max_tokens
            stops.append(int(np.searchsorted(ends, end, side="right")) - 1)
        return _Rows(self.max_tokens, np.diff(stops), np.diff(ends[stops]))

    def _mask(self, labels: NDArray[np.int64], bounds: NDArray[np.int32]) -> None:
        """Shift flat labels if asked to; mask those that no token of their sequence predicts."""
        if self.shift_labels:
            labels[:-1] = labels[1:].copy()
            labels[bounds[1:] - 1] = self.ignore_index
        else:
            labels[bounds[:-1]] = self.ignore_index


class _Documents(NamedTuple):
    """The documents of a batch, their values one after the other."""

    tokens: NDArray[np.int64]
    lengths: NDArray[np.int64]
    labels: NDArray[np.int64] | None


class _Rows(NamedTuple):
    """How many documents and tokens each row has."""

    width: int
    num_documents: NDArray[np.int64]
    num_tokens: NDArray[np.int64]

    def fill(self, out: NDArray[np.int64], values: NDArray[np.int64], padding: int) -> None:
        """Write values into rows, and padding behind them."""
        stop = 0
        for row, count in zip(out, self.num_tokens.tolist(), strict=True):
            row[:count] = values[stop : stop + count]
            row[count:] = padding
            stop += count


def _documents(samples: Sequence[Any]) -> _Documents:
    if isinstance(samples, RaggedArray):  # from a TokenFile: joined already
        return _Documents(samples.values, np.diff(samples.offsets), None)
    if not isinstance(samples[0], Mapping):
        return _Documents(*_joined(samples), None)
    tokens, lengths = _joined(_column(samples, _TOKENS))
    if "labels" not in samples[0]:
        return _Documents(tokens, lengths, None)
    labels, num_labels = _joined(_column(samples, "labels"))
    if wrong := np.flatnonzero(num_labels != lengths).tolist():
        place = wrong[0]
        raise CollateError(
            f"{{first}} has {lengths[place]} input_ids and {num_labels[place]} labels: a document "
            "needs one label per token.",
            (place, place),
        )
    return _Documents(tokens, lengths, labels)


def _column(samples: Sequence[Any], name: str) -> list[Any]:
    try:
        return [sample[name] for sample in samples]
    except (KeyError, TypeError, IndexError) as error:
        raise TypeError(
            "In a batch for PackedCollate, samples are all lists of token IDs, or all dicts with "
            f"{name!r}. One of this batch has no {name!r}; the first is {_described(samples[0])}."
        ) from error


def _described(sample: object) -> str:
    if isinstance(sample, Mapping):
        return f"a dict of {list(map(str, sample))}"
    return f"a {type(sample).__name__}"


def _joined(documents: Sequence[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the values of documents one after the other, and the documents' lengths."""
    arrays = [np.asarray(document) for document in documents]
    for place, array in enumerate(arrays):
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise TypeError(
                f"sample {place} of the batch is not a document: {_described(documents[place])} of "
                f"{array.dtype}, shape {array.shape}. It should be a list of token IDs, or a dict "
                "with them as 'input_ids'."
            )
    lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
    # An empty list became an array of floats.
    values = [array for array in arrays if array.size] or [np.empty(0, np.int64)]
    return np.concatenate(values, dtype=np.int64, casting="same_kind"), lengths


def _beside(samples: Sequence[Any], out: BatchMemory) -> dict[str, Any]:
    """Return the values that there are not per token, collated by the default."""
    if isinstance(samples, RaggedArray) or not isinstance(samples[0], Mapping):
        return {}
    keys = [key for key in samples[0] if key not in _PER_TOKEN]
    try:
        return {key: out.batch([sample[key] for sample in samples]) for key in keys}
    except CollateError as error:
        annotate(
            error,
            f"(PackedCollate stacks all values but {' and '.join(_PER_TOKEN)}. Leave out of the "
            "samples whatever else has a value per token, such as attention_mask)",
        )
        raise
