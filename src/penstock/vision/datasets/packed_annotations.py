# SPDX-License-Identifier: Apache-2.0
"""`PackedAnnotations`: images with objects marked in them, from a store that `pack` made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.errors import StoreError
from penstock.images.headers import read_header
from penstock.stores.dataset import StoreDataset
from penstock.stores.label_columns import are_names, from_metadata
from penstock.stores.records import EncodedImage
from penstock.vision.datasets.packed_sizes import SIZES, unpacked_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

__all__ = ["PackedAnnotations"]

_NUM_TOGETHER: Final = 64  # records that are read for their headers


class PackedAnnotations(StoreDataset):
    """What `pack` made of `AnnotatedImages`, with all that is known without an image being read.

    Samples are those of `StoreDataset`; there are also the names of landmarks and attributes, and
    the sizes of images, for `BucketBatchSampler` and the like.

    Concurrency:
        As `StoreDataset`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import cv2
        >>> from penstock.stores import pack
        >>> from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
        >>> from penstock.vision.datasets.annotated import AnnotatedImages
        >>> folder = tempfile.TemporaryDirectory()
        >>> photo = Path(folder.name, "1.png")
        >>> _ = cv2.imwrite(str(photo), np.zeros((6, 8, 3), np.uint8))
        >>> nose = AnnotatedObject("face", (0, 0, 8, 6), ((3.0, 4.0),), ("nose",))
        >>> address = f"lmdb:{folder.name}/faces.lmdb"
        >>> _ = pack(AnnotatedImages([AnnotatedImage(photo, "1", 8, 6, (nose,))]), address)
        >>> packed = PackedAnnotations(address)
        >>> packed.sizes_px.tolist(), packed.landmark_names, packed.num_landmarks
        ([[6, 8]], ('nose',), 1)
        >>> packed.close(); folder.cleanup()
    """

    _sizes_px: NDArray[np.int64] | None = None

    @property
    def landmark_names(self) -> tuple[str, ...]:
        """Names of the landmarks, in their order; empty if they have none."""
        return tuple(from_metadata(self._metadata, "landmark_names", are_names, ()))

    @property
    def num_landmarks(self) -> int:
        """Landmarks of an object; 0 if there are none."""
        count: int = from_metadata(
            self._metadata,
            "num_landmarks",
            lambda said: type(said) is int,
            len(self.landmark_names),
        )
        return count

    @property
    def sizes_px(self) -> NDArray[np.int64]:
        """Height and width of each image; int64, shape (len, 2); read-only.

        As they were when the store was packed. Where the store does not say them (samples were left
        out, or annotations did not say all sizes) records are read for their headers, once: 0 where
        one is damaged.

        Raises:
            StoreError: a record is missing or damaged, or its sample has no encoded image.
        """
        if self._sizes_px is None:
            said = unpacked_sizes(self._metadata.get(SIZES), len(self))
            sizes_px = np.zeros((len(self), 2), np.int64) if said is None else said
            (unknown,) = np.nonzero((sizes_px <= 0).any(axis=1))
            for start in range(0, len(unknown), _NUM_TOGETHER):
                self._read_sizes(sizes_px, unknown[start : start + _NUM_TOGETHER])
            sizes_px.flags.writeable = False
            self._sizes_px = sizes_px
        return self._sizes_px

    @property
    def _metadata(self) -> Mapping[str, Any]:
        return self.store.metadata

    def _read_sizes(self, sizes_px: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        records = self.store.get_many(positions)
        for position, record in zip(positions.tolist(), records, strict=True):
            sample = record.sample
            image = sample.get("image") if isinstance(sample, dict) else None
            if isinstance(image, np.ndarray):
                sizes_px[position] = image.shape[:2]
                continue
            if not isinstance(image, EncodedImage):
                raise StoreError(
                    f"record {record.key!r} of {self.store.address} has no entry 'image' with an "
                    "image: read this store with StoreDataset."
                )
            try:
                header = read_header(image.data)
            except ValueError:
                sizes_px[position] = 0
                continue
            sizes_px[position] = header.upright_height_px, header.upright_width_px
