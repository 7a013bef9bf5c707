# SPDX-License-Identifier: Apache-2.0
"""Steps of the pipeline: a dict goes in, and comes out with more in it.

Random numbers come from `penstock.sample_rng()`: they are decided by the seed, the epoch and the
sample's place in it, not by the worker that happens to make it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
from mmengine.registry import TRANSFORMS

from penstock import sample_rng
from penstock.images import decode_image
from penstock.vision import ColorJitter
from plugin.geometry import resized_intrinsics

__all__ = ["JitterViews", "LoadViews", "ResizeViews"]


@TRANSFORMS.register_module()
class LoadViews:
    """Reads the images: `views`, a list of uint8 (H, W, 3), RGB."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        views = [decode_image(Path(path).read_bytes()) for path in sample["img_paths"]]
        return {**sample, "views": views}


@TRANSFORMS.register_module()
class ResizeViews:
    """Resizes all views, and their cameras with them.

    Args:
        scale: Of both sides; the size is rounded to whole pixels, the intrinsics follow what the
            image really became.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        views, intrinsics = [], []
        for view, camera in zip(sample["views"], sample["intrinsics"], strict=True):
            height, width = view.shape[:2]
            new = round(width * self.scale), round(height * self.scale)
            views.append(cv2.resize(view, new, interpolation=cv2.INTER_AREA))
            intrinsics.append(resized_intrinsics(camera, (new[0] / width, new[1] / height)))
        return {**sample, "views": views, "intrinsics": np.stack(intrinsics)}


@TRANSFORMS.register_module()
class JitterViews:
    """Changes brightness, contrast, saturation and hue at random.

    Args:
        per_camera: Whether each camera gets a change of its own. Otherwise all six get the same, as
            another time of day would make it.
    """

    def __init__(
        self,
        brightness: float = 0.125,
        contrast: float = 0.5,
        saturation: float = 0.5,
        hue: float = 0.05,
        *,
        per_camera: bool = True,
    ) -> None:
        self.jitter = ColorJitter(brightness, contrast, saturation, hue)
        self.per_camera = per_camera

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        views = sample["views"]
        seeds = sample_rng().integers(2**63, size=len(views))
        if not self.per_camera:
            seeds[:] = seeds[0]
        changed = [
            self.jitter.apply(view, np.random.default_rng(seed))
            for view, seed in zip(views, seeds, strict=True)
        ]
        return {**sample, "views": changed}
