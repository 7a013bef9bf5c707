# SPDX-License-Identifier: Apache-2.0
"""Images of any kind for round trips, and files that are damaged in any way."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

from hypothesis import strategies as st

from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject

TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Co", "Cn", "Zs", "Zl", "Zp")),
    min_size=1,
    max_size=12,
)
WORD = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
NUMBER = st.one_of(
    st.integers(-50, 5000).map(float),
    st.integers(-5_000_000, 500_000_000).map(lambda n: n / 100_000),
)
POINT = st.one_of(st.tuples(NUMBER, NUMBER), st.just((math.nan, math.nan)))
FLAG = st.sampled_from([None, False, True])
BOX = st.tuples(NUMBER, NUMBER, NUMBER, NUMBER)


@st.composite
def objects(draw, *, depth=1):
    points = tuple(draw(st.lists(POINT, max_size=4)))
    count = len(points)
    names = draw(st.lists(TEXT, min_size=count, max_size=count, unique=True))
    seen = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    return AnnotatedObject(
        draw(TEXT),
        draw(st.none() | BOX),
        points,
        draw(st.sampled_from([(), tuple(names)])),
        draw(st.sampled_from([(), tuple(seen)])),
        *(draw(FLAG) for _ in range(3)),
        draw(st.just("") | TEXT),
        draw(st.dictionaries(TEXT, st.just("") | TEXT, max_size=3)),
        tuple(draw(st.lists(objects(depth=depth - 1), max_size=2))) if depth else (),
    )


def images(of=None):
    side = st.integers(1, 9000)
    return st.builds(
        lambda size, found: AnnotatedImage(Path("1.jpg"), "1", *size, tuple(found), ""),
        st.just((None, None)) | st.tuples(side, side),
        st.lists(objects() if of is None else of, max_size=3),
    )


def same(one, other):
    """Whether two are equal, NaN being NaN."""
    return repr(one) == repr(other)


PIECES = (
    b"<", b">", b"&", b'"', b"<!DOCTYPE a>", b"<!ENTITY x 'y'>", b"&x;", b"<object>", b"</object>",
    b"nan", b"inf", b"-1", b"1e999", b"99999999999999999999", b"\0", b"\xff\xfe", b"\xef\xbb\xbf",
    b"<landmarks>", b"<part/>", b"\r", b"\n", b"\t", b"..", b"/", b"\\", b"#", b": ", b"- ", b"[",
    b"{", b"*a", b"&a ", b"%", b"!!python/object:os.system ", b"0", b"1_0", b"\xc3",
)  # fmt: skip


VALUES = (
    b"", b" ", b"nan", b"inf", b"-inf", b"-1", b"0", b"1", b"2", b"1.5", b"1e999", b"1e300", b"1_0",
    b"9" * 5000, b"0x10", b"\xc2\xb2", b"\xd9\xa3", b"1 2", b"1,2", b"..", b"/", b"a" * 300,
    b"a&lt;b", b"<x1>1</x1>", b"<name>b</name>", b"<part><name>c</name></part>", b"&#0;",
    b"&#x10ffff;", b"\xff",
)  # fmt: skip
_VALUE = re.compile(rb"(?<=>)[^<>\n]+(?=<)|(?<=')[^'<>]+(?=')|(?<=[ ,])[\w.\\/]+(?=[ ,\]\r\n])")


def damaged(data, number):
    """Return `data` changed by the number alone: every other one has another value somewhere.

    The others have some bytes changed, cut, doubled or put in.
    """
    rng = random.Random(number)
    if number % 2:
        for _ in range(rng.randint(1, 2)):
            value = rng.choice(list(_VALUE.finditer(data)) or [re.match(b"", data)])
            data = data[: value.start()] + rng.choice(VALUES) + data[value.end() :]
        return data
    data = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        size = rng.choice((1, 1, 4, 30, 400))
        match rng.randrange(5):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(*rng.choice(((0, 256), (32, 127))))])
            case 1:
                del data[at : at + size]
            case 2:
                data[at:at] = rng.choice(PIECES) * rng.choice((1, 1, 1, 100))
            case 3:
                other = rng.randrange(len(data) + 1)
                data[at:at] = data[other : other + size]
            case _:
                data[at : at + size] = rng.choice(PIECES)
    return bytes(data)
