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


# Every value in every channel; 259 is prime, so no vector width divides the rows.
ALL_VALUES = (torch.arange(3 * 259 * 7) % 256).to(torch.uint8).reshape(3, 7, 37, 7, 1)
ALL_VALUES = ALL_VALUES.expand(3, 7, 37, 7, 3).reshape(21, 37, 7, 3).contiguous()
HALVES = (torch.float16, torch.bfloat16)


def in_two_steps(normalize, images):
    """The same with torch's functions, a whole pass each, in float32."""
    full = torch.addcmul(normalize.offset, images, normalize.factor)
    assert full.dtype == torch.float32
    return full.to(normalize.dtype).movedim(-1, -3)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_numbers_are_computed_in_full_and_rounded_once(dtype):
    normalize = NormalizeImages(dtype=dtype)
    got = normalize(ALL_VALUES)
    assert got.dtype == dtype
    assert torch.equal(got, in_two_steps(normalize, ALL_VALUES))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_is_the_nearest_to_the_exact_number(dtype):
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    exact = (ALL_VALUES.double() / 255 - mean.double()) / std.double()
    got = NormalizeImages(dtype=dtype)(ALL_VALUES).movedim(-3, -1).double()
    nearest = exact.to(dtype).double()
    # float32 may sit on the other side of a tie: then the neighbour, and that rarely.
    assert (got != nearest).double().mean() < 1e-3
    assert (got - exact).abs().max() <= 1.001 * (nearest - exact).abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_nothing_is_made_but_the_result(dtype):
    images, normalize = ALL_VALUES, NormalizeImages(dtype=dtype)
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            seen.append(function)
            return function(*arguments, **(named or {}))

    with Watch():
        normalize(images)
    moving = {torch.ops.aten.permute.default}  # a view
    made = [function for function in seen if function not in moving]
    assert made == [torch.ops.aten.empty.memory_format, torch.ops.aten.addcmul.out]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize(
    "images",
    [
        ALL_VALUES[::2, 1:, :, :],
        ALL_VALUES.flip(0)[:, :, ::3],
        ALL_VALUES.movedim(-1, 1).contiguous().movedim(1, -1),  # CHW in memory
        ALL_VALUES[:1].expand(4, -1, -1, -1),
        ALL_VALUES[0],
        ALL_VALUES[None, None],
    ],
    ids=["sliced", "strided", "chw", "expanded", "one image", "video"],
)
def test_the_memory_format_is_the_same_whatever_lies_before_it(images, dtype):
    got = NormalizeImages(dtype=dtype)(images)
    assert torch.equal(got, NormalizeImages(dtype=dtype)(images.contiguous()))
    assert got.shape == (*images.shape[:-3], 3, *images.shape[-3:-1])
    assert got.movedim(-3, -1).is_contiguous()
    if images.ndim == 4:
        assert got.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(0, 4, 4, 3), (2, 0, 4, 3), (0, 0, 3)], ids=str)
def test_an_empty_batch_stays_empty(shape):
    got = NormalizeImages(dtype=torch.float16)(torch.empty(shape, dtype=torch.uint8))
    assert got.shape == (*shape[:-3], 3, *shape[-3:-1])
    assert got.dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_autocast_does_not_change_it(dtype):
    normalize = NormalizeImages(dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = normalize(ALL_VALUES)
    assert got.dtype == dtype
    assert torch.equal(got, normalize(ALL_VALUES))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_it_works_in_every_mode_and_its_result_takes_gradients_on(mode):
    normalize = NormalizeImages()
    with torch.inference_mode():
        made_there = ALL_VALUES.clone()
    with mode():
        got = normalize(made_there)
    assert torch.equal(got, normalize(ALL_VALUES))
    assert not got.requires_grad
    weight = torch.ones(3, 1, 1, requires_grad=True)
    (normalize(ALL_VALUES) * weight).sum().backward()
    assert torch.isfinite(weight.grad).all()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_compiled_as_a_whole_it_gives_the_same(dtype, backend):
    normalize = NormalizeImages(dtype=dtype)
    compiled = torch.compile(normalize, backend=backend, fullgraph=True)
    for images in (ALL_VALUES, ALL_VALUES[:4], ALL_VALUES[:, ::2]):
        got = compiled(images)
        assert got.dtype == dtype
        assert torch.equal(got, normalize(images))
    torch.compiler.reset()


def test_each_call_gives_memory_of_its_own():
    normalize = NormalizeImages()
    first = normalize(ALL_VALUES)
    kept = first.clone()
    normalize(255 - ALL_VALUES)
    assert torch.equal(first, kept)


def test_it_has_nothing_to_save_in_a_checkpoint():
    assert NormalizeImages().state_dict() == {}


def test_other_images_are_refused():
    with pytest.raises(TypeError, match=r"not torch\.float32"):
        NormalizeImages()(torch.zeros(1, 4, 4, 3))
    with pytest.raises(ValueError, match=r"\(1, 3, 4, 4\)|\[1, 3, 4, 4\]"):
        NormalizeImages()(torch.zeros(1, 3, 4, 4, dtype=torch.uint8))
    with pytest.raises(ConfigError):
        NormalizeImages(std=(0.0, 1.0, 1.0))
    with pytest.raises(ConfigError, match=r"not torch\.uint8"):
        NormalizeImages(dtype=torch.uint8)
