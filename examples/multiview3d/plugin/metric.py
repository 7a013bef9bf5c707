# SPDX-License-Identifier: Apache-2.0
"""How many of the objects were found: a small stand-in for nuScenes' own score."""

from __future__ import annotations

from typing import Any

import torch
from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS

__all__ = ["CentreRecall"]


@METRICS.register_module()
class CentreRecall(BaseMetric):
    """Share of boxes with a prediction of their class nearby, among the best of each sample.

    As many predictions count as there are boxes. nuScenes matches by the distance of centres on the
    ground, too, but averages precision over all scores and several distances.

    Args:
        within_m: The farthest that a centre may lie away.
    """

    default_prefix = "recall"

    def __init__(self, within_m: float = 2.0) -> None:
        super().__init__()
        self.within_m = within_m

    def process(self, data_batch: dict[str, Any], data_samples: list[dict[str, Any]]) -> None:
        counts = data_batch["num_boxes"].tolist()
        truths = zip(
            data_batch["boxes"].split(counts), data_batch["labels"].split(counts), strict=True
        )
        for (boxes, labels), found in zip(truths, data_samples, strict=True):
            best = found["scores"].cpu().topk(min(len(boxes), len(found["scores"]))).indices
            centres, classes = found["boxes"].cpu()[best, :2], found["labels"].cpu()[best]
            near = torch.cdist(boxes[:, :2], centres) <= self.within_m
            is_found = (near & (labels[:, None] == classes[None])).any(dim=1)
            self.results.append((int(is_found.sum()), len(boxes)))

    def compute_metrics(self, results: list[tuple[int, int]]) -> dict[str, float]:
        found, total = (sum(numbers) for numbers in zip(*results, strict=True))
        return {f"within_{self.within_m:g}m": found / max(total, 1)}
