# SPDX-License-Identifier: Apache-2.0
"""`RecordRanges`: where the records of a store lie, for all that reads them by number."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.blobs.blobs import ByteRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class RecordRanges:
    """Where records lie: 20 bytes for each.

    Attributes:
        names: The objects.
        versions: As `Blob.version`, of each object; "" takes any.
        objects: Which object each record is in; int32, shape (records,).
        starts: Its first byte there; int64, shape (records,).
        stops: Behind its last byte; int64, shape (records,).
    """

    names: Sequence[str]
    versions: Sequence[str]
    objects: NDArray[np.int32]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.objects)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each record; int64, shape (records,)."""
        return self.stops - self.starts

    def at(self, numbers: NDArray[np.int64]) -> list[ByteRange]:
        """Return where some records are."""
        names, versions = self.names, self.versions
        return [
            ByteRange(names[n], start, stop, versions[n])
            for n, start, stop in zip(
                self.objects[numbers].tolist(),
                self.starts[numbers].tolist(),
                self.stops[numbers].tolist(),
                strict=True,
            )
        ]

    def digest(self, address: str) -> str:
        """Return a text that is another one for other records, or at another address."""
        texts = "\0".join((address, *self.names, *self.versions)).encode()
        total = hashlib.blake2b(texts, digest_size=16)
        for array in (self.objects, self.starts, self.stops):
            total.update(array.tobytes())
        return total.hexdigest()
