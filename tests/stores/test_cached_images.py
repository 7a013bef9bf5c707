# SPDX-License-Identifier: Apache-2.0
"""Datasets with `cache=`: the same batches, with each image decoded once."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pytest

import penstock.images
from penstock import Loader
from penstock.data import array_cache
from penstock.data.array_cache import ArrayCache
from penstock.errors import ConfigError, StoreError
from penstock.stores import EncodedImage, StoreDataset, pack
from penstock.vision import (
    AnnotatedImage,
    AnnotatedImages,
    AnnotatedObject,
    ImageFolder,
    ImagePipeline,
)

NUM_IMAGES = 24


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        image = cv2.resize(rng.integers(0, 256, (9, 12, 3), np.uint8), (160 + number, 120))
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), image)
    return tmp_path / "photos"


@pytest.fixture
def decoded(monkeypatch):
    """Count what this process decodes."""
    files = []
    original = penstock.images.decode_image

    def decode(data, **options):
        files.append(len(data))
        return original(data, **options)

    monkeypatch.setattr(penstock.images, "decode_image", decode)
    return files


def transforms():
    return {
        "pipeline": ImagePipeline.train(64),
        "antialias": ImagePipeline.train(64, resample="antialias", output="uint8_hwc"),
        "steps": ImagePipeline.eval(64, steps=[lambda image: 255 - image]),
        "writes into it": written_into,
    }


def written_into(image):
    image[:] += 1
    return cv2.resize(image, (32, 32))


def epochs(loader, count=2):
    return [list(loader) for _ in range(count)]


def assert_same(got, expected):
    for one, other in zip(got, expected, strict=True):
        for batch, same in zip(one, other, strict=True):
            assert np.array_equal(batch[0], same[0])
            assert np.array_equal(batch[1], same[1])


@pytest.mark.parametrize("name", ["pipeline", "antialias", "steps", "writes into it"])
def test_batches_from_the_cache_are_those_that_are_decoded(folder, name, decoded):
    def loader(cache):
        dataset = ImageFolder(folder, transforms()[name], cache=cache)
        return Loader(dataset, batch_size=5, shuffle=True, seed=3)

    nothing_fits = epochs(loader("ram:1"), 3)
    assert len(decoded) == 3 * NUM_IMAGES
    decoded.clear()
    assert_same(epochs(loader("ram:100MB"), 3), nothing_fits)
    assert len(decoded) == NUM_IMAGES
    decoded.clear()
    half = epochs(loader("ram:800kB"), 3)
    assert_same(half, nothing_fits)
    assert NUM_IMAGES < len(decoded) < 3 * NUM_IMAGES


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver", "threads"])
@pytest.mark.parametrize("place", ["ram:100MB", "folder"])
def test_workers_share_it(folder, tmp_path, context, place):
    place = place if place.startswith("ram") else f"{tmp_path}/cache"
    options = (
        {"backend": "thread"} if context == "threads" else {"multiprocessing_context": context}
    )
    dataset = ImageFolder(folder, ImagePipeline.train(64), cache=place)
    loader = Loader(dataset, 5, shuffle=True, seed=3, num_workers=2, **options)
    expected = Loader(
        ImageFolder(folder, ImagePipeline.train(64), cache="ram:1"), 5, shuffle=True, seed=3
    )
    assert_same(epochs(loader), epochs(expected))
    assert dataset.cache.num_kept == NUM_IMAGES


def test_samples_with_boxes_have_it_too(folder, decoded):
    cat = AnnotatedObject("cat", (1, 2, 30, 40))
    images = [
        AnnotatedImage(path, path.stem, width_px=None, height_px=None, objects=(cat,))
        for path in sorted(folder.glob("a/*.jpg"))
    ]

    def darker(sample):
        sample["image"][:] //= 2
        return sample

    expected = list(AnnotatedImages(images, transform=darker))
    decoded.clear()
    dataset = AnnotatedImages(images, transform=darker, cache="ram:100MB")
    for _ in range(3):
        for sample, other in zip(dataset, expected, strict=True):
            assert all(np.array_equal(sample[name], other[name]) for name in other)
    assert len(decoded) == len(images)


def test_an_epoch_that_is_resumed_has_the_same_batches(folder):
    def loader():
        dataset = ImageFolder(folder, ImagePipeline.train(64), cache="ram:100MB")
        return Loader(dataset, 5, shuffle=True, seed=3)

    (whole,) = epochs(loader(), 1)
    begun = loader()
    stream = iter(begun)
    first = [next(stream) for _ in range(2)]
    other = loader()
    other.load_state_dict(begun.state_dict())
    assert_same([first + list(other)], [whole])


def test_what_a_batch_needs_is_read_from_the_store_but_once(folder, tmp_path):
    address = f"lmdb:{tmp_path}/photos.lmdb"
    pack(str(folder), address)
    dataset = StoreDataset(address, transform=ImagePipeline.train(64), cache="ram:100MB")
    list(Loader(dataset, 5))
    os.unlink(tmp_path / "photos.lmdb")
    dataset.close()
    assert len(list(Loader(dataset, 5))) == 5


def test_a_folder_serves_the_next_run_and_other_data_have_another_file(folder, tmp_path, decoded):
    place = f"{tmp_path}/cache:50MB"
    for _ in range(2):
        list(Loader(ImageFolder(folder, ImagePipeline.train(64), cache=place), 5))
    assert len(decoded) == NUM_IMAGES
    (folder / "a" / "0.jpg").rename(folder / "a" / "x.jpg")
    list(Loader(ImageFolder(folder, ImagePipeline.train(64), cache=place), 5))
    assert len(decoded) == 2 * NUM_IMAGES
    assert len(os.listdir(tmp_path / "cache")) == 2


def test_folders_with_the_same_names_have_their_own_images(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    for path in other.glob("*/*.jpg"):
        cv2.imwrite(str(path), 255 - cv2.imread(str(path)))
    place = f"{tmp_path}/cache"
    one, two = (
        [ImageFolder(root, lambda image: image.mean(), cache=place)[n][0] for n in range(4)]
        for root in (folder, other)
    )
    assert all(abs(255 - a - b) < 2 for a, b in zip(one, two, strict=True))


def test_a_pipeline_that_makes_its_images_of_files_alone_is_refused(folder):
    class Own(ImagePipeline):
        def write(self, data, out, rng, *, strict=True):
            out[...] = 7

    with pytest.raises(ConfigError, match="Own makes its images of files alone"):
        ImageFolder(folder, Own.train(64), cache="ram:1MB")


def test_a_broken_image_is_the_same_error_in_each_epoch(folder):
    path = folder / "a" / "2.jpg"
    path.write_bytes(path.read_bytes()[:1500])
    dataset = ImageFolder(folder, ImagePipeline.train(64), cache="ram:100MB")
    for _ in range(2):
        with pytest.raises(ValueError, match="end") as caught:
            list(Loader(dataset, 5))
        assert "2.jpg" in "".join(caught.value.__notes__)
    repaired = [
        epochs(
            Loader(ImageFolder(folder, ImagePipeline.train(64), cache=c, repair=True), 5, seed=1)
        )
        for c in ("ram:100MB", "ram:1")
    ]
    assert_same(*repaired)


@pytest.mark.parametrize(
    ("source", "options"),
    [([(EncodedImage(b"x"), 1)], {"decode": "pil"}), ([(np.zeros(3), 1)], {})],
)
def test_what_is_no_image_with_a_class_is_refused(tmp_path, source, options):
    pack(source, f"lmdb:{tmp_path}/a.lmdb")
    with pytest.raises(ConfigError, match="have one each"):
        StoreDataset(f"lmdb:{tmp_path}/a.lmdb", cache="ram:1MB", **options)


@pytest.mark.parametrize("place", ["ram:400TB", "ram:9000000TB", "ram:90000000TB"])
def test_more_memory_than_a_process_can_have_is_refused_with_what_is_free(place):
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=rf"cache='{place}'.* \d.* of memory are free"):
        ArrayCache(place, 3, "")
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("place", ["ram:", "ram:much", "ram:-1"])
def test_a_size_that_is_none_is_refused(place):
    with pytest.raises(ConfigError, match="size"):
        ArrayCache(place, 1, "")


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("write", [no_space, lambda *_: 10])
def test_a_full_disk_ends_the_keeping_and_nothing_else(monkeypatch, write):
    cache = ArrayCache("ram:1MB", 3, "")
    image = np.ones((2, 3, 3), np.uint8)
    cache.put(1, image)
    with monkeypatch.context() as patched:
        patched.setattr(array_cache.os, "pwritev", write)
        cache.put(0, image)
    cache.put(2, image)
    assert (cache.get(0), cache.get(2), cache.num_kept) == (None, None, 1)
    assert np.array_equal(cache.get(1), image)
    assert not cache.get(1).flags.writeable


def test_what_a_maker_that_was_killed_left_is_set_up_anew(tmp_path):
    ArrayCache(f"{tmp_path}:1MB", 3, "these")
    (path,) = tmp_path.iterdir()
    path.write_bytes(bytes(200))
    cache = ArrayCache(f"{tmp_path}:1MB", 3, "these")
    cache.put(1, np.ones((1, 1, 3), np.uint8))
    assert cache.num_kept == 1


@pytest.mark.parametrize("size", [10, 100, 5000])
def test_a_file_that_is_cut_off_is_refused(tmp_path, size):
    ArrayCache(f"{tmp_path}:1MB", 3, "these")
    (path,) = tmp_path.iterdir()
    os.truncate(path, size)
    with pytest.raises(StoreError, match=r"cut off|no file of arrays"):
        ArrayCache(f"{tmp_path}:1MB", 3, "these")


def test_a_wrong_size_leaves_no_lock(tmp_path):
    for _ in range(2):
        with pytest.raises(ConfigError, match="no size"):
            ArrayCache(f"{tmp_path}:1.2.3GB", 3, "these")
    ArrayCache(f"{tmp_path}:1MB", 3, "these")


def put_by_threads(cache):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: cache.put(n, np.full((9, 9, 3), n, np.uint8)), range(200)))
    assert cache.num_kept == 200


def test_threads_of_a_forked_process_put_at_the_same_time():
    for _ in range(10):
        cache = ArrayCache("ram:1MB", 200, "")
        child = multiprocessing.get_context("fork").Process(target=put_by_threads, args=(cache,))
        child.start()
        child.join()
        assert child.exitcode == 0
        assert all((cache.get(n) == n).all() for n in range(200))


def test_another_file_of_the_name_is_not_touched(tmp_path):
    ArrayCache(tmp_path, 3, "these")
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"somebody's thesis")
    with pytest.raises(StoreError, match="no file of arrays"):
        ArrayCache(tmp_path, 3, "these")
    assert path.read_bytes() == b"somebody's thesis"


def test_a_pickle_of_memory_that_is_gone_has_memory_of_its_own():
    cache = ArrayCache("ram:1MB", 3, "")
    cache.put(1, np.ones((1, 1, 3), np.uint8))
    pickled = pickle.dumps(cache)
    assert pickle.loads(pickled).num_kept == 1
    del cache
    assert pickle.loads(pickled).num_kept == 0


def fill_and_die(cache, numbers):
    for number in numbers:
        cache.put(number, np.full((40, 50, 3), number % 256, np.uint8))
    os.kill(os.getpid(), 9)


def test_processes_that_are_killed_leave_only_whole_arrays():
    cache = ArrayCache("ram:100MB", 4000, "")
    rng = np.random.default_rng(1)
    fork = multiprocessing.get_context("fork")
    for delay_s in rng.uniform(0, 0.1, 12):
        workers = [
            fork.Process(target=fill_and_die, args=(cache, rng.permutation(4000))) for _ in range(3)
        ]
        for worker in workers:
            worker.start()
        workers[0].join(delay_s)
        for worker in workers:
            worker.kill()
            worker.join()
    cache.put(0, np.zeros((40, 50, 3), np.uint8))  # nobody holds the lock
    kept = [(number, cache.get(number)) for number in range(4000)]
    kept = [(number, array) for number, array in kept if array is not None]
    assert kept
    assert all(a.shape == (40, 50, 3) and (a == n % 256).all() for n, a in kept)
