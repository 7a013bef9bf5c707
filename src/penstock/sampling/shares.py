# SPDX-License-Identifier: Apache-2.0
"""Which share of the draws each class gets, by how many samples it has."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = ["Alpha", "check_alpha", "check_beta", "class_shares"]

_MOST_ALPHA: Final = 2  # classes as frequent as they were rare: more is a mistake

Alpha = float | Literal["effective"]
"""How far classes are balanced: 0 not at all, 1 wholly; or by their effective number."""


def class_shares(counts: ArrayLike, alpha: Alpha = 1.0, beta: float = 0.999) -> NDArray[np.float64]:
    """Return the share of the draws that each class gets.

    A number for `alpha` makes it proportional to count ** (1 - alpha): 0 is the natural share, 0.5
    that of the square root (Mahajan et al. 2018), 1 the same for all, and above 1 rare classes come
    more often than common ones.

    "effective" divides the natural share by the effective number of samples, (1 - beta ** count) /
    (1 - beta): among classes of far fewer than 1 / (1 - beta) samples shares are equal, and among
    those of far more they stay natural.

    Args:
        counts: Samples of each class, shape (classes,), each above 0.
        alpha: 0 to 2, or "effective".
        beta: From 0, which is natural, to below 1, which would be the same for all. Matters to
            "effective" alone.

    Returns:
        A fresh array of shape (classes,), of sum 1.

    Raises:
        ConfigError: one of the above does not hold.

    Reference:
        Cui et al.: Class-Balanced Loss Based on Effective Number of Samples. CVPR 2019.

    Example:
        >>> class_shares([100, 25], alpha=0.5)
        array([0.66666667, 0.33333333])
        >>> class_shares([100, 25], alpha="effective", beta=0.99).round(3)
        array([0.584, 0.416])
    """
    check_alpha(alpha)
    check_beta(beta)
    sizes = np.asarray(counts, np.float64)
    if sizes.ndim != 1 or not len(sizes) or not bool(np.all((sizes > 0) & np.isfinite(sizes))):
        raise ConfigError(
            "class_shares takes how many samples each class has, one class or more with 1 or more "
            f"each, but got {counts!r}."
        )
    if alpha == "effective":
        return _normalised(np.log(sizes) - np.log(_effective_numbers(sizes, beta)))
    return _normalised((1.0 - alpha) * np.log(sizes))


def check_alpha(alpha: object) -> None:
    """Raise `ConfigError` unless `alpha` is 0 or more, or "effective"."""
    is_number = isinstance(alpha, (int, float, np.number)) and not isinstance(alpha, bool)
    if isinstance(alpha, str) and alpha == "effective":
        return
    if not (is_number and 0 <= alpha <= _MOST_ALPHA):  # type: ignore[operator]
        raise ConfigError(
            "alpha should be a number from 0, which leaves classes as they are, to 1, which makes "
            f"all equally frequent (or to {_MOST_ALPHA}, which turns their order round), or "
            f'"effective", but got alpha={alpha!r}. The size of an epoch is num_samples.'
        )


def check_beta(beta: object) -> None:
    """Raise `ConfigError` unless 0 <= beta < 1."""
    is_number = isinstance(beta, (int, float, np.number)) and not isinstance(beta, bool)
    if not (is_number and 0 <= beta < 1):  # type: ignore[operator]
        raise ConfigError(f"beta should be 0 or more and below 1, but got beta={beta!r}.")


def _effective_numbers(sizes: NDArray[np.float64], beta: float) -> NDArray[np.float64]:
    if beta == 0:
        return np.ones_like(sizes)
    # expm1: of a beta near 1, 1 - beta ** count would lose its digits.
    numbers: NDArray[np.float64] = np.expm1(sizes * math.log(beta)) / (beta - 1.0)
    return numbers


def _normalised(logarithms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shares of which the logarithms are these, up to a constant: no alpha can overflow."""
    shares: NDArray[np.float64] = np.exp(logarithms - logarithms.max())
    shares /= shares.sum()
    return shares
