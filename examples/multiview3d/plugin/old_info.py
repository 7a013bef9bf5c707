# SPDX-License-Identifier: Apache-2.0
"""Info files of MMDetection3D before 1.1, with which DETR3D, BEVFormer and PETR were published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["as_data_list"]

VEHICLES = ("car", "truck", "trailer", "bus", "construction_vehicle", "bicycle", "motorcycle")
CLASSES = (*VEHICLES, "pedestrian", "traffic_cone", "barrier")  # in the order of 1.1's labels


def as_data_list(infos: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what `NuScenesFrames` reads of an info file, as 1.1 has it.

    Args:
        infos: The list of this name in the file. A frame of nuScenes' test set has no boxes.
    """
    labels = {name: label for label, name in enumerate(CLASSES)}
    boxes = [np.reshape(info.get("gt_boxes", []), (-1, 7)) for info in infos]
    names = [list(info.get("gt_names", [])) for info in infos]
    if _is_before_1_0(
        np.concatenate(boxes), np.array([name for some in names for name in some], str)
    ):
        boxes = [_turned(some) for some in boxes]
    frames = []
    for info, *of_frame in zip(infos, boxes, names, strict=True):
        objects = zip(*of_frame, info.get("valid_flag", []), strict=True)
        frames.append(
            {
                "token": info["token"],
                "images": {name: _camera(camera) for name, camera in info["cams"].items()},
                "instances": [
                    {
                        "bbox_3d": box,
                        "bbox_label_3d": labels.get(name, -1),
                        "bbox_3d_isvalid": is_valid,
                    }
                    for box, name, is_valid in objects
                ],
            }
        )
    return {"metainfo": {"categories": labels}, "data_list": frames}


def _is_before_1_0(boxes: np.ndarray, names: np.ndarray) -> bool:
    """Return whether sizes are width, length, height, which nothing in the file says.

    Vehicles are longer than wide. Without any, sizes are taken for length, width, height.
    """
    first, second = boxes[np.isin(names, VEHICLES), 3:5].sum(axis=0)
    return bool(first < second)


def _turned(boxes: np.ndarray) -> np.ndarray:
    """Return boxes of 0.x as 1.0 has them: length first, and yaw counterclockwise from x."""
    x, y, z, width, length, height, yaw = boxes.T
    return np.stack([x, y, z, length, width, height, -yaw - np.pi / 2], axis=1)


def _camera(camera: dict[str, Any]) -> dict[str, Any]:
    lidar2cam = np.eye(4)
    lidar2cam[:3, :3] = np.transpose(camera["sensor2lidar_rotation"])
    lidar2cam[:3, 3] = -lidar2cam[:3, :3] @ camera["sensor2lidar_translation"]
    return {
        "img_path": Path(camera["data_path"]).name,
        "cam2img": camera["cam_intrinsic"],
        "lidar2cam": lidar2cam,
    }
