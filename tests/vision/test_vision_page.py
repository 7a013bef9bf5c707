# SPDX-License-Identifier: Apache-2.0
"""What docs/vision.md shows runs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

PAGE = Path(__file__).parents[2] / "docs" / "vision.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the pages are not there")
def test_the_python_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for split in ("train", "valid"):
        for kind in ("cat", "dog"):
            Path("photos", split, kind).mkdir(parents=True)
            for number in range(1, 4):
                image = rng.integers(0, 256, (90, 120, 3), np.uint8)
                Image.fromarray(image).save(f"photos/{split}/{kind}/{number}.jpg")
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["array"].shape == (3, 64, 64)
    assert names["images"].shape == (6, 3, 224, 224)
    assert names["images"].dtype == torch.float32
    photo = names["train"].describe(0)
    assert names["noisy"](Path(photo)).shape == (3, 64, 64)
