# SPDX-License-Identifier: Apache-2.0
"""What is drawn lies where the sample says, in its class's colour, and within the image."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.errors import ConfigError
from penstock.vision import contact_sheet
from penstock.vision.drawing import (
    LINE_PX,
    class_colour,
    class_text,
    fitted,
    sample_of,
    samples_of_batch,
    shown_image,
    text_width,
)
from penstock.vision.pipeline import IMAGENET_MEAN, IMAGENET_STD

GROUND = 60


def sample(boxes=(), labels=None, height=120, width=160, **more):
    return {
        "image": np.full((height, width, 3), GROUND, np.uint8),
        "boxes": np.array(boxes, np.float32).reshape(-1, 4),
        **({} if labels is None else {"labels": np.array(labels)}),
        **more,
    }


def drawn(given, names=()):
    """The image of a sample, at its own size, with what is marked in it."""
    return contact_sheet([given], names, tile_px=160)[8:128, 8:168]


def where(image, colour):
    """Rows and columns of a colour: top, left, bottom, right; half-open."""
    rows, columns = np.nonzero((image == colour).all(axis=2))
    return rows.min(), columns.min(), rows.max() + 1, columns.max() + 1


def test_a_box_is_drawn_along_its_outermost_pixels():
    image = drawn(sample([[30, 20, 90, 80]], [2]))
    colour = class_colour(2)
    for row, column in ((20, 50), (79, 50), (50, 30), (50, 89)):
        assert tuple(image[row, column]) == colour
    assert (image[50, 40:80] == GROUND).all()
    assert (image[:, 100:] == GROUND).all()


@pytest.mark.parametrize(
    "labels",
    [
        ["cat", "dog"],
        np.array(["cat", "dog"]),
        np.array(["cat", "dog"], object),
        [np.nan, 1],
        np.array([np.inf, -np.inf]),
        [None, "cat"],
        [[], [0.2, 0.8]],
        [b"cat", 3],
        [],
    ],
    ids=["texts", "array", "objects", "nan", "infinity", "none", "mixture", "bytes", "too-few"],
)
def test_labels_of_any_form_are_drawn(labels):
    given = {**sample([[30, 20, 90, 80], [5, 5, 20, 20]]), "labels": labels}
    assert (drawn(given, ["cow"])[79, 50] != GROUND).any()


def test_masks_without_labels_are_drawn():
    assert (drawn(sample(masks=np.ones((1, 120, 160), bool)))[5, 5] != GROUND).any()


@pytest.mark.parametrize(
    "box", [[0, 0, 160, 120], [-500, -500, -400, -400], [150, 110, 900, 900], [-5, -5, 8, 8],
            [40, 40, 40, 40], [80, 90, 20, 10], [1e30, 0, -1e30, 5], [np.nan, 0, 5, 5]],
)  # fmt: skip
def test_any_box_can_be_drawn_and_tags_stay_within_the_image(box):
    image = drawn(sample([box], [0]), ["name"])
    assert image.shape == (120, 160, 3)


def test_landmarks_lie_on_their_pixel_and_those_not_marked_are_left_out():
    points = np.array([[[20, 30], [100, 90], [np.nan, np.nan], [1e9, 5]]], np.float32)
    image = drawn(sample([[10, 10, 110, 110]], landmarks=points))
    assert (image[30, 20] == 255).all()
    assert (image[90, 100] == 255).all()
    hidden = drawn(
        sample([[10, 10, 110, 110]], landmarks=points, visibility=np.array([[1, 2, 0, 0]]))
    )
    assert not (hidden[30, 20] == 255).all()
    assert (hidden[90, 100] == 255).all()


def test_landmarks_follow_the_scale_of_a_tile():
    given = sample(height=100, width=100, landmarks=np.array([[[9.5, 49.5], [89.5, 49.5]]]))
    sheet = contact_sheet([{**given, "boxes": np.zeros((1, 4))}], tile_px=200)
    white = (sheet[8:208, 8:208] == 255).all(axis=2)
    centres = [
        np.argwhere(white[:, part])[:, 1].mean() for part in (slice(0, 100), slice(100, 200))
    ]
    assert centres[0] == pytest.approx(19.5, abs=1.5)
    assert centres[1] == pytest.approx(179.5 - 100, abs=1.5)


@pytest.mark.parametrize(
    "image",
    [
        np.full((6, 8, 3), 51, np.uint8),
        np.full((6, 8), 51, np.uint8),
        np.full((6, 8, 4), 51, np.uint8),
        np.full((1, 6, 8), 51, np.uint8),
        np.full((3, 6, 8), 0.2, np.float32),
        torch.full((3, 6, 8), 0.2),
        np.full((6, 8, 1), 51, np.int64),
    ],
    ids=["rgb", "grey", "alpha", "grey-first", "floats", "tensor", "ints"],
)
def test_images_of_any_form_are_shown(image):
    shown = shown_image(image)
    assert (shown.shape, shown.dtype) == ((6, 8, 3), np.uint8)
    assert (shown == 51).all()
    assert shown.flags.writeable


@pytest.mark.parametrize("value", [np.zeros(3), "text", None, np.zeros((0, 4, 3))])
def test_what_is_no_image_is_an_error(value):
    with pytest.raises(ConfigError, match="an image should be an array"):
        shown_image(value)


def test_samples_of_any_form_are_taken():
    image = np.zeros((4, 5, 3), np.uint8)
    assert sample_of((image, 3))["label"] == 3
    assert sample_of((image, {"boxes": torch.zeros(1, 4)}))["boxes"].shape == (1, 4)
    assert list(sample_of(image)) == ["image"]
    with pytest.raises(ConfigError, match="a sample has no \"image\", but 'photo'"):
        sample_of({"photo": image})


def test_classes_are_named_numbered_or_mixed():
    names = ["cat", "dog"]
    assert [class_text(n, names) for n in (1, 5, -1, "cow", np.int64(0))] == [
        "dog", "5", "-1", "cow", "cat",
    ]  # fmt: skip
    assert class_text(np.array([0.0, 1.0]), names) == "dog"
    assert class_text(np.array([0.25, 0.75]), names) == "dog"
    assert class_text(object(), names) == ""


def test_text_is_shortened_to_its_room():
    whole = "a rather long name"
    short = fitted(whole, 60)
    assert short.endswith("…")
    assert text_width(short) <= 60 < text_width(whole)
    assert fitted(whole, 1000) == whole
    assert fitted(whole, 1) == ""
    assert text_width(fitted("long " * 100_000, 200)) <= 200


@pytest.mark.parametrize("name", ["é ñ", "中文", "a\nb\x00", ""])
def test_names_of_any_letters_are_drawn(name):
    plain, named = (drawn(sample([[30, 40, 90, 80]], [0]), [text]) for text in ("", name))
    assert np.array_equal(plain, named) == (not name)


def test_a_sheet_has_a_tile_for_each_sample():
    samples = [sample([[10, 10, 50, 50]], [n % 2], image_id=f"photo {n}") for n in range(7)]
    sheet = contact_sheet(samples, ["cat", "dog"], columns=3, tile_px=100)
    assert sheet.shape[1] == 3 * 108 + 8
    tops = [8 + n * (75 + LINE_PX + 8) for n in range(3)]
    for number in range(9):
        top, left = tops[number // 3], 8 + number % 3 * 108
        middle = sheet[top + 60, left + 80]
        assert (middle == (GROUND if number < 7 else 245)).all()


@pytest.mark.parametrize(
    ("samples", "options"), [([], {}), ([np.zeros((4, 4))], {"columns": 0}),
                             ([np.zeros((4, 4))], {"tile_px": 3})], ids=["none", "columns", "tile"],
)  # fmt: skip
def test_a_sheet_of_nothing_is_an_error(samples, options):
    with pytest.raises(ConfigError):
        contact_sheet(samples, **options)


def test_a_sheet_that_would_fill_the_memory_is_refused_with_its_numbers():
    wide = [np.zeros((1, 9000, 3), np.uint8)] * 400
    message = r"82,088 x 73,308 pixels, and 200,000,000 is the most: show fewer"
    with pytest.raises(ConfigError, match=message):
        contact_sheet([np.zeros((8, 9, 3), np.uint8)] * 400, tile_px=4096)
    assert contact_sheet(wide, tile_px=400, columns=40).shape[1] == 40 * 408 + 8


PHOTOS = np.random.default_rng(0).integers(0, 256, (3, 24, 32, 3), dtype=np.uint8)
CHW = np.ascontiguousarray(PHOTOS.transpose(0, 3, 1, 2))
BOXES = np.array([[2, 3, 12, 13]], np.float32)
TARGETS = [{"boxes": BOXES, "labels": np.array([n]), "image_id": f"{n}"} for n in range(3)]


def in_bytes(image):
    image = np.asarray(image)
    image = image if image.shape[2] <= 4 else image.transpose(1, 2, 0)
    return image if image.dtype == np.uint8 else np.rint(255 * image).astype(int)


@pytest.mark.parametrize(
    "images",
    [
        PHOTOS,
        CHW,
        torch.from_numpy(CHW),
        CHW.astype(np.float32) / 255,
        torch.from_numpy(CHW).float(),
        list(PHOTOS),
        torch.from_numpy(CHW).to(memory_format=torch.channels_last),
    ],
    ids=["hwc", "chw", "tensor", "floats", "to-255", "list", "channels-last"],
)
def test_images_of_any_form_are_shown_as_they_are(images):
    for batch in (images, (images,), [images, np.arange(3)], {"label": [1, 2, 3], "image": images}):
        samples = samples_of_batch(batch)
        assert [
            np.abs(in_bytes(one["image"]) - photo).max()
            for one, photo in zip(samples, PHOTOS, strict=True)
        ] == [0, 0, 0]
        assert contact_sheet(samples, tile_px=64).ndim == 3


@pytest.mark.parametrize(
    ("mean", "std", "known"),
    [
        (IMAGENET_MEAN, IMAGENET_STD, ()),
        ((0.5,) * 3, (0.5,) * 3, ()),
        ((0.2, 0.3, 0.4), (0.1, 0.2, 0.3), [([0.2, 0.3, 0.4], torch.tensor([0.1, 0.2, 0.3]))]),
    ],
    ids=["imagenet", "halves", "known"],
)
@pytest.mark.parametrize("is_chw", [True, False])
def test_a_normalisation_is_undone(mean, std, known, is_chw):
    images = ((PHOTOS / 255 - mean) / std).astype(np.float32)
    images = images.transpose(0, 3, 1, 2) if is_chw else images
    for one, photo in zip(samples_of_batch(images, known), PHOTOS, strict=True):
        assert np.abs(in_bytes(one["image"]) - photo).max() <= 1


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        (np.array([4, 5, 6]), {"label": 6}),
        (torch.tensor([4, 5, 6]), {"label": 6}),
        ([[1, 0], [0, 1], [0.5, 0.5]], {"label": [0.5, 0.5]}),
        (TARGETS, TARGETS[2]),
        ([np.c_[BOXES, [[n]]] for n in range(3)], {"boxes": BOXES, "labels": np.array([2])}),
        (
            {"boxes": np.stack([BOXES] * 3), "labels": np.array([[7], [8], [9]]), "note": "of all"},
            {"boxes": BOXES, "labels": np.array([9])},
        ),
        ({"labels": np.array([4, 5, 6])}, {"label": 6}),
        (np.arange(5), {}),  # of something else
        (None, {}),
    ],
    ids=["classes", "tensor", "mixtures", "targets", "arrays", "fields", "labels", "other", "none"],
)
def test_what_a_batch_says_of_an_image_goes_with_it(others, expected):
    *_, last = samples_of_batch((CHW, others))
    assert last.keys() - {"image"} == expected.keys()
    for key, value in expected.items():
        assert np.array_equal(np.asarray(last[key]), np.asarray(value))
    assert contact_sheet([last], ["a"] * 10, tile_px=64).ndim == 3


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (np.zeros((4, 10), np.float32), r"batch is \(4, 10\)"),
        (
            (torch.zeros(2, 8, 8, 8), [1, 2]),
            r"batch\[0\] is .*\[2, 8, 8, 8\].*\[1\] is list",
        ),
        ({"points": np.zeros((2, 3)), "of": "all"}, r"batch\['of'\] is str"),
    ],
)
def test_a_batch_without_images_names_its_leaves(batch, found):
    with pytest.raises(ConfigError, match=found):
        samples_of_batch(batch)
