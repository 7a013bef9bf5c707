# SPDX-License-Identifier: Apache-2.0
"""Indices drawn with given probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import ConfigError
from penstock.sampling.samplers import IndexSampler, check_positive, digest

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = ["WeightedRandomSampler"]


class WeightedRandomSampler(IndexSampler):
    """Indices drawn with given probabilities.

    Weights are summed in float64 and searched, so there may be any number of them (torch stops at
    2^24), and a draw costs O(log n).

    Example:
        >>> sampler = WeightedRandomSampler([0.0, 1.0, 3.0], num_samples=1000)
        >>> counts = np.bincount(sampler.indices(), minlength=3)
        >>> int(counts[0]), bool(700 < counts[2] < 800)
        (0, True)
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
        self.weights: NDArray[np.float64] = np.array(weights, np.float64)
        self.num_samples = num_samples
        self.replacement = replacement
        _check_weights(self.weights, num_samples, replacement=replacement)

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
        sums = np.cumsum(self.weights)
        points = self.rng().random(self.num_samples) * sums[-1]
        # side="right" steps over weights of 0. Rounding may put a point on the very end: that is
        # the last index with a weight.
        drawn = np.searchsorted(sums, points, side="right")
        last = np.searchsorted(sums, sums[-1])
        return np.asarray(np.minimum(drawn, last), np.int64)

    def _without_replacement(self) -> NDArray[np.int64]:
        # The first arrivals of independent exponential clocks, one clock per index, at the rate of
        # its weight, are a draw without replacement, and in its order.
        candidates = np.flatnonzero(self.weights)
        with np.errstate(divide="ignore"):  # an arrival at 0 is -inf: first, as it should be
            arrivals = np.log(self.rng().exponential(size=len(candidates)))
        arrivals -= np.log(self.weights[candidates])  # as logarithms, none can overflow
        first = np.argpartition(arrivals, self.num_samples - 1)[: self.num_samples]
        first = first[np.argsort(arrivals[first], kind="stable")]
        return candidates[first].astype(np.int64, copy=False)


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
