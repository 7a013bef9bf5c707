# SPDX-License-Identifier: Apache-2.0
"""Files of a data set that lie outside of its folder: a link, or a name with "..", leads there.

They are read like all others. But whoever copies a stranger's data set would copy his own files
with it, if they are named so: `pack` and `convert` ask here first.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = ["refuse_outside"]


class _Folder(NamedTuple):
    """A folder of files: where it really is, whether below a root, and which names are links."""

    place: str
    is_inside: bool
    links: frozenset[str]


def refuse_outside(roots: Sequence[str | Path], paths: Iterable[str]) -> None:
    """Raise if files lie outside of all of some folders.

    Folders are listed for it, and links alone are followed: a million files take some seconds.

    Args:
        roots: The folders; they may be links themselves.
        paths: Of the files, absolute or from the first folder.

    Raises:
        StoreError: some do; the message says how many, and where one is.
    """
    below = tuple(os.path.join(os.path.realpath(root), "") for root in roots)
    folders: dict[str, _Folder] = {}
    count, outside, first = 0, 0, ("", "")
    for count, path in enumerate(paths, 1):  # noqa: B007 - it is told
        above, _, name = path.rpartition("/")
        if path.startswith("/"):
            above = above or "/"
        folder = folders.get(above)
        if folder is None:
            folder = folders[above] = _looked_at(os.path.join(roots[0], above), below)
        if folder.is_inside and name not in folder.links and name != "..":
            continue
        place = os.path.realpath(os.path.join(folder.place, name))
        if not place.startswith(below):
            first = first if outside else (path, place)
            outside += 1
    if outside:
        places = " and ".join(map(str, roots))
        raise StoreError(
            f"{outside:,} of {count:,} files are outside of {places}, where links or their names "
            f"lead: {first[0]!r} is {first[1]!r}. They would be copied with the rest. If they "
            "belong to it, as what git-annex, DVC and Hugging Face's cache link to, give "
            "--follow-links (follow_links=True in Python)."
        )


def _looked_at(path: str, below: tuple[str, ...]) -> _Folder:
    place = os.path.realpath(path)
    is_inside = os.path.join(place, "").startswith(below)
    if not is_inside:
        return _Folder(place, is_inside, frozenset())
    try:
        with os.scandir(place) as entries:
            return _Folder(place, is_inside, frozenset(e.name for e in entries if e.is_symlink()))
    except OSError:  # not there: reading it says so
        return _Folder(place, is_inside, frozenset())
