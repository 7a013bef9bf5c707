# SPDX-License-Identifier: Apache-2.0
"""Lists of images and their classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import StoreError
from penstock.vision.annotations.lists import read_image_list


@pytest.fixture
def file(tmp_path):
    return tmp_path / "list.txt"


def test_labels_are_numbers_if_all_are(file):
    file.write_bytes(b"\xef\xbb\xbfa\\1.jpg 3\r\n\r\n  my cat.jpg\t-1 \r\n# x\n/b/2.jpg 0")
    assert read_image_list(file) == [
        (file.parent / "a/1.jpg", 3),
        (file.parent / "my cat.jpg", -1),
        (Path("/b/2.jpg"), 0),
    ]
    file.write_text("1.jpg 3\n2.jpg cat")
    assert read_image_list(file, "/r") == [(Path("/r/1.jpg"), "3"), (Path("/r/2.jpg"), "cat")]
    file.write_text("1.jpg, big cat")
    assert read_image_list(file, separator=",") == [(file.parent / "1.jpg", "big cat")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1.jpg 1\n\n2.jpg\n", r"list\.txt, line 3: it has 1 columns, not 2"),
        ("", "has no lines"),
        ("a\0 1", "line 1: .*null character"),
    ],
)
def test_what_is_wrong_names_file_and_line(file, text, message):
    file.write_text(text)
    with pytest.raises(StoreError, match=message):
        read_image_list(file)
