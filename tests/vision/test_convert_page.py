# SPDX-License-Identifier: Apache-2.0
"""What docs/convert.md shows runs, and prints what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from penstock.cli import main

pytest.importorskip("PIL.Image")

from tests.vision.annotation_files import (
    painted,
    voc_object,
    write_photo,
    write_voc_image,
)

PAGE = Path(__file__).parents[2] / "docs" / "convert.md"


@pytest.fixture
def photos(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    face = voc_object("face", (11, 11, 60, 80))
    write_voc_image("photos", "1", face, size=None, pixels=painted(90, 100))
    write_photo("more/2.jpg")
    Path("points.txt").write_text("photos/JPEGImages/1.jpg 20 50 30 30.5 10 10 60 80 31\n")
    Path("classes.txt").write_text("more/2.jpg person\n")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.skipif(not PAGE.exists(), reason="the pages are not there")
def test_the_python_of_the_page_runs(photos, capsys):
    names = {}
    code = "".join(blocks("python"))
    exec(compile(code, str(PAGE), "exec"), names)
    assert capsys.readouterr().out.splitlines() == re.findall(r"print\(.*\)  # (.*)", code)


@pytest.mark.skipif(not PAGE.exists(), reason="the pages are not there")
def test_the_command_of_the_page_runs(photos, capsys):
    command, said = blocks("console")[1].split("\n", 1)
    assert main(shlex.split(command.removeprefix("$ penstock "))) == 0
    assert capsys.readouterr().out == said
