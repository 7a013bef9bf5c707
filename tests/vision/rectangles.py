# SPDX-License-Identifier: Apache-2.0
"""Images of coloured rectangles, whose pixels say where each object is.

An object of label k is a rectangle of colour k drawn exactly over its box; "weights" repeats the
label as an array of the user's own, its landmarks are its corner pixels and its middle, and its
mask has its pixels.
"""

from __future__ import annotations

import contextlib

import numpy as np

from penstock.randomness.samples import SampleStreams

COLOURS = np.array(
    [[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 0], [255, 0, 255], [0, 255, 255]], np.uint8
)
GROUND = 60


@contextlib.contextmanager
def seeded(seed, position=0):
    """Draw as sample `position` of an epoch under `seed`."""
    streams = SampleStreams(seed, 0)
    with streams.active(isolated=True):
        streams.begin_sample(position)
        yield


def sample_of(boxes, labels, size):
    height, width = size
    image = np.full((height, width, 3), GROUND, np.uint8)
    landmarks = np.zeros((len(boxes), 3, 2), np.float32)
    masks = np.zeros((len(boxes), height, width), np.uint8)
    for row, ((x1, y1, x2, y2), label) in enumerate(zip(boxes, labels, strict=True)):
        image[y1:y2, x1:x2], masks[row, y1:y2, x1:x2] = COLOURS[label], 1
        corners = (x1, y1), (x2 - 1, y2 - 1)
        landmarks[row] = (*corners, ((x1 + x2 - 1) / 2, (y1 + y2 - 1) / 2))
    return {
        "image": image,
        "boxes": np.array(boxes, np.float32).reshape(-1, 4),
        "labels": np.array(labels, np.int64),
        "landmarks": landmarks,
        "masks": masks,
        "weights": np.array(labels, np.float64),
        "visibility": np.tile(np.arange(3, dtype=np.int8), (len(boxes), 1)),
        "image_id": "scene",
    }


def scene(seed, size=(90, 120), num_objects=6):
    """Rectangles of different colours that do not touch, in a grid of 2 x 3 cells."""
    rng = np.random.default_rng(seed)
    height, width = size[0] // 2, size[1] // 3
    boxes = []
    for row, column in [(row, column) for row in range(2) for column in range(3)]:
        x1, y1 = rng.integers(1, width // 4 + 1), rng.integers(1, height // 4 + 1)
        x2, y2 = rng.integers(width // 2 + 1, width - 1), rng.integers(height // 2 + 1, height - 1)
        left, top = column * width, row * height
        boxes.append((left + x1, top + y1, left + x2, top + y2))
    labels = rng.permutation(6)
    return sample_of(boxes[:num_objects], labels[:num_objects].tolist(), size)


class Scenes:
    """A map-style dataset of them, of many sizes."""

    class_names = tuple("abcdef")

    def __init__(self, length=7, num_objects=6, transform=None, size=None):
        self.length, self.num_objects = length, num_objects
        self.transform, self.size = transform, size

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        size = self.size or (60 + 11 * (index % 5), 150 - 13 * (index % 7))
        sample = {**scene(index, size, self.num_objects), "image_id": f"scene/{index}"}
        return sample if self.transform is None else self.transform(sample)

    def describe(self, index):
        return f"scene/{index}.png"


def is_colour(image, label):
    return (np.abs(image.astype(int) - COLOURS[label]) < 60).all(axis=-1)


def ious(sample):
    """IoU of each object's mask and its colour in its box, if they are more than specks."""
    masks, image = sample["masks"] > 0, sample["image"]
    palette = np.array([*COLOURS, [GROUND] * 3], float)
    nearest = np.linalg.norm(image[..., None, :] - palette, axis=-1).argmin(axis=-1)
    seen = np.zeros(masks.shape, bool)
    for place, box, label in zip(seen, sample["boxes"], sample["labels"], strict=True):
        x1, y1 = np.maximum(np.floor(box[:2]).astype(int) - 1, 0)
        x2, y2 = np.ceil(box[2:]).astype(int) + 1
        place[y1:y2, x1:x2] = nearest[y1:y2, x1:x2] == label
    union = (masks | seen).sum(axis=(1, 2))
    return (masks & seen).sum(axis=(1, 2))[union > 40] / union[union > 40]


def check_objects(sample):
    """Each object has the colour of its label in the middle of its box, and its own rows."""
    image, boxes = sample["image"], sample["boxes"]
    height, width = image.shape[:2]
    assert boxes.dtype == np.float32
    assert boxes.shape == (len(sample["labels"]), 4)
    assert (boxes >= 0).all()
    assert (boxes <= [width, height, width, height]).all()
    assert (boxes[:, 2:] > boxes[:, :2]).all()
    assert sample["weights"].tolist() == sample["labels"].tolist()
    assert sample["masks"].shape == (len(boxes), height, width)
    assert ious(sample).min(initial=1) > 0.7
    middles = ((boxes[:, :2] + boxes[:, 2:]) / 2).astype(int)
    for (x, y), label in zip(middles.tolist(), sample["labels"].tolist(), strict=True):
        assert is_colour(image[y, x], label), (x, y, label, image[y, x])
    check_middles(sample)


def check_middles(sample):
    """The third landmark of each object, if seen, lies on its colour."""
    image = sample["image"]
    for point, label in zip(sample["landmarks"][:, 2], sample["labels"].tolist(), strict=True):
        if not np.isnan(point).any():
            x, y = np.clip(np.rint(point), 0, np.array(image.shape[1::-1]) - 1).astype(int)
            assert is_colour(image[y, x], label)


def check_bounds(sample, tolerance_px=1.6):
    """Each box bounds the pixels of its colour; every colour occurs once."""
    for box, label in zip(sample["boxes"], sample["labels"].tolist(), strict=True):
        ys, xs = np.nonzero(is_colour(sample["image"], label))
        bounds = [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
        assert np.abs(bounds - box).max() <= tolerance_px, (label, bounds, box)
