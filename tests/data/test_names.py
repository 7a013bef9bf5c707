# SPDX-License-Identifier: Apache-2.0
"""What errors call the samples of a batch."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.data.names import name_samples


class Photos:
    samples = (("photos/cat.jpg", 0), ("photos/dog.jpg", 1))


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        ([1], "sample 1 (photos/dog.jpg)"),
        ([7], "sample 7"),
        (np.array([0, 1]), "samples [0, 1]"),
        (slice(0, 2), "samples slice(0, 2, None)"),
    ],
)
def test_samples_are_named_by_their_files(indices, expected):
    assert name_samples(Photos(), indices) == expected
