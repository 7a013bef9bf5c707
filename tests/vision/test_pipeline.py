# SPDX-License-Identifier: Apache-2.0
"""`ImagePipeline`: right pixels, the same ones by the sample and by the batch, and plain errors."""

from __future__ import annotations

import io
import pickle

import cv2
import numpy as np
import pytest
from PIL import Image

import penstock
from penstock import Loader
from penstock.images import decode_image
from penstock.stores.records import EncodedImage
from penstock.vision import (
    ColorJitter,
    ImageFolder,
    ImagePipeline,
    RandomResizedCrop,
    Resize,
)
from penstock.vision.crops import Cut
from penstock.vision.pipeline import IMAGENET_MEAN, IMAGENET_STD


class FixedCrop:
    """A crop that a test chooses."""

    is_drawless = True

    def __init__(self, top, left, height, width, size=224):
        self.size = size, size
        self._cut = Cut(top, left, height, width, size, size)

    def cut(self, height, width, rng):
        return self._cut


def smooth_image(height=120, width=160):
    rows, columns = np.mgrid[0:height, 0:width]
    planes = [rows * 255 // height, columns * 255 // width, (rows + columns) % 256 // 2]
    return np.stack(planes, -1).astype(np.uint8)


def as_file(image, form="PNG", **options):
    file = io.BytesIO()
    Image.fromarray(image).save(file, form, **options)
    return file.getvalue()


def photos(data_dir, step=1):
    return sorted((data_dir / "clothing" / "validation").glob("*/*.jpg"))[::step]


def by_pillow(path, cut, size=224):
    part = (cut.left, cut.top, cut.left + cut.width, cut.top + cut.height)
    with Image.open(path) as image:
        small = image.convert("RGB").crop(part).resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(small).astype(float)


@pytest.mark.parametrize(("resample", "most"), [("bilinear", 1.5), ("antialias", 0.1)])
def test_pixels_are_those_of_pillow_at_the_same_crop(data_dir, resample, most):
    crop, rng = RandomResizedCrop(224), np.random.default_rng(0)
    differences = []
    for path in photos(data_dir):
        with Image.open(path) as image:
            cut = crop.cut(image.height, image.width, rng)
        pipeline = ImagePipeline(FixedCrop(*cut[:4]), output="uint8_hwc", resample=resample)
        got = pipeline(path.read_bytes())
        differences.append(np.abs(got - by_pillow(path, cut)).mean())
    assert np.mean(differences) < most


def test_the_middle_is_that_of_torchvisions_recipe(data_dir):
    pipeline = ImagePipeline.eval(224, output="uint8_hwc", resample="antialias")
    for path in photos(data_dir, 16):
        with Image.open(path) as image:
            shorter = min(image.size)
            size = [256 if n == shorter else int(256 * n / shorter) for n in image.size]
            left, top = round((size[0] - 224) / 2), round((size[1] - 224) / 2)
            resized = image.convert("RGB").resize(size, Image.Resampling.BILINEAR)
            expected = np.asarray(resized.crop((left, top, left + 224, top + 224))).astype(int)
        assert np.abs(pipeline(path) - expected).mean() < 0.1


def test_a_large_image_is_not_aliased():
    """Lines of one pixel, 8 times too large: their mean is grey everywhere."""
    lines = np.zeros((800, 800, 3), np.uint8)
    lines[:, ::2] = 255
    for data in (as_file(lines), as_file(lines, "JPEG", quality=95), lines):
        got = ImagePipeline(Resize(100), output="uint8_hwc")(data)
        assert np.abs(got.astype(int) - 127).max() <= 4


def test_floats_are_normalised_by_channel():
    image = np.full((50, 60, 3), (255, 128, 0), np.uint8)
    got = ImagePipeline(Resize(8))(image)
    expected = (np.array([255, 128, 0]) / 255 - IMAGENET_MEAN) / np.array(IMAGENET_STD)
    assert got.shape == (3, 8, 8)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected[:, None, None].repeat(8, 1).repeat(8, 2), rtol=1e-6)
    plain = ImagePipeline(Resize(8), mean=None, std=None)(image)
    np.testing.assert_allclose(plain[:, 0, 0], [1.0, 128 / 255, 0.0], rtol=1e-6)


