# SPDX-License-Identifier: Apache-2.0
"""`detection_collate`: images in one array, and the objects of each beside it."""

from __future__ import annotations

import gc
import pickle

import numpy as np
import pytest
import torch
from tests.support.comparing import assert_same
from tests.vision.detection_samples import Photos, sample_of

from penstock import Loader
from penstock.errors import CollateError, ConfigError
from penstock.torch import DataLoader
from penstock.vision.batches import DetectionCollate, detection_collate

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Dated(Photos):
    """With arrays of types that torch does not have."""

    def __init__(self):
        super().__init__(4)

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        count = len(sample["boxes"])
        sample["taken"] = np.arange(count).astype("datetime64[D]")
        sample["precise"] = np.arange(count, dtype=np.longdouble)
        return sample


def test_images_become_floats_and_targets_a_list_of_dicts():
    samples = [sample_of(n) for n in range(4)]
    images, targets = detection_collate(samples)
    assert (images.dtype, images.shape) == (np.float32, (4, 3, 24, 32))
    expected = np.stack([sample["image"] for sample in samples]).transpose(0, 3, 1, 2) / 255
    assert np.allclose(images, expected, atol=1e-7)
    assert isinstance(targets, list)
    for target, sample in zip(targets, samples, strict=True):
        assert_same(target, {key: sample[key] for key in sample if key != "image"})
    assert targets[0]["boxes"].shape == (0, 4)
    assert targets[0]["landmarks"].shape == (0, 5, 2)


def test_samples_are_not_aliased():
    sample = sample_of(3)
    before = sample["boxes"].copy()
    _, targets = detection_collate([sample])
    targets[0]["boxes"][:] = -1
    assert np.array_equal(sample["boxes"], before)


def test_mean_and_std_are_those_of_values_in_0_to_1():
    sample = sample_of(1)
    images, _ = DetectionCollate(mean=MEAN, std=STD)([sample])
    expected = (sample["image"] / 255 - MEAN) / STD
    assert np.allclose(images[0], expected.transpose(2, 0, 1), atol=1e-6)


def test_one_number_is_for_all_channels_and_grey_images_have_one():
    grey = {**sample_of(1), "image": sample_of(1)["image"][..., :1]}
    images, _ = DetectionCollate(mean=[0.5], std=[0.25])([grey])
    assert images.shape == (1, 1, 24, 32)
    assert np.allclose(images[0, 0], (grey["image"][..., 0] / 255 - 0.5) / 0.25, atol=1e-6)
    with pytest.raises(ConfigError, match=r"3 values, but an image of the batch has 1 channel"):
        DetectionCollate(mean=MEAN, std=STD)([grey])


@pytest.mark.parametrize("view", [np.s_[:, ::-1], np.s_[::-1], np.s_[::2, ::2], np.s_[..., ::-1]])
def test_views_of_any_strides_are_right(view):
    sample = sample_of(1)
    images, _ = detection_collate([{**sample, "image": sample["image"][view]}])
    assert np.allclose(images[0] * 255, sample["image"][view].transpose(2, 0, 1), atol=1e-4)


def test_uint8_images_stay_as_they_are_if_asked_for():
    samples = [sample_of(n) for n in range(3)]
    images, _ = DetectionCollate(output="uint8_hwc")(samples)
    assert_same(images, np.stack([sample["image"] for sample in samples]))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint8])
def test_what_a_transform_has_made_is_stacked_as_it_is(dtype):
    made = [sample_of(n)["image"].transpose(2, 0, 1).astype(dtype) for n in range(2)]
    samples = [{**sample_of(n), "image": image} for n, image in enumerate(made)]
    images, targets = DetectionCollate(mean=MEAN, std=STD)(samples)
    assert_same(images, np.stack(made))
    assert isinstance(targets[1]["boxes"], np.ndarray)


def test_tensors_make_tensors():
    samples = [
        {**sample_of(n), "image": torch.rand(3, 4, 5), "boxes": torch.rand(n, 4)} for n in range(3)
    ]
    images, targets = detection_collate(samples)
    assert_same(images, torch.stack([sample["image"] for sample in samples]))
    assert_same(targets[2]["boxes"], samples[2]["boxes"])
    assert targets[2]["labels"].tolist() == samples[2]["labels"].tolist()
    assert isinstance(targets[2]["labels"], torch.Tensor)


def test_different_sizes_are_an_error_that_says_what_helps():
    samples = [sample_of(0), sample_of(1), sample_of(2, height=30, width=20)]
    with pytest.raises(CollateError) as caught:
        detection_collate(samples)
    assert str(caught.value) == (
        "images of one batch should have the same size and type, but sample 0 of the batch is "
        "uint8 of shape (24, 32, 3) and sample 2 of the batch is uint8 of shape (30, 20, 3). "
        "Resize or letterbox them in a transform, or "
        'collate with DetectionCollate(images="pad") or DetectionCollate(images="list").'
    )


