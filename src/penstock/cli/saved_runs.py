# SPDX-License-Identifier: Apache-2.0
"""Table that compares saved runs: a row for each figure, a column for each run."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from penstock.insight.units import duration, percent
from penstock.lines import amount, say
from penstock.program.saved import SavedLoader, SavedRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["say_side_by_side"]

_NONE: Final = "-"
_WIDEST: Final = 40  # characters of a command


def _wait_s(run: SavedRun) -> float:
    return sum(loader.wait_s for loader in run.loaders)


def _wait_share(thing: SavedRun | SavedLoader) -> float | None:
    loaders = thing.loaders if isinstance(thing, SavedRun) else [thing]
    seconds = sum(loader.seconds for loader in loaders)
    return sum(loader.wait_s for loader in loaders) / seconds if seconds else None


def _shortened(text: str) -> str:
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "\N{HORIZONTAL ELLIPSIS}"


# Title, attribute or function, text.
_OF_RUN: Final[list[tuple[str, Any, Callable[[Any], str]]]] = [
    ("program", lambda run: " ".join(run.program), _shortened),
    ("engine", "engine", str),
    ("wall time", "wall_s", duration),
    ("waiting for data", _wait_s, duration),
    ("waiting, share", _wait_share, percent),
    ("first batch", lambda run: run.loaders[0].first_batch_s if run.loaders else None, duration),
    ("CPU of all processes", "cpu_s", duration),
    ("peak memory", "peak_memory_bytes", amount),
]
_OF_LOADER: Final[list[tuple[str, Any, Callable[[Any], str]]]] = [
    ("  loaders", "loaders", "{:,}".format),
    ("  workers", "num_workers", "{:,}".format),
    ("  epochs", "epochs", "{:,}".format),
    ("  batches", "batches", "{:,}".format),
    ("  samples", "samples", "{:,}".format),
    ("  bad samples", "failed", "{:,}".format),
    ("  time of the loops", "seconds", duration),
    ("  waiting for data", "wait_s", duration),
    ("  waiting, share", _wait_share, percent),
    ("  first batch", "first_batch_s", duration),
]


def say_side_by_side(names: Sequence[str], runs: Sequence[SavedRun]) -> None:
    """Print the figures of runs side by side, those after the first with their ratio to it.

    Args:
        names: Names of the files.
        runs: The runs in them, in the same order.
    """
    rows = [["", *names], *_rows(_OF_RUN, runs)]
    by_line = [_by_line(run.loaders) for run in runs]
    for key in dict.fromkeys(key for loaders in by_line for key in loaders):
        found = [loaders.get(key) for loaders in by_line]
        rows += [[], *_rows([(key[0], "dataset", str), *_OF_LOADER], found)]
    widths = [max(len(row[at]) for row in rows if len(row) > at) for at in range(len(names) + 1)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        say("  ".join(cells).rstrip())
    if len(runs) > 1:
        say(f"(x: the ratio to {names[0]})")


def _by_line(loaders: Sequence[SavedLoader]) -> dict[tuple[str, int], SavedLoader]:
    """Return loaders by the line that made them, and which of that line's they are."""
    counts: Counter[str] = Counter()
    found = {}
    for loader in loaders:
        found[loader.made_at, counts[loader.made_at]] = loader
        counts[loader.made_at] += 1
    return found


def _rows(
    figures: Sequence[tuple[str, Any, Callable[[Any], str]]],
    things: Sequence[SavedRun | SavedLoader | None],
) -> Iterator[list[str]]:
    """Yield a row for each figure; those of time and memory have a ratio to the first."""
    for title, what, text in figures:
        get = what if callable(what) else lambda thing, name=what: getattr(thing, name)
        values = [None if thing is None else get(thing) for thing in things]
        cells = [_NONE if value is None else text(value) for value in values]
        if values[0] and text in (duration, amount):
            for at, value in enumerate(values[1:], 1):
                cells[at] += "" if value is None else f" ({value / values[0]:.2f} x)"
        yield [title, *cells]
