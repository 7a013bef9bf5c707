# SPDX-License-Identifier: Apache-2.0
"""Indices drawn with given probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.errors import ConfigError
from penstock.sampling.samplers import IndexSampler, check_positive, digest

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = ["WeightedRandomSampler", "as_weights"]

_BLOCK: Final = 1 << 16  # points searched for at a time: 512 KiB


class WeightedRandomSampler(IndexSampler):
    """Indices drawn with given probabilities.

    There may be any number of weights (torch stops at 2^24). They are summed in float64, so that
    the probability of an index is right to some 2^-52 of the whole: a weight of 1e-12 beside one of
    1 is drawn as often as it should be, to 0.03 %. One of less than 1e-16 of the sum may never be.
    A weight of 0 never is.

    10 million draws from 10 million weights take some 1 s; without replacement some 2 s. Nothing is
    made beforehand. Memory: 8 bytes per weight to keep them; in an epoch 8 more, and 8 per draw.
    Without replacement the sort takes some 30 per weight.

    Example:
        >>> sampler = WeightedRandomSampler([0.0, 1.0, 3.0], num_samples=1000)
        >>> counts = np.bincount(sampler.indices(), minlength=3)
        >>> int(counts[0]), bool(700 < counts[2] < 800)
        (0, True)

    Reference:
        Bentley, Saxe: Generating sorted lists of random numbers. ACM TOMS 6, 1980 (points that are
        drawn in order, by exponential gaps).
    """

    def __init__(
        self, weights: ArrayLike, num_samples: int, replacement: bool = True, seed: int = 0
    ) -> None:
        """Set the weights and the seed of the draws.

        Args:
            weights: One per sample, shape (n,), finite and not negative, not all 0. They need not
                sum to 1.
            num_samples: Indices in an epoch, at least 1.
            replacement: Whether an index may be drawn more than once. Without, `num_samples` may
                not exceed the number of weights above 0.
            seed: Decides the draws.

        Raises:
            ConfigError: one of the above does not hold.
        """
        super().__init__(seed)
        check_positive("num_samples", num_samples)
        if not isinstance(replacement, bool):
            raise ConfigError(
                f"replacement should be a boolean value, but got replacement={replacement!r}."
            )
        self.weights: NDArray[np.float64] = as_weights(weights)
        self.num_samples = int(num_samples)  # of numpy's integers there would be no JSON
        self.replacement = replacement
        _check_weights(self.weights, num_samples, replacement=replacement)

    @property
    def source_length(self) -> int:
        """Samples of the dataset that it was made for."""
        return len(self.weights)

    def __len__(self) -> int:
        """Return `num_samples`."""
        return self.num_samples

    def indices(self) -> NDArray[np.int64]:
        """Return the draws of the current epoch, shape (num_samples,); a fresh array."""
        return self._with_replacement() if self.replacement else self._without_replacement()

    def settings(self) -> dict[str, Any]:
        """Return what the draws depend on; the weights by their digest."""
        weights = digest(self.weights)
        return {**super().settings(), "weights": weights, "replacement": self.replacement}

    def _with_replacement(self) -> NDArray[np.int64]:
        # Points in random order would be searched for all over the sums: 9 s for 10 million of
        # each. Ascending ones are found side by side, and shuffling what was found takes 0.4 s.
        # Rejected: an alias table draws in 0.35 s, but takes 1 s and 500 MB to make, and 120 MB to
        # keep; a table that guides the search (Chen, Asai 1974) is no faster than this.
        rng = self.rng()
        sums = _sums(self.weights)
        points = _ascending_points(rng, self.num_samples)
        drawn = points.view(np.int64)
        for start in range(0, len(points), _BLOCK):  # in place: another array saved
            block = points[start : start + _BLOCK] * sums[-1]
            # side="right" steps over weights of 0.
            drawn[start : start + _BLOCK] = np.searchsorted(sums, block, side="right")
        # Rounding may put a point on the very end: that is the last index with a weight.
        np.minimum(drawn, np.searchsorted(sums, sums[-1]), out=drawn)
        rng.shuffle(drawn)
        return drawn

    def _without_replacement(self) -> NDArray[np.int64]:
        # The first arrivals of independent exponential clocks, one clock per index, at the rate of
        # its weight, are a draw without replacement, and in its order.
        candidates = np.flatnonzero(self.weights)
        arrivals = self.rng().standard_exponential(len(candidates))
        with np.errstate(divide="ignore"):  # an arrival at 0 is -inf: first, as it should be
            np.log(arrivals, out=arrivals)
        arrivals -= np.log(self.weights[candidates])  # as logarithms, none can overflow
        if self.num_samples == len(candidates):
            return candidates[np.argsort(arrivals, kind="stable")].astype(np.int64, copy=False)
        first = np.argpartition(arrivals, self.num_samples - 1)[: self.num_samples]
        first = first[np.argsort(arrivals[first], kind="stable")]
        return candidates[first].astype(np.int64, copy=False)


def as_weights(weights: ArrayLike) -> NDArray[np.float64]:
    """Return a copy of some numbers, of any shape.

    Raises:
        ConfigError: they are none, or lists of different lengths, or something that is no array.
    """
    try:
        given = np.asarray(weights)
        if given.dtype.kind not in "USmM":  # of those, numpy would read the numbers in strings
            return np.array(given, np.float64)
        reason = f"an array of {given.dtype}"
    except (TypeError, ValueError) as error:
        reason = str(error)
    raise ConfigError(
        f"weights should be an array or a list of numbers, but got {weights!r:.80} ({reason})."
    )


def _sums(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return running sums, scaled so that the largest weight is from 1/2 to 1."""
    # By a power of two, which changes no ratio. Products of a point and a sum near the least or the
    # largest numbers there are would be rounded to a few values, or overflow.
    _, exponent = np.frexp(weights.max())
    scaled = np.ldexp(weights, -exponent)
    return np.cumsum(scaled, out=scaled)


def _ascending_points(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Return what sorting `count` uniform random numbers of [0, 1] would give."""
    points = rng.standard_exponential(count + 1)
    np.cumsum(points, out=points)
    points /= points[-1]
    return points[:-1]


def _check_weights(weights: NDArray[np.float64], num_samples: int, *, replacement: bool) -> None:
    if weights.ndim != 1:
        raise ConfigError(
            f"weights should be a 1d sequence but given weights have shape {weights.shape}."
        )
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if wrong.size:
        raise ConfigError(
            f"weights should be finite and 0 or more, but weights[{wrong[0]}] is "
            f"{weights[wrong[0]]} ({wrong.size} such of {len(weights)})."
        )
    with np.errstate(over="ignore"):
        total = weights.sum()
    available = int(np.count_nonzero(weights))
    needed = 1 if replacement else num_samples
    if available < needed or not np.isfinite(total):
        raise ConfigError(
            f"{needed} or more weights should be above 0 with a finite sum, but {available} of "
            f"{len(weights)} are, with sum {total}. Without replacement each sample needs "
            "one."
        )
