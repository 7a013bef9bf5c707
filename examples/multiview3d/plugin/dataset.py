# SPDX-License-Identifier: Apache-2.0
"""Key frames of six cameras, from an info file as MMDetection3D writes it for nuScenes.

It writes a dict with `data_list` from 1.1 on. Before, it wrote one with `infos`: so are the files
that DETR3D, BEVFormer and PETR were published with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from mmengine.dataset import BaseDataset
from mmengine.registry import DATASETS

from plugin.info import load_info
from plugin.old_info import as_data_list

__all__ = ["NuScenesFrames"]

CAMERAS = (
    "CAM_FRONT",
    "CAM_FRONT_RIGHT",
    "CAM_FRONT_LEFT",
    "CAM_BACK",
    "CAM_BACK_LEFT",
    "CAM_BACK_RIGHT",
)


@DATASETS.register_module()
class NuScenesFrames(BaseDataset):
    """One sample is one moment: six images, their cameras, and the boxes around the car.

    A sample before the pipeline: `img_paths`; `intrinsics` (6, 3, 3) and `extrinsics` (6, 4, 4),
    lidar to camera at the moment of its photo, float64; `boxes` float32 (objects, 7): centre x, y,
    z, length, width, height in metres, yaw, in the lidar's frame; `labels` int64 (objects,).

    Images lie in the folder of their camera in `data_prefix`, `dict(CAM_FRONT="samples/CAM_FRONT")`
    and so on as in MMDetection3D's configs; in `data_root` without.

    Args:
        repeat: How often each frame comes in an epoch, each time with numbers of its own for its
            augmentation. nuScenes' own training set needs none; one frame makes an epoch by it.
        range_m: Boxes whose centres lie farther away than this, in x or y, are left out.
    """

    def __init__(self, *, repeat: int = 1, range_m: float = 51.2, **options: Any) -> None:  # noqa: ANN401
        self.repeat = repeat
        self.range_m = range_m
        super().__init__(**options)

    def load_data_list(self) -> list[dict[str, Any]]:
        info = load_info(self.ann_file)
        if "infos" in info:
            info = as_data_list(info["infos"])
        names = sorted(info["metainfo"]["categories"].items(), key=lambda pair: pair[1])
        self._metainfo["classes"] = [name for name, _ in names]
        frames = [self.parse_data_info(frame) for frame in info["data_list"]]
        return [dict(frame) for _ in range(self.repeat) for frame in frames]

    def parse_data_info(self, frame: dict[str, Any]) -> dict[str, Any]:
        cameras = [frame["images"][name] for name in CAMERAS]
        boxes, labels = self._boxes_of(frame["instances"])
        return {
            "token": frame["token"],
            "img_paths": [
                str(Path(self.data_prefix.get(name, self.data_root), camera["img_path"]))
                for name, camera in zip(CAMERAS, cameras, strict=True)
            ],
            "intrinsics": np.array([camera["cam2img"] for camera in cameras]),
            "extrinsics": np.array([camera["lidar2cam"] for camera in cameras]),
            "boxes": boxes,
            "labels": labels,
        }

    def _boxes_of(self, instances: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
        """Return boxes that a sensor has seen, of a class that counts (-1 is none), in range."""
        boxes = np.array([i["bbox_3d"] for i in instances], np.float32).reshape(-1, 7)
        labels = np.array([i["bbox_label_3d"] for i in instances], np.int64)
        is_valid = np.array([i["bbox_3d_isvalid"] for i in instances], bool)
        is_near = (np.abs(boxes[:, :2]) < self.range_m).all(axis=1)
        kept = is_valid & is_near & (labels >= 0)
        return boxes[kept], labels[kept]
