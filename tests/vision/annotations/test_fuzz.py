# SPDX-License-Identifier: Apache-2.0
"""Files that are damaged in any way give an error that is foreseen, or annotations; no more."""

from __future__ import annotations

import contextlib
import os
import time
from functools import partial

import pytest

from penstock.errors import StoreError
from penstock.vision.annotations.coco import masks_of, read_coco, write_coco
from penstock.vision.annotations.imglab import read_imglab
from penstock.vision.annotations.lists import landmark_lines, read_image_list
from penstock.vision.annotations.voc import parse_voc, read_voc, write_voc
from penstock.vision.annotations.yolo import read_yolo

Image = pytest.importorskip("PIL.Image")

from tests.vision.annotations.making import damaged  # noqa: E402 - it needs hypothesis

VOC = b"""<?xml version="1.0" encoding="utf-8"?>
<annotation><filename>1.jpg</filename><size><width>40</width><height>30</height></size><object>
<name>cat</name><pose>Left</pose><difficult>0</difficult><bndbox><xmin>1</xmin><ymin>2</ymin>
<xmax>40</xmax><ymax>30.5</ymax></bndbox><landmarks><landmark><name>nose</name><x>3</x><y>4</y>
<visibility>2</visibility></landmark></landmarks><part><name>ear</name>
</part><attributes><attribute><name>a</name><value>b</value></attribute></attributes></object>
</annotation>
"""
IMGLAB = b"""<?xml version='1.0' encoding='ISO-8859-1'?>
<dataset><images><image file='1.jpg' width='9' height='8'><box top='1' left='2' width='3' height='4'
 ignore='1'><label>cat</label><part name='00' x='3' y='4'/></box></image></images></dataset>
"""
COCO = b"""{"images": [{"id": 7, "file_name": "1.jpg", "width": 8}], "categories": [{"id": 3,
"name": "a", "keypoints": ["b"]}], "annotations": [{"image_id": 7, "category_id": 3,
"bbox": [1, 2, 3, 4.5], "keypoints": [1, 2, 2], "segmentation": [[1, 2, 4.5, 2, 1, 6]]},
{"image_id": 7, "category_id": 3, "segmentation": {"size": [6, 8], "counts": [8, 3, 37]}},
{"image_id": 7, "category_id": 3, "segmentation": {"size": [6, 8], "counts": "83U1"}}]}"""
IMAGES = b"a\\1.jpg 1\r\n\r\nb 2.jpg 2\r\n#c\r\n"
LANDMARKS = b"a\\1.jpg 1 2 3 4 5 6 7 8 1\r\n\r\nb 2.jpg 1 2 3 4 nan 6 7.5 8 2\r\n"
YAML = (
    b"path: .\ntrain: images/train\nval: [images/val, val.txt]\nnc: 2\nnames:\n  0: cat\n  1: dog\n"
)
LABELS = b"0 0.5 0.5 0.25 0.25\n1 0.1 0.1 0.05 0.05\n"
BOX = "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox>"
LONGEST_S = 10.0  # of one file; the usual time is under a millisecond


def read_all(read, data, num_files):
    """Read files damaged by 0, 1, 2 …, and return how many gave annotations."""
    num_read = 0
    for number in range(num_files):
        changed = damaged(data, number)
        start = time.monotonic()
        try:
            read(changed)
            num_read += 1
        except (ValueError, StoreError):
            pass
        except BaseException as error:
            error.add_note(f"file {number}: {changed!r}")
            raise
        assert time.monotonic() - start < LONGEST_S, f"file {number}: {changed!r}"
    return num_read


def read_voc_xml(data):
    image = read_voc(data, path="1.jpg", key="1")
    write_voc(image)  # what was read can be written
    parse_voc(data)


@pytest.fixture
def read_file(tmp_path):
    def by(reader):
        def read(data):
            (tmp_path / "file").write_bytes(data)
            return reader(tmp_path / "file")

        return read

    return by


@pytest.fixture
def yolo(tmp_path):
    for name in ("train/1", "val/2"):
        place = tmp_path / f"images/{name}.png"
        place.parent.mkdir(parents=True)
        Image.new("L", (8, 6)).save(place)
        (tmp_path / f"labels/{name}.txt").parent.mkdir(parents=True)
        (tmp_path / f"labels/{name}.txt").write_bytes(LABELS)
    (tmp_path / "val.txt").write_text("images/val/2.png\n")
    return tmp_path


def test_damaged_annotations_of_voc():
    assert 5 < read_all(read_voc_xml, VOC, 400) < 390


def test_files_with_very_many_of_something_take_no_longer_for_each():
    many = 50_000
    texts = (
        "<x>1</x>" * many,
        "<landmarks>" + "".join(f"<p{n} x='1' y='1'/>" for n in range(many)) + "</landmarks>",
        "<landmarks>" + "1 1 " * many + "</landmarks>",
    )
    for text in texts:
        start = time.process_time()
        with contextlib.suppress(ValueError):  # so many landmarks are an error
            read_voc_xml(f"<annotation><object><name>a</name>{text}{BOX}</object></annotation>")
        assert time.process_time() - start < LONGEST_S


def test_damaged_files_of_imglab(read_file):
    assert 5 < read_all(read_file(read_imglab), IMGLAB, 300) < 290


def test_damaged_files_of_coco(read_file):
    pytest.importorskip("pycocotools")

    def coco(path):
        (image,), ids = read_coco(path, by_id=True)
        masks_of([found.segmentation for found in image.objects], 6, 8)
        write_coco([image], tuple(ids))

    assert 5 < read_all(read_file(coco), COCO, 600) < 590


def read_landmarks(path):
    return list(landmark_lines(path, num_landmarks=4, classes=("who",)))


def test_damaged_lists(read_file):
    assert 5 < read_all(read_file(read_landmarks), LANDMARKS, 300) < 290
    assert 5 < read_all(read_file(read_image_list), IMAGES, 100) < 100


@pytest.mark.filterwarnings("ignore:no image of split:UserWarning")
def test_damaged_files_of_yolo(yolo):
    def yaml(data):
        (yolo / "data.yaml").write_bytes(data)
        return [read_yolo(yolo / "data.yaml", split) for split in ("train", "val")]

    def labels(data):
        (yolo / "labels/train/1.txt").write_bytes(data)
        return read_yolo(yolo / "data.yaml")

    assert 5 < read_all(yaml, YAML, 300) < 290
    (yolo / "data.yaml").write_bytes(YAML)
    assert 5 < read_all(labels, LABELS, 200) < 190


@pytest.mark.slow
def test_20_000_damaged_xml_files(data_dir, read_file):
    real = (data_dir / "bccd/Annotations/BloodImage_00000.xml").read_bytes()
    assert read_all(read_voc_xml, VOC, 10_000) > 300
    assert read_all(read_voc_xml, real, 5_000) > 300
    assert read_all(read_file(read_imglab), IMGLAB, 5_000) > 300


@pytest.mark.parametrize(
    "read",
    [read_imglab, read_landmarks, read_image_list, read_yolo, partial(read_coco, by_id=True)],
)
def test_a_pipe_is_not_waited_for(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match=r"cannot read .*/pipe.*: .*not a regular file"):
        read(tmp_path / "pipe")
