# SPDX-License-Identifier: Apache-2.0
"""Classes in other shares than they have: evenly, or between that and as they are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from penstock.data.labels.known import class_names_of, labels_given_or_known
from penstock.data.ragged import RaggedArray
from penstock.deprecation import removed_arguments
from penstock.errors import ConfigError
from penstock.sampling.class_items import ClassItems, shuffled_rows
from penstock.sampling.samplers import CountedSampler, check_bool, checked_positive

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

Alpha = float | Literal["effective"]
"""How far classes are balanced: 0 not at all, 1 wholly; or by their effective number."""

_MOST_ALPHA: Final = 2  # classes as frequent as they were rare: more is a mistake
# A share times a number of samples is off by some 1e-16 of it. What is so near to a whole number is
# meant to be one.
_ROUNDING: Final = 1e-9


class ClassBalancedSampler(CountedSampler):
    """Rare classes more often: the share of a class is proportional to count ** (1 - alpha).

    With `alpha` 0 classes have their natural shares, with 0.5 those of the square roots of their
    counts, with 1 equal ones. "effective" goes by the effective number of samples instead. A pair
    goes from one to the other over the epochs, so that a model learns from data as they are first.

    Within a class, samples come in turn: all of them, in random order, before one comes again in
    the epoch. No sample is read, labels are enough.

    Of samples with several labels, as in detection, a class is drawn first and then a sample that
    has it; those without any label keep their natural share. `balance_report` counts what that does
    to the boxes.

    Attributes:
        labels: As they were given or found.
        classes: The classes that occur, ascending, shape (classes,).
        counts: Samples that have each class, int64, likewise.
        class_names: Of the dataset that was given, by class number; None if it has none.
        exact: Whether each epoch has its shares exactly.
        num_samples: Indices in an epoch.

    Example:
        >>> labels = [0] * 90 + [1] * 10
        >>> sampler = ClassBalancedSampler(labels, exact=True, seed=7)
        >>> drawn = np.asarray(labels)[sampler.indices()]
        >>> len(sampler), np.bincount(drawn)
        (100, array([50, 50]))
        >>> len(ClassBalancedSampler(labels, num_samples="undersample"))
        20
        >>> sampler.shares, ClassBalancedSampler(labels, alpha=0.5).shares
        (array([0.5, 0.5]), array([0.75, 0.25]))
        >>> later = ClassBalancedSampler(labels, alpha=(0, 1), num_epochs=3)
        >>> later.set_epoch(1)
        >>> later.alpha, later.shares
        (0.5, array([0.75, 0.25]))

    Reference:
        A pair: Wang et al., Dynamic Curriculum Learning, ICCV 2019. "effective": Cui et al.,
        Class-Balanced Loss Based on Effective Number of Samples, CVPR 2019.
    """

    _shows = ("classes", "alpha", "length", "seed", "epoch")

    @removed_arguments(ramp="set_epoch and a sampler of each alpha; a pair goes evenly")
    def __init__(
        self,
        labels: Any,  # noqa: ANN401 - labels in many forms, or any dataset
        alpha: Alpha | tuple[float, float] = 1.0,
        num_samples: int | Literal["oversample", "undersample"] | None = None,
        replacement: bool | Literal["auto"] = "auto",
        seed: int | None = None,
        *,
        exact: bool = False,
        beta: float = 0.999,
        num_epochs: int | None = None,
        samples_per_class: int | None = None,
        column: str | int | None = None,
    ) -> None:
        """Set the shares of the classes and the size of an epoch.

        Args:
            labels: A label for each sample, an integer or a string; or some for each: a list of
                lists, a `RaggedArray`, an array of 0 and 1 of shape (samples, classes). Or a
                dataset that has them, see `penstock.labels_of`.
            alpha: 0 to 2, or "effective". A pair is those of the first and of the last epoch.
            num_samples: Indices in an epoch, at least 1. None means as many as there are samples;
                without replacement, as "undersample": the longest epoch in which no class gives
                more than it has. "oversample" is the shortest in which every class gives all that
                it has. Both are exact.
            replacement: "auto" begins a class anew when all its samples have come. True draws each
                sample of a class whatever was drawn before. False gives no sample twice in an
                epoch, and is always exact.
            seed: Decides the orders. The same on all ranks. None: that of the loader.
            exact: Whether each epoch has as many samples of each class as its share says, up or
                down to a whole number, by chance and right in the mean. Otherwise the class of each
                draw is independent of the others.
            beta: Of "effective", 0 <= beta < 1: among classes of fewer than some 1 / (1 - beta)
                samples shares are nearly equal, among those of more nearly natural.
            num_epochs: With a pair: epochs from the first `alpha` to the one that has the second,
                at least 1; later ones have that too. All epochs are of one size.
            samples_per_class: None draws each class by its share. A number lets all classes take
                turns, in random order, before one comes again, with so many draws of a class in a
                row; samples without a label never come. Of a class that ends its turn among them, a
                sample may come twice in the row.
            column: Which field of the annotations, column or attribute of a dataset the labels are:
                as for `penstock.labels_of`.

        Raises:
            ConfigError: one of the above does not hold, there are no labels, or no sample may come
                twice and there are too few.
        """
        super().__init__(seed)
        self._alphas = _checked_alphas(alpha, beta, num_epochs)
        check_bool("exact", exact)
        if not (isinstance(replacement, bool) or replacement == "auto"):
            raise ConfigError(f'replacement is True, False or "auto", not {replacement!r}.')
        if self._alphas is not None and (replacement is False or isinstance(num_samples, str)):
            raise ConfigError(
                "with a pair as alpha epochs are of one size, whatever the shares; so num_samples "
                f"is a number and replacement not False, but got {num_samples=}, {replacement=}."
            )
        if samples_per_class is not None:
            checked_positive("samples_per_class", samples_per_class)
            is_usual = (alpha, replacement, exact) == (1, "auto", False)
            if not is_usual or isinstance(num_samples, str):
                raise ConfigError(
                    "with samples_per_class classes take turns, and so do their samples: leave out "
                    f"{alpha=}, {replacement=}, {exact=}, {num_samples=}."
                )
        self.labels = labels_given_or_known(labels, type(self).__name__, column)
        self.class_names = class_names_of(labels, column)
        self._items = ClassItems(self.labels)
        self.classes, self.counts = self._items.classes, self._items.counts
        if not len(self.classes):
            raise ConfigError(f"nothing to balance: {len(self.labels)} samples have no label.")
        self.source_length = self._items.num_samples
        self._alpha: Any = alpha if isinstance(alpha, (str, tuple)) else float(alpha)
        self._num_epochs = num_epochs
        self._beta = float(beta)
        self._replacement = replacement
        self._samples_per_class = samples_per_class
        self.exact = exact or replacement is False or isinstance(num_samples, str)
        offsets = self.labels.offsets if isinstance(self.labels, RaggedArray) else np.arange(2)
        if replacement is False and (several := np.flatnonzero(np.diff(offsets) > 1)).size:
            raise ConfigError(
                f"replacement=False takes one label per sample, but sample {several[0]} has "
                f'{len(self.labels[several[0]])}: it might come twice. Use replacement="auto".'
            )
        self.num_samples = self._resolved(num_samples)

    @property
    def alpha(self) -> Alpha:
        """That of the current epoch; a number as float."""
        if self._alphas is None:
            return self._alpha  # type: ignore[no-any-return]
        (start, end), last = self._alphas, self._num_epochs - 1  # type: ignore[operator]
        return start + (end - start) * (min(self.epoch / last, 1.0) if last else 1.0)

    @property
    def shares(self) -> NDArray[np.float64]:
        """Share of the draws made for each class, float64 of shape (classes,)."""
        if self._samples_per_class is not None:
            return np.full(len(self.classes), 1.0 / len(self.classes))
        labelled = 1.0 - len(self._items.unlabelled) / self._items.num_samples
        return class_shares(self.counts, self.alpha, self._beta) * labelled

    def indices(self) -> NDArray[np.int64]:
        """Return the draws of the current epoch, shape (num_samples,); a fresh array."""
        rng = self.rng()
        if self._samples_per_class is not None:
            return self._items.cycled(
                self._classes_in_turn(self._samples_per_class, rng), rng
            ).reshape(-1)
        shares = self._all_shares()
        if self.exact:
            counts = _whole_counts(shares * self.num_samples, rng)
        else:
            counts = rng.multinomial(self.num_samples, shares)
        codes = np.arange(len(counts), dtype=np.min_scalar_type(len(self.classes)))
        sequence = np.repeat(codes, counts)
        rng.shuffle(sequence)
        if self._replacement is True:
            return self._items.independent(sequence, rng)
        return self._items.cycled(sequence, rng).reshape(-1)

    def _classes_in_turn(self, in_a_row: int, rng: np.random.Generator) -> NDArray[Any]:
        num_turns = -(-self.num_samples // in_a_row)
        cycles = shuffled_rows(-(-num_turns // len(self.classes)), len(self.classes), rng)
        return np.repeat(cycles.ravel()[:num_turns], in_a_row)[: self.num_samples]

    def settings(self) -> dict[str, Any]:
        """Return what the draws depend on, the same in all epochs; the labels by their digest."""
        # The kinds are those of classes of their own in earlier releases, whose states go on.
        settings = {**super().settings(), "labels": self._items.digest}
        if self._samples_per_class is not None:
            in_turn = {"kind": "ClassAwareSampler", "samples_per_class": self._samples_per_class}
            return {**settings, **in_turn}
        settings |= {"beta": self._beta, "replacement": self._replacement, "exact": self.exact}
        if self._alphas is None:
            return {**settings, "alpha": self._alpha}
        (start, end), num_epochs = self._alphas, self._num_epochs
        dynamic = {"kind": "DynamicBalancedSampler", "start": start, "end": end, "ramp": "linear"}
        return {**settings, **dynamic, "num_epochs": num_epochs}

    def _all_shares(self) -> NDArray[np.float64]:
        """`shares`, and behind them that of samples without a label, if there are any."""
        # A share of 0 must not stand there: `Generator.multinomial` gives the last one what
        # rounding leaves over.
        shares, num_without = self.shares, len(self._items.unlabelled)
        if num_without:
            shares = np.append(shares, num_without / self._items.num_samples)
        return np.asarray(shares / shares.sum())

    def _resolved(self, num_samples: object) -> int:
        """How many indices an epoch has."""
        is_single = self._replacement is False
        if num_samples is None and not is_single:
            return self._items.num_samples
        # In how many draws each class gives all its samples, and those without a class.
        shares = self._all_shares()
        draws = self._items.sizes[: len(shares)] / shares
        if num_samples == "oversample" and not is_single:
            return int(np.max(_rounded(draws, np.ceil)))
        # Of samples with several labels a class may have more than there is room for in all.
        most = min(int(_rounded(draws, np.floor).min()), self._items.num_samples)
        if num_samples is None or num_samples == "undersample":
            return max(most, 1)
        if num_samples == "oversample":
            raise ConfigError(
                'num_samples="oversample" gives samples of rare classes again, which '
                'replacement=False rules out. Leave one of the two out, or use "undersample".'
            )
        wanted = checked_positive("num_samples", num_samples)
        if is_single and wanted > most:
            scarce = int(np.argmin(self.counts / self.shares))
            raise ConfigError(
                f"at most {most} samples are possible without replacement, but got "
                f"num_samples={wanted}: class {self.classes[scarce]!s} has {self.counts[scarce]}. "
                'replacement="auto" gives its samples again when all of them have come.'
            )
        return wanted


def _checked_alphas(alpha: Any, beta: float, num_epochs: object) -> tuple[float, float] | None:  # noqa: ANN401
    """Return those of the first and the last epoch, or None for one."""
    if not isinstance(alpha, tuple):
        check_alpha(alpha, beta)
        if num_epochs is not None:
            raise ConfigError(f"num_epochs is for a pair as alpha, but got alpha={alpha!r}.")
        return None
    if len(alpha) != 2 or "effective" in alpha:
        raise ConfigError(f"a pair as alpha is of two numbers, but got alpha={alpha!r}.")
    checked_positive("num_epochs", num_epochs)
    for end in alpha:
        check_alpha(end, beta)
    return float(alpha[0]), float(alpha[1])


def _is_whole(numbers: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether they are whole numbers, but for what rounding has done to them."""
    nearest = np.rint(numbers)
    tolerance = np.minimum(_ROUNDING * np.maximum(nearest, 1.0), 0.1)
    return np.asarray(np.abs(numbers - nearest) <= tolerance)