def test_a_flip_exchanges_left_and_right():
    image = smooth_image()
    straight = ImagePipeline(Resize(32), output="uint8_hwc")(image)
    assert np.array_equal(
        ImagePipeline(Resize(32), flip=1.0, output="uint8_hwc")(image), straight[:, ::-1]
    )


@pytest.mark.parametrize(
    "give",
    [bytes, bytearray, memoryview, EncodedImage, lambda d: Image.open(io.BytesIO(d)), decode_image],
    ids=["bytes", "bytearray", "memoryview", "EncodedImage", "Pillow", "array"],
)
def test_an_image_may_be_given_in_any_form(give):
    data = as_file(smooth_image())
    pipeline = ImagePipeline.eval(64)
    assert np.array_equal(pipeline(give(data)), pipeline(data))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_photo_is_seen_upright(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = smooth_image()
    data = as_file(stored, "JPEG", quality=98, subsampling=0, exif=exif)
    with Image.open(io.BytesIO(data)) as image:
        turned = (
            np.asarray(image.convert("RGB").transpose(_TURNS[orientation]))
            if orientation > 1
            else stored
        )
    pipeline = ImagePipeline(Resize(64), output="uint8_hwc")
    assert np.abs(pipeline(data).astype(int) - pipeline(turned)).mean() < 3


_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@pytest.fixture
def folder(tmp_path):
    """12 photos of different sizes and forms in 3 classes."""
    for number in range(12):
        image = np.roll(smooth_image(60 + 9 * number, 150 - 7 * number), 13 * number, axis=1)
        form = ("PNG", "JPEG", "WEBP")[number % 3]
        path = tmp_path / "photos" / f"class{number % 3}" / f"{number:02}.{form.lower()}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(as_file(image, form))
    return tmp_path / "photos"


PIPELINES = {
    "train": lambda: ImagePipeline.train(32),
    "uint8": lambda: ImagePipeline.train(32, output="uint8_hwc"),
    "eval": lambda: ImagePipeline.eval(32),
    "colour": lambda: ImagePipeline.train(32, color=ColorJitter(0.4, 0.4, 0.4, 0.1)),
    "steps": lambda: ImagePipeline.train(32, steps=[brighten]),
    "antialias": lambda: ImagePipeline.train(32, resample="antialias"),
}


def brighten(image):
    """Draws from ours, and from a global generator."""
    amount = penstock.sample_rng().integers(0, 40) + np.random.randint(0, 40)
    return cv2.add(image, np.full_like(image, amount))


@pytest.mark.parametrize("kind", list(PIPELINES))
def test_batches_equal_samples_for_any_number_of_workers(folder, kind):
    dataset = ImageFolder(folder, transform=PIPELINES[kind]())
    assert dataset.can_get_batch
    whole = list(Loader(dataset, batch_size=5, shuffle=True, seed=7))
    workers = list(Loader(dataset, batch_size=5, shuffle=True, seed=7, num_workers=2))
    singles = list(Loader(_Plain(dataset), batch_size=5, shuffle=True, seed=7))
    assert len(whole) == len(workers) == len(singles) == 3
    for a, b, c in zip(whole, workers, singles, strict=True):
        assert a[0].dtype == dataset.transform.dtype
        assert np.array_equal(a[0], b[0])
        assert np.array_equal(a[0], c[0])
        assert np.array_equal(a[1], b[1])
        assert np.array_equal(a[1], c[1])


class _Plain:
    """A dataset read one sample at a time."""

    def __init__(self, dataset):
        self._dataset = dataset

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, index):
        return self._dataset[index]


def test_a_batch_is_written_where_it_is_to_lie(folder):
    given = []

    def alloc(shape, dtype):
        given.append(np.empty(shape, dtype))
        return given[-1]

    dataset = ImageFolder(folder, transform=ImagePipeline.eval(32))
    images, labels = dataset.get_batch(np.arange(12), alloc)
    assert any(images is array for array in given)
    assert any(labels is array for array in given)
    assert np.array_equal(images[4], dataset[4][0])


def test_a_pipeline_pickles(folder):
    pipeline = ImagePipeline.train(32, color=ColorJitter(hue=0.1))
    pipeline(smooth_image())
    again = pickle.loads(pickle.dumps(pipeline))
    assert repr(again) == repr(pipeline)
    assert again.shape == (3, 32, 32)


