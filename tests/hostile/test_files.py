# SPDX-License-Identifier: Apache-2.0
"""What lies where a file is expected may be anything: it is refused by name, at once.

Each reader meets each kind in a process of its own, with an alarm and a limit of memory.
"""

from __future__ import annotations

import os
import shutil
import socket
import warnings
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("lmdb")

from tests.hostile import damage
from tests.images.making import picture, saved
from tests.vision.annotations.test_fuzz import BOX, LABELS

from penstock.errors import PenstockError
from penstock.insight.trace import read_trace
from penstock.stores import open_store
from penstock.vision import ImageFolder
from penstock.vision.annotations.imglab import read_imglab
from penstock.vision.annotations.lists import landmark_lines, read_image_list
from penstock.vision.annotations.voc_folder import read_voc_folder
from penstock.vision.annotations.yolo import read_yolo

PNG = saved(picture(), "PNG")
FORMAT_1 = Path(__file__).parents[1] / "stores" / "format_1" / "readings"
LONGEST_S = 10
VOC = f"<annotation><object><name>a</name>{BOX}</object></annotation>"


def a_socket(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.fspath(path))


def sparse(path):
    with path.open("wb") as file:
        file.truncate(3 << 30)


def unfinished_link(path):
    path.symlink_to(path.name)


# What may lie there.
KINDS = {
    "FIFO": os.mkfifo,
    "socket": a_socket,
    "link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "link to /dev/tty": lambda path: path.symlink_to("/dev/tty"),
    "link to a FIFO": lambda path: (os.mkfifo(f"{path}.fifo"), path.symlink_to(f"{path}.fifo")),
    "folder": Path.mkdir,
    "link to itself": unfinished_link,
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "3 GiB of nothing": sparse,
    "link to /proc/self/mem": lambda path: path.symlink_to("/proc/self/mem"),
}


def store(make):
    """Return a reader of a store; `make` says which of its files is replaced."""

    def prepare(folder, victim):
        address = make(folder)
        (folder / victim).unlink()
        return folder / victim, lambda: [
            len(open_store(address)),
            open_store(address).get_many([0]),
        ]

    return prepare


def single(reader, name):
    return lambda folder, _: (folder / name, lambda: reader(folder / name))


def voc(folder, victim):
    for place in ("Annotations", "JPEGImages"):
        (folder / place).mkdir()
    (folder / "Annotations/1.xml").write_text(VOC)
    (folder / "JPEGImages/1.jpg").write_bytes(PNG)
    (folder / victim).unlink()
    return folder / victim, lambda: read_voc_folder(folder)


def yolo(folder, victim):
    (folder / "images/train").mkdir(parents=True)
    (folder / "labels/train").mkdir(parents=True)
    (folder / "images/train/1.png").write_bytes(PNG)
    (folder / "labels/train/1.txt").write_bytes(LABELS)
    (folder / "data.yaml").write_text("train: images/train\nnames: [a, b]\n")
    (folder / victim).unlink()
    return folder / victim, lambda: read_yolo(folder / "data.yaml")


def images(folder, victim):
    (folder / "cat").mkdir()
    for name in ("1.png", "2.png"):
        (folder / "cat" / name).write_bytes(PNG)
    (folder / victim).unlink()
    return folder / victim, lambda: list(ImageFolder(folder))


def packed_by_0_1(folder):
    shutil.copytree(FORMAT_1, folder, dirs_exist_ok=True)
    return f"folder:{folder}"


# Name: what prepares it, and which file is replaced.
READERS = {
    "image of a folder": (images, "cat/1.png"),
    "annotation of VOC": (voc, "Annotations/1.xml"),
    "data.yaml": (yolo, "data.yaml"),
    "labels of YOLO": (yolo, "labels/train/1.txt"),
    "imglab": (single(read_imglab, "a.xml"), ""),
    "list of images": (single(read_image_list, "a.csv"), ""),
    "list of landmarks": (single(lambda path: list(landmark_lines(path)), "a.txt"), ""),
    "trace": (single(read_trace, "a.json"), ""),
    "index": (store(packed_by_0_1), ".penstock-index"),
    "record": (store(packed_by_0_1), "0.record"),
    "LMDB": (store(damage.packed("lmdb:.lmdb")), "store.lmdb"),
    "shard of LMDB": (store(damage.packed("lmdb:", num_shards=2)), "store/00000-of-00002.lmdb"),
    "tar": (store(damage.tar), "0.tar"),
    "Parquet": (store(damage.parquet), "a.parquet"),
    "Arrow": (store(damage.arrow(damage.pa.ipc.new_file)), "a.arrow"),
}


NOT_HELD = {("index", "3 GiB of nothing")}  # read as a whole; to be emptied


def outcome(read, victim):
    """Return what comes of reading; an error names the file that is none."""
    warnings.simplefilter("ignore")
    try:
        read()
    except (PenstockError, ValueError) as error:
        is_named = victim.name in str(error) or str(victim.parent) in str(error)
        return "refused", None if is_named else f"does not name it: {error}"
    except Exception as error:
        return type(error).__name__, f"{type(error).__name__}: {error}"[:300]
    return "read", None


def wrong_of(reader, tmp_path):
    make, victim = READERS[reader]
    wrong = []
    for number, (kind, put) in enumerate(KINDS.items()):
        if (reader, kind) in NOT_HELD:
            continue
        folder = tmp_path / f"{number}"
        folder.mkdir()
        path, read = make(folder, victim)
        put(path)
        outcome_, why = damage.apart(lambda r=read, p=path: outcome(r, p), LONGEST_S)
        if why:
            wrong.append(f"{kind}: {outcome_}: {why}")
    return wrong


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_at_once(reader, tmp_path):
    wrong = wrong_of(reader, tmp_path)
    assert not wrong, "\n".join(wrong)
