# SPDX-License-Identifier: Apache-2.0
"""`ImageFolder` and `ImageList`: images with a class, from subfolders or from a text file."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.blobs.blobs import is_remote
from penstock.errors import ConfigError, StoreError
from penstock.stores.dataset import StoreDataset
from penstock.stores.folder.listing import IMAGE_SUFFIXES, INDEX_NAME
from penstock.stores.folder.objects import ObjectFolderStore
from penstock.stores.folder.store import FolderStore, ListedStore
from penstock.vision.annotations.lists import read_image_list

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.stores.dataset import Decode


class _FilesDataset(StoreDataset):
    store: FolderStore | ObjectFolderStore

    def describe(self, index: int) -> str:
        """Return the path of an image: what errors call it."""
        return str(self.store.file_of(index))


class ImageFolder(_FilesDataset):
    """Images of `ROOT/CLASS/**/NAME.jpg`, with their class.

    Classes, samples and their order are those of torchvision's ImageFolder, and so are the names
    `classes`, `class_to_idx`, `samples`, `imgs`, `targets`. An image is a uint8 array of shape
    (height, width, 3), unless `decode` says otherwise; hidden and system folders are no classes.

    `samples` and `targets` are lists, made when they are asked for: of a million images they take
    some 200 MB. To train with other classes, use `target_transform`. See docs/folders.md.

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
        cache: str | Path | None = None,
        allow_empty: bool = False,
        **options: Any,  # noqa: ANN401
    ) -> None:
        """List the folder.

        Args:
            root: The folder of the class folders, or its address in object storage, as
                `s3://BUCKET/PREFIX`.
            transform: Takes the image.
            target_transform: Takes the class.
            decode: As for `StoreDataset`: "pil" gives what torchvision's transforms are made for.
            repair: Whether JPEG files without an end are given one.
            cache: As for `StoreDataset`: where decoded images are kept for the next epochs.
            allow_empty: Whether a class folder without an image is a class with a number, not an
                error.
            options: Of the store: in object storage `local_cache`, `index`, `endpoint` …

        Raises:
            FileNotFoundError: a class folder has no image, and `allow_empty` is false.
            StoreError: there is no such folder, no image in it, or a folder that cannot be listed;
                or its subfolders are not classes: they hold annotations and images.
        """
        has_index = (Path(root) / INDEX_NAME).is_file()
        store: FolderStore | ObjectFolderStore
        if is_remote(str(root)):
            store = ObjectFolderStore(str(root), layout="classes", **options)
        else:
            store = FolderStore(root, layout="auto" if has_index else "classes", **options)
        super().__init__(
            store,
            transform=transform,
            target_transform=target_transform,
            decode=decode,
            repair=repair,
            cache=cache,
        )
        store.close()  # processes that are forked from here on inherit no connection
        if not allow_empty and not has_index:  # an index has the classes that were packed
            present = set(np.unique(np.asarray(self.labels)).tolist())
            empty = [name for n, name in enumerate(self.classes) if n not in present]
            if empty:  # as torchvision says it
                raise FileNotFoundError(
                    f"Found no valid file for the classes {', '.join(empty)}. Supported extensions "
                    f"are: {', '.join(IMAGE_SUFFIXES)}. Remove the folders from {root}, or give "
                    "allow_empty=True to keep them as classes without images."
                )

    @property
    def root(self) -> Path | str:
        """The folder; a text if it is in object storage."""
        return self.store.path

    @property
    def classes(self) -> list[str]:
        """Name of each class: `class_names`, as torchvision has them."""
        return list(self.class_names)

    @functools.cached_property
    def samples(self) -> list[tuple[str, int]]:
        """Path and class of each image."""
        return list(zip(map(self.describe, range(len(self))), self.targets, strict=True))

    @property
    def imgs(self) -> list[tuple[str, int]]:
        """The same list as `samples`."""
        return self.samples

    @functools.cached_property
    def targets(self) -> list[int]:
        """Class of each image; as an array they are `labels`."""
        labels: Any = self.labels
        return [] if labels is None else labels.tolist()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the long lists behind, which any copy can make for itself."""
        return {k: v for k, v in self.__dict__.items() if k not in ("samples", "targets")}


class ImageList(_FilesDataset):
    """A line for each image: `path label`. A sample is (image, class), as of `ImageFolder`.

    The label is the last column; the path is all before it. Labels that are whole numbers, written
    as 1 or as 1.0, stay the numbers that they are; if one is none, all are texts. Texts
    are numbered in the order of `class_names`, or of their sorting. Each line is a sample,
    repeated lines too.

    Example:
        >>> import tempfile
        >>> import cv2, numpy as np
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = cv2.imwrite(f"{folder.name}/1.png", np.zeros((4, 6, 3), np.uint8))
        >>> _ = Path(f"{folder.name}/train.txt").write_text("1.png 0")
        >>> dataset = ImageList(f"{folder.name}/train.txt", class_names=["cat"], transform=np.shape)
        >>> dataset.class_names, dataset.labels, dataset[0]
        (('cat',), array([0]), ((4, 6, 3), 0))
        >>> folder.cleanup()
    """

    def __init__(
        self,
        path: str | Path,
        root: str | Path | None = None,
        *,
        class_names: Sequence[str] | None = None,
        separator: str | None = None,
        **options: Any,  # noqa: ANN401 - those of StoreDataset
    ) -> None:
        """Read the list.

        Args:
            path: The text file.
            root: Folder that paths are relative to; that of the list if not given.
            class_names: The classes in their order; for labels that are numbers the name of each.
            separator: What separates path and label; blanks and tabs if not given. The last one
                of a line counts, so that a path may have some.
            **options: As for `ImageFolder`: `transform`, `target_transform`, `decode`, `repair`.

        Raises:
            StoreError: there is no such file, no image in it, or a line is damaged; or a label is
                none of `class_names`.
        """
        if isinstance(class_names, str):
            raise ConfigError(f"class_names is a list of names, not the text {class_names!r}.")
        entries = read_image_list(path, root, separator=separator)
        labels, names = _numbered([label for _, label in entries], class_names, path)
        folder = Path(path).parent if root is None else root
        store = ListedStore(folder, (image for image, _ in entries), labels, names, name=str(path))
        super().__init__(store, **options)


def _numbered(
    labels: Sequence[int | str], class_names: Sequence[str] | None, path: str | Path
) -> tuple[list[int], tuple[str, ...]]:
    """Return labels as numbers, and the classes' names."""
    texts = {label for label in labels if isinstance(label, str)}
    names = tuple(sorted(texts) if class_names is None else class_names)
    place_of: dict[int | str, int] = {name: place for place, name in enumerate(names)}
    if not texts:
        if class_names is None:
            return [int(label) for label in labels], ()
        place_of = {number: number for number in range(len(names))}
    for label in labels:
        if label not in place_of:
            raise StoreError(f"{path} has the class {label!r}, which class_names lacks: {names!r}.")
    return [place_of[label] for label in labels], names
