# SPDX-License-Identifier: Apache-2.0
"""`RandomPerspective`: the map is the published one, in its order."""

from __future__ import annotations

import math

import numpy as np
from tests.vision.rectangles import seeded

from penstock import sample_rng
from penstock.vision.transforms.geometry import RandomPerspective


def published(x, y, draw):
    """Where an edge of an image of 200 x 100 comes to: turned and scaled, then sheared, by hand."""
    x, y = x - 100, y - 50
    scale, angle = 1 + 0.2 * draw[3], math.radians(40 * draw[2])
    x, y = (
        scale * (math.cos(angle) * x + math.sin(angle) * y),
        scale * (math.cos(angle) * y - math.sin(angle) * x),
    )
    along_x, along_y = (math.tan(math.radians(25 * value)) for value in draw[4:6])
    x, y = x + along_x * y, y + along_y * x
    return x + (0.5 + 0.1 * draw[6]) * 200, y + (0.5 + 0.1 * draw[7]) * 100


def test_an_image_is_turned_first_and_sheared_then():
    edges = [(100.0, 50.0), (120.0, 55.0), (90.0, 40.0)]
    landmarks = np.array([edges], np.float32) - 0.5
    sample = {"image": np.zeros((100, 200, 3), np.uint8), "landmarks": landmarks}
    move = RandomPerspective(degrees=40, shear=25, scale=0.2, translate=0.1)
    for position in range(10):
        with seeded(6, position):
            moved = move(sample)["landmarks"][0] + 0.5
        with seeded(6, position):
            draw = sample_rng().uniform(-1, 1, 8)
        expected = [published(x, y, draw) for x, y in edges]
        np.testing.assert_allclose(moved, expected, atol=1e-3)
