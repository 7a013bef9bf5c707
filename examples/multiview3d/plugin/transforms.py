# SPDX-License-Identifier: Apache-2.0
"""Steps of the pipeline: a dict goes in, and comes out with more in it.

Random numbers come from `penstock.sample_rng()`: they are decided by the seed, the epoch and the
sample's place in it, not by the worker that happens to make it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from mmengine.registry import TRANSFORMS

from penstock import sample_rng
from penstock.images import decode_image
from plugin.geometry import resized_intrinsics

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["LoadViews", "PhotoMetricDistortionMultiViewImage", "ResizeViews"]


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
class PhotoMetricDistortionMultiViewImage:
    """Distorts colours as DETR3D's training does, each change with a probability of 1/2.

    Brightness; contrast; saturation; hue; the order of the channels. In half of the cases contrast
    comes after hue. Views become float32, and are not cut off at 0 and 255.

    Args:
        brightness_delta: The most that is added or taken away, of 255.
        contrast_range: Least and greatest factor of all values.
        saturation_range: Likewise, of the saturation.
        hue_delta: The most that the hue is turned, in degrees.
        per_camera: Whether each camera gets changes of its own, as there. Otherwise all six get the
            same, as another time of day would make it.
    """

    def __init__(
        self,
        brightness_delta: float = 32,
        contrast_range: tuple[float, float] = (0.5, 1.5),
        saturation_range: tuple[float, float] = (0.5, 1.5),
        hue_delta: float = 18,
        *,
        per_camera: bool = True,
    ) -> None:
        self.brightness_delta = brightness_delta
        self.contrast_range = contrast_range
        self.saturation_range = saturation_range
        self.hue_delta = hue_delta
        self.per_camera = per_camera

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        views = sample["views"]
        seeds = sample_rng().integers(2**63, size=len(views))
        if not self.per_camera:
            seeds[:] = seeds[0]
        changed = [
            self._distorted(view.astype(np.float32), np.random.default_rng(seed))
            for view, seed in zip(views, seeds, strict=True)
        ]
        return {**sample, "views": changed}

    def _distorted(
        self, view: NDArray[np.float32], random: np.random.Generator
    ) -> NDArray[np.float32]:
        brightness, contrast, saturation, hue, swap, contrast_last = random.random(6) < 0.5
        factor = random.uniform(*self.contrast_range) if contrast else 1.0
        if brightness:
            view += random.uniform(-self.brightness_delta, self.brightness_delta)
        if not contrast_last:
            view *= factor
        hsv = cv2.cvtColor(view, cv2.COLOR_RGB2HSV)
        if saturation:
            hsv[..., 1] *= random.uniform(*self.saturation_range)
        if hue:
            hsv[..., 0] = (hsv[..., 0] + random.uniform(-self.hue_delta, self.hue_delta)) % 360
        view = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)
        if contrast_last:
            view *= factor
        return view[..., random.permutation(3)] if swap else view
