# SPDX-License-Identifier: Apache-2.0
"""Text in an image, at exact places: in Pillow's own font, which has ASCII.

Other text is written in a font of the system, where one with many scripts is found; otherwise
without its accents, and with "?" for what is left.
"""

from __future__ import annotations

import contextlib
import functools
import unicodedata
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["fitted", "line_height", "text_width", "write"]

_WHITE, _BLACK = (255, 255, 255), (0, 0, 0)
_BRIGHT: Final = 140.0  # of 255; on brighter grounds black can be read better than white


_MANY_SCRIPTS: Final = (
    "NotoSansCJK-Regular.ttc",
    "wqy-microhei.ttc",
    "wqy-zenhei.ttc",
    "msyh.ttc",
    "PingFang.ttc",
    "Arial Unicode.ttf",
    "DejaVuSans.ttf",
)

_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@functools.cache
def _font(size_px: int) -> _Font:
    return ImageFont.load_default(size_px)


@functools.cache
def _wide_font(size_px: int) -> _Font | None:
    for name in _MANY_SCRIPTS:
        with contextlib.suppress(OSError):
            return ImageFont.truetype(name, size_px)
    return None


def _in_font(text: str, size_px: int) -> tuple[str, _Font]:
    """Return a text as it can be written, and the font."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    if text.isascii():
        return text, _font(size_px)
    if (wide := _wide_font(size_px)) is not None:
        return text, wide
    bare = unicodedata.normalize("NFKD", text)
    bare = "".join(c for c in bare if not unicodedata.combining(c))
    return bare.encode("ascii", "replace").decode(), _font(size_px)


@functools.lru_cache(4096)
def _mask(text: str, size_px: int) -> NDArray[np.floating[Any]]:
    """Return how much of each pixel the text covers, 0 to 1; float32 (height, width)."""
    text, font = _in_font(text, size_px)
    # A tall and a deep letter make all lines alike, but those of scripts that need more.
    _, top, _, bottom = font.getbbox("Hgj|" + text)
    height = max(int(np.ceil(bottom - top)), line_height(size_px) if text else 1)
    width = max(1, int(np.ceil(font.getlength(text))))
    page = Image.new("L", (width, height))
    ImageDraw.Draw(page).text((0, -top), text, fill=255, font=font)
    return np.asarray(page, np.float32)[: line_height(size_px) if text else None] / np.float32(255)


def text_width(text: str, size_px: int) -> int:
    """Return how many pixels a text takes from left to right."""
    return len(_mask(text, size_px).T)


def line_height(size_px: int) -> int:
    """Return how many pixels any text takes from top to bottom."""
    return len(_mask("", size_px))


def fitted(text: str, width_px: int, size_px: int) -> str:
    """Return a text, or as much of it as fits into a width, with an ellipsis."""
    if len(text) <= width_px and text_width(text, size_px) <= width_px:
        return text
    text = text[: max(width_px, 0)]  # no letter is narrower than a pixel
    while text and text_width(text + "…", size_px) > width_px:
        text = text[:-1]
    return text + "…" if text else ""


def write(
    image: NDArray[np.uint8],
    text: str,
    left: int,
    top: int,
    size_px: int,
    ground: tuple[int, int, int],
) -> None:
    """Write a text into an image, black or white as can be read on `ground`; cut at its borders."""
    light = 0.299 * ground[0] + 0.587 * ground[1] + 0.114 * ground[2]
    colour = np.array(_BLACK if light > _BRIGHT else _WHITE, np.float32)
    mask = _mask(text, size_px)
    under = image[max(top, 0) : top + mask.shape[0], max(left, 0) : left + mask.shape[1]]
    cover = mask[max(-top, 0) :, max(-left, 0) :][: under.shape[0], : under.shape[1], None]
    under[:] = np.rint(under * (1 - cover) + colour * cover).astype(np.uint8)
