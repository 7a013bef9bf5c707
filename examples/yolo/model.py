# SPDX-License-Identifier: Apache-2.0
"""A tiny detector without anchors, and its loss: enough to see that it learns from the batches.

One level of stride 16. The cell in which an object's centre lies answers for it; where there are
several, for the smallest. It says a score for each class, and a box: where its centre is, from half
a cell before the cell to half a cell behind it, and its width and height in strides, as logarithms.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

CHANNELS = (16, 32, 64, 96)  # each halves height and width: a stride of 16 in all
RARE = 0.01  # share of cells with an object that the scores begin at
BOX_WEIGHT = 2.0
MOST_STRIDES = 20.0  # width and height of a box


class TinyDetector(nn.Module):
    stride_px = 2 ** len(CHANNELS)

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        inputs = (3, *CHANNELS[:-1])
        self.body = nn.Sequential(*map(_stage, inputs, CHANNELS))
        self.head = nn.Conv2d(CHANNELS[-1], num_classes + 4, 1)
        assert self.head.bias is not None
        nn.init.constant_(self.head.bias[:num_classes], math.log(RARE / (1 - RARE)))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores (B, rows, columns, classes) as logits, and boxes (B, rows, columns, 4)."""
        output = self.head(self.body(images)).permute(0, 2, 3, 1)
        return output[..., :-4], self._boxes(output[..., -4:])

    def _boxes(self, output: Tensor) -> Tensor:
        """Left, top, right, bottom in pixels."""
        rows, columns = output.shape[1:3]
        y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        cells = torch.stack((x, y), dim=-1).to(output)
        centres = (cells + 2 * output[..., :2].sigmoid() - 0.5) * self.stride_px
        halves = output[..., 2:].clamp(max=math.log(MOST_STRIDES)).exp() * self.stride_px / 2
        return torch.cat((centres - halves, centres + halves), dim=-1)


def _stage(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.SiLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.SiLU(),
    )


def detection_loss(scores: Tensor, boxes: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """Return the sum of a batch's losses, and how many cells answer for an object.

    The quotient is the loss. Who wants it of several batches needs both: a batch without objects
    has a sum, too.

    Args:
        scores: Logits, shape (B, rows, columns, classes).
        boxes: Pixels, shape (B, rows, columns, 4).
        targets: Shape (n, 6), as `YOLOCollate` makes them.
    """
    batch, rows, columns, _ = scores.shape
    cells, objects = assigned(targets, batch, rows, columns)
    wanted = torch.zeros_like(scores).flatten(0, 2)
    wanted[cells, objects[:, 1].long()] = 1
    of_scores = functional.binary_cross_entropy_with_logits(
        scores.flatten(0, 2), wanted, reduction="sum"
    )
    size_px = targets.new_tensor((columns, rows)) * TinyDetector.stride_px
    centres, halves = objects[:, 2:4] * size_px, objects[:, 4:6] * size_px / 2
    truth = torch.cat((centres - halves, centres + halves), dim=1)
    of_boxes = (1 - generalized_iou(boxes.flatten(0, 2)[cells], truth)).sum()
    return of_scores + BOX_WEIGHT * of_boxes, len(cells)


def assigned(targets: Tensor, batch: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return the cells that answer for an object, as numbers in the batch, and their targets."""
    x = (targets[:, 2] * columns).long().clamp(0, columns - 1)
    y = (targets[:, 3] * rows).long().clamp(0, rows - 1)
    cells = (targets[:, 0].long() * rows + y) * columns + x
    # Ordered from the largest, so that the highest place in a cell is its smallest object's.
    order = (targets[:, 4] * targets[:, 5]).argsort(descending=True, stable=True)
    place = torch.full((batch * rows * columns,), -1, device=targets.device)
    place.scatter_reduce_(0, cells[order], torch.arange(len(order), device=order.device), "amax")
    taken = (place >= 0).nonzero().flatten()
    return taken, targets[order[place[taken]]]


def generalized_iou(boxes: Tensor, others: Tensor) -> Tensor:
    """Return the GIoU of boxes, row by row (Rezatofighi and others, CVPR 2019): -1 to 1."""
    left_top, right_bottom = boxes.split(2, dim=1)
    other_left_top, other_right_bottom = others.split(2, dim=1)
    inner = torch.minimum(right_bottom, other_right_bottom) - left_top.maximum(other_left_top)
    outer = torch.maximum(right_bottom, other_right_bottom) - left_top.minimum(other_left_top)
    shared, hull = inner.clamp(min=0).prod(dim=1), outer.prod(dim=1)
    areas = (right_bottom - left_top).prod(dim=1)
    union = areas + (other_right_bottom - other_left_top).prod(dim=1) - shared
    result: Tensor = shared / union - (hull - union) / hull
    return result
