# SPDX-License-Identifier: Apache-2.0
"""What becomes of boxes that cannot be right, and how many there were.

    kind        in the file's own numbers           fix                             drop    raise
    zero_area   begins and ends at one number       left out                        out     error
    inverted    ends before it begins               its ends are swapped            out     error
    outside     reaches beyond the image            cut to the image; left out      out     error
                                                    if it lies beyond altogether

An object of VOC's that has neither a box nor landmarks, but a polygon or a turned box, is bad too:
out under "fix" and "drop", an error under "raise". `unboxed` counts it. Under "keep" it is the
whole image.

Under "keep" all of them stay as the file has them; they are counted under every policy. A box may
be of two kinds. What was swapped is looked at again for the image's borders.

A file's own numbers matter where it includes both ends, as VOC's do: there xmin = xmax is a box of
one column if taken at its word, and in practice a click without a drag. Files of numbers cut short
after six digits miss the border by a hair; that much beyond it is no fault, and is cut off
silently.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["BAD_BOXES", "BadBoxes", "BoxCounts", "JudgedBoxes", "judged"]

BadBoxes = Literal["fix", "drop", "keep", "raise"]
BAD_BOXES: Final = ("fix", "drop", "keep", "raise")

# Of the image's side. Numbers of 0 to 1 printed with six digits are wrong by at most 5e-7 each; a
# centre and a half width add up to 7.5e-7. Ten times that: 0.006 of a pixel in 640.
_FARTHEST_PX: Final = 1e9  # no image is that large; float32 still tells pixels below 2^24
_SLACK: Final = 1e-5


@dataclass(frozen=True, slots=True)
class BoxCounts:
    """What was found about the objects of a data set, and done.

    Attributes:
        total: Objects in the files.
        kept: Objects in the data set.
        zero_area: Boxes that begin and end at one number.
        inverted: Boxes that end before they begin.
        outside: Boxes that reach beyond their image, or lie beyond it.
        swapped: Inverted boxes whose ends were swapped.
        clipped: Boxes that were cut to their image.
        dropped: Objects left out because of their box.
        difficult: Objects left out as difficult ones.
        unknown: Objects left out because their class is none of those asked for.
        unboxed: Objects that have no box in the file. Those with landmarks were given one around
            them; those without were dropped, or under "keep" given the whole image.
        unsized: Objects left out because the size of their image, which they are shares of, could
            not be read.
        unchecked: Boxes of images whose size is not known: whether they reach beyond the right or
            the lower border nobody can say.

    Example:
        >>> print(BoxCounts(total=4888, kept=4886, zero_area=2, dropped=2))
        4,888 objects, 4,886 kept (2 zero_area, 2 dropped)
    """

    total: int = 0
    kept: int = 0
    zero_area: int = 0
    inverted: int = 0
    outside: int = 0
    swapped: int = 0
    clipped: int = 0
    dropped: int = 0
    difficult: int = 0
    unknown: int = 0
    unboxed: int = 0
    unsized: int = 0
    unchecked: int = 0

    def __str__(self) -> str:
        """Return one line that leaves out what there was none of."""
        names = [item.name for item in fields(self)][2:]
        some = [f"{getattr(self, name):,} {name}" for name in names if getattr(self, name)]
        start = f"{self.total:,} objects, {self.kept:,} kept"
        return f"{start} ({', '.join(some)})" if some else start


@dataclass(frozen=True, eq=False)
class JudgedBoxes:
    """Boxes after a policy, and what it did to each.

    Attributes:
        boxes: float64, shape (boxes, 4): as they are now, those left out included; new memory.
        is_kept: bool, shape (boxes,).
        zero_area: bool, shape (boxes,).
        inverted: bool, shape (boxes,).
        outside: bool, shape (boxes,).
        clipped: bool, shape (boxes,): cut, and kept.
        swapped: bool, shape (boxes,): swapped, and kept.
    """

    boxes: NDArray[np.float64]
    is_kept: NDArray[np.bool_]
    zero_area: NDArray[np.bool_]
    inverted: NDArray[np.bool_]
    outside: NDArray[np.bool_]
    clipped: NDArray[np.bool_]
    swapped: NDArray[np.bool_]

    @property
    def is_bad(self) -> NDArray[np.bool_]:
        """Which boxes are of one of the three kinds; bool, shape (boxes,)."""
        return self.zero_area | self.inverted | self.outside

    def kinds_of(self, number: int) -> str:
        """Return the kinds of one box, in words."""
        kinds = ("zero_area", "inverted", "outside")
        return " and ".join(kind for kind in kinds if getattr(self, kind)[number])


def judged(
    boxes: NDArray[np.float64],
    sizes_px: NDArray[np.int64],
    policy: BadBoxes,
    *,
    added_px: int = 0,
) -> JudgedBoxes:
    """Return what `policy` makes of boxes. Under "raise" bad ones stay; raising is the caller's.

    Args:
        boxes: 0-based, half-open xyxy in pixels; shape (boxes, 4), finite.
        sizes_px: Height and width of the image of each box; shape (boxes, 2). 0: not known.
        policy: "fix", "drop", "keep" or "raise".
        added_px: What a side has here more than in the file's own numbers: 1 for files that include
            both ends.

    Raises:
        ConfigError: there is no such policy.

    Example:
        >>> boxes = np.array([[-3.0, 2, 5, 9], [7, 7, 7, 8], [9, 1, 4, 5]])
        >>> found = judged(boxes, np.full((3, 2), 20), "fix")
        >>> found.boxes[found.is_kept].tolist()
        [[0.0, 2.0, 5.0, 9.0], [4.0, 1.0, 9.0, 5.0]]
    """
    if policy not in BAD_BOXES:
        raise ConfigError(f"bad_boxes is one of {', '.join(BAD_BOXES)}, not {policy!r}.")
    # As samples will have them: in float32 two sides may fall together, or leave all bounds.
    boxes = np.clip(boxes, -_FARTHEST_PX, _FARTHEST_PX).astype(np.float32).astype(np.float64)
    sides = boxes[:, 2:] - boxes[:, :2] - added_px
    zero_area: NDArray[np.bool_] = np.any(sides == 0, axis=1)
    inverted: NDArray[np.bool_] = np.any(sides < 0, axis=1)
    upright = _swapped(boxes, sides < 0, added_px)
    cut = _cut(upright, sizes_px)
    # A box of which nothing lies within is outside, however little it misses the border.
    is_gone = ~zero_area & np.any(cut[:, 2:] <= cut[:, :2], axis=1)
    outside = _is_outside(upright, sizes_px) | is_gone
    if policy in ("keep", "raise"):
        none, every = np.zeros(len(boxes), np.bool_), np.ones(len(boxes), np.bool_)
        is_as_said = zero_area | inverted | outside | (policy == "keep")
        said = np.where(is_as_said[:, None], boxes, cut)
        return JudgedBoxes(said, every, zero_area, inverted, outside, none, none)
    if policy == "fix":
        is_kept = ~zero_area & (cut[:, 2:] > cut[:, :2]).all(axis=1)
    else:
        is_kept = ~(zero_area | inverted | outside)
    return JudgedBoxes(
        cut, is_kept, zero_area, inverted, outside, outside & is_kept, inverted & is_kept
    )


def _swapped(
    boxes: NDArray[np.float64], is_inverted: NDArray[np.bool_], added_px: int
) -> NDArray[np.float64]:
    """Return boxes whose ends are in order; swapped in the file's own numbers, not in ours."""
    low = np.where(is_inverted, boxes[:, 2:] - added_px, boxes[:, :2])
    high = np.where(is_inverted, boxes[:, :2] + added_px, boxes[:, 2:])
    return np.concatenate([low, high], axis=1)


def _limits(sizes_px: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return width, height of each box's image; infinite where it is not known."""
    limits = sizes_px[:, ::-1].astype(np.float64)
    limits[limits <= 0] = np.inf
    return limits


def _is_outside(boxes: NDArray[np.float64], sizes_px: NDArray[np.int64]) -> NDArray[np.bool_]:
    limits = _limits(sizes_px)
    slack = np.where(np.isinf(limits), 0, limits * _SLACK)
    return np.asarray(((boxes[:, :2] < -slack) | (boxes[:, 2:] > limits + slack)).any(axis=1))


def _cut(boxes: NDArray[np.float64], sizes_px: NDArray[np.int64]) -> NDArray[np.float64]:
    limits = _limits(sizes_px)
    return np.concatenate(
        [np.clip(boxes[:, :2], 0, limits), np.clip(boxes[:, 2:], 0, limits)], axis=1
    )
