# SPDX-License-Identifier: Apache-2.0
"""The two losses of RetinaNet: which class each anchor shows, and where its object lies.

Reference: Lin and others, "Focal Loss for Dense Object Detection", arXiv 1708.02002; smooth L1 from
Girshick, "Fast R-CNN", arXiv 1504.08083.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from anchors import IGNORED, encode, match
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Losses(NamedTuple):
    """Of one batch; scalars."""

    classes: Tensor
    boxes: Tensor
    num_positives: int


def sigmoid_focal_loss(
    logits: Tensor, targets: Tensor, *, alpha: float = 0.25, gamma: float = 2.0
) -> Tensor:
    """Return the focal loss of each number: cross entropy, and little of it where all is clear.

        p_t = sigmoid(logits) for targets of 1, else 1 - sigmoid(logits)
        loss = -alpha_t (1 - p_t)^gamma log(p_t),  alpha_t = alpha for targets of 1, else 1 - alpha

    Both factors are computed as logarithms of sigmoids, so that neither 1 - p_t nor log(p_t) loses
    its digits where p_t is next to 1 or 0.

    Args:
        logits: Of any shape.
        targets: 0 or 1, of the same shape.
        alpha: Weight of the targets of 1, 0 to 1.
        gamma: 0 is cross entropy; 2 is the paper's.

    Returns:
        Of the shape of `logits`.
    """
    towards = torch.where(targets > 0, logits, -logits)  # p_t = sigmoid(towards)
    weights = torch.where(targets > 0, alpha, 1 - alpha)
    unsure = torch.exp(gamma * functional.logsigmoid(-towards))
    return -weights * unsure * functional.logsigmoid(towards)


def retinanet_losses(
    class_logits: Tensor,
    box_offsets: Tensor,
    anchors: Tensor,
    targets: Sequence[dict[str, Tensor]],
    *,
    beta: float = 1 / 9,
) -> Losses:
    """Return both losses of a batch, each divided by the number of positive anchors.

    Images without objects count: all their anchors are background.

    Args:
        class_logits: (batch, A, classes).
        box_offsets: (batch, A, 4).
        anchors: (A, 4), in pixels.
        targets: For each image "boxes" (N, 4) and "labels" (N,); N may be 0.
        beta: Where smooth L1 turns from square to straight.
    """
    class_sum, box_sum = class_logits.new_zeros(()), box_offsets.new_zeros(())
    num_positives = 0
    for logits, offsets, target in zip(class_logits, box_offsets, targets, strict=True):
        found = match(anchors, target["boxes"])
        positive = (found >= 0).nonzero().squeeze(1)
        boxes = found[positive]
        wanted = torch.zeros_like(logits)
        wanted[positive, target["labels"][boxes]] = 1
        counted = found != IGNORED
        class_sum = class_sum + sigmoid_focal_loss(logits[counted], wanted[counted]).sum()
        box_sum = box_sum + functional.smooth_l1_loss(
            offsets[positive],
            encode(target["boxes"][boxes], anchors[positive]),
            beta=beta,
            reduction="sum",
        )
        num_positives += len(positive)
    divisor = max(num_positives, 1)  # a batch without an object
    return Losses(class_sum / divisor, box_sum / divisor, num_positives)
