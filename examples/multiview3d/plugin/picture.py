# SPDX-License-Identifier: Apache-2.0
"""Pictures of what was found, drawn into all cameras."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from penstock.images import decode_image
from plugin.dataset import CAMERAS
from plugin.geometry import box_corners, project, resized_intrinsics

if TYPE_CHECKING:
    from mmengine.runner import Runner
    from numpy.typing import NDArray

__all__ = ["DrawViews"]

ROWS = (
    ("CAM_FRONT_LEFT", "CAM_FRONT", "CAM_FRONT_RIGHT"),
    ("CAM_BACK_LEFT", "CAM_BACK", "CAM_BACK_RIGHT"),
)
# Corners of a box that differ in one sign.
EDGES = [(a, a | bit) for bit in (1, 2, 4) for a in range(8) if not a & bit]
TRUTH, FOUND = (255, 255, 255), (255, 60, 0)  # RGB
MIN_DEPTH_M = 0.1


@HOOKS.register_module()
class DrawViews(Hook):
    """Draws the first sample of each validation to `views/iter_N.jpg` in the work dir.

    Boxes as they are in white, and as many of those found, the best, in orange.

    Args:
        width: Of each camera's view, in pixels.
    """

    def __init__(self, width: int = 480) -> None:
        self.width = width

    def after_val_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: dict[str, Any],
        outputs: list[dict[str, Any]],
    ) -> None:
        if batch_idx or runner.rank:
            return
        meta, found = data_batch["metas"][0], outputs[0]
        truth = data_batch["boxes"][: data_batch["num_boxes"][0]]
        best = found["scores"].topk(min(len(truth), len(found["scores"]))).indices
        views = {}
        for camera, name in enumerate(CAMERAS):
            matrix = data_batch["lidar2img"][0, camera].double().cpu().numpy()
            view = self._view(meta["img_paths"][camera])
            matrix = _of_size(matrix, meta["img_shapes"][camera], view.shape)
            for boxes, colour in ((truth, TRUTH), (found["boxes"][best], FOUND)):
                _draw(view, boxes.double().cpu().numpy(), matrix, colour)
            cv2.putText(view, name, (6, 16), cv2.FONT_HERSHEY_PLAIN, 1, TRUTH, 1, cv2.LINE_AA)
            view[:, -1:] = view[-1:] = TRUTH
            views[name] = view
        picture = np.vstack([np.hstack([views[name] for name in row]) for row in ROWS])
        path = Path(runner.work_dir, "views", f"iter_{runner.iter}.jpg")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(cv2.imencode(".jpg", picture[..., ::-1])[1].tobytes())

    def _view(self, path: str) -> NDArray[np.uint8]:
        image = decode_image(Path(path).read_bytes())
        height = round(image.shape[0] * self.width / image.shape[1])
        return cv2.resize(image, (self.width, height), interpolation=cv2.INTER_AREA)


def _of_size(
    matrix: NDArray[np.float64], before: tuple[int, ...], after: tuple[int, ...]
) -> NDArray[np.float64]:
    """Return the matrix to pixels of the image in another size (height, width)."""
    scale = after[1] / before[1], after[0] / before[0]
    return np.vstack([resized_intrinsics(matrix[:3], scale), matrix[3:]])


def _draw(
    view: NDArray[np.uint8],
    boxes: NDArray[np.float64],
    matrix: NDArray[np.float64],
    colour: tuple[int, int, int],
) -> None:
    """Draw the edges of boxes whose both ends lie before the camera."""
    pixels, depths = project(box_corners(boxes).reshape(-1, 3), matrix[None])
    pixels = (pixels * 16).reshape(-1, 8, 2)  # cv2 takes parts of pixels as whole numbers
    depths = depths.reshape(-1, 8)
    for corners, depth in zip(pixels, depths, strict=True):
        for start, end in EDGES:
            if min(depth[start], depth[end]) > MIN_DEPTH_M:
                ends = corners[[start, end]].round().astype(int).tolist()
                cv2.line(view, *ends, colour, 1, cv2.LINE_AA, shift=4)
