# SPDX-License-Identifier: Apache-2.0
"""JPEG files to pixels: libjpeg-turbo for all kinds that it knows, OpenCV for odd sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import cv2
import numpy as np
import simplejpeg

from penstock.images.repair import repair_jpeg
from penstock.images.segments import jpeg_segments

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.images.headers import ImageHeader, JpegHeader

__all__ = ["check_jpeg", "decode_jpeg"]

_KNOWN: Final = {
    "baseline", "extended", "progressive", "lossless", "arithmetic", "arithmetic progressive",
}  # fmt: skip
# Each block of 8 x 8 pixels takes a bit at least of the first scan; arithmetic coding may do with
# less. What has less is cut off: known before the memory for its pixels is taken.
_MAX_PIXELS_PER_BYTE: Final = 8 * 64
# Encoders make some ten scans. Each goes over all blocks, however few bytes it has, so that a small
# file with many keeps a decoder busy for hours.
_MAX_SCANS: Final = 100
_SCAN: Final = b"\xff\xda"
_UNKNOWN_SAMPLING: Final = "subsampling"  # TurboJPEG's word where it knows no name for it


def decode_jpeg(
    data: bytes | memoryview, header: ImageHeader, jpeg: JpegHeader, *, strict: bool
) -> NDArray[np.uint8]:
    """Return the pixels of a JPEG file as they are stored: uint8, (height, width, 3), RGB.

    Raises:
        ValueError: the file is damaged, or of a kind that no library here decodes.
    """
    check_jpeg(data, header, jpeg, strict=strict)
    try:
        return _by_turbojpeg(data, jpeg, strict)
    except ValueError as error:
        if _UNKNOWN_SAMPLING in str(error):
            return _by_opencv(data, strict)
        tidy = _without_gaps(data, jpeg)
        if len(tidy) == len(data):
            raise
    return _by_turbojpeg(tidy, jpeg, strict)


def check_jpeg(
    data: bytes | memoryview, header: ImageHeader, jpeg: JpegHeader, *, strict: bool
) -> None:
    """Raise ValueError if a file cannot be decoded, or only at a cost that its size does not tell.

    Whoever hands a file to a decoder asks first. A usual file costs a microsecond; one of several
    scans is searched for them.
    """
    _check_kind(jpeg)
    if strict:
        _check_amount(data, header, jpeg)
    if not (jpeg.is_single_scan and jpeg.process in ("baseline", "extended", "lossless")):
        _check_scans(data)


def _check_kind(jpeg: JpegHeader) -> None:
    if jpeg.process not in _KNOWN:
        raise ValueError(f"a JPEG file of the kind {jpeg.process!r}, which no library here decodes")
    if jpeg.precision_bits != 8:
        raise ValueError(
            f"a JPEG file of {jpeg.precision_bits} bits per sample: the libraries here decode 8. "
            "Convert it, to a PNG file of 16 bits for example"
        )
    if jpeg.num_components not in (1, 3, 4):
        raise ValueError(
            f"a JPEG file of {jpeg.num_components} components; 1, 3 and 4 have a meaning"
        )


def _check_amount(data: bytes | memoryview, header: ImageHeader, jpeg: JpegHeader) -> None:
    num_bytes = len(data) - jpeg.scan_offset
    num_pixels = header.height_px * header.width_px
    if "arithmetic" not in jpeg.process and num_pixels > (num_bytes + 1) * _MAX_PIXELS_PER_BYTE:
        size = f"{header.height_px} x {header.width_px} px (height x width)"
        raise ValueError(
            f"Premature end of JPEG file: {num_bytes} bytes cannot be an image of {size}"
        )


def _check_scans(data: bytes | memoryview) -> None:
    num_scans = bytes(data).count(_SCAN)
    if num_scans > _MAX_SCANS:
        raise ValueError(
            f"a JPEG file of {num_scans} scans, more than {_MAX_SCANS}: made to keep a decoder busy"
        )


def _by_turbojpeg(data: bytes | memoryview, jpeg: JpegHeader, strict: bool) -> NDArray[np.uint8]:
    pixels: NDArray[np.uint8]
    if jpeg.num_components == 4:
        return _from_cmyk(simplejpeg.decode_jpeg(data, "CMYK", strict=strict))
    if jpeg.num_components == 1 and jpeg.process == "lossless":
        # Only as it is: asked for RGB it refuses, and asked for a smaller size it ends the process
        # (simplejpeg 1.9).
        grey = simplejpeg.decode_jpeg(data, "GRAY", strict=strict)
        return np.repeat(grey, 3, axis=2)
    pixels = simplejpeg.decode_jpeg(data, "RGB", strict=strict)
    return pixels


def _from_cmyk(lack: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return RGB for inks without a profile: each colour is its ink's lack times black's.

    Adobe's programs write the lack instead of the ink, and nearly all such files are theirs. Those
    of others have no mark to be told by that OpenCV or Pillow heed: both take all for Adobe's.
    """
    pixels: NDArray[np.uint8] = np.empty((*lack.shape[:2], 3), np.uint8)
    for row, out in zip(lack, pixels, strict=True):  # by rows: twice the bits for one row only
        product = row[:, :3].astype(np.uint16) * row[:, 3:] + 127
        out[:] = product // 255
    return pixels


def _without_gaps(data: bytes | memoryview, jpeg: JpegHeader) -> bytes:
    """Return the file without what lies between its segments and belongs to none.

    Programs that rewrite metadata leave it. It is no damage of the image, but strictness is not
    to be had for the pixels alone.
    """
    pieces: list[bytes | memoryview] = [b"\xff\xd8"]
    for marker, start, stop in jpeg_segments(data):
        pieces += (bytes((0xFF, marker)), data[start - 2 : stop])
    return b"".join((*pieces, data[jpeg.scan_offset :]))


def _by_opencv(data: bytes | memoryview, strict: bool) -> NDArray[np.uint8]:
    whole = data if strict else repair_jpeg(data) or data
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    image: NDArray[Any] | None
    try:
        image = cv2.imdecode(np.frombuffer(whole, np.uint8), flags)
    except cv2.error:
        image = None
    if image is None:
        raise ValueError("a JPEG file of rare sampling, and damaged: OpenCV cannot decode it")
    return image.astype(np.uint8, copy=False)
