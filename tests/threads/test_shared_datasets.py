# SPDX-License-Identifier: Apache-2.0
"""One dataset object, used by several threads at once, gives what it gives to one."""

from __future__ import annotations

import io
import sys
import tarfile

import numpy as np
import pytest

from penstock import Loader
from penstock.collate import default_collate
from penstock.data import Subset

cv2 = pytest.importorskip("cv2")
pytest.importorskip("PIL")
pytest.importorskip("lmdb")

from tests.stores.mongod import mongod, mongod_program  # noqa: E402, F401 - found by their names
from tests.support.comparing import assert_same  # noqa: E402

from penstock.stores import EncodedImage, LMDBDataset, StoreDataset, pack  # noqa: E402
from penstock.vision import (  # noqa: E402
    ImageFolder,
    ImagePipeline,
    Letterbox,
    Mosaic,
    VOCDetection,
    detection_collate,
)

NUM_THREADS = 4


@pytest.fixture(autouse=True)
def threads_take_turns_often():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Forty photos of three classes."""
    folder = tmp_path_factory.mktemp("photos")
    for number in range(40):
        small = np.random.default_rng(number).integers(0, 256, (6, 8, 3), np.uint8)
        path = folder / f"class{number % 3}" / f"{number:02}.{('jpg', 'png', 'webp')[number % 3]}"
        path.parent.mkdir(exist_ok=True)
        cv2.imwrite(str(path), cv2.resize(small, (80 + number, 120 - number)))
    return folder


def leaves(tree):
    """Arrays and numbers of a sample or batch, in order."""
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    if isinstance(tree, (list, tuple)):
        return [leaf for item in tree for leaf in leaves(item)]
    return [bytes(tree.data) if isinstance(tree, EncodedImage) else tree]


def first(batch):
    """Samples as they are."""
    return batch


def assert_threads_give_what_one_gives(make, collate_fn=None, **options):
    """With a new dataset for each loader, so that threads open its files together, too."""

    def batches(num_workers):
        loader = Loader(
            make(), 3, shuffle=True, seed=5, num_workers=num_workers, backend="thread",
            collate_fn=collate_fn, **options,
        )  # fmt: skip
        found = [leaves(batch) for epoch in range(2) for batch in loader]
        return found

    for one, other in zip(batches(0), batches(NUM_THREADS), strict=True):
        assert_same(one, other)


def as_lmdb(pairs, folder):
    address = f"lmdb:{folder}/photos.lmdb"
    pack(pairs, address, num_workers=0)
    return address


def as_tar(pairs, folder):
    with tarfile.open(folder / "photos.tar", "w") as tar:
        for number, (image, label) in enumerate(pairs[k] for k in range(len(pairs))):
            for extension, data in (("jpg", bytes(image)), ("cls", b"%d" % label)):
                member = tarfile.TarInfo(f"{number:04}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return f"tar:{folder}/photos.tar"


def as_arrow(pairs, folder):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [pairs[k] for k in range(len(pairs))]
    images = pa.array([bytes(image) for image, _ in rows], pa.binary())
    table = pa.table({"image": images, "label": [label for _, label in rows]})
    parquet.write_table(table, folder / "photos.parquet", row_group_size=7)
    return f"arrow:{folder}/photos.parquet"


WRITERS = {"lmdb": as_lmdb, "tar": as_tar, "arrow": as_arrow}


@pytest.mark.parametrize("collate_fn", [None, default_collate], ids=["batch", "samples"])
@pytest.mark.parametrize("output", ["float_chw", "uint8_hwc"])
@pytest.mark.parametrize("store", ["folder", "lmdb", "tar", "arrow"])
def test_a_pipeline_over_any_store(photos, tmp_path, store, output, collate_fn):
    pipeline = ImagePipeline.train(32, output=output)
    if store == "folder":
        assert_threads_give_what_one_gives(
            lambda: ImageFolder(photos, transform=pipeline), collate_fn
        )
        return
    address = WRITERS[store](ImageFolder(photos, decode=None), tmp_path)
    opened = []

    def make():
        opened.append(StoreDataset(address, transform=pipeline))
        return opened[-1]

    assert_threads_give_what_one_gives(make, collate_fn)
    for dataset in opened:
        dataset.close()


def test_records_of_every_kind_from_lmdb(tmp_path):
    samples = [
        {"x": np.full(k % 5 + 1, k), "name": f"sample {k}", "pair": (k, float(k))}
        for k in range(50)
    ]
    pack(samples, f"lmdb:{tmp_path}/all.lmdb", num_workers=0)
    opened = []

    def make():
        opened.append(LMDBDataset(tmp_path / "all.lmdb"))
        return opened[-1]

    assert_threads_give_what_one_gives(make, first)
    for dataset in opened:
        dataset.close()


def test_annotated_photos_and_mosaics_of_them(data_dir):
    def few():
        return Subset(VOCDetection(data_dir / "bccd"), range(16))

    assert_threads_give_what_one_gives(few, first)
    boxed = Letterbox(96)

    class Boxed:
        def __init__(self):
            self.inner = few()

        def __len__(self):
            return len(self.inner)

        def __getitem__(self, index):
            return boxed(self.inner[index])

    assert_threads_give_what_one_gives(Boxed, detection_collate)
    assert_threads_give_what_one_gives(lambda: Mosaic(few(), 96), first)


def test_an_albumentations_chain():
    A = pytest.importorskip("albumentations")
    from penstock.vision import Albumentations

    chain = Albumentations(
        A.Compose([A.RandomCrop(20, 20), A.HorizontalFlip(p=0.5), A.RandomBrightnessContrast(p=1)])
    )

    class Images:
        def __len__(self):
            return 40

        def __getitem__(self, index):
            image = np.random.default_rng(index).integers(0, 256, (40, 30, 3), np.uint8)
            return chain(image)

    assert_threads_give_what_one_gives(Images)
