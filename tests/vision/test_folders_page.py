# SPDX-License-Identifier: Apache-2.0
"""What docs/folders.md shows runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from penstock.data.ragged import RaggedArray
from penstock.errors import StoreError
from penstock.vision import ImageFolder

cv2 = pytest.importorskip("cv2")
Image = pytest.importorskip("PIL.Image")
PAGE = Path(__file__).parents[2] / "docs" / "folders.md"

OBJECT = (
    "<object><name>{}</name><bndbox><xmin>68</xmin><ymin>11</ymin><xmax>200</xmax>"
    "<ymax>150</ymax></bndbox></object>"
)


def write_image(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), np.zeros((160, 210, 3), np.uint8))


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("dress/1", "hat/2", "pants/3"):
        write_image(Path("clothes/train", f"{name}.jpg"))
    for name in ("dress/1", "pants/3"):
        write_image(Path("clothes/few", f"{name}.jpg"))
    Path("clothes/few/hat").mkdir()
    write_image(Path("photos/1.jpg"))
    for name, kind in (("1", "cat"), ("2", "dog")):
        write_image(Path(f"VOC2012/JPEGImages/{name}.jpg"))
        Path("VOC2012/Annotations").mkdir(exist_ok=True)
        xml = f"<annotation>{OBJECT.format(kind)}</annotation>"
        Path(f"VOC2012/Annotations/{name}.xml").write_text(xml)
    Path("VOC2012/ImageSets/Main").mkdir(parents=True)
    Path("VOC2012/ImageSets/Main/train.txt").write_text("1\n")
    return tmp_path


@pytest.mark.skipif(not PAGE.exists(), reason="the pages are not there")
def test_the_python_of_the_page_runs(folders, capsys):
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
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


@pytest.mark.skipif(not PAGE.exists(), reason="the pages are not there")
def test_what_is_said_of_annotations_on_the_page_is_what_is_given(folders):
    (said,) = re.findall(r"^StoreError: (.*)$", PAGE.read_text(), re.MULTILINE)
    write_image(Path("masks/images/1.jpg"))
    Path("masks/annotations").mkdir()
    Path("masks/annotations/1.xml").write_text("<annotation/>")
    with pytest.raises(StoreError) as caught:
        ImageFolder("masks")
    assert str(caught.value) == said
