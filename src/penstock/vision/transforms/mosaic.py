# SPDX-License-Identifier: Apache-2.0
"""`Mosaic`: four or nine images side by side on one canvas.

    4 tiles: quadrants around a random point       9 tiles: a grid around the first one
    (cx, cy), each tile at its inner corner        (canvas 3 s, of which 2 s are kept)

        +-------+----+                                  +---+-----+---+
        |     0 | 1  |                                  | 8 |  1  | 2 |
        +-------+----+ cy                               +---+-----+---+
        |     2 | 3  |                                  | 7 |  0  | 3 |
        +-------+----+                                  +---+-----+---+
               cx                                       | 6 |  5  | 4 |

Each image is scaled until its longer side is s, put into its cell at the corner or side next to the
middle, and cut at the cell. Where it does not fill the cell, the canvas is grey. The canvas is 2 s
wide and high: a `RandomPerspective(s)` has to cut it to s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import cv2
import numpy as np

from penstock.errors import ConfigError
from penstock.randomness.samples import sample_rng
from penstock.vision.arguments import (
    checked_number,
    checked_transform,
    checked_whole,
    named_here,
)
from penstock.vision.samples import image_of, joined, without_letterbox
from penstock.vision.transforms.coordinates import clipped, moved
from penstock.vision.transforms.letterbox import Letterbox
from penstock.vision.transforms.partners import PartneredDataset

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["Mosaic"]

# Columns and rows (0, 1, 2) of the cells around the first of nine, clockwise from the top.
_AROUND: Final = ((1, 0), (2, 0), (2, 1), (2, 2), (1, 2), (0, 2), (0, 1), (0, 0))


class Mosaic(PartneredDataset):
    """Samples of a detection dataset, each on one canvas with partners; the canvas is 2 s wide.

    `Mosaic(dataset, s)` alone gives images of 2 s x 2 s. To get s x s, as the recipe trains on, you
    must pass `transform=RandomPerspective(s)`, which moves the canvas at random and cuts it.

    A sample that gets no mosaic (`probability`, `until_epoch`) is letterboxed to s and handed to
    `transform`. Without a `transform` it lies in the middle of a canvas of 2 s, so that all samples
    have one size; a `RandomPerspective(s)` later in the chain makes the same of it. Both are
    squares. Where you train on images that are none, a `whole_transform` takes the place of that.

    In a mosaic boxes are clipped to the visible part of their image; landmarks beyond are NaN,
    their visibility 0. What is of the image as a whole ("image_id") is that of sample `index`;
    "letterbox" is dropped.

    Attributes:
        dataset: Where the images come from: its samples are dicts.

    Concurrency:
        As the dataset and the transform. Partners come from the sample's own generator.

    Reference:
        Bochkovskiy and others, "YOLOv4: Optimal Speed and Accuracy of Object Detection" (2020);
        canvas, centre, fill and the end of it in the last epochs as published with YOLOv5.

    Example:
        >>> cell = {
        ...     "image": np.full((30, 40, 3), 255, np.uint8),
        ...     "boxes": np.array([[10, 10, 20, 20]], np.float32),
        ...     "labels": np.array([3]),
        ... }
        >>> sample = Mosaic([cell, cell], size=64)[0]
        >>> sample["image"].shape, sample["boxes"].shape[1], set(sample["labels"].tolist())
        ((128, 128, 3), 4, {3})
    """

    @named_here(p="probability", img_scale="size")
    def __init__(
        self,
        dataset: Any,  # noqa: ANN401 - anything with an index and a length
        size: int = 640,
        *,
        tiles: int = 4,
        probability: float = 1.0,
        fill: int = 114,
        min_side_px: float = 1.0,
        transform: Callable[[Any], Any] | None = None,
        until_epoch: int | None = None,
        whole_transform: Callable[[Any], Any] | None = None,
    ) -> None:
        """Say how large, and how often.

        Args:
            dataset: Map-style, with a length.
            size: s, in pixels, at least 2: the longer side of each image on the canvas, which is
                2 s wide and high.
            tiles: 4 or 9.
            probability: Of a mosaic, 0 to 1.
            fill: Value of the canvas in all channels, 0 to 255.
            min_side_px: Objects are dropped whose box, clipped, is not wider and higher than this.
            transform: Applied to the result: `RandomPerspective(size)`, or a chain that begins
                with it. None gives the whole canvas.
            until_epoch: Epochs from this one on have no mosaic: the recipe trains its last epochs
                (10 or 15) on whole images. None: all have. The loader tells the epoch.
            whole_transform: Applied to a sample that gets no mosaic, as the dataset has it, and all
                that is: it is neither letterboxed to s nor handed to `transform`. For sizes that
                are no squares: `Compose(Letterbox((480, 640)), ...)`. None: see above.

        Raises:
            ConfigError: an argument is out of its range, or the dataset is not map-style.
        """
        super().__init__(
            dataset, probability=probability, transform=transform, until_epoch=until_epoch
        )
        if whole_transform is not None:
            checked_transform("whole_transform is None, or", whole_transform)
        self.whole_transform = whole_transform
        if tiles not in {4, 9}:
            raise ConfigError(f"tiles is 4 or 9; got {tiles!r}")
        self.size_px = checked_whole("size", size, 2)
        self.num_tiles = tiles
        self.fill = checked_whole("fill", fill, 0, 255)
        self.min_side_px = checked_number("min_side_px", min_side_px, 0)
        self._letterbox = Letterbox(self.size_px, self.fill)
        self._middle = Letterbox(2 * self.size_px, self.fill, enlarge=False)

    def _alone(self, sample: Any) -> Any:  # noqa: ANN401
        boxed = self._letterbox(_checked_sample(sample))
        # What comes after `transform` may well want images of one size: a batch, or MixUp.
        return without_letterbox(boxed if self.transform is not None else self._middle(boxed))

    def _whole(self, sample: Any) -> Any:  # noqa: ANN401
        if self.whole_transform is None:
            return super()._whole(sample)
        return self.whole_transform(_checked_sample(sample))

    def _combined(self, index: int) -> dict[str, Any]:
        rng, side = sample_rng(), self.size_px
        partners = self._partners(self.num_tiles - 1)
        if self.num_tiles == 4:
            centre = rng.uniform(side / 2, 3 * side / 2, 2).astype(int).tolist()
            cells = _quadrants(centre, 2 * side)
            order = rng.permutation(4).tolist()  # the sample itself is in any of the four
            return self._tiled(index, partners, [cells[place] for place in order])
        corner = rng.integers(0, side, 2, endpoint=True).tolist()
        own = _checked_sample(self.dataset[index])
        height, width = _fitting(image_of(own), side)
        return self._tiled(index, partners, _grid(width, height, side, corner), own)

    def _tiled(
        self,
        index: int,
        partners: list[int],
        cells: list[_Cell],
        own: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        own = _checked_sample(self.dataset[index]) if own is None else own
        first = image_of(own)
        side = 2 * self.size_px
        canvas = np.full((side, side, *first.shape[2:]), self.fill, first.dtype)
        placed = [self._placed(own, cells[0], canvas)]
        for partner, cell in zip(partners, cells[1:], strict=True):
            sample = _checked_sample(self._partner(partner, index))
            placed.append(self._placed(sample, cell, canvas))
        return joined(placed, canvas)

    def _placed(self, sample: dict[str, Any], cell: _Cell, canvas: NDArray[Any]) -> dict[str, Any]:
        """Draw an image into its cell; return its objects, as they are on the canvas."""
        image = image_of(sample)
        if image.shape[2:] != canvas.shape[2:] or image.dtype != canvas.dtype:
            raise ConfigError(
                f"the images of a mosaic are {image.dtype} {image.shape} and {canvas.dtype} "
                f"(…, {canvas.shape[2:]}): decode all of them to uint8 RGB"
            )
        height, width = _fitting(image, self.size_px)
        left, top = cell.corner_for(width, height)
        # A tile begins where its cell does, or in the first column or row, which the canvas cuts.
        x1, y1 = max(left, 0), max(top, 0)
        x2 = max(x1, min(left + width, cell.right, canvas.shape[1]))
        y2 = max(y1, min(top + height, cell.bottom, canvas.shape[0]))
        if x2 > x1 and y2 > y1:
            scaled = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
            canvas[y1:y2, x1:x2] = scaled[y1 - top : y2 - top, x1 - left : x2 - left].reshape(
                y2 - y1, x2 - x1, *canvas.shape[2:]
            )
        scale = width / image.shape[1], height / image.shape[0]
        return clipped(moved(sample, scale, (left, top)), (x1, y1, x2, y2), self.min_side_px)


class _Cell(NamedTuple):
    """Where a tile may be drawn on the canvas, in pixels; and at which of its sides it lies."""

    left: int
    top: int
    right: int
    bottom: int
    is_at_right: bool
    is_at_bottom: bool

    def corner_for(self, width: int, height: int) -> tuple[int, int]:
        """Left and top of a tile of this size."""
        left = self.right - width if self.is_at_right else self.left
        top = self.bottom - height if self.is_at_bottom else self.top
        return left, top


def _quadrants(centre: list[int], side: int) -> list[_Cell]:
    xs, ys = (0, centre[0], side), (0, centre[1], side)
    return [
        _Cell(xs[column], ys[row], xs[column + 1], ys[row + 1], column == 0, row == 0)
        for row in range(2)
        for column in range(2)
    ]


def _grid(width: int, height: int, size_px: int, corner: list[int]) -> list[_Cell]:
    """Cells of 3 x 3 around a tile of this size, as seen from `corner` of the canvas of 3 s."""
    xs = _lines(width, size_px, corner[0])
    ys = _lines(height, size_px, corner[1])
    return [
        _Cell(xs[column], ys[row], xs[column + 1], ys[row + 1], column == 0, row == 0)
        for column, row in ((1, 1), *_AROUND)
    ]


def _lines(length: int, size_px: int, corner: int) -> tuple[int, int, int, int]:
    """Where three cells begin and end, the middle one as long as the tile in the middle."""
    start = (3 * size_px - length) // 2
    return -corner, start - corner, start + length - corner, 3 * size_px - corner


def _fitting(image: NDArray[Any], side: int) -> tuple[int, int]:
    """Height and width of an image whose longer side is `side` pixels."""
    height, width = image.shape[:2]
    scale = side / max(height, width)
    return max(1, round(height * scale)), max(1, round(width * scale))


def _checked_sample(sample: Any) -> dict[str, Any]:  # noqa: ANN401
    if not isinstance(sample, dict):
        raise ConfigError(
            f'Mosaic is made of samples that are dicts with "image" and "boxes"; got a '
            f"{type(sample).__name__}. For pairs of image and class there are MixUp and CutMix"
        )
    return sample
