# SPDX-License-Identifier: Apache-2.0
"""A small network with three heads, and losses that leave out what a face has no label for."""

from __future__ import annotations

from itertools import pairwise

from data import EYE_CORNERS, NUM_LANDMARKS, UNKNOWN
from torch import Tensor, nn

Faces = dict[str, Tensor]


class FaceNet(nn.Module):
    """Gives for images (N, 3, 64, 64) boxes (N, 4), landmarks (N, 68, 2), poses (N, classes)."""

    def __init__(self, num_poses: int, width: int = 32) -> None:
        super().__init__()

        def stage(channels: int, out: int) -> nn.Sequential:
            convolution = nn.Conv2d(channels, out, 3, padding=1, bias=False)
            return nn.Sequential(convolution, nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2))

        widths = [3, width, 2 * width, 2 * width, 2 * width]
        stages = [stage(*pair) for pair in pairwise(widths)]
        self.body = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(4), nn.Flatten())
        num_features = widths[-1] * 16
        self.box = nn.Linear(num_features, 4)
        self.landmarks = nn.Linear(num_features, 2 * NUM_LANDMARKS)
        self.pose = nn.Linear(num_features, num_poses)

    def forward(self, images: Tensor) -> Faces:
        features = self.body(images - 0.5)
        landmarks = self.landmarks(features).unflatten(1, (NUM_LANDMARKS, 2))
        return {"box": self.box(features), "landmarks": landmarks, "pose": self.pose(features)}


def known_l1(predicted: Tensor, wanted: Tensor) -> Tensor:
    """Return the smooth L1 loss, a mean over the coordinates that are known; 0 if none is."""
    known = wanted.isfinite()
    # NaN is taken out before the loss, not after it: 0 x NaN would be NaN in the gradient.
    pairs = predicted[known], wanted[known]
    total: Tensor = nn.functional.smooth_l1_loss(*pairs, beta=0.1, reduction="sum")
    return total / known.sum().clamp(min=1)


def losses(predicted: Faces, wanted: Faces) -> Faces:
    """Return the loss of each head; a batch without a label for one gives 0 there."""
    pose = nn.functional.cross_entropy(
        predicted["pose"], wanted["pose"], ignore_index=UNKNOWN, reduction="sum"
    )
    return {
        "box": known_l1(predicted["box"], wanted["box"]),
        "landmarks": known_l1(predicted["landmarks"], wanted["landmarks"]),
        "pose": pose / (wanted["pose"] != UNKNOWN).sum().clamp(min=1),
    }


def landmark_errors(predicted: Tensor, wanted: Tensor) -> Tensor:
    """Return each face's mean landmark error over the distance of its outer eye corners.

    Args:
        predicted: float32 (N, 68, 2).
        wanted: The same; NaN where not marked.

    Returns:
        float32 (M,), of those faces that have an eye corner on both sides and anything else.
    """
    left, right = (wanted[:, corner] for corner in EYE_CORNERS)
    distances: Tensor = (predicted - wanted).norm(dim=2).nanmean(dim=1) / (right - left).norm(dim=1)
    return distances[distances.isfinite()]
