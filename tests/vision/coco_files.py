# SPDX-License-Identifier: Apache-2.0
"""A small COCO file of coloured rectangles, their masks in all forms that COCO has."""

from __future__ import annotations

import json

import cv2
import numpy as np
from pycocotools import mask as coco_mask
from tests.vision.annotation_files import write_photo
from tests.vision.rectangles import scene

IDS = (3, 18, 27, 44, 67, 90)  # of the colours, with gaps
HEIGHT, WIDTH = 90, 120


def compressed(mask):
    runs = coco_mask.encode(np.asfortranarray(mask))
    return {"size": runs["size"], "counts": runs["counts"].decode()}


def uncompressed(mask):
    """Lengths of runs down the columns, the first of zeros."""
    pixels = mask.ravel(order="F")
    ends = np.flatnonzero(np.diff(pixels)) + 1
    return {"size": list(mask.shape), "counts": np.diff([0, *ends, len(pixels)]).tolist()}


def polygon(mask):
    (outline,), _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    return [(outline.ravel() + 0.5).tolist()]


def write_shapes(folder, num_images=4, **edits):
    """Write images/NUMBER.png and a file of six objects each; return its path."""
    images, annotations = [], []
    for image_id in range(139, 139 + num_images):
        sample = scene(image_id, (HEIGHT, WIDTH))
        is_turned = image_id == 140  # and Exif says so
        pixels = np.rot90(sample["image"]) if is_turned else sample["image"]
        write_photo(folder / f"images/{image_id}.png", pixels, 6 if is_turned else None)
        size = {"width": WIDTH, "height": HEIGHT}
        images.append({"id": image_id, "file_name": f"{image_id}.png", **size})
        rows = zip(sample["boxes"].tolist(), sample["labels"], sample["masks"], strict=True)
        for number, ((x1, y1, x2, y2), label, mask) in enumerate(rows):
            annotations.append(
                {
                    "id": 1000 + len(annotations),
                    "image_id": image_id,
                    "category_id": IDS[label],
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "area": int(mask.sum()),
                    "iscrowd": int(number == 5),
                    "segmentation": (polygon, compressed, uncompressed)[number % 3](mask),
                }
            )
    categories = [{"id": n, "name": f"kind {n}"} for n in IDS[::-1]]
    said = {"images": images, "annotations": annotations, "categories": categories, **edits}
    (folder / "shapes.json").write_text(json.dumps(said))
    return folder / "shapes.json"
