# SPDX-License-Identifier: Apache-2.0
"""Which requests to send for ranges: near ones are one request, a long one several at a time."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.blobs.blobs import ByteRange

# A request of its own costs what these bytes cost: 1 ms at 64 MB/s, and a fee.
GAP_BYTES: Final = 64 << 10
REQUEST_BYTES: Final = 8 << 20  # of one connection; several are faster together


def plan_requests(
    ranges: Sequence[ByteRange], gap_bytes: int = GAP_BYTES
) -> tuple[list[ByteRange], list[tuple[int, int]]]:
    """Return what to ask for, each byte once, and where each range is in the answers.

    That is the number of its request, and from which byte of that on. Ranges with a gap of up to
    `gap_bytes` between them are one request.

    Example:
        >>> from penstock.blobs.blobs import ByteRange
        >>> ranges = [ByteRange("a", 900, 950), ByteRange("b", 0, 10), ByteRange("a", 0, 100)]
        >>> requests, places = plan_requests(ranges)
        >>> [request[:3] for request in requests], places
        ([('a', 0, 950), ('b', 0, 10)], [(0, 900), (1, 0), (0, 0)])
    """
    places = [(0, 0)] * len(ranges)
    requests: list[ByteRange] = []
    for number in sorted(range(len(ranges)), key=lambda number: _rank(ranges[number])):
        wanted = ranges[number]
        if requests and (joined := _joined(requests[-1], wanted, gap_bytes)) is not None:
            requests[-1] = joined
        else:
            requests.append(wanted)
        places[number] = len(requests) - 1, wanted.start - requests[-1].start
    return requests, places


def _rank(one: ByteRange) -> tuple[str, str, int, float]:
    return one.name, one.version, one.start, math.inf if one.stop is None else one.stop


def _joined(one: ByteRange, other: ByteRange, gap_bytes: int) -> ByteRange | None:
    """Return one range for two, of which `other` begins behind the first; None if they are far."""
    if (one.name, one.version) != (other.name, other.version) or other.start == other.stop:
        return None
    if one.stop is None:
        return one
    if other.start > one.stop + gap_bytes:
        return None
    stop = None if other.stop is None else max(one.stop, other.stop)
    is_long = stop is None or stop - one.start > REQUEST_BYTES
    return None if is_long and stop != one.stop else one._replace(stop=stop)


def parts_of(request: ByteRange) -> list[ByteRange]:
    """Return a long request in parts of equal size."""
    if request.stop is None or request.stop - request.start <= REQUEST_BYTES:
        return [request]
    size = request.stop - request.start
    num_parts = -(-size // REQUEST_BYTES)
    ends = [request.start + size * k // num_parts for k in range(num_parts + 1)]
    return [request._replace(start=a, stop=b) for a, b in itertools.pairwise(ends)]
