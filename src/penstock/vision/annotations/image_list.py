# SPDX-License-Identifier: Apache-2.0
"""Images and their classes in a text file: a line `path label` for each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import StoreError
from penstock.stores.folder.listing import IMAGE_SUFFIXES
from penstock.vision.annotations.numbers import whole_value
from penstock.vision.annotations.paths import listed_path
from penstock.vision.annotations.text_lines import numbered_lines

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["read_image_list", "read_labelled_paths", "write_image_list"]


def read_image_list(
    path: str | Path, root: str | Path | None = None, *, separator: str | None = None
) -> list[tuple[Path, int | str]]:
    """Return the images of a list and their labels, in its order.

    The label is what comes after the last blank, so that a path may have blanks in it. Lines end as
    they do on any system; those that are empty or begin with "#" say nothing.

    Args:
        path: The list, in UTF-8.
        root: The folder that relative paths start from; None is that of the list.
        separator: What separates path and label; None is blanks and tabs.

    Returns:
        Pairs of path and label. Labels are ints if all of them are whole numbers, written as 1 or
        as 1.0; else texts.

    Raises:
        StoreError: the list cannot be read, has no lines, or one without a label or with several.
            The message names the line.
    """
    path = Path(path)
    folder = path.parent if root is None else Path(root)
    pairs = []
    for number, text, label in read_labelled_paths(path, separator, folder):
        try:
            pairs.append((listed_path(text, folder), label))
        except ValueError as error:
            raise StoreError(f"cannot read {path}, line {number}: {error}.") from error
    numbers = [whole_value(label) for _, label in pairs]
    if any(number is None for number in numbers):
        return list(pairs)
    return [
        (p, number) for (p, _), number in zip(pairs, numbers, strict=True) if number is not None
    ]


def read_labelled_paths(
    path: Path, separator: str | None = None, root: Path | None = None
) -> list[tuple[int, str, str]]:
    """Return number, path and label of each line, as they stand there.

    Args:
        path: The list.
        separator: What separates path and label.
        root: As in `read_image_list`.

    Raises:
        StoreError: see `read_image_list`.
    """
    found = []
    for number, line in numbered_lines(path):
        words = [word.strip() for word in line.rsplit(separator, 1)]
        if len(words) != 2 or not all(words):
            raise StoreError(f"cannot read {path}, line {number}: {line[:80]!r} has no label.")
        several = _columns_of_labels(words[0], separator, path.parent if root is None else root)
        if several:
            raise StoreError(
                f"cannot read {path}, line {number}: {words[0]!r:.80} is no image and is not "
                f"there; {several[0]!r:.80} would be one. Are {[*several[1:], words[1]]!r:.80} "
                "labels? A line has one. Leave one column, or read images of several labels with "
                "a dataset of your own."
            )
        found.append((number, words[0], words[1]))
    if not found:
        raise StoreError(f"{path} has no lines: it is no list of images.")
    return found


def _columns_of_labels(text: str, separator: str | None, root: Path) -> list[str]:
    """Return a path's columns, if it seems to end before the last of them; else nothing."""
    if text.lower().endswith(IMAGE_SUFFIXES):
        return []
    columns = [word.strip() for word in text.split(separator)]
    ends = [n for n, word in enumerate(columns) if word.lower().endswith(IMAGE_SUFFIXES)]
    if not ends or os.path.exists(root / text.replace("\\", "/").replace("\0", "")):
        return []
    first = (separator or " ").join(columns[: ends[0] + 1])
    return [first, *columns[ends[0] + 1 :]]


def write_image_list(pairs: Iterable[tuple[str | Path, int | str]]) -> bytes:
    r"""Return a list, in UTF-8, of paths and labels.

    Raises:
        ValueError: a path or a label would not stay in its place.

    Example:
        >>> write_image_list([("cat 1.jpg", "cat"), ("2.jpg", "dog")])
        b'cat 1.jpg cat\n2.jpg dog\n'
    """
    return "".join(f"{_line(os.fspath(path), str(label))}\n" for path, label in pairs).encode()


def _line(path: str, label: str) -> str:
    is_plain = path.isprintable() and path == path.strip() and path and path[0] not in "#\ufeff"
    if not is_plain or "\\" in path:
        raise ValueError(f"a list cannot have the path {path!r}")
    if label.split() != [label]:
        raise ValueError(f"{path}: the label {label!r} does not stay in a column")
    return f"{path} {label}"