@pytest.mark.parametrize("output", ["float_chw", "uint8_hwc"])
def test_padding_goes_to_the_right_and_the_bottom(output):
    samples = [sample_of(0, 20, 32), sample_of(1, 24, 30)]
    collate = DetectionCollate("pad", output, pad_multiple=16, fill=51)
    images, targets = collate(samples)
    if output == "uint8_hwc":
        assert (images.shape, images.dtype) == ((2, 32, 32, 3), np.uint8)
        pixels = images
    else:
        assert (images.shape, images.dtype) == ((2, 3, 32, 32), np.float32)
        pixels = np.rint(images.transpose(0, 2, 3, 1) * 255).astype(np.uint8)
    assert np.array_equal(pixels[0, :20, :32], samples[0]["image"])
    assert np.array_equal(pixels[1, :24, :30], samples[1]["image"])
    assert (pixels[0, 20:] == 51).all()
    assert (pixels[1, 24:] == 51).all()
    assert (pixels[1, :, 30:] == 51).all()
    assert [target["image_size"] for target in targets] == [(20, 32), (24, 30)]
    assert_same(targets[1]["boxes"], samples[1]["boxes"])


def test_a_list_of_images_keeps_their_sizes():
    samples = [sample_of(0, 20, 32), sample_of(1, 24, 30)]
    images, _ = DetectionCollate("list")(samples)
    assert type(images) is list
    assert [image.shape for image in images] == [(3, 20, 32), (3, 24, 30)]
    assert np.allclose(images[1] * 255, samples[1]["image"].transpose(2, 0, 1), atol=1e-4)


def test_rows_of_five_for_code_that_wants_them():
    samples = [sample_of(n) for n in range(4)]
    _, targets = DetectionCollate(targets="array")(samples)
    assert [(target.dtype, target.shape) for target in targets] == [
        (np.float32, (n, 5)) for n in range(4)
    ]
    assert np.array_equal(targets[3][:, :4], samples[3]["boxes"])
    assert np.array_equal(targets[3][:, 4], samples[3]["labels"])
    with pytest.raises(ConfigError, match=r"boxes \(0, 4\) and labels \(\)"):
        DetectionCollate(targets="array")(
            [{"image": samples[0]["image"], "boxes": np.zeros((0, 4))}]
        )


class Pairs(Photos):
    """Samples as SSD's datasets give them: an image, channels first, and rows of five numbers."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        rows = np.column_stack([sample["boxes"], sample["labels"]])
        return torch.from_numpy(sample["image"]).permute(2, 0, 1) / 255, rows


@pytest.mark.parametrize("kind", [Loader, DataLoader, torch.utils.data.DataLoader])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_pairs_with_arrays_become_ssds_batch(kind, num_workers):
    loader = kind(Pairs(), 4, collate_fn=detection_collate, num_workers=num_workers)
    for first, (images, targets) in zip(range(0, 12, 4), loader, strict=True):
        pairs = [Pairs()[first + n] for n in range(4)]
        assert np.array_equal(images, torch.stack([image for image, _ in pairs]))
        assert np.asarray(images).dtype == np.float32
        assert type(images) is type(targets[3]) is (np.ndarray if kind is Loader else torch.Tensor)
        for target, (_, rows) in zip(targets, pairs, strict=True):
            assert_same(np.asarray(target), rows.astype(np.float32).reshape(-1, 5))


def test_pairs_with_lists_of_any_width_and_without_objects():
    image = np.zeros((4, 5, 3), np.uint8)
    samples = [(image, [[1, 2, 3, 4, 0]] * 2), (image, []), [image, np.zeros((0, 15))]]
    _, targets = detection_collate(samples[:2])
    assert [target.tolist() for target in targets] == [samples[0][1], []]
    assert [target.shape for target in detection_collate(samples[1:])[1]] == [(0, 5), (0, 5)]
    with pytest.raises(CollateError, match=r"float32 of shape \(1, 15\)"):
        detection_collate([samples[0], (image, np.zeros((1, 15)))])


def test_pairs_with_dicts_are_those_dicts():
    samples = [sample_of(n) for n in range(3)]
    pairs = [(sample.pop("image"), sample) for sample in map(dict, samples)]
    for collate in (detection_collate, DetectionCollate("pad"), DetectionCollate(targets="array")):
        assert_same(collate(pairs), collate(samples))


class Masked(Photos):
    """With masks of each object."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        limits = 30 * (1 + np.arange(len(sample["boxes"])))
        return sample | {"masks": (sample["image"][..., 0] < limits[:, None, None]).astype("u1")}


