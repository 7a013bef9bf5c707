# SPDX-License-Identifier: Apache-2.0
"""Samples dealt out to parts, as train and val, so that each part has its share of every class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.data.ragged import RaggedArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["stratified_parts"]


def stratified_parts(
    labels: NDArray[Any] | RaggedArray, shares: Sequence[float], seed: int
) -> NDArray[np.int64]:
    """Return the part that each sample goes to, by number.

    Iterative stratification: the rarest class is dealt out first, each of its samples to the part
    that lacks most of it, and so on with the class that is the rarest of those left. A part without
    the class comes before one that has it. So of one class per sample each part has what its share
    says, up or down by less than the number of parts, and at least one where the class has as many
    samples as there are parts. Samples without a class come last, and even out the sizes. The
    shares sum to 1.

    Reference:
        Sechidis, Tsoumakas and Vlahavas, "On the Stratification of Multi-Label Data", ECML PKDD
            2011.
    """
    if not isinstance(labels, RaggedArray):
        classes = np.unique(labels, return_inverse=True)[1]
        labels = RaggedArray(classes, np.arange(len(labels) + 1))
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(labels)).tolist()
    codes_of = [set(row.tolist()) for row in labels]
    members: dict[int, list[int]] = {}
    for sample in order:
        for code in codes_of[sample]:
            members.setdefault(code, []).append(sample)
    left = {code: len(members[code]) for code in sorted(members)}
    dealer = _Dealer(left, len(labels), shares)
    parts = np.full(len(labels), -1, np.int64)
    while left:
        rarest = min(left, key=left.__getitem__)
        for sample in members[rarest]:
            if parts[sample] < 0:
                parts[sample] = dealer.deal(rarest, codes_of[sample])
                for code in codes_of[sample]:
                    left[code] -= 1
        left = {code: count for code, count in left.items() if count}
    for sample in order:
        if parts[sample] < 0:
            parts[sample] = dealer.deal(None, ())
    return parts


class _Dealer:
    """What each part still lacks: of each class, and in all."""

    def __init__(self, counts: dict[int, int], num_samples: int, shares: Sequence[float]) -> None:
        self._lacks = {code: [share * count for share in shares] for code, count in counts.items()}
        self._is_there = {code: [False] * len(shares) for code in counts}
        self._lacks_in_all = [share * num_samples for share in shares]
        self._parts = range(len(shares))

    def deal(self, of_class: int | None, codes: Any) -> int:  # noqa: ANN401 - a set, or none
        """Return the part of a sample that has the classes `codes`, and is dealt for one of them.

        Numbers are compared to nine digits, so rounding does not make equal ones different.
        """

        def need(part: int) -> tuple[bool, float, float]:
            in_all = round(self._lacks_in_all[part], 9)
            if of_class is None:
                return False, 0.0, in_all
            lacks = round(self._lacks[of_class][part], 9)
            return not self._is_there[of_class][part], lacks, in_all

        chosen = max(self._parts, key=need)
        self._lacks_in_all[chosen] -= 1
        for code in codes:
            self._lacks[code][chosen] -= 1
            self._is_there[code][chosen] = True
        return chosen
