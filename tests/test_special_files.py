# SPDX-License-Identifier: Apache-2.0
"""Nothing that is neither a file nor a folder is ever replaced, or written into, by any writer."""

from __future__ import annotations

import os
import re
import socket
import stat

import numpy as np
import pytest

from penstock.cli import main
from penstock.errors import StoreError
from penstock.stores import pack

pytest.importorskip("typer")
Image = pytest.importorskip("PIL.Image")

KINDS = ("pipe", "socket", "device", "link")
IS_SPECIAL = r"out/(special\.png|pipe) is a "


@pytest.fixture(params=KINDS)
def special(request, tmp_path, monkeypatch):
    """The name of something that is neither a file nor a folder, in the current folder."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("out")
    path = "out/special.png"
    if request.param == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
    elif request.param == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("no permission to make a device")
    else:
        os.mkfifo(path)
    if request.param == "link":
        os.rename(path, "out/pipe")
        os.symlink("pipe", path)
    before = state_of("out")
    yield path
    assert state_of("out") == before


def state_of(folder):
    return {name: tuple(os.lstat(f"{folder}/{name}")[:4]) for name in os.listdir(folder)}


@pytest.fixture
def photos():
    for name in ("cat", "dog"):
        os.makedirs(f"photos/{name}")
        Image.new("RGB", (8, 8)).save(f"photos/{name}/1.jpg")
    return "photos"


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resume": True}], ids=str)
def test_pack_refuses_it(special, options):
    with pytest.raises(StoreError, match=IS_SPECIAL):
        pack([1, 2], f"lmdb:{special}", **options)


def test_pack_refuses_it_where_it_came_meanwhile(special):
    os.rename(special, "aside")

    class Numbers:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            if os.path.lexists("aside"):
                os.rename("aside", special)
            return index

    with pytest.raises(StoreError, match=IS_SPECIAL):
        pack(Numbers(), f"lmdb:{special}", num_workers=0)
    os.remove(f"{special}.partial")


@pytest.mark.parametrize("what", [".partial", ".partial.lock"])
@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("resume", [False, True])
def test_pack_refuses_it_beside_its_destination(special, num_shards, what, resume):
    os.rename(special, f"out/made{what}")
    with pytest.raises(StoreError, match=rf"cannot write .*out/made: .*out/made{what} is a "):
        pack([1, 2], "lmdb:out/made", num_shards=num_shards, resume=resume)
    os.rename(f"out/made{what}", special)


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("what", [".partial", ".partial.lock"])
@pytest.mark.parametrize("resume", [False, True])
def test_pack_follows_no_link_beside_its_destination(tmp_path, num_shards, what, resume):
    """What another user may have put into a folder that all can write to."""
    (tmp_path / "own").write_bytes(b"")
    (tmp_path / f"made{what}").symlink_to("own")
    with pytest.raises(StoreError, match=rf"made{what} is a link, and nothing is put in its place"):
        pack([1, 2], f"lmdb:{tmp_path}/made", num_shards=num_shards, resume=resume)
    assert (tmp_path / "own").read_bytes() == b""
    assert sorted(os.listdir(tmp_path)) == [f"made{what}", "own"]


@pytest.mark.parametrize(
    "command",
    [
        "view data:images -o {}",
        "tune data:numbers --json {}",
    ],
)
def test_commands_refuse_it_at_once(special, photos, capsys, command):
    with open("data.py", "w") as file:
        file.write("raise SystemExit('never imported')\n")
    assert main(command.format(special).split()) == 1
    assert re.search(IS_SPECIAL, capsys.readouterr().err)


def test_traces_and_reports_refuse_it(special):
    from penstock import Loader

    loader = Loader(np.arange(8), 4)
    list(loader)
    with pytest.raises(OSError, match=IS_SPECIAL):
        loader.trace(special)
