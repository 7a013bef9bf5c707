# SPDX-License-Identifier: Apache-2.0
"""From points around the car to pixels: pinhole cameras in the lidar's frame.

Pixel (u, v) = (column, row), whole numbers at the centres of pixels, as nuScenes has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["box_corners", "lidar2img", "project", "resized_intrinsics"]


def lidar2img(
    intrinsics: NDArray[np.float64], lidar2cam: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the (..., 4, 4) matrices that take points (x, y, z, 1) to (u d, v d, d, 1).

    Args:
        intrinsics: (..., 3, 3), camera to pixels.
        lidar2cam: (..., 4, 4), the extrinsics.
    """
    padded = np.zeros_like(lidar2cam)
    padded[..., :3, :3] = intrinsics
    padded[..., 3, 3] = 1
    return padded @ lidar2cam


def project(
    points: NDArray[np.float64], matrices: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return pixels (cameras, points, 2) and depths (cameras, points) of points (points, 3).

    Pixels of points behind a camera, where the depth is not above 0, mean nothing.
    """
    homogeneous = np.concatenate([points, np.ones((len(points), 1))], axis=1)
    seen = np.einsum("nij,pj->npi", matrices, homogeneous)
    depth = seen[..., 2]
    return seen[..., :2] / np.where(depth > 0, depth, np.nan)[..., None], depth


def resized_intrinsics(
    intrinsics: NDArray[np.float64], scale_xy: tuple[float, float]
) -> NDArray[np.float64]:
    """Return the intrinsics of an image that was resized.

    The left edge of the image stays where it is, and it lies half a pixel left of the first centre:
    u becomes (u + 1/2) s - 1/2. To scale the matrix alone shifts it all by up to half a pixel.
    """
    scale = np.diag([*scale_xy, 1.0])
    scale[:2, 2] = (np.array(scale_xy) - 1) / 2
    return scale @ intrinsics


def box_corners(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the corners (boxes, 8, 3) of boxes x, y, z (centre), length, width, height, yaw."""
    signs = np.stack(np.meshgrid([-1, 1], [-1, 1], [-1, 1], indexing="ij"), axis=-1).reshape(8, 3)
    local = signs[None] * boxes[:, None, 3:6] / 2
    cos, sin = np.cos(boxes[:, 6]), np.sin(boxes[:, 6])
    zero, one = np.zeros_like(cos), np.ones_like(cos)
    turn = np.stack([cos, -sin, zero, sin, cos, zero, zero, zero, one], axis=-1).reshape(-1, 3, 3)
    return np.einsum("bij,bpj->bpi", turn, local) + boxes[:, None, :3]
