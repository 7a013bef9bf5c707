# SPDX-License-Identifier: Apache-2.0
"""Table that compares saved runs: a row for each figure, a column for each run."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from penstock.insight.units import duration, percent
from penstock.lines import amount, say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.program.saved import SavedLoader, SavedRun

__all__ = ["say_side_by_side"]

_NONE: Final = "-"
_WIDEST: Final = 40  # characters of a command


def say_side_by_side(names: Sequence[str], runs: Sequence[SavedRun]) -> None:
    """Print the figures of runs side by side, those after the first with their ratio to it.

    Args:
        names: Names of the files.
        runs: The runs in them, in the same order.
    """
    firsts = [run.loaders[0].first_batch_s if run.loaders else None for run in runs]
    waits = [sum(loader.wait_s for loader in run.loaders) for run in runs]
    loops = [sum(loader.seconds for loader in run.loaders) for run in runs]
    rows = [
        ["", *names],
        ["program", *(_shortened(" ".join(run.program)) for run in runs)],
        ["engine", *(run.engine for run in runs)],
        _row("wall time", [run.wall_s for run in runs], duration),
        _row("waiting for data", waits, duration),
        _row("waiting, share", [_share(*pair) for pair in zip(waits, loops, strict=True)]),
        _row("first batch", firsts, duration),
        _row("CPU of all processes", [run.cpu_s for run in runs], duration),
        _row("peak memory", [run.peak_memory_bytes for run in runs], amount),
    ]
    by_line = [_by_line(run.loaders) for run in runs]
    for made_at, number in dict.fromkeys(key for loaders in by_line for key in loaders):
        found = [loaders.get((made_at, number)) for loaders in by_line]
        rows += [[], *_rows_of_loader(made_at, found)]
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


def _rows_of_loader(made_at: str, found: Sequence[SavedLoader | None]) -> list[list[str]]:
    def row(title: str, name: str, text: Callable[[float], str] | None = None) -> list[str]:
        values = [None if loader is None else getattr(loader, name) for loader in found]
        if text is None:
            return [title, *(_NONE if value is None else f"{value:,}" for value in values)]
        return _row(title, values, text)

    shares = [None if loader is None else _share(loader.wait_s, loader.seconds) for loader in found]
    return [
        [made_at, *(_NONE if loader is None else loader.dataset for loader in found)],
        row("  loaders", "loaders"),
        row("  workers", "num_workers"),
        row("  epochs", "epochs"),
        row("  batches", "batches"),
        row("  samples", "samples"),
        row("  bad samples", "failed"),
        row("  time of the loops", "seconds", duration),
        row("  waiting for data", "wait_s", duration),
        _row("  waiting, share", shares),
        row("  first batch", "first_batch_s", duration),
    ]


def _row(
    title: str,
    values: Sequence[float | None],
    text: Callable[[float], str] | None = None,
) -> list[str]:
    """Return a row of figures; without `text`, the values are shares, shown without a ratio."""
    cells = [_NONE if value is None else (text or percent)(value) for value in values]
    first = values[0]
    for at, value in enumerate(values):
        if at and text and first and value is not None:
            cells[at] += f" ({value / first:.2f} x)"
    return [title, *cells]


def _share(part_s: float, seconds: float) -> float | None:
    return part_s / seconds if seconds else None


def _shortened(text: str) -> str:
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "\N{HORIZONTAL ELLIPSIS}"
