# SPDX-License-Identifier: Apache-2.0
"""Whether a folder may be replaced: if there is none, if it is empty, or if all in it is ours.

.penstock-files lists what a writer put into a folder, with the size and time of each file; as long
as it is unfinished, .penstock-journal names them. A file that is in neither, or that was changed
since, is somebody's work, and nothing that holds some is ever removed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from penstock.data.packed_list import PackedList
from penstock.errors import StoreError
from penstock.opening import read_file
from penstock.stores.folder.marks import INDEX_NAME, MARKER_NAME, OURS, read_marker
from penstock.stores.records import decode_record, encode_record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Set
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["JOURNAL_NAME", "NEW_NAME", "note_files", "refuse_to_replace", "strangers_in"]

FILES_NAME: Final = OURS + "-files"
JOURNAL_NAME: Final = OURS + "-journal"
NEW_NAME: Final = OURS + "-new"  # a file until it is whole
_OUR_NAMES: Final = frozenset((MARKER_NAME, INDEX_NAME, FILES_NAME, JOURNAL_NAME, NEW_NAME))


def note_files(root: Path, files: Iterable[str], stats: NDArray[np.int64]) -> None:
    """Leave the list of the files that were written, with the size and time of each."""
    text, offsets = PackedList(files).to_utf8()
    tree = {"paths": {"text": text, "offsets": offsets}, "stats": stats}
    (root / FILES_NAME).write_bytes(encode_record("files", tree).data)


def refuse_to_replace(place: Path) -> None:
    """Raise unless `place` is free, empty, or holds nothing but what a writer put there.

    Every file is looked at, and none is read: of a million that takes some seconds.

    Raises:
        StoreError: it holds something else, and the message names it; or it cannot be listed.
    """
    if not place.exists():
        return
    if not place.is_dir():
        raise _would_be_lost(place, "a file")
    try:
        if not os.listdir(place):
            return
        known = _known_files(place)
        for path, stat in _files_below(place):
            if path not in known:
                what = "a folder with files that Penstock did not write"
                raise _would_be_lost(place, f"{what}, {path!r} for one")
            if stat != known[path]:
                what = "a folder with files that were changed since Penstock wrote them"
                raise _would_be_lost(place, f"{what}, {path!r} for one")
    except OSError as error:
        raise StoreError(f"cannot list {error.filename}: {error.strerror}.") from error


def strangers_in(partial: Path, journaled: Set[str]) -> list[str]:
    """Return the files of an unfinished folder that no writer put there, and all links.

    Args:
        partial: The folder, or one that was replaced and is to be removed.
        journaled: What its journal names.

    Raises:
        OSError: it cannot be listed.
        StoreError: its list of files is damaged.
    """
    if not partial.is_dir():
        return [partial.name] if partial.exists() else []
    known = journaled | _known_files(partial).keys()
    return [path for path, stat in _files_below(partial) if stat is None or path not in known]


def _would_be_lost(place: Path, what: str) -> StoreError:
    return StoreError(
        f"{place} is {what}, and would be replaced as a whole. Name a place that is free, or "
        "move away or remove it yourself."
    )


def _known_files(root: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of the files that a writer put there; none if it left no list."""
    path = root / FILES_NAME
    if not path.is_file() or read_marker(root) is None:
        return {}
    try:
        tree: Any = decode_record(read_file(path, None), str(path)).sample
        names = PackedList.from_utf8(tree["paths"]["text"], tree["paths"]["offsets"])
        stats = [(int(size), int(time_ns)) for size, time_ns in tree["stats"].tolist()]
        return dict(zip(names, stats, strict=True))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(
            f"{path} is damaged: {error}. It says which files of the folder may be replaced: "
            "move the folder away, or remove it yourself."
        ) from error


def _files_below(root: Path) -> Iterator[tuple[str, tuple[int, int] | None]]:
    """Yield path, and size and time, of every file but our own; None for those of links."""
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        with os.scandir(f"{root}/{folder}") as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                path = folder + entry.name
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{path}/")
                elif entry.is_symlink():
                    yield path, None
                elif path not in _OUR_NAMES:
                    status = entry.stat(follow_symlinks=False)
                    yield path, (status.st_size, status.st_mtime_ns)
