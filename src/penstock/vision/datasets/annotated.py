# SPDX-License-Identifier: Apache-2.0
"""`AnnotatedImages`: images with objects marked in them, from whatever files they were read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import ConfigError
from penstock.stores.dataset import StoreDataset
from penstock.vision.datasets.annotation_rules import AnnotationRules, settled
from penstock.vision.datasets.annotation_store import AnnotationStore
from penstock.vision.datasets.class_check import warn_of_absent
from penstock.vision.datasets.frames import size_of_file
from penstock.vision.datasets.table_builder import TableBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.stores.dataset import Decode
    from penstock.vision.annotations.model import AnnotatedImage
    from penstock.vision.datasets.annotation_table import AnnotationTable
    from penstock.vision.datasets.box_policy import BoxCounts
    from penstock.vision.datasets.frame_votes import FrameCounts

__all__ = ["AnnotatedImages"]


class AnnotatedImages(StoreDataset):
    """Images with boxes, and landmarks where there are some; a sample is a dict.

        "image"         uint8 (height, width, 3), RGB
        "boxes"         float32 (N, 4): left, top, right, bottom; pixels, 0-based, half-open
        "labels"        int64 (N,): place of the class in `class_names`
        "landmarks"     float32 (N, K, 2): x, y; (0, 0) is the centre of the top left pixel; NaN
                        where a point is not marked
        "visibility"    int8 (N, K): 0 not marked, 1 hidden, 2 seen
        "difficult", "truncated", "occluded"    bool (N,)
        any attribute   int64 (N,): place of its text in `attribute_names[name]`
        "image_id"      str: what the image is called

    The first three and the last are always there; the others in all samples, if any file has them.
    What is no array belongs to the image as a whole; every array but the image has a row for each
    object. An object without a box has the one around its landmarks' pixels, or the whole image if
    all of these are missing; one that has neither box nor landmarks is bad. Arrays are the
    caller's own.

    All annotations are read when the dataset is made, into arrays that workers share; image files
    then, of which only the header, where no annotation says a size that is needed. Pixels and boxes
    are in one frame: see `orientation`.

    `pack` takes such a dataset, and a `StoreDataset` over what it wrote gives equal samples, with
    their keys, classes and labels.

    Concurrency:
        Any thread or process; it pickles.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import cv2, numpy as np
        >>> from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
        >>> folder = tempfile.TemporaryDirectory()
        >>> photo = Path(folder.name, "1.png")
        >>> _ = cv2.imwrite(str(photo), np.zeros((6, 8, 3), np.uint8))
        >>> objects = (AnnotatedObject("cat", (1, 1, 9, 4)), AnnotatedObject("dog", (5, 5, 5, 6)))
        >>> dataset = AnnotatedImages([AnnotatedImage(photo, "1", 8, 6, objects)])
        >>> dataset[0]["boxes"], dataset.class_names
        (array([[1., 1., 8., 4.]], dtype=float32), ('cat', 'dog'))
        >>> print(dataset.box_counts)
        2 objects, 1 kept (1 zero_area, 1 outside, 1 clipped, 1 dropped)
        >>> folder.cleanup()
    """

    store: AnnotationStore

    def __init__(
        self,
        images: Iterable[AnnotatedImage],
        *,
        class_names: Sequence[str] | None = None,
        attributes: Sequence[str] | None = (),
        transform: Callable[[Any], Any] | None = None,
        decode: Decode = "rgb",
        repair: bool = False,
        rules: AnnotationRules | None = None,
        name: str = "annotated images",
    ) -> None:
        """Take over annotations.

        Args:
            images: What was read; gone through once.
            class_names: The classes in their order; those found, sorted, if not given. It is a
                warning if no object is of one of them.
            attributes: Which of the objects' `extra` (or "pose") become arrays; None takes all.
            transform: Takes the sample.
            decode: As for `StoreDataset`.
            repair: Whether JPEG files without an end are given one.
            rules: Frames, bad boxes, unknown classes, difficult objects, images without objects.
            name: What errors call the dataset.

        Raises:
            StoreError: an annotation is wrong, or bad under these rules.
            ConfigError: an argument is none of those.
        """
        builder = TableBuilder(attributes)
        for image in images:
            builder.add(image)
        self._take(
            builder.table(class_names),
            rules or AnnotationRules(),
            name,
            transform=transform,
            decode=decode,
            repair=repair,
            given_classes=class_names,
        )

    def _take(
        self,
        table: AnnotationTable,
        rules: AnnotationRules,
        name: str,
        *,
        transform: Callable[[Any], Any] | None,
        decode: Decode,
        repair: bool,
        given_classes: Sequence[str] | None = None,
        unreadable: Mapping[str, int] | None = None,
        root: str | Path | None = None,
    ) -> None:
        """Become the dataset of a table as it was read; classes given are looked for in it."""
        if getattr(transform, "takes_files", False) is True:
            raise ConfigError(
                f"{type(transform).__name__} makes images alone, and would leave the boxes behind: "
                "give transforms of samples, such as Letterbox or RandomPerspective."
            )
        all_labels = table.labels
        table, counts = settled(table, rules)
        num_unsized = sum((unreadable or {}).values())
        self._box_counts = replace(
            counts, total=counts.total + num_unsized, unsized=counts.unsized + num_unsized
        )
        if given_classes is not None:
            warn_of_absent(table.class_names, all_labels)
        self._rules = rules
        self._sizes_px: NDArray[np.int64] | None = None
        store = AnnotationStore(table, rules.orientation, name, unreadable, root)
        StoreDataset.__init__(self, store, transform=transform, decode=decode, repair=repair)

    @property
    def box_counts(self) -> BoxCounts:
        """What was found about the boxes of the files, and done."""
        return self._box_counts

    @property
    def frame_counts(self) -> FrameCounts:
        """In which frame annotations are, as far as their sizes tell: see `frame_votes`.

        When it is first asked for, the headers of up to 1,000 images are read.
        """
        return self.store.frame_votes.counts()

    @property
    def landmark_names(self) -> tuple[str, ...]:
        """Names of the landmarks, in their order; empty if they have none."""
        return self.store.table.landmark_names

    @property
    def num_landmarks(self) -> int:
        """Landmarks of an object; 0 if there are none."""
        return self.store.table.num_landmarks

    @property
    def sizes_px(self) -> NDArray[np.int64]:
        """Height and width of each image without decoding it; int64, shape (len, 2); read-only.

        Those that annotations do not say are read from the files' headers, once, when they are
        first asked for. 0 where a header cannot be read.
        """
        if self._sizes_px is None:
            table = self.store.table
            sizes_px = table.sizes_px.copy()
            for position in np.flatnonzero((sizes_px <= 0).any(axis=1)).tolist():
                size = size_of_file(table.paths[position], self._rules.orientation)
                sizes_px[position] = size or 0
            sizes_px.flags.writeable = False
            self._sizes_px = sizes_px
        return self._sizes_px

    def annotation(self, index: int) -> AnnotatedImage:
        """Return what the dataset has of one image, without reading it.

        Raises:
            IndexError: out of range.
        """
        return self.store.table.image(int(self.store.checked([index])[0]))

    def describe(self, index: int) -> str:
        """Return the path of an image: what errors call it."""
        return self.store.table.paths[index]

    def _summary(self) -> Iterator[tuple[str, object]]:
        yield from super()._summary()
        if self.num_landmarks:
            yield "landmarks", self._landmarks()
        yield "boxes", str(self._box_counts)
        frames = self.store.frame_votes.known
        if frames is not None:
            yield "frames", str(frames)

    def _landmarks(self) -> str:
        return f"{self.num_landmarks} each"