@pytest.mark.parametrize("images", ["stack", "pad", "list"])
@pytest.mark.parametrize("kind", [Loader, DataLoader])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_masks_are_as_large_as_their_images(kind, images, num_workers):
    dataset = Masked(wide=() if images == "stack" else {2, 5})
    collate = DetectionCollate(images, pad_multiple=32 if images == "pad" else 1)
    loader = kind(dataset, 4, collate_fn=collate, num_workers=num_workers)
    targets = [(image, target) for batch in loader for image, target in zip(*batch, strict=True)]
    for index, (image, target) in enumerate(targets):
        masks = dataset[index]["masks"]
        assert target["masks"].shape == (len(masks), *image.shape[1:])
        assert isinstance(target["masks"], np.ndarray if kind is Loader else torch.Tensor)
        found = np.asarray(target["masks"])
        assert found.dtype == np.uint8
        assert np.array_equal(found[:, :24, : masks.shape[2]], masks)
        assert found.sum() == masks.sum()
    assert_same(pickle.loads(pickle.dumps(targets)), targets)


def test_masks_that_do_not_fit_name_the_sample():
    samples = [Masked()[1], Masked()[2] | {"masks": np.zeros((2, 24, 31), np.uint8)}]
    with pytest.raises(ConfigError, match=r"\(2, 24, 31\), and its image has 24 x 32") as caught:
        detection_collate(samples)
    assert "in sample 1 of the batch" in caught.value.__notes__[0]
    with pytest.raises(CollateError, match='sample 0 of the batch has "masks" and sample 1'):
        detection_collate([Masked()[1], sample_of(2)])


def test_images_without_objects_may_have_arrays_of_any_type():
    bare = {**sample_of(0), "boxes": np.array([]), "labels": np.array([])}
    _, targets = detection_collate([bare, sample_of(2), bare])
    assert (targets[0]["boxes"].shape, targets[0]["boxes"].dtype) == ((0, 4), np.float32)
    assert targets[2]["labels"].dtype == np.int64
    _, targets = detection_collate([bare])
    assert (targets[0]["boxes"].shape, targets[0]["boxes"].dtype) == ((0, 4), np.float32)
    assert (targets[0]["labels"].shape, targets[0]["labels"].dtype) == ((0,), np.int64)


def test_arrays_that_differ_in_more_than_their_rows_are_an_error():
    samples = [sample_of(0), sample_of(1), {**sample_of(2), "landmarks": np.zeros((2, 7, 2), "f4")}]
    with pytest.raises(CollateError) as caught:
        detection_collate(samples)
    assert str(caught.value).startswith(
        '"landmarks" should differ in its number of rows alone, but that of sample 1 of the batch '
        "is float32 of shape (1, 5, 2) and that of sample 2 of the batch is float32 of shape "
        "(2, 7, 2). "
    )


def test_an_array_that_some_samples_lack_is_an_error():
    samples = [sample_of(1), {**sample_of(2), "{score}": np.ones(2)}]
    with pytest.raises(
        CollateError, match=r'sample 1 of the batch has "\{score\}" and sample 0 of'
    ):
        detection_collate(samples)


def test_rows_that_do_not_match_name_the_sample():
    with pytest.raises(ConfigError, match='"labels" of a sample has the shape') as caught:
        detection_collate([sample_of(1), {**sample_of(2), "labels": np.zeros(3, int)}])
    assert "in sample 1 of the batch" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "sample",
    [(np.zeros((3, 3, 3)), of) for of in (1, [[1, 2], [3]])] + [{"boxes": np.zeros((0, 4))}],
)
def test_what_is_no_such_sample_is_an_error(sample):
    with pytest.raises(ConfigError, match=r'takes dicts with an "image", or pairs .* sample 1 of'):
        detection_collate([sample_of(1), sample])


@pytest.mark.parametrize("kind", [Loader, DataLoader, torch.utils.data.DataLoader])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_arrays_that_torch_has_no_type_for_stay_arrays(kind, num_workers):
    loader = kind(Dated(), 4, collate_fn=detection_collate, num_workers=num_workers)
    ((_, targets),) = loader
    for index, target in enumerate(targets):
        assert_same(target["taken"], Dated()[index]["taken"])
        assert target["precise"].dtype == np.longdouble  # whose bytes are not all of the number
        assert np.array_equal(target["precise"], Dated()[index]["precise"])
    assert isinstance(targets[3]["labels"], torch.Tensor) is (kind is DataLoader)


@pytest.mark.parametrize("name", ["mean", "std"])
def test_numbers_in_0_to_255_are_refused_with_the_unit(name):
    with pytest.raises(
        ConfigError, match=rf"{name} is in units .* {name}=\(0.4851, 0.4561, 0.4059"
    ):
        DetectionCollate(**{name: (123.7, 116.3, 103.5)})
    DetectionCollate(mean=(1, 1, 1), std=(1, 1, 1))


