# SPDX-License-Identifier: Apache-2.0
"""Image files of every form, made from one picture, for tests."""

from __future__ import annotations

import io
import struct
import zlib

import cv2
import numpy as np
from PIL import Image

HEIGHT, WIDTH = 24, 36


def picture(height=HEIGHT, width=WIDTH, seed=0):
    """Smooth colours, so that lossy forms stay near; no symmetry, so that every turn shows."""
    few = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8)
    return cv2.resize(few, (width, height), interpolation=cv2.INTER_LINEAR)


def mask(height=HEIGHT, width=WIDTH):
    """Alpha: a part is transparent, a part half."""
    alpha = np.full((height, width), 255, np.uint8)
    alpha[: height // 3] = 0
    alpha[height // 3 : height // 2] = 100
    return alpha


def saved(pixels, form, **how):
    """Return the file that Pillow makes of an array or an image of its own."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    file = io.BytesIO()
    image.save(file, form, **how)
    return file.getvalue()


def encoded(pixels, suffix, *options):
    """Return the file that OpenCV makes of an array in RGB order, of any dtype."""
    order = {3: [2, 1, 0], 4: [2, 1, 0, 3]}.get(pixels.shape[2] if pixels.ndim == 3 else 1)
    array = np.ascontiguousarray(pixels if order is None else pixels[:, :, order])
    done, file = cv2.imencode(suffix, array, list(options))
    assert done
    return file.tobytes()


def oriented(form, orientation, pixels=None, **how):
    """Return a file whose Exif gives an orientation; its stored pixels are the picture's."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(picture() if pixels is None else pixels, form, exif=exif, **how)


def png_chunk(name, content):
    check = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)


def png_file(width, height, raw, *, depth=8, colours=2, interlaced=0, before=b""):
    """Return a PNG file with any header over any raw bytes."""
    header = struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, interlaced)
    chunks = png_chunk(b"IHDR", header) + before + png_chunk(b"IDAT", zlib.compress(raw))
    return b"\x89PNG\r\n\x1a\n" + chunks + png_chunk(b"IEND", b"")


def interlaced_png(pixels):
    """Return an interlaced PNG file (Adam7), which neither Pillow nor OpenCV writes."""
    height, width = pixels.shape[:2]
    raw = b""
    for top, left, down, right in (
        (0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2),
        (1, 0, 2, 1),
    ):  # fmt: skip
        rows = pixels[top::down, left::right]
        raw += b"".join(b"\0" + row.tobytes() for row in rows if row.size)
    return png_file(width, height, raw, interlaced=1)


def segment(marker, content):
    """Return a segment of a JPEG file."""
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def frame(height, width, num, marker=0xC0):
    """Return the segment of a JPEG file that gives its size, and names `num` components."""
    components = b"".join(bytes((n + 1, 0x11, 0)) for n in range(num))
    return segment(marker, struct.pack(">BHHB", 8, height, width, num) + components)


