# SPDX-License-Identifier: Apache-2.0
"""Draw what six cameras see of some boxes around a car, in the form of nuScenes.

    python draw_scene.py data/drawn

So the example runs without nuScenes. A ray is cast through each pixel, which is another way than to
project corners, as the example does: where outlines fit what is drawn, both are right.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# In the order of MMDetection3D's labels: length, width, height in metres.
SIZES = {
    "car": (4.6, 2.0, 1.7),
    "truck": (6.9, 2.5, 2.8),
    "trailer": (12.3, 2.9, 3.9),
    "bus": (11.1, 2.9, 3.5),
    "construction_vehicle": (6.4, 2.8, 3.2),
    "bicycle": (1.7, 0.6, 1.3),
    "motorcycle": (2.1, 0.8, 1.5),
    "pedestrian": (0.7, 0.7, 1.8),
    "traffic_cone": (0.4, 0.4, 1.1),
    "barrier": (0.5, 2.5, 1.0),
}
OFTEN = (0.3, 0.08, 0.02, 0.04, 0.04, 0.08, 0.08, 0.16, 0.1, 0.1)
# Degrees from ahead to the left, and focal length in pixels: the camera behind sees a wider angle.
CAMERAS = {
    "CAM_FRONT": (0, 1260),
    "CAM_FRONT_RIGHT": (-55, 1260),
    "CAM_FRONT_LEFT": (55, 1260),
    "CAM_BACK": (180, 800),
    "CAM_BACK_LEFT": (110, 1260),
    "CAM_BACK_RIGHT": (-110, 1260),
}
WIDTH, HEIGHT = 1600, 900
GROUND_Z, CAMERA_Z = -1.84, -0.3  # metres, from the lidar on the roof
SKY = np.array([168, 196, 224], np.float32)
SHADES = np.array([0.85, 0.65, 1.0], np.float32)  # of faces across x, y and z
HAZE_M = 80.0


def scatter(count: int, random: np.random.Generator) -> tuple[NDArray[np.float64], list[int]]:
    """Return boxes (count, 7) that stand around the car and not in each other; and their labels."""
    boxes: list[NDArray[np.float64]] = []
    labels: list[int] = []
    while len(boxes) < count:
        label = int(random.choice(len(SIZES), p=OFTEN))
        size = np.array(list(SIZES.values())[label]) * random.uniform(0.9, 1.1)
        angle, radius = random.uniform(0, 2 * np.pi), random.uniform(8, 40)
        x, y = radius * np.cos(angle), radius * np.sin(angle)
        box = np.array([x, y, GROUND_Z + size[2] / 2, *size, random.uniform(-np.pi, np.pi)])
        apart = [np.hypot(*(box - other)[:2]) - (box + other)[3] / 2 for other in boxes]
        if min(apart, default=1) >= 1 and radius > 3 + size[0] / 2:
            boxes.append(box)
            labels.append(label)
    return np.array(boxes), labels


def camera(angle_deg: float, focal: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return intrinsics (3, 3), and lidar to camera (4, 4): x to the right, y down, z ahead."""
    sin, cos = np.sin(np.radians(angle_deg)), np.cos(np.radians(angle_deg))
    lidar2cam = np.array([[cos, sin, 0, 0], [0, 0, -1, 0], [-sin, cos, 0, 0], [0, 0, 0, 1.0]])
    eye = np.array([-sin, cos, CAMERA_Z])  # a metre from the lidar
    lidar2cam[:3, 3] = -lidar2cam[:3, :3] @ eye
    centre = (WIDTH - 1) / 2, (HEIGHT - 1) / 2
    return np.array([[focal, 0, centre[0]], [0, focal, centre[1]], [0, 0, 1]]), lidar2cam


def cast(
    intrinsics: NDArray[np.float64],
    lidar2cam: NDArray[np.float64],
    boxes: NDArray[np.float64],
    colours: NDArray[np.float32],
) -> NDArray[np.uint8]:
    """Return the image (H, W, 3), RGB, that a camera has of solid boxes on the ground."""
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    pixels = np.stack([columns, rows, np.ones_like(rows)], axis=-1)
    turn = lidar2cam[:3, :3]
    rays = (pixels @ np.linalg.inv(intrinsics).T @ turn).astype(np.float32)  # a metre of depth each
    eye = -turn.T @ lidar2cam[:3, 3]
    with np.errstate(divide="ignore", invalid="ignore"):  # rays along a face, or above the horizon
        depth = np.where(rays[..., 2] < 0, (GROUND_Z - eye[2]) / rays[..., 2], np.inf)
        tiles = np.floor((eye + depth[..., None] * rays)[..., :2] / 4).sum(axis=-1) % 2
        image = np.where(tiles == 1, 96, 112)[..., None] * np.ones(3, np.float32)
        for box, colour in zip(boxes, colours, strict=True):
            sin, cos = np.sin(box[6]), np.cos(box[6])
            own = np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]], np.float32)
            start, along = (eye - box[:3]) @ own, rays @ own
            sides = np.stack([(end * box[3:6] / 2 - start) / along for end in (-1, 1)])
            enters, leaves = sides.min(axis=0), sides.max(axis=0).min(axis=-1)
            face, entry = enters.argmax(axis=-1), enters.max(axis=-1)
            is_hit = (entry > 0) & (entry < leaves) & (entry < depth)
            image[is_hit] = SHADES[face[is_hit], None] * colour
            depth[is_hit] = entry[is_hit]
    clear = np.exp(-depth / HAZE_M)[..., None]
    return (image * clear + SKY * (1 - clear)).round().astype(np.uint8)


def main() -> None:
    """Write the images and the info file."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    boxes, labels = scatter(30, np.random.default_rng(3))
    hues = np.array([[[360 * label / len(SIZES), 0.6, 230] for label in labels]], np.float32)
    colours = cv2.cvtColor(hues, cv2.COLOR_HSV2RGB)[0]
    images: dict[str, Any] = {}
    for name, (angle_deg, focal) in CAMERAS.items():
        intrinsics, lidar2cam = camera(angle_deg, focal)
        image = cast(intrinsics, lidar2cam, boxes, colours)
        path = folder / f"{name}.jpg"
        cv2.imwrite(str(path), image[..., ::-1])
        images[name] = {
            "img_path": path.name,
            "cam2img": intrinsics.tolist(),
            "lidar2cam": lidar2cam.tolist(),
        }
    instances = [
        {"bbox_3d": box.tolist(), "bbox_label_3d": label, "bbox_3d_isvalid": True}
        for box, label in zip(boxes, labels, strict=True)
    ]
    infos = {
        "metainfo": {"categories": {name: label for label, name in enumerate(SIZES)}},
        "data_list": [{"token": "drawn", "images": images, "instances": instances}],
    }
    (folder / "infos.pkl").write_bytes(pickle.dumps(infos))


if __name__ == "__main__":
    main()
