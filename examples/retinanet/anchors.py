# SPDX-License-Identifier: Apache-2.0
"""Anchor boxes, which object each of them is to find, and boxes as offsets from them.

Boxes are float tensors (N, 4): left, top, right, bottom in pixels of the network's input, 0-based
and half-open, as Penstock's samples have them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

STRIDES_PX: Final = (8, 16, 32, 64, 128)  # of P3 to P7
BACKGROUND: Final = -1
IGNORED: Final = -2
# A side is at most so many times the anchor's: an untrained network would overflow float32.
_MOST_LOG_SCALE: Final = math.log(1000 / 16)


@dataclass(frozen=True)
class AnchorGrid:
    """At each place of each level, an anchor for every scale and ratio.

    Attributes:
        sides_per_stride: Side of a level's smallest square anchor, in strides of the level. The
            paper has 4 (32 px on P3), for photos of 600 to 800 px. Small images have small objects:
            2 begins at 16 px.
        scales: Factors of the side.
        ratios: Height by width; the area stays.

    Reference:
        Lin and others, "Focal Loss for Dense Object Detection", arXiv 1708.02002, section 4.
    """

    sides_per_stride: float = 4.0
    scales: tuple[float, ...] = (1.0, 2 ** (1 / 3), 2 ** (2 / 3))
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0)

    def __len__(self) -> int:
        """Return the number of anchors at one place."""
        return len(self.scales) * len(self.ratios)

    def shapes_at(self, stride_px: int) -> Tensor:
        """Return width and height of the anchors at one place, float32 (len(self), 2)."""
        side = self.sides_per_stride * stride_px
        sides = [
            (side * scale / math.sqrt(ratio), side * scale * math.sqrt(ratio))
            for scale in self.scales
            for ratio in self.ratios
        ]
        return torch.tensor(sides)

    def boxes(self, level_sizes: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
        """Return the anchors of one image, in the order of the network's outputs.

        Args:
            level_sizes: Height and width of P3 to P7, in places.
            device: Where to.

        Returns:
            float32 (A, 4): level by level, row by row, place by place, anchor by anchor. Shared by
            all calls with these arguments: not to be written to.
        """
        return _boxes(self, tuple(level_sizes), device)


@functools.lru_cache(maxsize=16)
def _boxes(
    grid: AnchorGrid, level_sizes: tuple[tuple[int, int], ...], device: torch.device
) -> Tensor:
    levels = []
    for (height, width), stride in zip(level_sizes, STRIDES_PX, strict=True):
        y = (torch.arange(height) + 0.5) * stride
        x = (torch.arange(width) + 0.5) * stride
        centre_y, centre_x = torch.meshgrid(y, x, indexing="ij")
        centres = torch.stack([centre_x, centre_y], dim=-1).reshape(-1, 1, 2)
        half = grid.shapes_at(stride) / 2
        levels.append(torch.cat([centres - half, centres + half], dim=-1).reshape(-1, 4))
    return torch.cat(levels).to(device)


def box_iou(first: Tensor, second: Tensor) -> Tensor:
    """Return the intersection over the union of all pairs, (N, M); 0 for boxes without area."""
    areas_first = (first[:, 2:] - first[:, :2]).clamp(min=0).prod(dim=1)
    areas_second = (second[:, 2:] - second[:, :2]).clamp(min=0).prod(dim=1)
    left_top = torch.maximum(first[:, None, :2], second[None, :, :2])
    right_bottom = torch.minimum(first[:, None, 2:], second[None, :, 2:])
    shared = (right_bottom - left_top).clamp(min=0).prod(dim=2)
    union = areas_first[:, None] + areas_second[None, :] - shared
    return torch.where(union > 0, shared / union, torch.zeros_like(union))


def match(
    anchors: Tensor, boxes: Tensor, *, foreground: float = 0.5, background: float = 0.4
) -> Tensor:
    """Say for each anchor which box it is to find.

    An anchor gets the box that it overlaps most, if the IoU is `foreground` or more. Below
    `background` it is BACKGROUND, between the two IGNORED. Beyond the paper, as most code has it:
    the anchors that overlap a box most get that box, however little that is, or an object that
    suits no anchor would never be learned. An anchor that is the best one of several boxes gets
    the one of them that it overlaps most: so nearly all boxes have an anchor, not each.

    Args:
        anchors: (A, 4).
        boxes: (N, 4), N may be 0.
        foreground: IoU from which on an anchor is positive.
        background: IoU below which it is negative.

    Returns:
        int64 (A,): the box's number, BACKGROUND or IGNORED.
    """
    if not len(boxes):
        return torch.full((len(anchors),), BACKGROUND, dtype=torch.int64, device=anchors.device)
    iou = box_iou(boxes, anchors)
    most, found = iou.max(dim=0)
    found = torch.where(most < foreground, IGNORED, found)
    found = torch.where(most < background, BACKGROUND, found)
    best = iou.max(dim=1, keepdim=True).values
    is_best = (iou == best) & (best > 0)
    return torch.where(is_best.any(dim=0), torch.where(is_best, iou, -1).argmax(dim=0), found)


def encode(boxes: Tensor, anchors: Tensor) -> Tensor:
    """Return boxes as offsets from their anchors: what the box subnet learns.

    Args:
        boxes: (N, 4), with sides above 0.
        anchors: (N, 4), one for each box.

    Returns:
        (N, 4): how far the centre is moved, in the anchor's width and height, and the logarithms of
        how many times as wide and high the box is.
    """
    sides, centres = _sides_and_centres(boxes)
    anchor_sides, anchor_centres = _sides_and_centres(anchors)
    moved = (centres - anchor_centres) / anchor_sides
    return torch.cat([moved, torch.log(sides / anchor_sides)], dim=-1)


def decode(offsets: Tensor, anchors: Tensor) -> Tensor:
    """Return the boxes that offsets stand for: `encode` undone.

    Args:
        offsets: (..., N, 4).
        anchors: (N, 4).

    Returns:
        (..., N, 4); sides are at most 62.5 times the anchor's.
    """
    anchor_sides, anchor_centres = _sides_and_centres(anchors)
    centres = offsets[..., :2] * anchor_sides + anchor_centres
    half = offsets[..., 2:].clamp(max=_MOST_LOG_SCALE).exp() * anchor_sides / 2
    return torch.cat([centres - half, centres + half], dim=-1)


def _sides_and_centres(boxes: Tensor) -> tuple[Tensor, Tensor]:
    return boxes[..., 2:] - boxes[..., :2], (boxes[..., :2] + boxes[..., 2:]) / 2