def lossless_jpeg(pixels, adobe=None):
    """Return a lossless JPEG file: each value less the one on its left, by one table of 17 codes.

    Reference:
        ITU-T T.81, annex H. Codes of 5 bits, all alike long; predictor 1.
    """
    height, width, num = pixels.shape
    scan = bytes((num, *(b for n in range(num) for b in (n + 1, 0)), 1, 0, 0))
    head = b"" if adobe is None else segment(0xEE, b"Adobe\0\x64\0\0\0\0" + bytes((adobe,)))
    table = bytes((0, 0, 0, 0, 0, 17, *[0] * 11, *range(17)))
    values = pixels.astype(int)
    left = np.empty_like(values)
    left[:, 1:] = values[:, :-1]
    left[1:, 0] = values[:-1, 0]
    left[0, 0] = 128
    bits = []
    for difference in (values - left).ravel().tolist():
        size = abs(difference).bit_length()
        bits.append(f"{size:05b}")
        if size:
            bits.append(f"{difference + (difference < 0) * ((1 << size) - 1):0{size}b}")
    text = "".join(bits)
    text += "1" * (-len(text) % 8)
    data = int(text, 2).to_bytes(len(text) // 8, "big").replace(b"\xff", b"\xff\0")
    head += segment(0xC4, table) + frame(height, width, num, 0xC3) + segment(0xDA, scan)
    return b"\xff\xd8" + head + data + b"\xff\xd9"


def with_gain_map(primary, gain_map, between=b""):
    """Return a JPEG file as Ultra HDR is: an image, and behind its end a second one.

    Reference:
        CIPA DC-007, the multi-picture format: an index in APP2 says where each image lies.
    """
    xmp = b"http://ns.adobe.com/xap/1.0/\0" + b'<rdf:Description hdrgm:Version="1.0"/>'
    head = primary[:2] + segment(0xE1, xmp)
    entries = ((0xB000, 7, 4, b"0100"), (0xB001, 4, 1, b"\2\0\0\0"), (0xB002, 7, 32, b"\x32\0\0\0"))
    index = b"MPF\0II*\0" + struct.pack("<IH", 8, len(entries))
    index += b"".join(struct.pack("<HHI", *entry[:3]) + entry[3] for entry in entries) + bytes(4)
    first_bytes = len(head) + 4 + len(index) + 32 + len(primary) - 2
    place = first_bytes + len(between) - (len(head) + 8)  # counted from "II"
    index += struct.pack("<IIIHH", 0x030000, first_bytes, 0, 0, 0)
    index += struct.pack("<IIIHH", 0, len(gain_map), place, 0, 0)
    return head + segment(0xE2, index) + primary[2:] + between + gain_map


def with_frame(jpeg, *, height=None, width=None, precision=None, marker=None, sampling=None):
    """Return a JPEG file with another frame header over the same data."""
    data = bytearray(jpeg)
    place = next(
        data.find(bytes((0xFF, sof))) for sof in (0xC0, 0xC2) if bytes((0xFF, sof)) in data
    )
    if marker is not None:
        data[place + 1] = marker
    if precision is not None:
        data[place + 4] = precision
    if height is not None:
        struct.pack_into(">H", data, place + 5, height)
    if width is not None:
        struct.pack_into(">H", data, place + 7, width)
    for number, factors in enumerate(sampling or ()):
        data[place + 11 + 3 * number] = factors
    return bytes(data)


def many_forms():
    """Return files of all forms and kinds that can be made here, by name."""
    rgb = picture()
    rgba = np.dstack([rgb, mask()])
    grey = rgb[:, :, 0].copy()
    palette = Image.fromarray(rgb).quantize(32)
    deep = rgb.astype(np.uint16) * 257
    second = [Image.fromarray(255 - rgb)]
    return {
        "baseline.jpg": saved(rgb, "JPEG", quality=95),
        "444.jpg": saved(rgb, "JPEG", subsampling=0),
        "progressive.jpg": saved(rgb, "JPEG", progressive=True),
        "grey.jpg": saved(grey, "JPEG"),
        "cmyk.jpg": saved(Image.fromarray(rgb).convert("CMYK"), "JPEG"),
        "restarts.jpg": saved(rgb, "JPEG", restart_marker_blocks=2),
        "turned.jpg": oriented("JPEG", 6),
        "lossless_grey.jpg": lossless_jpeg(rgb[:, :, :1]),
        "lossless.jpg": lossless_jpeg(rgb),
        "rgb.png": saved(rgb, "PNG"),
        "rgba.png": saved(rgba, "PNG"),
        "palette.png": saved(palette, "PNG", transparency=3),
        "bits.png": saved(Image.fromarray(grey).convert("1"), "PNG"),
        "deep.png": encoded(deep, ".png"),
        "interlaced.png": interlaced_png(rgb),
        "animated.png": saved(rgb, "PNG", save_all=True, append_images=second),
        "turned.png": oriented("PNG", 7),
        "flat.gif": saved(palette, "GIF"),
        "transparent.gif": saved(palette, "GIF", transparency=3),
        "animated.gif": saved(rgb, "GIF", save_all=True, append_images=second),
        "lossy.webp": saved(rgb, "WEBP"),
        "lossless.webp": saved(rgba, "WEBP", lossless=True, exact=True),
        "alpha.webp": saved(rgba, "WEBP"),
        "animated.webp": saved(rgb, "WEBP", save_all=True, append_images=second),
        "turned.webp": oriented("WEBP", 5),
        "raw.tif": saved(rgb, "TIFF"),
        "lzw.tif": saved(rgba, "TIFF", compression="tiff_lzw"),
        "jpeg.tif": saved(rgb, "TIFF", compression="jpeg"),
        "deflate.tif": encoded(deep, ".tiff"),
        "rgb.bmp": saved(rgb, "BMP"),
        "palette.bmp": saved(palette, "BMP"),
        "rgb.ppm": saved(rgb, "PPM"),
        "deep.ppm": encoded(deep, ".ppm"),
        "rgb.jp2": saved(rgb, "JPEG2000"),
        "rgb.avif": saved(rgba, "AVIF"),
    }
