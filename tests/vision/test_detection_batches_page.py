# SPDX-License-Identifier: Apache-2.0
"""What docs/detection-batches.md shows runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

cv2 = pytest.importorskip("cv2")
PAGE = Path(__file__).parents[2] / "docs" / "detection-batches.md"
SIZES = [(160, 210), (210, 160), (150, 200), (200, 150)]


@pytest.fixture
def voc(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("Annotations", "JPEGImages"):
        Path("VOC2012", name).mkdir(parents=True)
    for number, (height, width) in enumerate(SIZES):
        cv2.imwrite(f"VOC2012/JPEGImages/{number}.jpg", np.zeros((height, width, 3), np.uint8))
        Path(f"VOC2012/Annotations/{number}.xml").write_text(
            f"<annotation><size><width>{width}</width><height>{height}</height></size><object>"
            "<name>cat</name><bndbox><xmin>68</xmin><ymin>11</ymin><xmax>120</xmax>"
            "<ymax>150</ymax></bndbox></object></annotation>"
        )


@pytest.mark.skipif(not PAGE.exists(), reason="the pages are not there")
def test_the_python_of_the_page_runs(voc, capsys):
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    assert capsys.readouterr().out.splitlines() == [
        "torch.float32 (2, 3, 320, 320)",
        "torch.Size([1, 4]) tensor([0]) 0",
        "torch.float32 (2, 3, 320, 320)",
        "torch.Size([1, 4]) tensor([0]) 2",
        "(224, 160) [(210, 160), (200, 150)]",
        "(160, 224) [(150, 200), (160, 210)]",
        "[0.0, 0.20000000298023224, 1.0]",
        "3 uint8",
    ]
