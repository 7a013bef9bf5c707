# SPDX-License-Identifier: Apache-2.0
"""Labels read in blocks, so that counting millions of them takes little memory of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.data.ragged import RaggedArray
from penstock.sampling.class_codes import ClassCodes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["LabelBlock", "LabelBlocks"]

# Samples and labels at a time: a few MiB of temporaries, and numpy's cost per call is gone.
_BLOCK: Final = 1 << 18


class LabelBlock(NamedTuple):
    """The labels of some samples that follow one another.

    Attributes:
        start: The first sample.
        stop: The one behind the last.
        rows: Whose label it is, counted from `start`; int64 of shape (labels,), ascending.
        codes: Which class it is, as a position in `LabelBlocks.classes`; int64, shape (labels,).
    """

    start: int
    stop: int
    rows: NDArray[np.int64]
    codes: NDArray[np.int64]

    def once(self, num_classes: int) -> LabelBlock:
        """Return the block with each class of a sample once, ascending within the sample."""
        num_bits = num_classes.bit_length()
        keys = (self.rows << num_bits) | self.codes  # a shift is undone faster than a product
        keys.sort()
        keys = keys[np.diff(keys, prepend=-1) != 0]
        codes = keys & ((1 << num_bits) - 1)
        return LabelBlock(self.start, self.stop, keys >> num_bits, codes)


class LabelBlocks:
    """Labels as positions in the list of classes that occur, a block of samples at a time.

    Attributes:
        classes: The labels' own values, each once, ascending; shape (classes,).
        num_samples: Number of samples.
        num_labels: Number of labels; that of samples, where each has one.
        is_ragged: Whether a sample may have any number of labels.

    Example:
        >>> blocks = LabelBlocks(RaggedArray.of([[7, 7, 3], [], [3]]))
        >>> blocks.classes, [block.codes for block in blocks]
        (array([3, 7]), [array([1, 1, 0, 0])])
    """

    def __init__(self, labels: NDArray[Any] | RaggedArray) -> None:
        """Find the classes. The labels are kept as they are, not copied."""
        self.is_ragged = isinstance(labels, RaggedArray)
        self.num_samples = len(labels)
        self._values = labels.values if isinstance(labels, RaggedArray) else labels
        self._offsets = labels.offsets if isinstance(labels, RaggedArray) else None
        self.num_labels = len(self._values)
        self._codes = ClassCodes(self._values) if self.num_labels else None
        self.classes: NDArray[Any] = self._values if self._codes is None else self._codes.classes

    def __iter__(self) -> Iterator[LabelBlock]:
        """Yield the blocks, in order of the samples."""
        start = 0
        while start < self.num_samples:
            stop = self._end_of_block(start)
            if self._offsets is None:
                rows = np.arange(stop - start, dtype=np.int64)
                values = self._values[start:stop]
            else:
                counts = np.diff(self._offsets[start : stop + 1])
                rows = np.repeat(np.arange(stop - start, dtype=np.int64), counts)
                values = self._values[self._offsets[start] : self._offsets[stop]]
            codes = np.empty(0) if self._codes is None else self._codes.of(values)
            yield LabelBlock(start, stop, rows, codes.astype(np.int64))
            start = stop

    def _end_of_block(self, start: int) -> int:
        stop = min(start + _BLOCK, self.num_samples)
        if self._offsets is None:
            return stop
        # One sample at least, however many labels it has.
        labels = int(self._offsets[start]) + _BLOCK
        return max(start + 1, min(stop, int(np.searchsorted(self._offsets, labels, "right")) - 1))
