# SPDX-License-Identifier: Apache-2.0
"""`ImageFolder`: images in a subfolder for each class."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import StoreError
from penstock.stores.dataset import StoreDataset
from penstock.stores.folder.listing import IMAGE_SUFFIXES, INDEX_NAME
from penstock.stores.folder.store import FolderStore
from penstock.stores.transform_check import check_transform

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.stores.dataset import Decode

__all__ = ["ImageFolder"]


class ImageFolder(StoreDataset):
    """Images of `ROOT/CLASS/**/NAME.jpg`, with their class.

    Classes, samples and their order are those of torchvision's ImageFolder, and so are the names
    `classes`, `class_to_idx`, `samples`, `imgs`, `targets`. What differs: an image is a uint8 array
    of shape (height, width, 3), unless `decode` says otherwise; hidden and system folders
    (`.ipynb_checkpoints`, `__MACOSX`) are no classes; and no folder is listed twice, whatever links
    lead into it.

    torchvision's `loader` and `is_valid_file` are not there: `decode` takes a function of the
    file's bytes, `penstock.data.Subset` a part of the images. See docs/folders.md.

    Only names are kept in memory, in two arrays that workers share. `samples` and `targets` are
    lists, made when they are asked for: of a million images they take some 200 MB. They and
    `labels`, which cannot be written to, describe the samples and do not make them: to train with
    other classes, use `target_transform`.

    Concurrency:
        Any thread or process; it pickles.

    Example:
        >>> import tempfile
        >>> import cv2, numpy as np
        >>> folder = tempfile.TemporaryDirectory()
        >>> for name in ("cat", "dog"):
        ...     Path(folder.name, name).mkdir()
        ...     _ = cv2.imwrite(f"{folder.name}/{name}/1.png", np.zeros((4, 6, 3), np.uint8))
        >>> dataset = ImageFolder(folder.name, transform=lambda image: image.mean())
        >>> dataset.classes, dataset.labels, dataset[1]
        (['cat', 'dog'], array([0, 1]), (np.float64(0.0), 1))
        >>> folder.cleanup()
    """

    def __init__(
        self,
        root: str | Path,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        *,
        decode: Decode = "rgb",
        repair: bool = False,
        allow_empty: bool = False,
    ) -> None:
        """List the folder.

        Args:
            root: The folder of the class folders.
            transform: Takes the image.
            target_transform: Takes the class.
            decode: As for `StoreDataset`: "pil" gives what torchvision's transforms are made for.
            repair: Whether JPEG files without an end are given one.
            allow_empty: Whether a class folder without an image is a class with a number, not an
                error.

        Raises:
            FileNotFoundError: a class folder has no image, and `allow_empty` is false.
            StoreError: there is no such folder, no image in it, or a folder that cannot be listed;
                or its subfolders are not classes: they hold annotations and images.
            ConfigError: `decode` is none of those.
        """
        check_transform("transform", transform)
        check_transform("target_transform", target_transform)
        has_index = (Path(root) / INDEX_NAME).is_file()
        store = FolderStore(root, layout="auto" if has_index else "classes")
        super().__init__(
            store,
            transform=transform,
            target_transform=target_transform,
            decode=decode,
            repair=repair,
        )
        if len(store) and not store.index.are_pairs:
            raise StoreError(
                f"{root} was packed from samples other than images with a class: read it with "
                f'StoreDataset("{store.address}").'
            )
        self._store = store
        self._lists: dict[str, list[Any]] = {}  # made when they are asked for
        if not allow_empty and not has_index:  # an index has the classes that were packed
            _refuse_empty_classes(self)

    @property
    def root(self) -> Path:
        """The folder."""
        return self._store.path

    @property
    def classes(self) -> list[str]:
        """Name of each class: `class_names`, as torchvision has them."""
        return list(self.class_names)

    @property
    def samples(self) -> list[tuple[str, int]]:
        """Path and class of each image."""
        if "samples" not in self._lists:
            paths = map(self.describe, range(len(self)))
            self._lists["samples"] = list(zip(paths, self.targets, strict=True))
        return self._lists["samples"]

    @property
    def imgs(self) -> list[tuple[str, int]]:
        """The same list as `samples`."""
        return self.samples

    @property
    def targets(self) -> list[int]:
        """Class of each image; as an array they are `labels`."""
        if "targets" not in self._lists:
            labels: Any = self.labels
            self._lists["targets"] = [] if labels is None else labels.tolist()
        return self._lists["targets"]

    def describe(self, index: int) -> str:
        """Return the path of an image: what errors call it."""
        return str(self._store.file_of(index))

    def __getstate__(self) -> dict[str, Any]:
        """Leave the long lists behind, which any copy can make for itself."""
        return {**self.__dict__, "_lists": {}}


def _refuse_empty_classes(dataset: ImageFolder) -> None:
    """Raise as torchvision does, in its words, where a class folder has no image."""
    labels: Any = dataset.labels
    present = set(np.unique(labels).tolist())
    empty = [name for number, name in enumerate(dataset.classes) if number not in present]
    if empty:
        raise FileNotFoundError(
            f"Found no valid file for the classes {', '.join(empty)}. Supported extensions are: "
            f"{', '.join(IMAGE_SUFFIXES)}. Remove the folders from {dataset.root}, or give "
            "allow_empty=True to keep them as classes without images."
        )
