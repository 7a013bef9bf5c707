# SPDX-License-Identifier: Apache-2.0
"""Sizes of images as a short text: what a store keeps of them in its metadata, which are JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from penstock.errors import StoreError
from penstock.stores.label_columns import packed_numbers, unpacked_numbers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["SIZES", "packed_sizes", "unpacked_sizes"]

SIZES: Final = "sizes_px"


def packed_sizes(sizes_px: NDArray[np.int64]) -> dict[str, Any]:
    """Return sizes as JSON: 8 kB for 10,000 images of six sizes, 56 kB of as many sizes.

    Args:
        sizes_px: Height and width; int64, shape (images, 2).

    Example:
        >>> import numpy as np
        >>> packed = packed_sizes(np.array([[6, 8], [0, 0]]))
        >>> packed["num_images"], unpacked_sizes(packed, 2).tolist()
        (2, [[6, 8], [0, 0]])
    """
    return {"num_images": len(sizes_px), "zlib_base64_u32": packed_numbers(sizes_px)}


def unpacked_sizes(packed: Any, num_images: int) -> NDArray[np.int64] | None:  # noqa: ANN401
    """Return sizes, new memory; None if there are none, or they are of more or fewer images.

    Raises:
        StoreError: they are damaged.
    """
    if not isinstance(packed, dict) or packed.get("num_images") != num_images:
        return None
    try:
        return unpacked_numbers(packed["zlib_base64_u32"], 2 * num_images).reshape(num_images, 2)
    except (KeyError, ValueError) as error:
        raise StoreError(f"the metadata {SIZES!r} of the store are damaged: {error}.") from error
