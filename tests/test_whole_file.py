# SPDX-License-Identifier: Apache-2.0
"""Files are replaced as a whole; links, permissions and what is no file stay what they are."""

from __future__ import annotations

import os
import socket
import stat

import pytest

from penstock.whole_file import write_whole


def test_a_file_keeps_its_permissions(tmp_path):
    path = tmp_path / "run.html"
    path.write_text("old")
    path.chmod(0o600)
    write_whole(path, "new")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o600)


def test_what_a_link_leads_to_is_replaced_and_not_the_link(tmp_path):
    (tmp_path / "real").write_text("old")
    link = tmp_path / "latest"
    link.symlink_to("real")
    assert write_whole(link, "new") == link
    assert link.is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_a_stream_of_the_shell_is_written_to():
    reader, writer = os.pipe()
    try:
        write_whole(f"/dev/fd/{writer}", "text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
        os.close(writer)
    assert write_whole("/dev/null", "text").exists()


def test_what_is_no_file_is_refused_and_stays(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for name in ("pipe", "socket"):
            (tmp_path / f"to {name}").symlink_to(name)
        before = {path.name: path.lstat() for path in tmp_path.iterdir()}
        for name in before:
            with pytest.raises(OSError, match=r"is a (FIFO|socket), and nothing is put in"):
                write_whole(tmp_path / name, "text")
        assert {path.name: path.lstat() for path in tmp_path.iterdir()} == before


def test_a_name_may_be_as_long_as_names_can_be_and_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    name = "a" * 250 + ".html"
    assert write_whole(f"~/{name}", "text") == tmp_path / name
    assert os.listdir(tmp_path) == [name]
