# SPDX-License-Identifier: Apache-2.0
"""`NormalizeImages` gives what the pipeline gives as floats."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.errors import ConfigError
from penstock.torch import NormalizeImages
from penstock.vision import ImagePipeline


@pytest.mark.parametrize(
    "options", [{}, {"mean": None, "std": None}, {"std": (0.1, 0.2, 0.3)}], ids=str
)
def test_normalising_later_gives_the_same_numbers(options):
    image = np.random.default_rng(0).integers(0, 256, (70, 90, 3), np.uint8)
    pipeline = ImagePipeline.eval(32, output="uint8_hwc", **options)
    normalize = NormalizeImages(pipeline.mean, pipeline.std)
    got = normalize(torch.from_numpy(pipeline(image))[None])
    expected = ImagePipeline.eval(32, **options)(image)
    np.testing.assert_allclose(got[0].numpy(), expected, atol=2e-6)
    assert got.is_contiguous(memory_format=torch.channels_last)


def test_half_precision_is_computed_in_full():
    images = torch.randint(0, 256, (2, 4, 4, 3), dtype=torch.uint8)
    half, full = NormalizeImages(dtype=torch.float16)(images), NormalizeImages()(images)
    assert half.dtype == torch.float16
    assert torch.equal(half, full.to(torch.float16))


def test_it_has_nothing_to_save_in_a_checkpoint():
    assert NormalizeImages().state_dict() == {}


def test_other_images_are_refused():
    with pytest.raises(TypeError, match=r"not torch\.float32"):
        NormalizeImages()(torch.zeros(1, 4, 4, 3))
    with pytest.raises(ValueError, match=r"\(1, 3, 4, 4\)|\[1, 3, 4, 4\]"):
        NormalizeImages()(torch.zeros(1, 3, 4, 4, dtype=torch.uint8))
    with pytest.raises(ConfigError):
        NormalizeImages(std=(0.0, 1.0, 1.0))
