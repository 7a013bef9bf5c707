# SPDX-License-Identifier: Apache-2.0
"""What several trainers send alike lies in the object store once: parcels in pieces, by content.

A large array of a dataset is a piece by itself; all the rest of a parcel, its pickle and its small
arrays, is another. Pieces are known by a hash of what they hold. So ranks with the same dataset
share all of its arrays, even where their pickles differ: that of a class which is defined in the
script itself has a random number of Ray's in it, and that of an iterable's recipe has the rank.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.engine.backends.ray.parcels import Parcel

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Piece", "SharedParcel", "join_parcel", "split_parcel"]

_BY_ITSELF_BYTES: Final = 1 << 20  # less is not worth an object of its own


class Piece(NamedTuple):
    """A part of a parcel.

    Attributes:
        digest: Of what is in it.
        content: A `Parcel`, or one large buffer.
    """

    digest: str
    content: Any

    @property
    def num_bytes(self) -> int:
        """Bytes of it."""
        is_parcel = isinstance(self.content, Parcel)
        return int(self.content.num_bytes if is_parcel else self.content.nbytes)


class SharedParcel(NamedTuple):
    """A parcel whose pieces lie in the object store.

    Attributes:
        places: Which of the parcel's buffers each piece is, but for the first piece, which is the
            pickle with the small buffers.
        pieces: References of the pieces; in a list, so that Ray hands on these and not the objects.
    """

    places: tuple[int, ...]
    pieces: list[Any]


def split_parcel(parcel: Parcel) -> tuple[tuple[int, ...], list[Piece]]:
    """Return the pieces of a parcel, and their places as `SharedParcel` has them.

    Nothing is copied.

    Example:
        >>> import numpy as np
        >>> small, large = np.zeros(10, np.uint8), np.ones(2 << 20, np.uint8)
        >>> places, (rest, piece) = split_parcel(Parcel(b"...", [small, large]))
        >>> places, len(rest.content.buffers), piece.content is large
        ((1,), 1, True)
    """
    buffers = parcel.buffers
    places = tuple(k for k, buffer in enumerate(buffers) if buffer.nbytes >= _BY_ITSELF_BYTES)
    small = [buffer for buffer in buffers if buffer.nbytes < _BY_ITSELF_BYTES]
    rest = Piece(_digest([parcel.pickled, *small]), Parcel(parcel.pickled, small))
    return places, [rest, *(Piece(_digest([buffers[k]]), buffers[k]) for k in places)]


def _digest(parts: Sequence[Any]) -> str:
    found = hashlib.blake2b(digest_size=20)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()


async def join_parcel(shared: SharedParcel) -> Parcel:
    """Return the parcel again; its buffers are views of the object store.

    Raises:
        ray.exceptions.ObjectLostError: a piece is gone.
    """
    rest, *large = await asyncio.gather(*shared.pieces)
    by_place = dict(zip(shared.places, large, strict=True))
    small = iter(rest.buffers)
    num_buffers = len(rest.buffers) + len(large)
    buffers = [by_place[k] if k in by_place else next(small) for k in range(num_buffers)]
    return Parcel(rest.pickled, buffers)
