# SPDX-License-Identifier: Apache-2.0
"""What docs/detection.md shows runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.vision.annotation_files import (
    painted,
    voc_object,
    write_photo,
    write_split,
    write_voc_image,
)

PAGE = Path(__file__).parents[2] / "docs" / "detection.md"
SIZE = (160, 210)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = "<difficult>0</difficult><truncated>0</truncated>"
    boxes = [(68, 11, 200, 150), (9, 9, 9, 30), (-3, 9, 20, 30)]
    objects = [voc_object("cat", box, said) for box in boxes]
    write_voc_image("VOC2012", "1", *objects, size=SIZE, pixels=painted(*SIZE))
    write_voc_image("VOC2012", "2", voc_object("dog"), size=SIZE, pixels=painted(*SIZE))
    write_split("VOC2012", "train", "1")
    write_photo("cells/images/1.jpg")
    Path("cells/labels").mkdir()
    Path("cells/labels/1.txt").write_text("0 0.5 0.5 1 1\n")
    Path("cells/data.yaml").write_text("names: [red]\ntrain: images\n")
    write_photo("faces/1.jpg")
    Path("faces/train.txt").write_text("1.jpg 3 9 4 8 man none\n")
    box = "<box top='1' left='2' width='9' height='8'><part name='0' x='3' y='4'/></box>"
    xml = f"<dataset><images><image file='1.jpg'>{box}</image></images></dataset>"
    Path("faces/training.xml").write_text(xml)
    for name in ("1", "2"):
        write_photo(f"faces/lfw/{name}.jpg", painted(300, 300))
    write_photo("clothes/1.jpg")
    Path("clothes/train.txt").write_text("1.jpg hat\n")


@pytest.mark.skipif(not PAGE.exists(), reason="the pages are not there")
def test_the_python_of_the_page_runs(folders, capsys):
    pytest.importorskip("lmdb")
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    assert capsys.readouterr().out.splitlines() == [
        "('neutral', 'smiling')",
        "5 2 objects, 2 kept",
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
