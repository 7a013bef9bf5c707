# SPDX-License-Identifier: Apache-2.0
"""Text in an image, at exact places: in Pillow's own font, which has ASCII.

Other text is written in a font of the system that has all its letters, where one is found;
otherwise in the one that has most of them, without accents that it lacks, and with "?" for what is
left.
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

__all__ = ["fitted", "line_height", "text_width", "wrapped", "write"]

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

_PROBE_PX: Final = 24  # large enough for letters to differ from the box of those that lack
_NO_LETTER: Final = "\U0010ffff"  # is no character, and never will be

_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@functools.cache
def _font(size_px: int) -> _Font:
    return ImageFont.load_default(size_px)


@functools.cache
def _wide_font(name: str, size_px: int) -> ImageFont.FreeTypeFont | None:
    with contextlib.suppress(OSError):
        return ImageFont.truetype(name, size_px)
    return None


@functools.lru_cache(65536)
def _has_glyph(name: str, letter: str) -> bool:
    """Return whether a font draws a letter as something else than what it has no glyph for."""
    font = _wide_font(name, _PROBE_PX)
    if font is None:
        return False
    drawn, lacking = (font.getmask(text) for text in (letter, _NO_LETTER))
    return drawn.size != lacking.size or bytes(drawn) != bytes(lacking)


def _in_font(text: str, size_px: int) -> tuple[str, _Font]:
    """Return a text as it can be written, and the font."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    if text.isascii():
        return text, _font(size_px)
    letters = [c for c in set(text) if not c.isascii()]
    number_of = {name: sum(_has_glyph(name, c) for c in letters) for name in _MANY_SCRIPTS}
    best = max(number_of, key=lambda name: number_of[name])
    wide = _wide_font(best, size_px) if number_of[best] else None
    if wide is None:
        return "".join(map(_bare, text)), _font(size_px)
    return "".join(c if c.isascii() or _has_glyph(best, c) else _bare(c) for c in text), wide


def _bare(letter: str) -> str:
    """Return a letter without accents; "?" for one that is not of ASCII then."""
    parts = unicodedata.normalize("NFKD", letter)
    left = "".join(c for c in parts if not unicodedata.combining(c))
    return left.encode("ascii", "replace").decode()


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


def wrapped(text: str, width_px: int, size_px: int, most_lines: int) -> list[str]:
    """Return a text in lines that fit into a width; the last one ends in an ellipsis if need be.

    Lines end between words; words that are longer than a line, as paths are, anywhere.

    Example:
        >>> wrapped("a cat and a dog", 60, 12, 5)
        ['a cat', 'and a dog']
    """
    lines: list[str] = []
    while text and len(lines) < most_lines - 1 and text_width(text, size_px) > width_px:
        stop = max(1, len(fitted(text, width_px, size_px)) - 1)  # without its ellipsis
        blank = text.rfind(" ", 1, stop + 1)
        stop = blank if blank > 0 else stop
        lines.append(text[:stop].rstrip())
        text = text[stop:].lstrip()
    return [*lines, fitted(text, width_px, size_px)] if text and most_lines > 0 else lines


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
