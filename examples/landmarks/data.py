# SPDX-License-Identifier: Apache-2.0
"""One dataset over the XML that `penstock convert` wrote: a sample for each face.

A face has a box always, landmarks and a pose if a list told of them. What is missing is NaN, or
UNKNOWN, and the losses leave it out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import torch
from torch.utils.data import Dataset

from penstock import sample_rng
from penstock.vision import (
    Compose,
    HorizontalFlip,
    Letterbox,
    RandomHSV,
    RandomPerspective,
    VOCDetection,
)
from penstock.vision.samples import kept

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

UNKNOWN = -1
NUM_LANDMARKS = 68
MIRRORED = {"left": "right", "right": "left"}
EYE_CORNERS = (36, 45)  # the outer ones; what is between them is the unit of errors


def mirrored_order() -> list[int]:
    """Return which landmark of a face each one of its mirror image is, of the 68 of iBUG 300-W."""
    order = np.arange(NUM_LANDMARKS)
    # The jaw, the brows, the nostrils, and the rows of the mouth run from one side to the other.
    for start, stop in ((0, 17), (17, 27), (31, 36), (48, 55), (55, 60), (60, 65), (65, 68)):
        order[start:stop] = order[start:stop][::-1]
    # The eyes go round: corner, upper lid, corner, lower lid.
    order[36:42], order[42:48] = [45, 44, 43, 42, 47, 46], [39, 38, 37, 36, 41, 40]
    return order.tolist()


class MirrorFace:
    """Half of the faces mirrored. A left eye becomes a right one, and who looked left looks right.

    Penstock's flip knows of landmarks; what a pose means is ours to know.
    """

    def __init__(self, pose_names: list[str]) -> None:
        self.flip = HorizontalFlip(1, landmark_order=mirrored_order())
        of_mirrored = [pose_names.index(MIRRORED.get(name, name)) for name in pose_names]
        self.poses = np.array([*of_mirrored, UNKNOWN])  # [UNKNOWN] is the last

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if sample_rng().random() < 0.5:
            return sample
        return {**self.flip(sample), "pose": self.poses[sample["pose"]]}


class Faces(Dataset[dict[str, torch.Tensor]]):
    """The faces of a VOC folder, each cut out with as much again around it.

    A sample has "image", float32 (3, size, size) in 0..1; "box", float32 (4,), and "landmarks",
    float32 (68, 2), from -1 to 1 over the image, NaN where not marked; "pose", int64, or UNKNOWN.
    """

    def __init__(self, root: Path, split: str, *, size_px: int = 64, augment: bool) -> None:
        self.photos = VOCDetection(root, split, attributes=["pose"])
        if self.photos.num_landmarks != NUM_LANDMARKS:
            raise ValueError(
                f"{root}, split {split!r}: faces have {self.photos.num_landmarks} landmarks, and "
                f"{NUM_LANDMARKS} are trained on. Join the photos with the list that has them: "
                "penstock convert PHOTOS landmarks:LIST FACES --to voc "
                f"--landmarks {NUM_LANDMARKS} --layout xyxy --box --classes class,pose"
            )
        texts = self.photos.attribute_names["pose"]  # "" is a face of which nobody told
        self.pose_names = sorted({*texts, *MIRRORED} - {""})
        self.codes = np.array([self.pose_names.index(text) if text else UNKNOWN for text in texts])
        self.size_px = size_px
        changes = [
            MirrorFace(self.pose_names),
            RandomPerspective(size_px, degrees=20, translate=0.1, scale=0.2),
            RandomHSV(0.015, 0.5, 0.4),
        ]
        self.transform: Callable[[Any], Any] = Compose(Letterbox(size_px), *changes * augment)
        self.places = [
            (photo, number)
            for photo in range(len(self.photos))
            for number in range(len(self.photos.annotation(photo).objects))
        ]
        # What samplers balance by, known without an image being read.
        self.labels = np.array([self._pose(*place) for place in self.places])

    def _pose(self, photo: int, number: int) -> int:
        text = self.photos.annotation(photo).objects[number].extra.get("pose")
        return self.pose_names.index(text) if text else UNKNOWN

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        photo, number = self.places[index]
        sample = self.photos[photo]
        sample["pose"] = self.codes[sample["pose"]]
        face = self.transform(surroundings(kept(sample, np.array([number]))))
        scale = 2 / self.size_px
        return {
            "image": torch.from_numpy(face["image"].transpose(2, 0, 1).astype(np.float32) / 255),
            "box": torch.from_numpy(face["boxes"][0] * scale - 1),
            # A landmark is counted from the centre of a pixel, a box from its edge.
            "landmarks": torch.from_numpy((face["landmarks"][0] + 0.5) * scale - 1),
            "pose": torch.tensor(face["pose"][0]),
        }


def surroundings(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a square of twice the size of the sample's one box, which is in its middle.

    Beyond the photo's borders its outermost pixels go on.
    """
    left, top, right, bottom = sample["boxes"][0]
    side = max(16, round(2 * float(max(right - left, bottom - top))))
    corner = np.round([(left + right - side) / 2, (top + bottom - side) / 2]).astype(np.float32)
    x, y = (corner + (side - 1) / 2).tolist()  # whole pixels, so that nothing is interpolated
    image: NDArray[np.uint8] = cv2.getRectSubPix(sample["image"], (side, side), (x, y))
    return {
        **sample,
        "image": image,
        "boxes": sample["boxes"] - np.tile(corner, 2),
        "landmarks": sample["landmarks"] - corner,
    }
