# SPDX-License-Identifier: Apache-2.0
"""`Letterbox`: how pixels are resampled."""

from __future__ import annotations

import numpy as np

from penstock.vision.transforms.geometry import Letterbox


def test_what_shrinks_is_averaged_so_that_no_pixel_is_skipped():
    image = np.zeros((64, 64, 3), np.uint8)
    image[:, ::8] = 240  # a line in each eighth column, between those that two in a row would read
    assert (Letterbox(8)(image) == 30).all()


def test_what_grows_is_interpolated():
    image = np.zeros((2, 2, 3), np.uint8)
    image[:, 1] = 200
    grown = Letterbox(8)(image)[0, :, 0].astype(int)
    assert (np.diff(grown) >= 0).all()
    assert len(set(grown.tolist())) == 6  # two ends, and a ramp of four steps between them
