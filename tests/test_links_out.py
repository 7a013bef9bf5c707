# SPDX-License-Identifier: Apache-2.0
"""Files outside of a data set's folder are read, and copied only by --follow-links."""

from __future__ import annotations

import os
import re

import pytest

from penstock.cli import main
from penstock.errors import StoreError
from penstock.stores import StoreDataset, pack
from penstock.stores.pack_source import refuse_outside
from penstock.vision import ImageList, ImglabDetection, LandmarkList, VOCDetection, YOLODetection
from penstock.vision.convert import Source, convert

pytest.importorskip("typer")
Image = pytest.importorskip("PIL.Image")

XML = (
    "<annotation><size><width>8</width><height>8</height></size><object><name>cat</name><bndbox>"
    "<xmin>1</xmin><ymin>1</ymin><xmax>4</xmax><ymax>4</ymax></bndbox></object></annotation>"
)


def photo(path):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    Image.new("RGB", (8, 8)).save(path)


def text(path, content):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(content)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """The user's own photo and text, beside the data set `set` of a stranger."""
    monkeypatch.chdir(tmp_path)
    photo("own/1.jpg")
    text("own/secret", "root:x:0:0")
    os.mkdir("set")


def class_folders():
    photo("set/a/1.jpg")
    os.symlink("../../own/1.jpg", "set/a/2.jpg")
    return "set", lambda: StoreDataset("set")


def class_folder_that_is_a_link():
    photo("set/a/1.jpg")
    os.symlink("../own", "set/b")
    return "set", lambda: StoreDataset("set")


def voc_images():
    text("set/Annotations/1.xml", XML)
    os.mkdir("set/JPEGImages")
    os.symlink("../../own/1.jpg", "set/JPEGImages/1.jpg")
    return "set", lambda: VOCDetection("set")


def image_list():
    text("set/list.txt", "../own/1.jpg 0\n")
    return "set/list.txt", lambda: ImageList("set/list.txt")


def landmark_list_through_a_folder():
    os.makedirs("own/below")
    os.symlink("../own/below", "set/link")
    text("set/list.txt", "link/../1.jpg 1 2 3 4\n")
    return "set/list.txt", lambda: LandmarkList("set/list.txt")


def imglab():
    path = os.path.abspath("own/1.jpg")
    box = "<box left='1' top='1' width='4' height='4'/>"
    text("set/a.xml", f"<dataset><images><image file='{path}'>{box}</image></images></dataset>")
    return "set/a.xml", lambda: ImglabDetection("set/a.xml")


def yolo():
    text("own/1.txt", "0 0.5 0.5 0.2 0.2\n")
    text("set/data.yaml", "train: ../own\nnames: [cat]\n")
    return "set/data.yaml", lambda: YOLODetection("set/data.yaml")


SETS = [
    class_folders, class_folder_that_is_a_link, voc_images, image_list,
    landmark_list_through_a_folder, imglab, yolo,
]  # fmt: skip


@pytest.mark.parametrize("make", SETS)
def test_what_lies_outside_is_read_and_not_packed_unless_it_is_asked_for(make):
    _, opened = make()
    dataset = opened()
    assert all(dataset[position] is not None for position in range(len(dataset)))
    with pytest.raises(StoreError, match=r"1 of \d files are outside of set.* is .*own/1\.(j|x)"):
        pack(opened(), "lmdb:made.lmdb")
    assert not os.path.exists("made.lmdb")
    assert pack(opened(), "lmdb:made.lmdb", follow_links=True).num_records == len(dataset)


@pytest.mark.parametrize("make", [class_folders, image_list, imglab, yolo, voc_images])
def test_the_command_says_how_many_and_what_to_give(make, capsys):
    source, _ = make()
    assert main(["pack", source, "made.lmdb"]) == 1
    assert re.search(r"1 of \d files are outside .* --follow-links", capsys.readouterr().err)
    assert main(["pack", source, "made.lmdb", "--follow-links"]) == 0


@pytest.mark.parametrize("make", [image_list, imglab, yolo, voc_images])
def test_convert_copies_nothing_from_outside_unless_it_is_asked_for(make, capsys):
    source, _ = make()
    source = f"image-list:{source}" if make is image_list else source
    for form, status in (("voc", 1), ("landmarks", 0)):
        assert main(["convert", source, f"made-{form}", f"--to={form}"]) == status
    assert re.search(r"1 of 1 files are outside .* --follow-links", capsys.readouterr().err)
    asked = ["convert", source, "made", "--to=voc", "--follow-links"]
    assert main(asked) == 0
    assert [entry.is_symlink() for entry in os.scandir("made/JPEGImages")] == [False]


def test_what_is_no_image_is_never_taken_through_a_link(capsys):
    photo("set/a/1.jpg")
    os.symlink("../../own/secret", "set/a/9.jpg")
    assert main(["pack", "set", "made.lmdb"]) == 1
    assert main(["pack", "set", "made.lmdb", "--follow-links"]) == 1
    assert "not an image by its first bytes (while encoding 'a/9.jpg'" in capsys.readouterr().err
    assert main(["pack", "set", "made.lmdb", "--follow-links", "--skip-bad"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("a/9.jpg\tnot an image by its first bytes")
    assert "root:x" not in said
    text("set/list.txt", "a/9.jpg cat\n")
    with pytest.raises(StoreError, match=r"a/9\.jpg is not an image by its first bytes"):
        convert(
            Source("set/list.txt", "image-list"), "made", target_format="voc", follow_links=True
        )
    assert not os.path.exists("made")


def test_links_that_stay_inside_and_a_folder_that_is_a_link_itself_are_taken(tmp_path):
    photo("set/blobs/1.jpg")
    os.mkdir("set/data")
    for name in ("a", "b"):
        os.mkdir(f"set/data/{name}")
        os.symlink("../../blobs/1.jpg", f"set/data/{name}/1.jpg")
    os.symlink("set", "elsewhere")
    refuse_outside(["elsewhere"], ["data/a/1.jpg", "data/../data/b/1.jpg", "data/a/none.jpg"])
    refuse_outside([tmp_path / "elsewhere"], [str(tmp_path / "set/data/a/1.jpg")])
    photo("set/data/a/2.jpg")
    text("set/list.txt", "data/a/1.jpg 0\n./data/a/2.jpg 1\n")
    assert pack(ImageList("elsewhere/list.txt"), "lmdb:made.lmdb").num_records == 2
    photo("own2/a/1.jpg")
    os.symlink("own2", "root")
    assert pack("root", "lmdb:made").num_records == 1
    with pytest.raises(StoreError, match="2 of 2 files are outside"):
        refuse_outside(["set/data"], ["a/1.jpg", "b/1.jpg"])
