# SPDX-License-Identifier: Apache-2.0
"""What pages take for granted that readers have: photos, a data set, a GPU."""

from __future__ import annotations

import torch
from tests.docs.pages import Setup

_PHOTOS = """
import shutil
from pathlib import Path

import numpy as np
from PIL import Image


def _photos(folder, *names, number=12, height=64, width=80):
    rng = np.random.default_rng(0)
    for name in names:
        Path(folder, name).mkdir(parents=True)
        for position in range(number):
            pixels = rng.integers(0, 256, (height // 8, width // 8, 3), np.uint8)
            image = Image.fromarray(pixels).resize((width, height))
            image.save(Path(folder, name, f"{position}.jpg"))


def _voc(folder, number=12, height=64, width=80):
    _photos(folder, "JPEGImages", number=number, height=height, width=width)
    for place in ("Annotations", "ImageSets/Main"):
        Path(folder, place).mkdir(parents=True)
    for position in range(number):
        kind = ("RBC", "WBC")[position % 5 == 0]
        Path(folder, "Annotations", f"{position}.xml").write_text(
            f"<annotation><size><width>{width}</width><height>{height}</height><depth>3</depth>"
            f"</size><object><name>{kind}</name><difficult>0</difficult><bndbox><xmin>5</xmin>"
            "<ymin>6</ymin><xmax>40</xmax><ymax>50</ymax></bndbox></object></annotation>"
        )
    names = "".join(f"{position}\\n" for position in range(number))
    for split in ("train", "val"):
        Path(folder, "ImageSets/Main", f"{split}.txt").write_text(names)
"""

_README = (
    _PHOTOS
    + """
dataset = np.zeros((1024, 4), np.float32)


def augment(image):
    return np.array(image)


_photos("photos", "cat", "dog")
_photos("photos/train", "cat", "dog")
shutil.move("photos/train", "train")
_voc("BCCD")
Path("train.py").write_text(
    "import sys\\n"
    "from torch.utils.data import DataLoader\\n"
    "from penstock.vision import ImageFolder, ImagePipeline\\n"
    "photos = ImageFolder(sys.argv[1], transform=ImagePipeline.eval(32))\\n"
    "for batch in DataLoader(photos, batch_size=4):\\n"
    "    pass\\n"
)
"""
)

_STORES = (
    _PHOTOS
    + """
def augment(image):
    return np.array(image)


samples = [np.arange(4), np.arange(5)]
_photos("photos", "cat", "dog", number=55)
"""
)

_FILES = """
import gzip
import json
import os

os.mkdir("corpus")
for _number in range(7):
    _lines = [
        json.dumps({"id": _number * 1000 + _line, "text": "some words " * (_line % 9)})
        for _line in range(500 + 100 * _number)
    ]
    with gzip.open(f"corpus/{_number}.jsonl.gz", "wt") as _file:
        _file.write("\\n".join(_lines))
"""

_CORPUS = """
import json
import random

from tokenizers import Tokenizer, models, pre_tokenizers

_words = [f"w{number}" for number in range(298)]
_made = models.WordLevel({word: n for n, word in enumerate(["[UNK]", "</s>", *_words])}, "[UNK]")
_tokenizer = Tokenizer(_made)
_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
_tokenizer.save("tokenizer.json")
_random = random.Random(0)
with open("corpus.jsonl", "w") as _file:
    for _ in range(3000):
        _length = 1 + int(_random.expovariate(1 / 107))
        _text = " ".join(_random.choices(_words, k=_length))
        _file.write(json.dumps({"text": _text}) + "\\n")
"""

# The loop of the page goes to a GPU; where there is none, to what there is.
_DEVICE = () if torch.cuda.is_available() else (('device="cuda"', 'device="auto"'),)