def _rounded(numbers: NDArray[np.float64], how: Any) -> NDArray[np.float64]:  # noqa: ANN401
    """Round up or down, by `np.ceil` or `np.floor`, what is no whole number."""
    return np.where(_is_whole(numbers), np.rint(numbers), how(numbers))


def _whole_counts(quotas: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Round quotas up or down by chance, so that the sum stays and each is right in the mean."""
    # Systematic sampling (Madow 1949): the fractions in a row, in random order, and a comb of teeth
    # 1 apart laid over them, beginning anywhere. A quota is rounded up if a tooth meets its
    # fraction.
    counts = _rounded(quotas, np.floor).astype(np.int64)
    fractions = np.maximum(quotas - counts, 0.0)
    fractions[_is_whole(quotas)] = 0.0
    num_up = round(float(quotas.sum())) - int(counts.sum())
    order = rng.permutation(len(quotas))
    ends = np.cumsum(fractions[order])
    if num_up and ends[-1] > 0:
        ends *= num_up / ends[-1]  # what rounding has left over
        ends[-1] = num_up
        teeth = np.floor(ends + rng.random()).astype(np.int64)
        counts[order] += np.diff(teeth, prepend=0)
    return counts


def class_shares(counts: ArrayLike, alpha: Alpha = 1.0, beta: float = 0.999) -> NDArray[np.float64]:
    """Return the share of the draws that each class gets, summing to 1.

    A number for `alpha` makes it proportional to count ** (1 - alpha). "effective" divides the
    natural share by the effective number of samples, (1 - beta ** count) / (1 - beta).
    """
    logarithms = np.log(np.asarray(counts, np.float64))
    if alpha != "effective":
        logarithms *= 1.0 - alpha
    elif beta > 0:
        # expm1: of a beta near 1, 1 - beta ** count would lose its digits.
        numbers = np.expm1(np.asarray(counts, np.float64) * math.log(beta)) / (beta - 1.0)
        logarithms -= np.log(numbers)
    shares: NDArray[np.float64] = np.exp(logarithms - logarithms.max())  # none overflows
    return np.asarray(shares / shares.sum())


def check_alpha(alpha: Any, beta: float = 0.0) -> None:  # noqa: ANN401
    """Raise `ConfigError` unless `alpha` is from 0 to 2, or "effective", and 0 <= beta < 1."""
    if not 0 <= beta < 1:
        raise ConfigError(f"beta should be 0 or more and below 1, but got beta={beta!r}.")
    if alpha == "effective":
        return
    if isinstance(alpha, (str, bool)) or not 0 <= alpha <= _MOST_ALPHA:
        raise ConfigError(
            "alpha should be a number from 0, which leaves classes as they are, to 1, which makes "
            f"all equally frequent (or to {_MOST_ALPHA}, which turns their order round), or "
            f'"effective", but got alpha={alpha!r}. The size of an epoch is num_samples.'
        )
