# SPDX-License-Identifier: Apache-2.0
"""What the pages about images and annotations show runs, and prints what they say."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.blobs.object_storage import bucket, object_server  # noqa: F401 - fixtures
from tests.vision.annotation_files import (
    painted,
    voc_object,
    voc_xml,
    write_photo,
    write_split,
    write_voc_image,
)

from penstock.data.ragged import RaggedArray
from penstock.errors import StoreError
from penstock.stores import pack
from penstock.vision import ImageFolder

PAGES = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.skipif(not PAGES.exists(), reason="the pages are not there")
SIZE = (160, 210)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(page, **places):
    """The names that the blocks of a page define, one after the other; some texts are replaced."""
    names, text = {}, (PAGES / page).read_text()
    for shown, meant in places.items():
        text = text.replace(shown, meant)
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, page, "exec"), names)
    return names


def test_the_page_of_detection(capsys):
    pytest.importorskip("lmdb")
    said = "<difficult>0</difficult><truncated>0</truncated>"
    boxes = [(68, 11, 200, 150), (9, 9, 9, 30), (-3, 9, 20, 30)]
    objects = [voc_object("cat", box, said) for box in boxes]
    write_voc_image("VOC2012", "1", *objects, size=SIZE, pixels=painted(*SIZE))
    write_voc_image("VOC2012", "2", voc_object("dog"), size=SIZE, pixels=painted(*SIZE))
    write_split("VOC2012", "train", "1")
    write_photo("masks/images/IMG_1.jpg")
    Path("masks/annotations").mkdir()
    xml = voc_xml(voc_object(), before="<filename>IMG_1.jpg</filename>")
    Path("masks/annotations/1.xml").write_text(xml)
    write_photo("cells/images/1.jpg")
    Path("cells/labels").mkdir()
    Path("cells/labels/1.txt").write_text("0 0.5 0.5 1 1\n")
    Path("cells/data.yaml").write_text("names: [red]\ntrain: images\n")
    write_photo("coco/val/1.jpg")
    Path("coco/annotations").mkdir()
    Path("coco/annotations/instances_val.json").write_text(
        '{"images": [{"id": 139, "file_name": "1.jpg"}], "categories": [{"id": 47, "name": "cup"},'
        '{"id": 18, "name": "dog"}], "annotations": [{"image_id": 139, "category_id": 18, '
        '"bbox": [2, 3, 20, 10], "iscrowd": 0, "segmentation": [[2, 3, 22, 3, 2, 13]]}]}'
    )
    write_photo("faces/1.jpg")
    Path("faces/train.txt").write_text("1.jpg 3 9 4 8 man none\n")
    box = "<box top='1' left='2' width='9' height='8'><part name='0' x='3' y='4'/></box>"
    xml = f"<dataset><images><image file='1.jpg'>{box}</image></images></dataset>"
    Path("faces/training.xml").write_text(xml)
    for name in ("1", "2"):
        write_photo(f"faces/lfw/{name}.jpg", painted(300, 300))
    write_photo("clothes/1.jpg")
    Path("clothes/train.txt").write_text("1.jpg hat\n")
    names = run("detection.md")
    assert capsys.readouterr().out.splitlines() == [
        "1 masks/images/IMG_1.jpg True",
        "('neutral', 'smiling')",
        "5 2 objects, 2 kept",
        "(1, 30, 40) [False] {'dog': 18, 'cup': 47}",
        "{'image_id': 139, 'category_id': 18, 'bbox': [2.0, 3.0, 20.0, 10.0], 'score': 0.9}",
        "['boxes', 'difficult', 'image', 'image_id', 'labels', 'truncated']",
        "[[ 67.  10. 200. 150.]",
        " [  0.   8.  20.  30.]] ['cat', 'cat']",
        "[0 0] {'cat': 0, 'dog': 1}",
        "[160 210]",
        "2 ('none',)",
        "VOC2012/JPEGImages/1.jpg True",
        "3 objects, 2 kept (1 zero_area, 1 outside, 1 clipped, 1 dropped)",
        "True True",
        "[160 210] () 0",
        "('cat', 'dog') cat",
    ]
    assert names["clothes"][0][1] == 0
    assert names["dlib"][0]["landmarks"].tolist() == [[[3, 4]]]
    assert names["yolo"][0]["boxes"].tolist() == [[0, 0, 40, 30]]
    assert list(names["batches"]) == [[0]]
    names["packed"].close()
    names["known"].close()


def test_the_page_of_batches(capsys):
    for number, size in enumerate([(160, 210), (210, 160), (150, 200), (200, 150)]):
        box = voc_object("cat", (68, 11, 120, 150))
        write_voc_image("VOC2012", str(number), box, size=size, pixels=painted(*size))
    run("detection-batches.md")
    assert capsys.readouterr().out.splitlines() == [
        "torch.float32 (2, 3, 320, 320)",
        "torch.Size([1, 4]) tensor([0]) 0",
        "torch.float32 (2, 3, 320, 320)",
        "torch.Size([1, 4]) tensor([0]) 2",
        "(2, 3, 300, 300) torch.float32 (2, 5)",
        "(224, 160) [(210, 160), (200, 150)]",
        "(160, 224) [(150, 200), (160, 210)]",
        "[0.0, 0.20000000298023224, 1.0]",
        "3 uint8",
    ]


def test_the_page_of_photos():
    for split in ("train", "valid"):
        for kind in ("cat", "dog"):
            for number in range(1, 4):
                write_photo(f"photos/{split}/{kind}/{number}.jpg", painted(90, 120))
    names = run("vision.md")
    assert names["array"].shape == (3, 64, 64)
    assert names["images"].shape == (6, 3, 224, 224)
    assert names["images"].dtype == torch.float32
    photo = names["train"].describe(0)
    assert names["noisy"](Path(photo)).shape == (3, 64, 64)


def test_the_page_of_caching(bucket, tmp_path, capsys):  # noqa: F811
    for number in range(9):
        write_photo(f"photos/{'cat' if number % 2 else 'dog'}/{number}.jpg", painted(90, 120))
    pack("photos", bucket)
    names = run(
        "guide/caching.md", **{"s3://bucket/photos": bucket, "/fast/disk:60GB": "disk:60MB"}
    )
    names["dataset"].close()
    assert capsys.readouterr().out == "9 of 9 images are kept\n"
    assert sorted(path.name for path in tmp_path.glob("disk/*/*")) == [
        "0", "lock", "orders", "table", "users",
    ]  # fmt: skip
    assert len(list(tmp_path.glob("disk/*/0/*"))) == 9


def test_the_page_of_augmentation(capsys):
    pytest.importorskip("albumentations")
    names = run("augmentation.md")
    said = re.findall(r"print\(.*\)  # (.*)", (PAGES / "augmentation.md").read_text())
    assert len(said) == 7
    assert capsys.readouterr().out.splitlines() == said
    few = names["without_some"](names["Cells"]()[0])
    assert len(few["boxes"]) == len(few["labels"])


@pytest.fixture
def folders():
    for name in ("train/dress/1", "train/hat/2", "train/pants/3", "few/dress/1", "few/pants/3"):
        write_photo(f"clothes/{name}.jpg", painted(*SIZE))
    Path("clothes/few/hat").mkdir()
    write_photo("photos/1.jpg", painted(*SIZE))
    for name, kind in (("1", "cat"), ("2", "dog")):
        box = voc_object(kind, (68, 11, 200, 150))
        write_voc_image("VOC2012", name, box, size=SIZE, pixels=painted(*SIZE))
    write_split("VOC2012", "train", "1")


def test_the_page_of_folders(folders, capsys):
    names = run("folders.md")
    assert capsys.readouterr().out.splitlines() == [
        "['dress', 'hat', 'pants']",
        "1",
        "['dress', 'hat', 'pants']",
        "None",
        "('cat',)",
        "[[ 67.  10. 200. 150.]]",
        "[False] [False]",
        "('cat', 'dog')",
        "[0]",
    ]
    assert names["flat"][0].shape == (160, 210, 3)
    assert names["greys"][0][0].mode == "L"
    assert [label for _, label in names["hats"]] == [1]
    assert isinstance(names["voc"].labels, RaggedArray)
    assert names["annotation"].boxes_xyxy_px.dtype == np.float32


def test_what_is_said_of_annotations_on_the_page_is_what_is_given():
    (said,) = re.findall(r"^StoreError: (.*)$", (PAGES / "folders.md").read_text(), re.MULTILINE)
    write_photo("masks/images/1.jpg")
    Path("masks/annotations").mkdir()
    Path("masks/annotations/1.xml").write_text("<annotation/>")
    with pytest.raises(StoreError) as caught:
        ImageFolder("masks")
    assert str(caught.value) == said
