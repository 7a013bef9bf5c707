# SPDX-License-Identifier: Apache-2.0
"""Files of a data set that lie outside of its folder: a link, or a name with "..", leads there.

They are read like all others. But copying a stranger's data set would copy one's own files with it,
if they are named so: `pack` and `convert` refuse them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


def refuse_outside(roots: Sequence[str | Path], paths: Iterable[str]) -> None:
    """Raise if files lie outside of all of some folders."""
    below = tuple(os.path.join(os.path.realpath(root), "") for root in roots)
    folders: dict[str, tuple[str, frozenset[str] | None]] = {}
    count, outside, first = 0, 0, ("", "")
    for count, path in enumerate(paths, 1):  # noqa: B007 - the error has it
        above, name = os.path.split(path)
        if above not in folders:
            folders[above] = _links_in(os.path.join(roots[0], above), below)
        folder, links = folders[above]
        if links is not None and name not in links and name != "..":
            continue
        place = os.path.realpath(os.path.join(folder, name))
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


def _links_in(path: str, below: tuple[str, ...]) -> tuple[str, frozenset[str] | None]:
    """Return where a folder really is, and which names in it are links; None if it is outside."""
    place = os.path.realpath(path)
    if not os.path.join(place, "").startswith(below):
        return place, None
    try:
        with os.scandir(place) as entries:
            return place, frozenset(entry.name for entry in entries if entry.is_symlink())
    except OSError:  # not there: reading it says so
        return place, frozenset()
