# SPDX-License-Identifier: Apache-2.0
"""`ImageList`: images and their class in a text file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, StoreError
from penstock.stores.dataset import StoreDataset
from penstock.stores.folder.store import ListedStore
from penstock.stores.transform_check import check_transform
from penstock.vision.annotations.image_list import read_image_list

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.stores.dataset import Decode

__all__ = ["ImageList"]


class ImageList(StoreDataset):
    """A line for each image: `path label`. A sample is (image, class), as of `ImageFolder`.

    The label is the last column; the path is all before it. Labels that are whole numbers, written
    as 1 or as 1.0, stay the numbers that they are; if one is none, all are texts. Texts
    are numbered in the order of `class_names`, or of their sorting. Each line is a sample,
    repeated lines too.

    Concurrency:
        Any thread or process; it pickles.

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
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        class_names: Sequence[str] | None = None,
        separator: str | None = None,
        decode: Decode = "rgb",
        repair: bool = False,
    ) -> None:
        """Read the list.

        Args:
            path: The text file.
            root: Folder that paths are relative to; that of the list if not given.
            transform: Takes the image.
            target_transform: Takes the class.
            class_names: The classes in their order; for labels that are numbers the name of each.
            separator: What separates path and label; blanks and tabs if not given. The last one
                of a line counts, so that a path may have some.
            decode: As for `StoreDataset`.
            repair: Whether JPEG files without an end are given one.

        Raises:
            StoreError: there is no such file, no image in it, or a line is damaged; or a label is
                none of `class_names`.
            ConfigError: `decode` is none of those, or `class_names` a text.
        """
        if isinstance(class_names, str):
            raise ConfigError(f"class_names is a list of names, not the text {class_names!r}.")
        check_transform("transform", transform)
        check_transform("target_transform", target_transform)
        entries = read_image_list(path, root, separator=separator)
        labels, names = _numbered([label for _, label in entries], class_names, path)
        store = ListedStore(
            Path(path).parent if root is None else root,
            (image for image, _ in entries),
            labels,
            names,
            name=str(path),
        )
        super().__init__(
            store,
            transform=transform,
            target_transform=target_transform,
            decode=decode,
            repair=repair,
        )
        self._store = store

    def describe(self, index: int) -> str:
        """Return the path of an image: what errors call it."""
        return str(self._store.file_of(index))


def _numbered(
    labels: Sequence[int | str], class_names: Sequence[str] | None, path: str | Path
) -> tuple[list[int], tuple[str, ...]]:
    """Return labels as numbers, and the classes' names."""
    texts = [label for label in labels if isinstance(label, str)]
    if not texts:
        numbers = [int(label) for label in labels]
        for wrong in (min(numbers), max(numbers)):
            if class_names is not None and not 0 <= wrong < len(class_names):
                raise StoreError(
                    f"{path} has the class {wrong}, and class_names are {len(class_names)}: from 0 "
                    f"to {len(class_names) - 1}."
                )
        return numbers, tuple(class_names or ())
    names = tuple(sorted(set(texts)) if class_names is None else class_names)
    place_of = {name: place for place, name in enumerate(names)}
    unknown = next((text for text in texts if text not in place_of), None)
    if unknown is not None:
        raise StoreError(f"{path} has the class {unknown!r}, and class_names lacks it: {names!r}.")
    return [place_of[text] for text in texts], names
