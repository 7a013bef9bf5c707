# SPDX-License-Identifier: Apache-2.0
"""The images of a folder, found by listing it: class folders, or images alone.

No file is opened and none is looked at: a million of them take a second or two.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.data.packed_list import PackedList
from penstock.errors import StoreError
from penstock.stores.folder.marks import IMAGE, PAIR, Listing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [
    "IMAGE_SUFFIXES",
    "cannot_list",
    "image_names",
    "is_system_folder",
    "list_classes",
    "list_flat",
    "scan",
]

# Those of torchvision's ImageFolder: what trains through it is what has to be found.
IMAGE_SUFFIXES: Final = (
    ".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp",
)  # fmt: skip
# Folders of programs, which hold no images of the data set; so do names that begin with ".".
_SYSTEM_FOLDERS: Final = frozenset(
    (
        "__MACOSX",  # macOS, in zip files
        "__pycache__",  # Python
        "@eaDir",  # Synology's thumbnails
        "lost+found",  # Linux, at the root of a disk
        "$RECYCLE.BIN",  # Windows, likewise
        "System Volume Information",
    )
)


def is_system_folder(name: str) -> bool:
    """Return whether a folder of this name holds what some program keeps there.

    Example:
        >>> [is_system_folder(name) for name in (".ipynb_checkpoints", "__MACOSX", "cat")]
        [True, True, False]
    """
    return name.startswith(".") or name in _SYSTEM_FOLDERS


def scan(folder: str, *, with_system: bool = False) -> tuple[list[str], list[str]]:
    """Return the names of subfolders, links to folders included, and of image files; both sorted.

    Args:
        folder: What is listed.
        with_system: Whether hidden and system folders are among them.

    Raises:
        StoreError: the folder cannot be listed.
    """
    subfolders, images = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if _is_dir(entry):
                    if with_system or not is_system_folder(entry.name):
                        subfolders.append(entry.name)
                elif entry.name.lower().endswith(IMAGE_SUFFIXES):
                    images.append(entry.name)
    except OSError as error:
        raise cannot_list(error) from error
    return sorted(subfolders), sorted(images)


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a ring: a file that cannot be read, which reading it will tell
        return False


def cannot_list(error: OSError) -> StoreError:
    """Return the error of a folder that cannot be listed, for the caller to raise."""
    return StoreError(
        f"cannot list {error.filename}: {error.strerror}. Its images would be passed over; allow "
        "it to be read, or name another folder."
    )


def image_names(folder: Path) -> list[str]:
    """Return the names of the images in a folder, sorted; those in its subfolders left out."""
    return scan(os.fspath(folder))[1]


def list_flat(root: Path) -> Listing:
    """Return the images that lie in `root` itself, without labels.

    Raises:
        StoreError: it cannot be listed.
    """
    names = PackedList(image_names(root))
    return Listing(names, names, np.full(len(names), IMAGE, np.uint8))


def list_classes(root: Path, *, with_system: bool = False) -> Listing:
    """Return the images of class folders, in the order of torchvision's ImageFolder.

    A class is a direct subfolder of `root`, and all images below it are of that class. Classes are
    sorted; within one, folders are sorted by their whole path and files by their name.

    Links to folders are followed, and no folder is listed twice: of two ways into one, that of the
    class folder itself counts, then the first in order.

    Args:
        root: The folder.
        with_system: As in `scan`.

    Raises:
        StoreError: a folder cannot be listed, or two classes are one folder.
    """
    class_names, _ = scan(os.fspath(root), with_system=with_system)
    entered = _identities(root, class_names)
    counts = np.zeros(len(class_names), np.int64)

    def keys() -> Iterator[str]:
        for label, name in enumerate(class_names):
            for folder, images in sorted(_walk(f"{root}/", name, entered, with_system=with_system)):
                counts[label] += len(images)
                yield from (f"{folder}/{image}" for image in images)

    packed = PackedList(keys())
    labels = np.repeat(np.arange(len(class_names)), counts) if len(packed) else None
    kinds = np.full(len(packed), PAIR, np.uint8)
    return Listing(packed, packed, kinds, labels, tuple(class_names))


def _identities(root: Path, class_names: list[str]) -> set[tuple[int, int]]:
    """Return device and inode of the folders that no link may lead into once more."""
    named: dict[tuple[int, int], str] = {}
    for name in class_names:
        identity = _identity(f"{root}/{name}")
        if identity in named:
            raise StoreError(
                f"the classes {named[identity]!r} and {name!r} of {root} are one folder: one is a "
                "link to the other. Which of the two are its images? Remove the link."
            )
        named[identity] = name
    return {*named, _identity(os.fspath(root))}


def _identity(folder: str) -> tuple[int, int]:
    try:
        status = os.stat(folder)
    except OSError as error:
        raise cannot_list(error) from error
    return status.st_dev, status.st_ino


def _walk(
    prefix: str, folder: str, entered: set[tuple[int, int]], *, with_system: bool
) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder from `folder` down, relative to `prefix`, with its images."""
    waiting = [folder]
    while waiting:
        folder = waiting.pop()
        subfolders, images = scan(prefix + folder, with_system=with_system)
        yield folder, images
        found = []
        for name in subfolders:
            identity = _identity(f"{prefix}{folder}/{name}")
            if identity not in entered:
                entered.add(identity)
                found.append(f"{folder}/{name}")
        waiting += reversed(found)
