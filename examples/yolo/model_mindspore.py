# SPDX-License-Identifier: Apache-2.0
"""The tiny detector of `model.py` in MindSpore, and its loss.

In place of the smallest object of a cell, all of them answer for it: every shape is then known.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

CHANNELS = (16, 32, 64, 96)  # each halves height and width: a stride of 16 in all
STRIDE_PX = 2 ** len(CHANNELS)
RARE = 0.01  # share of cells with an object that the scores begin at
BOX_WEIGHT = 2.0
MOST_STRIDES = 20.0  # width and height of a box


class TinyDetector(nn.Cell):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        stages = itertools.starmap(_stage, itertools.pairwise((3, *CHANNELS)))
        self.body = nn.SequentialCell(*stages)
        bias = np.zeros(num_classes + 4, np.float32)
        bias[:num_classes] = math.log(RARE / (1 - RARE))
        self.head = nn.Conv2d(
            CHANNELS[-1], num_classes + 4, 1, has_bias=True, bias_init=Tensor(bias)
        )

    def construct(self, images: Any) -> tuple[Any, Any]:  # noqa: ANN401
        """Return scores (B, rows, columns, classes) as logits, and boxes (B, rows, columns, 4)."""
        output = self.head(self.body(images)).permute(0, 2, 3, 1)
        rows, columns = output.shape[1:3]
        y, x = ops.meshgrid(ops.arange(rows), ops.arange(columns), indexing="ij")
        cells = ops.stack((x, y), -1).astype(output.dtype)
        centres = (cells + 2 * ops.sigmoid(output[..., -4:-2]) - 0.5) * STRIDE_PX
        strides = ops.exp(ops.minimum(output[..., -2:], math.log(MOST_STRIDES)))
        halves = strides * (STRIDE_PX / 2)
        return output[..., :-4], ops.concat((centres - halves, centres + halves), -1)


def _stage(inputs: int, outputs: int) -> nn.SequentialCell:
    return nn.SequentialCell(
        nn.Conv2d(inputs, outputs, 3, stride=2, pad_mode="pad", padding=1),
        nn.BatchNorm2d(outputs),
        nn.SiLU(),
        nn.Conv2d(outputs, outputs, 3, pad_mode="pad", padding=1),
        nn.BatchNorm2d(outputs),
        nn.SiLU(),
    )


def detection_loss(scores: Any, boxes: Any, targets: Any) -> Any:  # noqa: ANN401
    """Return the loss of a batch, for each object.

    Args:
        scores: Logits, shape (B, rows, columns, classes).
        boxes: Pixels, shape (B, rows, columns, 4).
        targets: Shape (B, N, 6): rows as `YOLOCollate` makes them, and rows of -1 for no object.
    """
    _, rows, columns, num_classes = scores.shape
    objects = targets.reshape(-1, 6)
    is_there = (objects[:, 0] >= 0).astype(mindspore.float32)
    whole = ops.maximum(objects, 0)
    x = ops.minimum(whole[:, 2] * columns, columns - 1).astype(mindspore.int32)
    y = ops.minimum(whole[:, 3] * rows, rows - 1).astype(mindspore.int32)
    cells = (whole[:, 0].astype(mindspore.int32) * rows + y) * columns + x
    logits = scores.reshape(-1, num_classes)
    places = ops.stack((cells, whole[:, 1].astype(mindspore.int32)), 1)
    wanted = ops.tensor_scatter_max(ops.zeros_like(logits), places, is_there)
    ones = ops.ones_like(logits)
    of_scores = ops.binary_cross_entropy_with_logits(logits, wanted, ones, ones, reduction="sum")
    size_px = Tensor([columns * STRIDE_PX, rows * STRIDE_PX], mindspore.float32)
    centres, halves = whole[:, 2:4] * size_px, whole[:, 4:6] * size_px / 2
    truth = ops.concat((centres - halves, centres + halves), 1)
    overlaps = generalized_iou(ops.gather(boxes.reshape(-1, 4), cells, 0), truth)
    of_boxes = ((1 - overlaps) * is_there).sum()
    return (of_scores + BOX_WEIGHT * of_boxes) / ops.maximum(is_there.sum(), 1)


def generalized_iou(boxes: Any, others: Any) -> Any:  # noqa: ANN401
    """Return the GIoU of boxes, row by row (Rezatofighi and others, CVPR 2019): -1 to 1."""
    both = ops.maximum(boxes[:, :2], others[:, :2]), ops.minimum(boxes[:, 2:], others[:, 2:])
    hull = ops.minimum(boxes[:, :2], others[:, :2]), ops.maximum(boxes[:, 2:], others[:, 2:])
    common, around = _area(*both), _area(*hull)
    union = _area(boxes[:, :2], boxes[:, 2:]) + _area(others[:, :2], others[:, 2:]) - common
    return common / (union + 1e-7) - (around - union) / (around + 1e-7)


def _area(left_top: Any, right_bottom: Any) -> Any:  # noqa: ANN401
    return ops.maximum(right_bottom - left_top, 0).prod(1)
