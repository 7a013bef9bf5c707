# SPDX-License-Identifier: Apache-2.0
"""What docs/guide/imbalanced-annotations.md shows runs, from the files that it speaks of."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from penstock.cli import main

pytest.importorskip("cv2")

from tests.vision.annotation_files import voc_object, write_voc_image

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "imbalanced-annotations.md"
BLOCK = re.compile(r"```(python|console)\n(.*?)```", re.DOTALL)


def make_faces(root):
    """Write the photos, the XML files and the list of the page."""
    poses = ["frontal"] * 180 + ["half"] * 12 + ["profile"] * 8
    lines = []
    for number, pose in enumerate(poses, 1):
        fields = f"<pose>{pose}</pose><truncated>0</truncated><difficult>0</difficult>"
        face = voc_object("face", (5, 3, 34, 28), fields)
        key = f"{number:04}"
        if number == 1:
            write_voc_image(root, key, face)
        else:
            shutil.copy(root / "JPEGImages/0001.jpg", root / f"JPEGImages/{key}.jpg")
            text = (root / "Annotations/0001.xml").read_text()
            (root / f"Annotations/{key}.xml").write_text(text.replace(">frontal<", f">{pose}<"))
        gender = "woman" if number % 2 else "man"
        points = "12 26 19 13 25  10 10 16 22 22"
        lines.append(f"JPEGImages/{key}.jpg  {points}  {gender} {int(number % 5 == 0)} {pose}\n")
    (root / "list.txt").write_text("".join(lines))


@pytest.mark.skipif(not PAGE.exists(), reason="the pages are not there")
def test_the_python_and_the_commands_of_the_page_say_what_it_shows(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    make_faces(tmp_path / "faces")
    text = PAGE.read_text(encoding="utf-8")
    assert Path("faces/list.txt").read_text().splitlines()[0] in text
    names, ran = {}, set()
    for language, block in BLOCK.findall(text):
        capsys.readouterr()
        ran.add(language)
        if language == "python":
            exec(compile(block, str(PAGE), "exec"), names)
            shown = re.findall(r"^# (.*)$", block, re.MULTILINE)
            assert capsys.readouterr().out.splitlines() == shown
        else:
            (command, *shown) = block.removeprefix("$ penstock ").splitlines()
            assert main(shlex.split(command)) == 0
            assert capsys.readouterr().out.splitlines()[: len(shown)] == shown
    assert ran == {"python", "console"}
