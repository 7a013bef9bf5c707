# SPDX-License-Identifier: Apache-2.0
"""`ListedStore`: image files that a list names, wherever they lie."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from penstock.data.packed_list import PackedList
from penstock.stores.folder.marks import PAIR, Listing
from penstock.stores.folder.store import FolderStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import ArrayLike

__all__ = ["ListedStore"]


class ListedStore(FolderStore):
    """Images with a class, as a list has them; read like those of a folder.

    A sample is (image, class). A key is the path below the folder, or the whole path where it is
    not below. No file is looked at before it is read.

    Concurrency:
        Any thread or process. Nothing is held open.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = Path(f"{folder.name}/1.jpg").write_bytes(b"...")
        >>> store = ListedStore(folder.name, [f"{folder.name}/1.jpg"], [1], ("cat", "dog"))
        >>> store.get_many([0])
        [Record(key='1.jpg', label=1, sample=(<EncodedImage of 3 bytes>, 1))]
        >>> folder.cleanup()
    """

    def __init__(
        self,
        root: str | Path,
        paths: Iterable[str | Path],
        labels: ArrayLike,
        class_names: Sequence[str] = (),
        *,
        name: str = "",
    ) -> None:
        """Take over a list.

        Args:
            root: The folder that keys are relative to.
            paths: The image files.
            labels: Class of each; integers, shape (images,).
            class_names: Name of each class.
            name: The file that the list was read from, for errors.
        """
        super().__init__(root)
        self._name = name
        keys = PackedList(_keys(root, paths))
        relative = PackedList(
            os.path.relpath(key, root) if os.path.isabs(key) else key for key in keys
        )
        kinds = np.full(len(keys), PAIR, np.uint8)
        numbers = np.array(labels, np.int64)
        self._listings.append(
            Listing(
                keys,
                keys if keys == relative else relative,
                kinds,
                numbers if len(keys) else None,
                tuple(class_names),
            )
        )

    @property
    def address(self) -> str:
        """The list's name; not an address that `open_store` takes."""
        return self._name or super().address


def _keys(root: str | Path, paths: Iterable[str | Path]) -> Iterator[str]:
    below = os.path.join(os.path.abspath(root), "")
    for path in paths:
        whole = os.path.abspath(path)
        yield whole.removeprefix(below).replace(os.sep, "/") if whole.startswith(below) else whole
