# SPDX-License-Identifier: Apache-2.0
"""What datasets share that make a sample of several: whose partners come from where.

The partners of a sample are drawn from the sample's own generator, uniformly over the dataset. So
they depend on (seed, epoch, position) alone, like everything else that is drawn for it.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, ClassVar, Final

from penstock.data.dataset import (
    Dataset,
    IterableDataset,
    announce_epoch,
    read_each,
)
from penstock.data.fingerprint import fingerprint_of
from penstock.data.labels.known import known_labels
from penstock.data.names import describe_sample
from penstock.errors import ConfigError
from penstock.faults import UnreadSample, annotate, note_unread
from penstock.randomness.samples import sample_rng
from penstock.vision.arguments import checked_number, checked_transform, checked_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["PartneredDataset"]

_DEEPEST: Final = 8  # datasets around datasets


class PartneredDataset(Dataset[Any]):
    """A dataset around another, each of whose samples is made of several of the other's.

    A subclass defines `_combined(index)` and `_alone(sample)`.

    Attributes:
        dataset: The other one.
        transform: Applied to what was made; None is nothing.

    Concurrency:
        As the other dataset and the transform. It pickles if they do.
    """

    _shows = ("dataset", "length", "probability")
    _shows_unless: ClassVar = {"transform": None, "until_epoch": None}

    def __init__(
        self,
        dataset: Any,  # noqa: ANN401 - anything with an index and a length
        *,
        probability: float,
        transform: Callable[[Any], Any] | None,
        until_epoch: int | None,
    ) -> None:
        """Keep the dataset.

        Raises:
            ConfigError: the dataset is not map-style, or an argument is out of its range.
        """
        kind = type(self).__name__
        is_map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if isinstance(dataset, IterableDataset) or not is_map_style:
            raise ConfigError(
                f"{kind} draws partners by index, so its dataset needs __getitem__ and __len__; "
                f"{type(dataset).__name__} does not have both"
            )
        if transform is not None:
            checked_transform("transform is None, or", transform)
        self.dataset = dataset
        self.probability = checked_number("probability", probability, 0, 1)
        self.transform = transform
        self.until_epoch = (
            None if until_epoch is None else checked_whole("until_epoch", until_epoch, 0)
        )
        self._epoch = 0

    def __len__(self) -> int:
        """Return the number of samples: as many as the other dataset has."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401 - as the other dataset's
        """Return sample `index` with what its partners add, or by itself.

        Raises:
            IndexError: not -length <= index < length.
            TypeError: it is no integer.
            Exception: what reading it or a partner raises, with a note naming the partner. A loader
                with `on_error="skip"` or `"replace"` makes the sample with other partners.
        """
        position = self._checked(index)
        if sample_rng().random() < self.probability and self._is_on():
            sample = self._combined(position)
            return sample if self.transform is None else self.transform(sample)
        return self._whole(self.dataset[position])

    # `__getitems__` is there for subsets of other libraries, which read batches and know nothing of
    # streams. A loader had better read sample by sample, to say which one failed.
    reads_each = True

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples at `indices`, each made under its own random numbers."""
        return read_each(self, indices)

    def _combined(self, index: int) -> Any:  # noqa: ANN401
        raise NotImplementedError

    def _alone(self, sample: Any) -> Any:  # noqa: ANN401
        raise NotImplementedError

    def _whole(self, sample: Any) -> Any:  # noqa: ANN401
        """What is returned for a sample that gets no partners."""
        sample = self._alone(sample)
        return sample if self.transform is None else self.transform(sample)

    def _is_on(self) -> bool:
        return self.until_epoch is None or self._epoch < self.until_epoch

    def _checked(self, index: Any) -> int:  # noqa: ANN401
        try:
            position = operator.index(index)
        except TypeError:
            raise TypeError(f"an index of a dataset is an integer, not {index!r}.") from None
        length = len(self)
        if not -length <= position < length:
            raise IndexError(
                f"index {position} is out of range for a dataset of {length} samples "
                f"({-length} <= index < {length})."
            )
        return position % length

    def _partners(self, count: int) -> list[int]:
        drawn: list[int] = sample_rng().integers(len(self), size=count).tolist()
        return drawn

    def _partner(self, partner: int, index: int) -> Any:  # noqa: ANN401
        """Read a sample of the other dataset that is to be joined with sample `index`."""
        try:
            return self.dataset[partner]
        except Exception as error:
            name = describe_sample(self.dataset, partner)
            drawn, own = self._named(partner, name), self._named(index, self.describe(index))
            annotate(error, f"in {drawn}, which {type(self).__name__} drew as a partner of {own}")
            note_unread(error, UnreadSample(partner, name, is_partner=True))
            raise

    @staticmethod
    def _named(index: int, name: str | None) -> str:
        return f"sample {index}" + ("" if name is None else f" ({name})")

    def set_epoch(self, epoch: int) -> None:
        """Take note of the epoch, and tell the other dataset; the loader calls it.

        Args:
            epoch: Its number, from 0.
        """
        self._epoch = epoch
        announce_epoch(self.dataset, epoch)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of each class, as the other dataset has them; empty if it has none."""
        return tuple(self._of_inner("class_names") or ())

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Class of each name."""
        return {name: number for number, name in enumerate(self.class_names)}

    @property
    def labels(self) -> Any:  # noqa: ANN401 - an array, or a RaggedArray
        """The other dataset's labels, of each sample without its partners; None without any."""
        labels = getattr(self.dataset, "labels", None)
        return known_labels(self.dataset) if labels is None else labels

    @property
    def fingerprint(self) -> str | None:
        """The other dataset's fingerprint; None without one."""
        return fingerprint_of(self.dataset)

    def describe(self, index: int) -> str | None:
        """Return what errors call a sample: as in the other dataset, partners left out."""
        return describe_sample(self.dataset, index)

    def _of_inner(self, name: str) -> Any:  # noqa: ANN401
        """An attribute of the nearest dataset within that has it, through subsets of it."""
        dataset = self.dataset
        for _ in range(_DEEPEST):
            if (found := getattr(dataset, name, None)) is not None:
                return found
            dataset = getattr(dataset, "dataset", None)
        return None