@pytest.mark.parametrize(
    "options",
    [
        {"images": "tile"},
        {"output": "float_hwc"},
        {"targets": "csv"},
        {"pad_multiple": 0, "images": "pad"},
        {"pad_multiple": 32},
        {"fill": 256},
        {"mean": MEAN, "output": "uint8_hwc"},
        {"std": (1, 0, 1)},
        {"mean": MEAN, "std": (1, 1)},
    ],
    ids=lambda options: "-".join(options),
)
def test_arguments_out_of_range_are_refused(options):
    with pytest.raises(ConfigError):
        DetectionCollate(**options)


@pytest.mark.parametrize("collate", [
    detection_collate,
    DetectionCollate("pad", "uint8_hwc", pad_multiple=32),
    DetectionCollate("list", mean=MEAN, std=STD, targets="array"),
], ids=["stack", "pad", "list"])  # fmt: skip
@pytest.mark.parametrize("kind", [Loader, DataLoader])
def test_batches_are_the_same_for_any_number_of_workers(kind, collate):
    wide = () if collate is detection_collate else {2, 5, 7}
    options = {"shuffle": True, "seed": 3, "collate_fn": collate}
    expected = list(kind(Photos(wide=wide), 5, **options))
    leaf = np.ndarray if kind is Loader else torch.Tensor
    assert isinstance(expected[0][0][0], leaf)
    for num_workers, method in ((2, "fork"), (1, "spawn")):
        start = {"num_workers": num_workers, "multiprocessing_context": method}
        found = list(kind(Photos(wide=wide), 5, **start, **options))
        assert_same(found, expected)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_torchs_own_loader_gives_the_same_values(num_workers):
    theirs = torch.utils.data.DataLoader(
        Photos(), 5, collate_fn=detection_collate, num_workers=num_workers
    )
    ours = Loader(Photos(), 5, collate_fn=detection_collate)
    for one, other in zip(theirs, ours, strict=True):
        assert_same(one, list(other) if isinstance(one, list) else other)


@pytest.mark.parametrize("collate", [detection_collate, DetectionCollate(targets="array")])
def test_the_rows_of_all_images_are_pickled_as_one_array(collate):
    samples = [sample_of(n, num_objects=9) for n in range(64)]
    _, targets = collate(samples)
    arrays = [v for t in targets for v in (t.values() if isinstance(t, dict) else [t])]
    num_bytes = sum(one.nbytes for one in arrays if isinstance(one, np.ndarray))
    data = pickle.dumps(targets, protocol=5)
    assert len(data) < num_bytes + 64 * 60  # four arrays for each target take 500
    assert_same(pickle.loads(data), targets)


@pytest.mark.parametrize("change", [
    lambda targets: targets[0].update(boxes=targets[0]["boxes"] * 2, more=[7]),
    lambda targets: targets[1].pop("labels"),
    lambda targets: targets[0].update(boxes=targets[1]["boxes"]),
    lambda targets: targets.reverse(),
    lambda targets: targets.pop(0),
    lambda targets: targets.__setitem__(1, "no dict"),
], ids=["other", "less", "exchanged", "reversed", "shorter", "no dict"])  # fmt: skip
def test_a_target_that_was_changed_is_pickled_as_it_is(change):
    _, targets = detection_collate([sample_of(n, num_objects=n) for n in (2, 3)])
    change(targets)
    assert_same(pickle.loads(pickle.dumps(targets)), targets)


@pytest.mark.parametrize("kind", [Loader, DataLoader])
def test_one_target_keeps_its_values_while_slots_are_used_again(kind):
    loader = kind(
        Photos(60, num_objects=400), 2, num_workers=1, collate_fn=detection_collate, seed=1
    )
    batches = iter(loader)
    _, targets = next(batches)
    kept = targets[1]["boxes"]
    del targets, _
    gc.collect()
    before = np.asarray(kept).copy()
    for _images, later in batches:
        later[0]["boxes"][:] = -1  # writable, and no other batch's
    assert np.array_equal(kept, before)
    assert np.array_equal(before, sample_of(1, num_objects=400)["boxes"])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_does_not_fit_is_left_out_by_a_policy(num_workers):
    loader = Loader(
        Photos(wide={6}), 4, num_workers=num_workers, collate_fn=detection_collate, on_error="skip"
    )
    with pytest.warns(UserWarning, match="1 bad sample"):
        batches = list(loader)
    assert [len(images) for images, _ in batches] == [4, 3, 4]
    assert [target["image_id"] for target in batches[1][1]] == [f"image {n}" for n in (4, 5, 7)]
