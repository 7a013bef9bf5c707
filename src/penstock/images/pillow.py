# SPDX-License-Identifier: Apache-2.0
"""Pillow, asked for a few forms of image only, and raising nothing but ValueError."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Final

from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.images.headers import ImageHeader

__all__ = ["check_opened", "open_by_pillow", "told_as_value_errors", "unidentified"]

# Not among them: what has no mark to know it by (TGA), what starts another program to be drawn
# (EPS), what holds a file of another form and size (ICO), what is decoded by slow Python (QOI).
_FORMS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF")
_NUM_BYTES_SHOWN: Final = 24  # enough for "<!DOCTYPE html>" or "version https://git-lfs"
_POINTER: Final = "version https://git-lfs"


@contextlib.contextmanager
def told_as_value_errors() -> Iterator[None]:
    """Turn what Pillow raises over damaged data, nearly anything, into ValueErrors."""
    try:
        yield
    except MemoryError:
        raise
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error


def open_by_pillow(data: bytes | memoryview) -> Image.Image:
    """Return Pillow's image of a file, of which it has read no pixels.

    `Image.open` is not called: of what has more pixels than a limit that belongs to the whole
    process it warns, or refuses it; here the size is for the caller to check. For TIFF, and for
    some GIF, Pillow heeds that limit all the same (`PIL.Image.MAX_IMAGE_PIXELS`, and twice that).

    Raises:
        ValueError: the file is of no known form, or its header is damaged.
    """
    Image.init()
    file = io.BytesIO(data)
    prefix = file.read(16)
    for form in _FORMS:
        if form not in Image.OPEN:  # Pillow was built without it
            continue
        make, accept = Image.OPEN[form]
        if accept is not None and accept(prefix) is not True:
            continue
        file.seek(0)
        with told_as_value_errors():
            return make(file, "")
    raise unidentified(bytes(data[:_NUM_BYTES_SHOWN]))


def check_opened(image: Image.Image, header: ImageHeader, max_pixels: int | None) -> None:
    """Raise ValueError if Pillow is about to decode another size than the header's.

    A file may give its size in several places, and Pillow's is not always the one that was judged.
    Of TIFF Pillow may give the sides changed round, as the image is to be seen.
    """
    size = f"{image.height} x {image.width} px (height x width)"
    if max_pixels is not None and image.height * image.width > max_pixels:
        raise ValueError(f"{size} is more than {max_pixels:,} pixels")
    if (image.height, image.width) not in (
        (header.height_px, header.width_px),
        (header.upright_height_px, header.upright_width_px),
    ):
        raise ValueError(
            f"the file gives two sizes: {size}, and {header.height_px} x {header.width_px} px"
        )


def unidentified(start: bytes) -> ValueError:
    """Return the error that says what a file is that is no image, by how it begins."""
    if not all(32 <= byte < 127 or byte in b"\t\r\n" for byte in start):
        return ValueError("no known kind of image, or its header is damaged")
    text = start.decode()
    why = ": the file itself was not fetched (git lfs pull)" if text.startswith(_POINTER) else ""
    return ValueError(f"text, not an image: it begins with {text!r}{why}")
