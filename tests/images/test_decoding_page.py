# SPDX-License-Identifier: Apache-2.0
"""What docs/decoding.md shows runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("cv2")
pytest.importorskip("PIL.Image")

from tests.images.making import oriented, picture, saved

PAGE = Path(__file__).parents[2] / "docs" / "decoding.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the pages are not there")
def test_the_python_of_the_page_runs_and_prints_what_its_comments_say(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    photo = picture(48, 64)
    Path("photo.jpg").write_bytes(saved(photo, "JPEG", quality=95))
    Path("turned.jpg").write_bytes(oriented("JPEG", 6, photo))
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    said = re.findall(r"^ *print\(.*\)  # (.*)$", "".join(blocks), re.MULTILINE)
    assert len(said) == 9
    said[0] = said[0].partition(":")[0]
    assert capsys.readouterr().out.splitlines() == said
