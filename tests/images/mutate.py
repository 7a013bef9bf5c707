# SPDX-License-Identifier: Apache-2.0
"""Decodes damaged files by the thousand, in a process of its own: `python -m tests.images.mutate`.

A file that ends the process, or keeps it for a minute, ends it with its number as the last line.
What is raised and is no ValueError is printed. Memory is limited for the process as a whole.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import resource
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
from tests.images.making import many_forms, oriented, picture, saved, with_gain_map

from penstock.images import decode_image, jpeg, read_header, repair_image, without_orientation
from penstock.images.decode import check_image
from penstock.images.regions import Region, decode_region
from penstock.images.shrink import shrink_image

LONGEST_S = 60  # for all that is done with one file; the slowest that was seen took 2 s
LIMIT_BYTES = 4 << 30  # of addresses: the libraries alone take more than 1 GiB of those
EXTREMES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)


def many_files():
    """Return files of all forms, and larger JPEG files, of which parts are decoded."""
    large = picture(120, 90)
    return many_forms() | {
        "codestream.j2k": saved(picture(), "JPEG2000", no_jp2=True),
        "large.jpg": saved(large, "JPEG"),
        "gain_map.jpg": with_gain_map(saved(large, "JPEG"), saved(picture(), "JPEG")),
        "large444.jpg": saved(large, "JPEG", subsampling=0),
        "large_restarts.jpg": saved(large, "JPEG", restart_marker_rows=1),
        "large_grey.jpg": saved(large[:, :, 0].copy(), "JPEG"),
        "large_progressive.jpg": saved(large, "JPEG", progressive=True),
        **{f"large{turn}.jpg": oriented("JPEG", turn, large) for turn in range(2, 9)},
    }


def mutated(rng, files):
    """Return one of the files, damaged in one to four places or ways."""
    names = sorted(files)
    name = names[rng.integers(len(names))]
    data = bytearray(files[name])
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        way = rng.integers(7)
        start = _place(rng, len(data))
        if way == 0:
            for _ in range(rng.integers(1, 20)):
                data[_place(rng, len(data))] = rng.integers(256)
        elif way == 1:
            del data[max(start, 4) :]
        elif way == 2:
            other = files[names[rng.integers(len(names))]]
            data[start:] = other[_place(rng, len(other)) :]
        elif way == 3:
            number = EXTREMES[rng.integers(len(EXTREMES))]
            size = int(rng.choice([1, 2, 4]))
            form = ("<", ">")[rng.integers(2)] + {1: "B", 2: "H", 4: "I"}[size]
            if start + size <= len(data):
                struct.pack_into(form, data, start, number % (1 << 8 * size))
        elif way == 4:
            data[start:start] = rng.bytes(int(rng.integers(1, 64)))
        elif way == 5:
            stop = start + int(rng.integers(1, 200))
            data[start:start] = data[start:stop]
        else:
            stop = start + int(rng.integers(1, 64))
            data[start:stop] = bytes(len(data[start:stop]))
        if len(data) < 5:
            break
    if name.endswith(".png") and rng.integers(4):
        _correct_checksums(data)  # so that the damage gets beyond them
    return name, bytes(data)


def _place(rng, size):
    """A place in a file; half of them where its header is."""
    return int(rng.integers(min(size, 120) if rng.integers(2) else size)) if size else 0


def _correct_checksums(data):
    place = 8
    while place + 12 <= len(data):
        (size,) = struct.unpack_from(">I", data, place)
        stop = place + 8 + size
        if stop + 4 > len(data):
            return
        struct.pack_into(">I", data, stop, zlib.crc32(data[place + 4 : stop]))
        place = stop + 4


def upper_half(data):
    """Decode a part of the image as it is seen: whatever decodes as a whole gives the same here."""
    header = read_header(data)
    region = Region(0, 0, max(1, header.upright_height_px // 2), header.upright_width_px)
    image = part_or_none(decode_image, data)
    for factor in (1, 2):
        for whole in (False, True):
            part = part_or_none(
                decode_region, data, header, region, factor, fast=False, whole=whole
            )
            if image is None:
                assert part is None or not whole, "what the whole decode notices is overlooked"
                continue
            assert part is not None, "a part is refused, the whole is not"
            if factor == 1:
                assert np.array_equal(part, image[: region.height]), "other pixels"
            # A turned image is widened on any side to whole pixels of the reduced one.
            extra = np.subtract(
                part.shape, (-(-region.height // factor), image.shape[1] // factor, 3)
            )
            assert ((extra >= 0) & (extra <= 1)).all(), f"a part of shape {part.shape}"
    if image is None:
        raise ValueError("refused as a whole")


def part_or_none(decode, *arguments, **how):
    try:
        return decode(*arguments, **how)
    except ValueError:
        return None


def cut_to_fit(data):
    """Return a JPEG file without the image data that its frame header leaves over."""
    header = read_header(data).jpeg
    files = (data[:stop] + b"\xff\xd9" for stop in range(header.scan_offset, len(data)))
    return next(
        file for file in files if part_or_none(jpeg.jpeg_by_opencv, file, header) is not None
    )


def attempt(data):
    """Do with a file all that can be done; return how many of these were refused.

    Raises:
        Exception: anything but ValueError, which is what this looks for.
    """
    refused = 0
    for act in (
        read_header,
        decode_image,
        lambda whole: decode_image(whole, strict=False, orientation="stored"),
        lambda whole: decode_image(repair_image(whole) or whole, strict=False),
        lambda whole: decode_image(without_orientation(whole)),
        check_image,
        lambda whole: shrink_image(whole, 16, None),
        upper_half,
    ):
        try:
            act(data)
        except ValueError:
            refused += 1
    return refused


def peak_bytes():
    """Return the most memory that this process had; getrusage counts its parent's before exec."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])


def main(decoder, seed, start, stop, *folders):
    if decoder == "OpenCV":
        jpeg.simplejpeg = None
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    files = many_files()
    for folder in folders:
        paths = [p for p in sorted(Path(folder).iterdir()) if p.suffix in (".jpg", ".png", ".gif")]
        files.update({p.name: p.read_bytes() for p in paths if 1000 < p.stat().st_size < 20_000})
    refused = decoded = 0
    wrong = []
    errors = sys.stderr.fileno()
    for number in range(int(start), int(stop)):
        name, data = mutated(np.random.default_rng((int(seed), number)), files)
        os.write(1, f"{number} {name}\n".encode())
        faulthandler.dump_traceback_later(LONGEST_S, exit=True, file=errors)
        try:
            num_refused = attempt(data)
        except Exception as error:
            wrong.append(f"{number} {name}: {type(error).__name__}: {error}")
        else:
            refused += num_refused > 0
            decoded += num_refused == 0
    faulthandler.cancel_dump_traceback_later()
    said = {"refused": refused, "decoded": decoded, "wrong": wrong, "peak_bytes": peak_bytes()}
    os.write(1, json.dumps(said).encode() + b"\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(*sys.argv[1:])
