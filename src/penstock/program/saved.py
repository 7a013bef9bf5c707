# SPDX-License-Identifier: Apache-2.0
"""Figures of a finished run: `penstock run --save` writes them, `penstock report` reads them."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from penstock.errors import ConfigError
from penstock.insight.plain import read_versioned
from penstock.insight.stats import Span  # noqa: TC001 - `read_versioned` reads the annotations
from penstock.usage import cpu_seconds, memory_bytes
from penstock.whole_file import write_whole

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from penstock.program.options import Options

_FORMAT: Final = "penstock run"
_VERSION: Final = 2
_EVERY_S: Final = 1.0
# Pause, in times of a sample: it walks all pages, 3 ms for 300 MB, 1 s for 100 GB.
_REST: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLoader:
    """The figures of all loaders that one line of the program made."""

    made_at: str  # the line, as "train.py:31"
    dataset: str  # class of the dataset
    num_workers: int  # of the loader that ran longest
    loaders: int
    first_batch_s: float  # from the first `iter()` to its first batch
    run: Span  # sums over all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """The figures of a finished run.

    Attributes:
        engine: "penstock" or "torch": the loader that ran.
        program: The script or module, without its arguments, which may have secrets.
        wall_s: Seconds from the program's start to its end.
        cpu_s: CPU seconds, user and system, of all its processes; None where the system does not
            count them.
        peak_memory_bytes: Peak memory of all its processes, sampled once a second. It is the
            proportional set size: a page that several processes map counts once. None as above.
        loaders: The program's loaders, in the order of their first epochs.
    """

    engine: str
    program: str
    wall_s: float
    cpu_s: float | None
    peak_memory_bytes: int | None
    loaders: list[SavedLoader]


def is_saved_run(data: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether `data`, read from JSON, is marked as a saved run."""
    return isinstance(data, Mapping) and data.get("format") == _FORMAT


def run_in(data: object, path: str | os.PathLike[str]) -> SavedRun:
    """Return the run that a file holds; ConfigError if it holds anything else or is damaged."""
    if not is_saved_run(data):
        raise ConfigError(f"{path} is no file that `penstock run --save` wrote: name such files.")
    found: SavedRun = read_versioned(SavedRun, data, _VERSION, f"saved run {path}")
    return found


def write_run(run: SavedRun, path: str | os.PathLike[str]) -> Path:
    """Write a saved run as JSON."""
    record = {"format": _FORMAT, "version": _VERSION, **asdict(run)}
    return write_whole(path, json.dumps(record, allow_nan=False, indent=1) + "\n")


class Usage:
    """A sampler of the memory of a program's processes: once a second, less often where it is slow.

    Concurrency:
        A daemon thread takes the samples. A forked child has no such thread.
    """

    def __init__(self, options: Options) -> None:
        """Start sampling."""
        self._options = options
        self._peak_bytes: int | None = None
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, name="penstock usage", daemon=True).start()

    def end(self) -> dict[str, Any]:
        """Stop sampling, and return time, CPU and memory so far, by their names in `SavedRun`."""
        self._is_over.set()
        self._look()
        return {
            "wall_s": time.time() - self._options.started,
            "cpu_s": cpu_seconds(self._options.pid),
            "peak_memory_bytes": self._peak_bytes,
        }

    def _watch(self) -> None:
        rest_s = 0.0
        while not self._is_over.wait(rest_s):
            begun = time.monotonic()
            self._look()
            rest_s = max(_EVERY_S, _REST * (time.monotonic() - begun))

    def _look(self) -> None:
        with contextlib.suppress(OSError):  # a process may have changed its user
            found = memory_bytes(self._options.pid)
            if found is not None:
                self._peak_bytes = max(found, self._peak_bytes or 0)
