# SPDX-License-Identifier: Apache-2.0
"""What loaders, datasets, samplers, stats and reports show of themselves: one line, one table."""

import importlib
import inspect
import re
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import torch.utils.data as stock
from tests.docs.promised import promised_names
from tests.insight.recordings import Run, recording_of
from tests.sampling.test_every_sampler import LABELS, MAKERS

import penstock
from penstock import data, sampling, stores, text, vision
from penstock import torch as dropin
from penstock.insight.stats import Span, Verdict
from penstock.integrations.huggingface import HuggingFaceRows, HuggingFaceStream
from penstock.summary import Summarized, kind_of

ARRAY = np.arange(90)
TENSOR = torch.arange(90)
KINDS = (Summarized, stock.Dataset, stock.Sampler, stock.DataLoader)
TORCHS = {
    f"penstock.torch.{name}"
    for name in dropin.__all__
    if getattr(dropin, name).__module__.startswith("torch.")
}
RETURNED = {
    "penstock.sampling.balance.BalanceReport",
    "penstock.insight.stats.Span",
    "penstock.insight.stats.Verdict",
}
ABSTRACT = {
    *(f"penstock.torch.{name}" for name in ("Dataset", "IterableDataset", "Sampler")),
    *(f"penstock.data.{name}" for name in ("Dataset", "IterableDataset")),
    *(f"penstock.sampling.{name}" for name in ("Sampler", "IndexSampler")),
}
ELSEWHERE = {"penstock.stores.MongoDataset"}  # tests/stores/test_mongo.py, with a server


class Stream(data.IterableDataset):
    def __iter__(self):
        return iter(range(90))


def annotated_images():
    thing = vision.AnnotatedObject("thing", (1.0, 1.0, 5.0, 5.0))
    return vision.AnnotatedImages([vision.AnnotatedImage(Path("1.png"), "1", 8, 8, (thing,))])


SAMPLERS = {
    f"penstock.sampling.{type(make(3)).__name__}": lambda make=make: make(3)
    for make in MAKERS.values()
    if not type(make(3)).__name__.startswith("_")
}
BOXES = [{"image": np.zeros((8, 8, 3), np.uint8), "boxes": np.zeros((0, 4), np.float32)}] * 90
PAIRS = [(np.zeros((8, 8, 3), np.uint8), 0)] * 90


def on_disk(make):
    """Mark what reads a folder, which it is given."""
    make.reads_folder = True
    return make


@on_disk
def images(root):
    return vision.ImageFolder(root / "classes", transform=vision.Letterbox(8))


