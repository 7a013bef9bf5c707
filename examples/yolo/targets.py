# SPDX-License-Identifier: Apache-2.0
"""Batches in the form that YOLO's losses take: images, and one table of all objects.

targets, float32 (n, 6):   image   class   centre x   centre y   width   height
                           0..B-1          as shares of the batch's width and height
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.collate import Collator
from penstock.vision import DetectionCollate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.collate import BatchMemory

Sample = dict[str, Any]


class YOLOCollate:
    """Makes `(images, targets, notes)` of samples with boxes and labels.

    Images of different sizes are padded at the right and bottom, to the next multiple of the stride
    of the largest height and width; those of one such size are only stacked. They are float32
    (batch, 3, height, width) in 0..1. `notes` has a dict for each image: what belongs to it as a
    whole, such as "image_id", and "letterbox", by which boxes are brought back to its file.
    """

    def __init__(self, stride: int, fill: int = 114) -> None:
        self.stride = stride
        self._collate = DetectionCollate(images="pad", pad_multiple=stride, fill=fill)

    def collate_into(
        self, samples: Sequence[Sample], out: BatchMemory
    ) -> tuple[Any, Any, list[Sample]]:
        """Return the batch in memory of `out`: in a worker, a slot of shared memory."""
        # Without their objects, for which the slot has a place below.
        images, _ = self._collate.collate_into([{"image": one["image"]} for one in samples], out)
        sizes = [sample["image"].shape[:2] for sample in samples]
        height, width = (
            -(-max(sides) // self.stride) * self.stride for sides in zip(*sizes, strict=True)
        )
        rows = out.empty((sum(len(sample["boxes"]) for sample in samples), 6), np.float32)
        rows[:] = target_rows(samples, height, width)
        return images, out.leaf(rows), [_of_whole_image(sample) for sample in samples]

    def __call__(self, samples: Sequence[Sample]) -> tuple[Any, Any, list[Sample]]:
        """Return the same batch as numpy arrays of its own; for other loaders and for a look."""
        return self.collate_into(samples, Collator(np.empty))


def target_rows(samples: Sequence[Sample], height: int, width: int) -> NDArray[np.float32]:
    """Return the objects of all images as one table, see above."""
    boxes = np.concatenate([sample["boxes"] for sample in samples])
    corners = boxes.reshape(-1, 2, 2) / (width, height)
    image = np.repeat(np.arange(len(samples)), [len(sample["boxes"]) for sample in samples])
    label = np.concatenate([sample["labels"] for sample in samples])
    centre, size = corners.mean(axis=1), corners[:, 1] - corners[:, 0]
    return np.column_stack((image, label, centre, size)).astype(np.float32)


def boxes_px(rows: NDArray[np.float32], height: int, width: int) -> NDArray[np.float32]:
    """Return left, top, right, bottom in pixels of rows of targets: shape (n, 4)."""
    centre, half = rows[:, 2:4], rows[:, 4:6] / 2
    shares = np.concatenate((centre - half, centre + half), axis=1)
    return (shares * (width, height, width, height)).astype(np.float32)


def _of_whole_image(sample: Sample) -> Sample:
    return {key: value for key, value in sample.items() if not isinstance(value, np.ndarray)}