SETUPS = {
    "README.md": Setup(
        _README,
        (("photos/train", "train"), *_DEVICE),
        runs_commands=True,
    ),
    "docs/packing.md": Setup(
        _PHOTOS + '_voc("BCCD")\n',
        (
            (
                '("shirt", 240), ("shoes", 120), ("hat", 40)',
                '("shirt", 12), ("shoes", 6), ("hat", 8)',
            ),
            # The script that makes the folder comes after the first command.
            ("```console\n$ penstock pack photos photos.lmdb\nlmdb:", "```text\n"),
            ("Image files are", "```console\n$ penstock pack photos photos.lmdb\n```\n\n"),
        ),
        runs_commands=True,
        skipped=(
            "penstock pack cells/data.yaml",
            "penstock pack faces.xml",
            "penstock pack points.txt",
            "penstock pack 'mongodb:",
            "penstock pack photos.parquet",
            "diff -r",
        ),
    ),
    "docs/stores.md": Setup(_STORES, runs_commands=True),
    "docs/guide/file-streams.md": Setup(_FILES),
    "docs/guide/token-rows.md": Setup(_CORPUS, runs_commands=True),
    "docs/reproducibility.md": Setup("dataset = range(1000)\n"),
}

# Pages with a test of their own, which executes their Python.
TESTED_BY = {
    "docs/augmentation.md": "tests/vision/test_pages.py",
    "docs/convert.md": "tests/vision/test_convert_page.py",
    "docs/decoding.md": "tests/images/test_decoding_page.py",
    "docs/design/scale.md": "tests/docs/test_guides.py",
    "docs/detection-batches.md": "tests/vision/test_pages.py",
    "docs/detection.md": "tests/vision/test_pages.py",
    "docs/folders.md": "tests/vision/test_pages.py",
    "docs/guide/accelerate.md": "tests/clients/test_pages.py",
    "docs/guide/caching.md": "tests/vision/test_pages.py",
    "docs/guide/device.md": "tests/docs/test_guides.py",
    "docs/guide/distributed.md": "tests/distributed/test_distributed_page.py",
    "docs/guide/huggingface-datasets.md": "tests/clients/test_pages.py",
    "docs/guide/imbalanced-annotations.md": "tests/sampling/test_imbalanced_annotations_page.py",
    "docs/guide/jax.md": "tests/clients/test_pages.py",
    "docs/guide/lightning.md": "tests/clients/test_pages.py",
    "docs/guide/metrics.md": "tests/docs/test_guides.py",
    "docs/guide/mindspore.md": "tests/clients/test_pages.py",
    "docs/guide/mmengine.md": "tests/clients/test_pages.py",
    "docs/guide/object-storage.md": "tests/stores/test_shards.py",
    "docs/guide/progress.md": "tests/docs/test_guides.py",
    "docs/guide/ray-data.md": "tests/ray/test_ray_data_page.py",
    "docs/guide/ray.md": "tests/ray/test_ray_page.py",
    "docs/guide/report.md": "tests/insight/test_report_pages.py",
    "docs/guide/threads.md": "tests/docs/test_guides.py",
    "docs/guide/torchvision.md": "tests/clients/test_pages.py",
    "docs/guide/trace.md": "tests/insight/test_report_pages.py",
    "docs/guide/transformers.md": "tests/clients/test_pages.py",
    "docs/guide/tune.md": "tests/docs/test_guides.py",
    "docs/guide/why-does-my-gpu-wait.md": "tests/insight/test_waiting_page.py",
    "docs/index.md": "tests/docs/test_front_page.py",
    "docs/migrating-from-torch.md": "tests/docs/test_migrating_page.py",
    "docs/mongodb.md": "tests/stores/test_mongo.py",
    "docs/quickstart.md": "tests/docs/test_quickstart_page.py",
    "docs/stores-read-only.md": "tests/stores/test_arrow.py",
    "docs/vision.md": "tests/vision/test_pages.py",
    "examples/retinanet/README.md": "tests/examples/test_retinanet.py",
}

# Python that is not executed, marked `py`: how many blocks a page has, and why.
NOT_RUN = {
    "examples/multiview3d/README.md": (1, "an excerpt of a configuration, with dots"),
    "docs/guide/jax.md": (1, "several processes of JAX, one per device"),
    "docs/guide/token-rows.md": (1, "kernels of other libraries, for a GPU"),
    "docs/guide/transformers.md": (1, "a class of another library"),
    "docs/migrating-from-torch.md": (3, "other libraries' own code, from which one migrates"),
}
