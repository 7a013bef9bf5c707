# SPDX-License-Identifier: Apache-2.0
"""Small annotated data sets, written as files, for tests of what reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject

HEIGHT, WIDTH = 30, 40
GREY, RED = (90, 90, 90), (250, 10, 10)
ORIENTATION_TAG = 0x0112


def painted(height=HEIGHT, width=WIDTH, box=None):
    """Give a grey image with a red rectangle."""
    pixels = np.full((height, width, 3), GREY, np.uint8)
    if box is not None:
        x1, y1, x2, y2 = box
        pixels[y1:y2, x1:x2] = RED
    return pixels


def write_photo(path, pixels=None, orientation=None):
    """Write pixels as they are, without loss, and a tag that says how to turn them."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(painted() if pixels is None else pixels)
    exif = Image.Exif()
    if orientation is not None:
        exif[ORIENTATION_TAG] = orientation
    form = {".png": "PNG"}.get(path.suffix, "JPEG")
    how = {"quality": 100, "subsampling": 0} if form == "JPEG" else {}
    image.save(path, form, exif=exif, **how)
    return path


def voc_object(name="cat", box=(1, 1, 40, 30), extra=""):
    sides = zip(("xmin", "ymin", "xmax", "ymax"), box or (), strict=False)
    inner = "".join(f"<{side}>{value}</{side}>" for side, value in sides)
    bndbox = f"<bndbox>{inner}</bndbox>" if box else ""
    return f"<object><name>{name}</name>{extra}{bndbox}</object>"


def voc_xml(*objects, size=(HEIGHT, WIDTH), before=""):
    said = f"<size><width>{size[1]}</width><height>{size[0]}</height></size>" if size else ""
    return f"<annotation>{before}{said}{''.join(objects)}</annotation>"


def write_voc_image(root, key, *objects, size=(HEIGHT, WIDTH), pixels=None, orientation=None):
    root = Path(root)
    (root / "Annotations").mkdir(parents=True, exist_ok=True)
    (root / f"Annotations/{key}.xml").write_text(voc_xml(*objects, size=size))
    write_photo(root / f"JPEGImages/{key}.jpg", pixels, orientation)


def write_split(root, name, *keys):
    folder = Path(root) / "ImageSets/Main"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.txt").write_text("".join(f"{key}\n" for key in keys))


def one_image(path, *objects, size=(HEIGHT, WIDTH), key="1", source=""):
    height, width = size or (None, None)
    return AnnotatedImage(Path(path), key, width, height, objects, source)


def thing(box=(0.0, 0.0, 8.0, 6.0), name="cat", **more):
    return AnnotatedObject(name, box, **more)


def is_red(pixels):
    """Give which pixels belong to the rectangle; JPEG's loss allowed for."""
    return (pixels[..., 0] > 170) & (pixels[..., 1] < 90)


def assert_equal_samples(one, other):
    assert list(one) == list(other)
    for name, value in one.items():
        if isinstance(value, np.ndarray):
            assert value.dtype == other[name].dtype, name
            np.testing.assert_array_equal(value, other[name], err_msg=name)
        else:
            assert value == other[name], name
