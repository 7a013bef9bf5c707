# SPDX-License-Identifier: Apache-2.0
"""`NormalizeImages` gives what the pipeline gives as floats."""

from __future__ import annotations

import copy
import pickle
import re

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


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_compiled_as_a_whole_it_gives_the_same(dtype, backend, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else torch 2.6 starts processes
    normalize = NormalizeImages(dtype=dtype)
    compiled = torch.compile(normalize, backend=backend, fullgraph=True)
    for images in (ALL_VALUES, ALL_VALUES[:4], ALL_VALUES[:, ::2]):
        got = compiled(images)
        assert got.dtype == dtype
        assert torch.equal(got, normalize(images))
    torch.compiler.reset()


TURNS = {
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.to(torch.bfloat16),
    "double": lambda module: module.double(),
    "and back": lambda module: module.half().float(),
    "emptied": lambda module: module.to("meta").to_empty(device="cpu"),
    "shared": lambda module: module.share_memory(),
    "copied": lambda module: copy.deepcopy(module.half()),
    "pickled": lambda module: pickle.loads(pickle.dumps(module.half())),
}


@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_turning_a_model_does_not_change_what_it_gives(turn, dtype):
    expected = NormalizeImages(dtype=dtype)(ALL_VALUES)
    model = turn(torch.nn.Sequential(NormalizeImages(dtype=dtype)))
    assert torch.equal(model(ALL_VALUES), expected)
    assert model(ALL_VALUES).dtype == dtype
    assert model[0].factor.dtype == model[0].offset.dtype == torch.float32
    assert model.state_dict() == {}


def test_it_follows_to_another_device_and_stays_as_it_is_on_its_own():
    normalize = NormalizeImages()
    before = normalize.factor
    assert normalize.to("cpu") is normalize
    assert normalize.factor is before  # a captured graph reads from there
    assert normalize.half().to("meta").offset.device.type == "meta"
    with torch.device("meta"):
        assert NormalizeImages().factor.device.type == "meta"


@pytest.mark.parametrize(
    "images",
    [[ALL_VALUES, 1], {"image": ALL_VALUES}, np.zeros((1, 4, 4, 3), np.uint8), b"jpeg"],
    ids=["list", "dict", "ndarray", "bytes"],
)
def test_what_is_no_tensor_is_told_what_to_do(images):
    said = rf"got a {type(images).__name__} .*normalize\(batch\[0\]\)"
    with pytest.raises(TypeError, match=said):
        NormalizeImages()(images)


@pytest.mark.parametrize("name", ["mean", "std"])
@pytest.mark.parametrize("value", [(0.5, 0.5), (float("nan"), 1, 1), {0.5}], ids=repr)
def test_what_is_not_three_numbers_is_refused(name, value):
    with pytest.raises(ConfigError, match="mean and std are three finite numbers each"):
        NormalizeImages(**{name: value})


@pytest.mark.parametrize("dtype", ["float16", np.float16, None, torch.int32, 16], ids=str)
def test_a_dtype_that_is_none_is_named(dtype):
    with pytest.raises(ConfigError, match=re.escape(f"not {dtype!r}.")):
        NormalizeImages(dtype=dtype)


def test_other_images_are_refused():
    with pytest.raises(TypeError, match=r"Tensor torch\.float32"):
        NormalizeImages()(torch.zeros(1, 4, 4, 3))
    with pytest.raises(ValueError, match=r"\(1, 3, 4, 4\)|\[1, 3, 4, 4\]"):
        NormalizeImages()(torch.zeros(1, 3, 4, 4, dtype=torch.uint8))
    with pytest.raises(ConfigError):
        NormalizeImages(std=(0.0, 1.0, 1.0))
    with pytest.raises(ConfigError, match=r"not torch\.uint8"):
        NormalizeImages(dtype=torch.uint8)
