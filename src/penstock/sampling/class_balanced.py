# SPDX-License-Identifier: Apache-2.0
"""Classes in other shares than they have: evenly, or anywhere between that and as they are."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError
from penstock.sampling.class_sampler import ClassSampler
from penstock.sampling.samplers import check_positive
from penstock.sampling.shares import check_alpha, check_beta, class_shares

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from penstock.sampling.shares import Alpha

__all__ = ["ClassBalancedSampler", "DynamicBalancedSampler"]

# A share times a number of samples is off by some 1e-16 of it. What is so near to a whole number is
# meant to be one.
_ROUNDING: Final = 1e-9
_RAMPS: Final[dict[str, Callable[[float], float]]] = {
    "linear": lambda progress: progress,
    "cosine": lambda progress: (1.0 - math.cos(math.pi * progress)) / 2.0,
}


class ClassBalancedSampler(ClassSampler):
    """Rare classes more often: the share of a class is proportional to count ** (1 - alpha).

    With `alpha` 0 classes have their natural shares, with 0.5 those of the square roots of their
    counts, with 1 equal ones. "effective" goes by the effective number of samples instead.

    Within a class, samples come in turn: all of them, in random order, before one comes again in
    the epoch. No sample is read, labels are enough.

    Of samples with several labels, as in detection, a class is drawn first and then a sample that
    has it; those without any label keep their natural share. What that does to the numbers of boxes
    is another matter: see `penstock.sampling.balance_report`, and `RepeatFactorSampler`.

    Attributes:
        labels: As they were given or found.
        classes: The labels' values, ascending, shape (classes,).
        counts: Samples that have each class, int64 of shape (classes,).
        class_names: Of the dataset that was given, by class number; None if it has none.
        replacement: As given.
        beta: As given.
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
    """

    def __init__(
        self,
        labels: Any,  # noqa: ANN401 - labels in many forms, or anybody's dataset
        alpha: Alpha = 1.0,
        num_samples: int | Literal["oversample", "undersample"] | None = None,
        replacement: bool | Literal["auto"] = "auto",
        seed: int = 0,
        *,
        exact: bool = False,
        beta: float = 0.999,
        column: str | int | None = None,
    ) -> None:
        """Set the shares of the classes and the size of an epoch.

        Args:
            labels: A label for each sample, an integer or a string; or some for each: a list of
                lists, a `RaggedArray`, an array of 0 and 1 of shape (samples, classes). Or a
                dataset that knows them, see `penstock.labels_of`.
            alpha: 0 to 2, or "effective".
            num_samples: Indices in an epoch, at least 1. None means as many as there are samples;
                without replacement, as "undersample". "undersample" is the longest epoch in which
                no class gives more than it has: with `alpha` 1, as many samples of each class as
                the rarest has. "oversample" is the shortest in which every class gives all that it
                has: with `alpha` 1, as many of each as the largest has. Both are exact.
            replacement: "auto" begins a class anew when all its samples have come. True draws each
                sample of a class whatever was drawn before. False gives no sample twice in an
                epoch, and is always exact.
            seed: Decides the orders. The same on all ranks.
            exact: Whether each epoch has as many samples of each class as its share says, up or
                down to a whole number, by chance and right in the mean. Otherwise the class of each
                draw is independent of the others.
            beta: Of "effective", 0 <= beta < 1: among classes of fewer than some 1 / (1 - beta)
                samples shares are nearly equal, among those of more nearly natural.
            column: Which field of the annotations, column or attribute of a dataset the labels are:
                as for `penstock.labels_of`.

        Raises:
            ConfigError: one of the above does not hold, there are no labels, or no sample may come
                twice and there are too few.
        """
        super().__init__(labels, seed, column)
        check_alpha(alpha)
        check_beta(beta)
        _check_flags(replacement, exact)
        self._alpha: Alpha = alpha if isinstance(alpha, str) else float(alpha)
        self.beta = float(beta)
        self.replacement = replacement
        self.exact = exact or replacement is False or isinstance(num_samples, str)
        if replacement is False:
            _check_single(self.labels)
        self.num_samples = self._resolved(num_samples)

    @property
    def alpha(self) -> Alpha:
        """As given; a number as float."""
        return self._alpha

    @property
    def shares(self) -> NDArray[np.float64]:
        """Share of the draws made for each class, float64 of shape (classes,); a fresh array.

        The sum is 1, less the share of samples without any label.
        """
        labelled = 1.0 - len(self._items.unlabelled) / self._items.num_samples
        shares: NDArray[np.float64] = class_shares(self.counts, self.alpha, self.beta) * labelled
        return shares

    def indices(self) -> NDArray[np.int64]:
        """Return the draws of the current epoch, shape (num_samples,); a fresh array."""
        rng = self.rng()
        shares = self._all_shares()
        if self.exact:
            counts = _whole_counts(shares * self.num_samples, rng)
        else:
            counts = rng.multinomial(self.num_samples, shares)
        sequence = np.repeat(np.arange(len(counts), dtype=self._items.code_dtype), counts)
        rng.shuffle(sequence)
        if self.replacement is True:
            return self._items.independent(sequence, rng)
        return self._items.cycled(sequence, rng)

    def _summary(self) -> Iterator[tuple[str, object]]:
        yield "classes", len(self.classes)
        yield "alpha", self.alpha
        yield from super()._summary()

    def settings(self) -> dict[str, Any]:
        """Return what the draws depend on; the labels by their digest."""
        return {
            **super().settings(),
            "labels": self._items.digest,
            "alpha": self.alpha,
            "beta": self.beta,
            "replacement": self.replacement,
            "exact": self.exact,
        }

    def _all_shares(self) -> NDArray[np.float64]:
        """`shares`, and behind them that of samples without a label, if there are any.

        A share of 0 must not stand there: `Generator.multinomial` gives the last one what rounding
        leaves over.
        """
        shares, num_without = self.shares, len(self._items.unlabelled)
        if num_without:
            shares = np.append(shares, num_without / self._items.num_samples)
        shares /= shares.sum()
        return shares

    def _resolved(self, num_samples: object) -> int:
        """How many indices an epoch has."""
        if num_samples is None and self.replacement is not False:
            return self._items.num_samples
        if num_samples == "oversample" and self.replacement is not False:
            return int(np.max(_rounded(self._draws_until_all(), np.ceil)))
        # Of samples with several labels a class may have more than there is room for in all.
        most = min(int(_rounded(self._draws_until_all(), np.floor).min()), self._items.num_samples)
        if num_samples is None or num_samples == "undersample":
            return max(most, 1)
        if num_samples == "oversample":
            raise ConfigError(
                'num_samples="oversample" gives samples of rare classes again, which '
                'replacement=False rules out. Leave one of the two out, or use "undersample".'
            )
        check_positive("num_samples", num_samples)
        wanted = operator.index(num_samples)  # type: ignore[arg-type]
        if self.replacement is False and wanted > most:
            raise ConfigError(self._too_many(wanted, most))
        return wanted

    def _draws_until_all(self) -> NDArray[np.float64]:
        """In how many draws each class gives all its samples, and those without a class."""
        shares = self._all_shares()
        draws: NDArray[np.float64] = self._items.sizes[: len(shares)] / shares
        return draws

    def _too_many(self, num_samples: int, most: int) -> str:
        shares = self.shares
        scarce = int(np.argmin(self.counts / shares))
        return (
            f"num_samples={num_samples} without replacement would take "
            f"{num_samples * shares[scarce]:.1f} samples of class {self.classes[scarce]!s}, which "
            f'has {self.counts[scarce]}. At most {most} are possible; replacement="auto" gives a '
            "rare class's samples again when all of them have come."
        )


class DynamicBalancedSampler(ClassBalancedSampler):
    """From natural shares of the classes to balanced ones, over the epochs.

    A model learns from data as they are first, and from all classes alike in the end (Wang et al.
    2019). The size of an epoch stays the same. It goes by the epoch that `set_epoch` tells, so that
    a run that is resumed in epoch 30 has the shares of epoch 30.

    Attributes:
        start: `alpha` of epoch 0.
        end: `alpha` of the last epoch, and of all after it.
        num_epochs: As given.

    Reference:
        Wang et al.: Dynamic Curriculum Learning for Imbalanced Data Classification. ICCV 2019.

    Example:
        >>> sampler = DynamicBalancedSampler([0] * 90 + [1] * 10, num_epochs=3)
        >>> for epoch in range(4):
        ...     sampler.set_epoch(epoch)
        ...     print(sampler.alpha, sampler.shares.round(2))
        0.0 [0.9 0.1]
        0.5 [0.75 0.25]
        1.0 [0.5 0.5]
        1.0 [0.5 0.5]
    """

    def __init__(
        self,
        labels: Any,  # noqa: ANN401 - as ClassBalancedSampler's
        num_epochs: int,
        start: float = 0.0,
        end: float = 1.0,
        ramp: Literal["linear", "cosine"] = "linear",
        num_samples: int | None = None,
        replacement: bool | Literal["auto"] = "auto",
        seed: int = 0,
        *,
        exact: bool = False,
        column: str | int | None = None,
    ) -> None:
        """Set where the shares begin and end.

        Args:
            labels: As of `ClassBalancedSampler`.
            num_epochs: Epochs from the first to the one that has `end`, at least 1.
            start: `alpha` of epoch 0, a number.
            end: `alpha` of epoch `num_epochs` - 1 and of later ones, a number.
            ramp: Whether `alpha` goes from one to the other evenly, or slowly at both ends.
            num_samples: Indices in an epoch; None means as many as there are samples.
            replacement: As of `ClassBalancedSampler`, but not False.
            seed: Decides the orders.
            exact: As of `ClassBalancedSampler`.
            column: As of `ClassBalancedSampler`.

        Raises:
            ConfigError: one of the above does not hold, or there are no labels.
        """
        check_positive("num_epochs", num_epochs)
        for name, value in (("start", start), ("end", end)):
            _check_end(name, value)
        if ramp not in _RAMPS:
            raise ConfigError(f"ramp should be one of {sorted(_RAMPS)}, but got ramp={ramp!r}.")
        if replacement is False or isinstance(num_samples, str):
            raise ConfigError(
                "DynamicBalancedSampler has epochs of one size, whatever the shares; so "
                "num_samples is a number and replacement not False, but got "
                f"num_samples={num_samples!r}, replacement={replacement!r}."
            )
        self.start = float(start)
        self.end = float(end)
        self.ramp = ramp
        self.num_epochs = num_epochs
        super().__init__(
            labels, self.start, num_samples, replacement, seed, exact=exact, column=column
        )

    @property
    def alpha(self) -> float:
        """Of the current epoch."""
        last = self.num_epochs - 1
        progress = min(self.epoch / last, 1.0) if last else 1.0
        return self.start + (self.end - self.start) * _RAMPS[self.ramp](progress)

    def settings(self) -> dict[str, Any]:
        """Return what the draws depend on: the same in all epochs."""
        ramp = {"start": self.start, "end": self.end, "ramp": self.ramp}
        settings = {**super().settings(), **ramp, "num_epochs": self.num_epochs}
        del settings["alpha"]
        return settings


def _check_end(name: str, alpha: Alpha) -> None:
    if isinstance(alpha, str):
        raise ConfigError(f"{name} should be a number, but got {name}={alpha!r}.")
    check_alpha(alpha)


def _check_flags(replacement: object, exact: object) -> None:
    if not (isinstance(replacement, bool) or replacement == "auto"):
        raise ConfigError(
            f'replacement should be True, False or "auto", but got replacement={replacement!r}.'
        )
    if not isinstance(exact, bool):
        raise ConfigError(f"exact should be a boolean value, but got exact={exact!r}.")


def _check_single(labels: NDArray[Any] | RaggedArray) -> None:
    if isinstance(labels, RaggedArray) and bool((np.diff(labels.offsets) > 1).any()):
        first = int(np.argmax(np.diff(labels.offsets) > 1))
        raise ConfigError(
            f"replacement=False takes one label per sample, but sample {first} has "
            f"{len(labels[first])}: drawn for one class, it may be drawn for another again. Use "
            'replacement="auto".'
        )


def _is_whole(numbers: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether they are whole numbers, but for what rounding has done to them."""
    nearest = np.rint(numbers)
    tolerance = np.minimum(_ROUNDING * np.maximum(nearest, 1.0), 0.1)
    is_whole: NDArray[np.bool_] = np.abs(numbers - nearest) <= tolerance
    return is_whole


def _rounded(numbers: NDArray[np.float64], how: Any) -> NDArray[np.float64]:  # noqa: ANN401
    """Round up or down, by `np.ceil` or `np.floor`, what is no whole number."""
    return np.where(_is_whole(numbers), np.rint(numbers), how(numbers))


def _whole_counts(quotas: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Round quotas up or down by chance, so that the sum stays and each is right in the mean.

    Systematic sampling (Madow 1949): the fractions in a row, in random order, and a comb of teeth 1
    apart laid over them, beginning anywhere. A quota is rounded up if a tooth meets its fraction.
    """
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
