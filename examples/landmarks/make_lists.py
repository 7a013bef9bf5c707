# SPDX-License-Identifier: Apache-2.0
"""Make the three kinds of files that such a project begins with, from dlib's face photos.

    photos/         a detection set in VOC's XML: photos, a box around every face, two splits
    points.txt      path, x1 y1 .. x68 y68, left top right bottom, class, pose

Three faces in four are in the list, as if its annotator had not finished. The pose is "left",
"frontal" or "right", by where the tip of the nose is between the eyes. Your own project has such
files already: begin at `penstock convert`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.vision.annotations.imglab import read_imglab
from penstock.vision.convert import convert

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.vision import AnnotatedImage, AnnotatedObject

NOSE_TIP, LEFTMOST_EYE_CORNER, RIGHTMOST_EYE_CORNER = 30, 36, 45
SPLITS = {"train": "training", "test": "testing"}
EVERY_FOURTH = 4


def pose_of(face: AnnotatedObject) -> str:
    """Return which side of the image a face looks to."""
    points = np.asarray(face.landmarks_xy_px)
    begin, end = points[LEFTMOST_EYE_CORNER], points[RIGHTMOST_EYE_CORNER]
    between = end - begin
    share = (points[NOSE_TIP] - begin) @ between / (between @ between)  # 0.5 in the middle
    return "left" if share < 0.35 else "right" if share > 0.65 else "frontal"


def lines_of(images: list[AnnotatedImage], folder: str) -> Iterator[str]:
    number = 0
    for image in images:
        for face in image.objects:
            number += 1
            if number % EVERY_FOURTH and face.box_xyxy_px:
                points = [value for point in face.landmarks_xy_px for value in point]
                numbers = " ".join(f"{value:g}" for value in (*points, *face.box_xyxy_px))
                yield f"{folder}/{image.path.name} {numbers} face {pose_of(face)}\n"


def make_lists(faces: Path, out: Path) -> None:
    """Write `out` from a folder with dlib's `training.xml`, `testing_with_face_landmarks.xml` .."""
    sources = [faces / f"{name}.xml" for name in SPLITS.values()]
    convert(sources, out / "photos", target_format="voc", default_class="face")
    os.makedirs(out / "photos/ImageSets/Main", exist_ok=True)
    with open(out / "points.txt", "w") as points:
        for split, name in SPLITS.items():
            images = read_imglab(faces / f"{name}_with_face_landmarks.xml")
            points.writelines(lines_of(images, "photos/JPEGImages"))
            stems = "".join(f"{image.path.stem}\n" for image in images)
            (out / f"photos/ImageSets/Main/{split}.txt").write_text(stems)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("faces", type=Path, help="the folder `examples/faces` of dlib")
    parser.add_argument("out", type=Path, help="a folder to make")
    arguments = parser.parse_args()
    make_lists(arguments.faces, arguments.out)


if __name__ == "__main__":
    main()