MAKE = {
    "penstock.Loader": lambda: penstock.Loader(ARRAY, 7, shuffle=True, on_error="skip"),
    "penstock.torch.DataLoader": lambda: dropin.DataLoader(TENSOR, 7, drop_last=True),
    "penstock.torch.StatefulDataLoader": lambda: dropin.StatefulDataLoader(TENSOR, 7),
    "penstock.torch.DevicePrefetcher": lambda: dropin.DevicePrefetcher(
        dropin.DataLoader(TENSOR), "cpu"
    ),
    "penstock.data.ArrayDataset": lambda: data.ArrayDataset(*[ARRAY] * 50),
    "penstock.data.ChainDataset": lambda: data.ChainDataset([Stream()] * 9),
    "penstock.data.ConcatDataset": lambda: data.ConcatDataset([ARRAY] * 1000),
    "penstock.data.FileStream": lambda: data.FileStream(__file__, "lines"),
    "penstock.data.StackDataset": lambda: data.StackDataset(ARRAY, ARRAY),
    "penstock.data.Subset": lambda: data.Subset(ARRAY, np.arange(80)),
    **SAMPLERS,
    "penstock.sampling.AbsentShard": lambda: sampling.AbsentShard(90),
    "penstock.sampling.balance.BalanceReport": lambda: sampling.balance_report(
        sampling.ClassBalancedSampler(LABELS)
    ),
    "penstock.sampling.BalancedBatchSampler": lambda: sampling.BalancedBatchSampler(LABELS, 2, 3),
    "penstock.sampling.BalancedShuffle": lambda: sampling.BalancedShuffle(Stream()),
    "penstock.sampling.BatchSampler": lambda: sampling.BatchSampler(range(90), 7, False),
    "penstock.sampling.BucketBatchSampler": lambda: sampling.BucketBatchSampler(ARRAY, 7),
    "penstock.sampling.LaneBatchSampler": lambda: sampling.LaneBatchSampler([90], 7, window=9),
    "penstock.sampling.PackingSampler": lambda: sampling.PackingSampler([5] * 90, 20),
    "penstock.sampling.SequentialSampler": lambda: sampling.SequentialSampler(range(90)),
    "penstock.sampling.ShardSampler": lambda: sampling.ShardSampler([5] * 90),
    "penstock.stores.LMDBDataset": on_disk(lambda root: stores.LMDBDataset(root / "packed.lmdb")),
    "penstock.stores.StoreDataset": on_disk(
        lambda root: stores.StoreDataset(f"lmdb:{root}/packed.lmdb", transform=lambda pair: pair)
    ),
    "penstock.text.TokenFile": on_disk(lambda root: text.TokenFile(root / "tokens", max_tokens=2)),
    "penstock.vision.AnnotatedImages": annotated_images,
    "penstock.vision.COCODetection": on_disk(
        lambda root: vision.COCODetection(root / "coco.json", root)
    ),
    "penstock.vision.CutMix": lambda: vision.CutMix(PAIRS),
    "penstock.vision.ImageFolder": images,
    "penstock.vision.ImageList": on_disk(lambda root: vision.ImageList(root / "classes.txt")),
    "penstock.vision.ImglabDetection": on_disk(lambda root: vision.ImglabDetection(root / "i.xml")),
    "penstock.vision.LandmarkList": on_disk(lambda root: vision.LandmarkList(root / "marks.txt")),
    "penstock.vision.MixUp": lambda: vision.MixUp(PAIRS, until_epoch=9),
    "penstock.vision.Mosaic": lambda: vision.Mosaic(BOXES, 64),
    "penstock.vision.PackedAnnotations": on_disk(
        lambda root: vision.PackedAnnotations(root / "annotated.lmdb")
    ),
    "penstock.vision.VOCDetection": on_disk(lambda root: vision.VOCDetection(root / "voc")),
    "penstock.vision.YOLODetection": on_disk(lambda root: vision.YOLODetection(root / "yolo")),
    "penstock.insight.stats.Span": lambda: Span(batches=3, seconds=1.0),
    "penstock.insight.stats.Stats": lambda: recording_of(Run(batches=300)).stats,
    "penstock.insight.stats.Verdict": lambda: recording_of(Run(batches=300)).stats.verdict,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Return a folder with a data set in each form."""
    root = tmp_path_factory.mktemp("forms")
    photos = ["classes/cat/1.png", "voc/JPEGImages/1.png", "yolo/images/1.png"]
    files = {
        "classes.txt": "classes/cat/1.png 0\n",
        "marks.txt": "classes/cat/1.png 1 1 5 5\n",
        "i.xml": "<dataset><images><image file='classes/cat/1.png'>"
        "<box top='1' left='1' width='4' height='4'/></image></images></dataset>",
        "voc/Annotations/1.xml": "<annotation><filename>1.png</filename><object><name>cat</name>"
        "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>5</xmax><ymax>5</ymax></bndbox></object>"
        "</annotation>",
        "coco.json": '{"images": [{"id": 1, "file_name": "classes/cat/1.png"}], "categories": '
        '[{"id": 1, "name": "cat"}], "annotations": [{"image_id": 1, "category_id": 1, '
        '"bbox": [0, 0, 5, 5]}]}',
        "yolo/labels/1.txt": "0 0.5 0.5 0.5 0.5\n",
    }
    for name in [*photos, *files]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
    for name in photos:
        cv2.imwrite(str(root / name), np.zeros((8, 8, 3), np.uint8))
    for name, content in files.items():
        (root / name).write_text(content)
    stores.pack(PAIRS, f"lmdb:{root}/packed.lmdb")
    stores.pack(vision.VOCDetection(root / "voc"), f"lmdb:{root}/annotated.lmdb")
    text.TokenFile.write(root / "tokens", [[1, 2, 3]])
    return root


def made(name, root):
    make = MAKE[name]
    return make(root) if hasattr(make, "reads_folder") else make()


def promised_kinds():
    """Yield the promised classes that are loaders, datasets, samplers, stats or reports."""
    for module, names in promised_names().items():
        if module.startswith("penstock.integrations"):
            continue  # of other packages, which may be missing; they derive from `Dataset`
        for name in names:
            value = getattr(importlib.import_module(module), name)
            if inspect.isclass(value) and issubclass(value, KINDS):
                yield f"{module}.{name}"


def test_every_promised_loader_dataset_sampler_and_report_is_tried():
    assert set(promised_kinds()) - TORCHS - ABSTRACT - ELSEWHERE == set(MAKE) - RETURNED


@pytest.mark.parametrize("name", MAKE)
def test_repr_is_one_short_line(name, root):
    line = repr(made(name, root))
    assert re.match(r"\w+\(.", line)
    assert line.isprintable()
    assert len(line) <= 200
    assert "0x" not in line


def test_what_is_shown_was_in_memory(root, tmp_path):
    shutil.copytree(root, tmp_path / "copy")
    datasets = [make(tmp_path / "copy") for make in MAKE.values() if hasattr(make, "reads_folder")]
    before = list(map(repr, datasets))
    shutil.rmtree(tmp_path / "copy")
    assert list(map(repr, datasets)) == before


def test_a_loader_tells_what_it_loads_and_what_differs_from_the_defaults():
    loader = dropin.DataLoader(
        dropin.TensorDataset(TENSOR), 8, shuffle=True, num_workers=2, pin_memory=True, seed=7
    )
    assert repr(loader) == (
        "DataLoader(dataset=TensorDataset of 90, length=12, batch_size=8, num_workers=2, seed=7, "
        "backend=process, pin_memory=True, sampler=RandomSampler of 90)"
    )
    assert repr(penstock.Loader(ARRAY, 90, on_error="skip", collate_fn=np.stack)) == (
        "Loader(dataset=ndarray of 90, length=1, batch_size=90, num_workers=0, seed=0, "
        "backend=process, on_error=skip, collate_fn=stack)"
    )


class LongStream(stock.IterableDataset):
    def __len__(self):
        return 3

    def __iter__(self):
        return iter(range(9))


@pytest.mark.filterwarnings("error")  # torch's, that a stream is longer than its loader said
def test_the_length_of_a_stream_is_not_asked_of_the_loader():
    loader = dropin.DataLoader(LongStream())
    assert "length" not in repr(loader)
    assert len(list(loader)) == 9
    theirs = stock.DataLoader(LongStream())
    assert "loader=DataLoader, " in repr(dropin.DevicePrefetcher(theirs, "cpu"))
    assert len(list(theirs)) == 9


def test_what_cannot_be_had_ends_the_line_and_does_not_raise():
    unmade = object.__new__(dropin.DataLoader)
    assert repr(unmade) == "DataLoader()"

    class Hollow(data.Dataset):
        def __len__(self):
            raise OSError("no disk")

    assert repr(Hollow()) == "Hollow()"
    assert kind_of(Hollow()) == "Hollow"


def test_no_text_of_a_user_is_a_secret_or_a_second_line():
    hostile = "\n\x1b[31m mongodb://me:s3cret@host/a?token=s3cret"
    text = repr(Verdict("workers", hostile))
    assert not any(part in text for part in ("s3cret", "\x1b", "\n"))


def test_a_long_value_loses_its_middle():
    line = repr(Verdict("workers", f"first {'x' * 9999} last"))
    assert "text=first xxx" in line
    assert "xxx last" in line
    assert len(line) < 120


def test_rows_of_hugging_face_are_datasets_of_ours():
    assert issubclass(HuggingFaceRows, Summarized)
    assert issubclass(HuggingFaceStream, Summarized)
