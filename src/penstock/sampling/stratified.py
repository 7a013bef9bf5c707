# SPDX-License-Identifier: Apache-2.0
"""Samples dealt out to parts, as train and val, so that each part has its share of every class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.data.ragged import RaggedArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def stratified_parts(
    labels: NDArray[Any] | RaggedArray, shares: Sequence[float], seed: int
) -> NDArray[np.int64]:
    """Return the part that each sample goes to, by number."""
    # Iterative stratification: the rarest class is dealt out first, each of its samples to the part
    # that lacks most of it, and so on with the class that is the rarest of those left. A part
    # without the class comes before one that has it. So of one class per sample each part has what
    # its share says, up or down by less than the number of parts, and at least one where the class
    # has as many samples as there are parts. Samples without a class come last, and even out the
    # sizes. The shares sum to 1.
    #
    # Reference:
    # Sechidis, Tsoumakas and Vlahavas, "On the Stratification of Multi-Label Data", ECML PKDD
    # 2011.
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
    lacks = {code: [share * count for share in shares] for code, count in left.items()}
    is_there = {code: [False] * len(shares) for code in left}
    lacks_in_all = [share * len(labels) for share in shares]
    parts = np.full(len(labels), -1, np.int64)

    def deal(sample: int, of_class: int | None) -> None:
        """Choose the part that lacks most; to nine digits, so that equal numbers stay equal."""

        def need(part: int) -> tuple[bool, float, float]:
            in_all = round(lacks_in_all[part], 9)
            if of_class is None:
                return False, 0.0, in_all
            return not is_there[of_class][part], round(lacks[of_class][part], 9), in_all

        chosen = parts[sample] = max(range(len(shares)), key=need)
        lacks_in_all[chosen] -= 1
        for code in codes_of[sample]:
            lacks[code][chosen] -= 1
            is_there[code][chosen] = True
            left[code] -= 1

    while left:
        rarest = min(left, key=left.__getitem__)
        for sample in members[rarest]:
            if parts[sample] < 0:
                deal(sample, rarest)
        for code in [code for code, count in left.items() if not count]:
            del left[code]
    for sample in order:
        if parts[sample] < 0:
            deal(sample, None)
    return parts