def test_a_broken_file_is_named_and_can_be_left_out(folder):
    (folder / "class1" / "04.jpeg").write_bytes(b"<html>not found</html>")
    dataset = ImageFolder(folder, transform=ImagePipeline.eval(32))
    with pytest.raises(ValueError, match="text, not an image") as caught:
        list(Loader(dataset, batch_size=4))
    assert any("04.jpeg" in note for note in caught.value.__notes__)
    loader = Loader(dataset, batch_size=4, on_error="skip", num_workers=2)
    with pytest.warns(UserWarning, match="left out"):
        assert sum(len(labels) for _, labels in loader) == 11
    assert [failure.index for failure in loader.failures] == [5]


def test_a_truncated_file_is_an_error_or_repaired(folder):
    path = folder / "class1" / "04.jpeg"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"(?i)premature"):
        list(Loader(ImageFolder(folder, transform=ImagePipeline.eval(32)), batch_size=4))
    dataset = ImageFolder(folder, transform=ImagePipeline.eval(32), repair=True)
    assert sum(len(labels) for _, labels in Loader(dataset, batch_size=4, num_workers=2)) == 12


def test_a_bomb_costs_no_memory(tmp_path):
    header = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (60_000).to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0"
    with pytest.raises(ValueError, match="more than 100,000,000 pixels"):
        ImagePipeline.eval(32)(header + bytes(20))
    with pytest.raises(ValueError, match="more than 1,000 pixels"):
        ImagePipeline.eval(32, max_pixels=1000)(as_file(smooth_image()))


def test_a_step_that_fails_is_named():
    pipeline = ImagePipeline(Resize(8), steps=[shrink])
    with pytest.raises(ValueError, match=r"made uint8 \(4, 8, 3\) of uint8 \(8, 8, 3\)") as caught:
        pipeline(smooth_image())
    assert "in the step shrink of the ImagePipeline" in caught.value.__notes__[0]


def shrink(image):
    return image[::2]


@pytest.mark.parametrize(
    "image",
    [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3), np.float32), np.zeros((0, 4, 3), np.uint8)],
    ids=["grey", "float", "empty"],
)
def test_arrays_of_another_kind_are_refused(image):
    with pytest.raises(ValueError, match="an image is uint8 of shape"):
        ImagePipeline(Resize(8))(image)


def test_what_is_no_image_is_refused():
    with pytest.raises(TypeError, match="not dict"):
        ImagePipeline(Resize(8))({"image": smooth_image()})


@pytest.mark.parametrize("resample", ["bilinear", "antialias"])
@pytest.mark.parametrize("size", [(2, 3000), (3000, 2), (40, 900)], ids=str)
def test_a_panorama_is_not_resized_as_a_whole(resample, size):
    """20,000 x 2 px would become 2,560,000 x 256."""
    image = smooth_image(*size)
    pipeline = ImagePipeline.eval(64, output="uint8_hwc", resample=resample)
    cut = pipeline.crop.cut(*size, None)
    resized = (cut.resized_width, cut.resized_height)
    if resample == "bilinear":
        whole = cv2.resize(image, resized)
    else:
        whole = np.asarray(Image.fromarray(image).resize(resized, Image.Resampling.BILINEAR))
    bottom, right = cut.row_offset + 64, cut.column_offset + 64
    expected = whole[cut.row_offset : bottom, cut.column_offset : right].astype(int)
    assert np.abs(pipeline(image) - expected).max() <= 4
    assert pipeline(smooth_image(2, 70_000)).shape == (64, 64, 3)
    assert pipeline(smooth_image(70_000, 2)).shape == (64, 64, 3)


def test_all_rows_are_decoded_when_asked():
    """Damage below the crop is seen then, and not otherwise."""
    data = bytearray(as_file(smooth_image(480, 160), "JPEG", quality=95))
    data[-600:-540] = b"\xff\xd9" * 30
    top = FixedCrop(0, 0, 100, 160, size=64)
    assert ImagePipeline(top)(bytes(data)).shape == (3, 64, 64)
    with pytest.raises(ValueError, match=r"(?i)premature|corrupt"):
        ImagePipeline(top, whole=True)(bytes(data))
