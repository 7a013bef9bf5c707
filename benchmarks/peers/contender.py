# SPDX-License-Identifier: Apache-2.0
r"""What a contender is, and what runs ONE contender on ONE work in ONE process.

    python contender.py --contender NAME --work WORK --data DIR [--smoke] [--tolerant]

prints one line `READING {json}`. compare.py starts it in the environment of the peer; by hand it
shows whether a contender works:

    .peers/torch/bin/python benchmarks/peers/contender.py --contender "torch (Pillow)" \
        --work photos --data .peers/data --smoke

A file in contenders/ has `CONTENDERS`, a list of `Contender`. It imports the standard library,
numpy, `contender`, `works`, and what contenders/ shares at its top, and its own library inside
functions: contenders are listed from environments that have not that library.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    *("MOST_SAID", "SHARED_WORKS", "Contender", "Epoch", "Job", "Resumable"),
    *("contender_files", "contenders", "find"),
]

HERE = Path(__file__).parent
SHARED_FILES = ("photo_ops", "shared")  # of contenders/
MOST_SAID = 300  # characters of what a peer said last
SHARED_WORKS = ("first", "killed", "corrupt")  # the loader matters, not the image operations
# Epoch 0, 1, ... to the batches of that epoch. Workers live on from call to call where they can.
Epoch = Callable[[int], Iterator[Any]]


@dataclass(frozen=True, slots=True)
class Job:
    """What is handed to each function of a contender.

    Attributes:
        photos: Folder of class folders with JPEGs.
        packed: Folder in which `pack` writes, and from which `packed` reads; empty before `pack`.
        batch_size: Samples per batch.
        num_workers: Processes or threads that load.
        num_samples: Rows of `tiny` and `resume`, batches of `transport`, paths of `paths`.
        seed: Of the order and of crops.
        tolerant: Whether to switch on the peer's own way to survive bad samples.
    """

    photos: Path
    packed: Path
    batch_size: int
    num_workers: int
    num_samples: int
    seed: int
    tolerant: bool


class Resumable(Protocol):
    """An epoch that can be left and gone on with in another process."""

    def batches(self) -> Iterator[np.ndarray]:
        """Return the batches from the start, or from where `restore` said."""

    def state(self) -> bytes:
        """Return the place after the batch that was delivered last."""

    def restore(self, state: bytes) -> None:
        """Go to a place; called in a fresh process, before `batches`."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A peer with its settings, and its functions for the works in which it has a part.

    Attributes:
        name: As the page shows it.
        environment: requirements/ENVIRONMENT.txt
        libraries: Modules that are imported first, timed apart.
        settings: What was set, and where its makers advise it.
        photos: Yields images, float32 (n, 3, 224, 224), and labels, int (n,).
        pack: Packs the photos, bytes as they are and label, into the peer's own format.
        packed: Yields what `photos` yields, from there.
        tiny: Yields the shuffled rows of `works.tiny_rows`, float32 (n, 32).
        transport: Yields `works.big_batch(k)` for each k, in any order.
        paths: Yields int64 (n,): `works.number_in` of each `works.path_of(i)`, shuffled.
        resume: As `tiny`; can be left and gone on with.
        prepare: Packs what `tiny`, `paths` or `resume` read, for a peer that reads files of its own
            alone; gets the job and the name of the work. It runs in a process of its own before
            anything is measured (`compare.py --prepare`, or `contender.py --prepare` by hand), and
            has nothing to do where it has run before.
        worker_pids: Which processes load; None takes the children of the process.
        antialias: Whether its resizing averages over the pixels that it drops; None: it has none.
        same_loader_as: Name of the contender that differs in the image operations alone: what
            `first`, `killed` and `corrupt` show of that one is not run again.
        rounds: Timed rounds of `photos` and `packed`, for one that is slow; None takes all.
        absent: Work -> why the contender has no part in it.
    """

    name: str
    environment: str
    libraries: tuple[str, ...]
    settings: str
    photos: Callable[[Job], Epoch] | None = None
    pack: Callable[[Job], None] | None = None
    packed: Callable[[Job], Epoch] | None = None
    tiny: Callable[[Job], Epoch] | None = None
    transport: Callable[[Job], Epoch] | None = None
    paths: Callable[[Job], Epoch] | None = None
    resume: Callable[[Job], Resumable] | None = None
    prepare: Callable[[Job, str], None] | None = None
    worker_pids: Callable[[], list[int]] | None = None
    antialias: bool | None = None
    same_loader_as: str | None = None
    rounds: int | None = None
    absent: Mapping[str, str] = field(default_factory=dict)

    def has_part_in(self, work: str) -> bool:
        """Return whether the contender does a work.

        One that reads its packed format alone starts, is killed and meets the corrupt photo there.
        """
        if work in SHARED_WORKS:
            has_photos = self.photos is not None or self.packed is not None
            return has_photos and self.same_loader_as is None
        return getattr(self, "resume" if work.startswith("resume") else work) is not None


def contender_files() -> list[Path]:
    """Return the files in contenders/ that have contenders."""
    paths = sorted((HERE / "contenders").glob("*.py"))
    return [path for path in paths if path.stem not in ("__init__", *SHARED_FILES)]


def contenders() -> dict[str, Contender]:
    """Return all contenders by name.

    Raises:
        ValueError: Two have the same name.
    """
    found: dict[str, Contender] = {}
    for path in contender_files():
        for contender in importlib.import_module(f"contenders.{path.stem}").CONTENDERS:
            if contender.name in found:
                raise ValueError(f"two contenders are called {contender.name!r}")
            found[contender.name] = contender
    return found


def find(name: str) -> Contender:
    """Return a contender by name, and import no more files than it takes.

    Raises:
        LookupError: There is none of that name.
    """
    return _located(name)[0]


def sources(contender: Contender) -> list[Path]:
    """Return the files that say what a contender does, and with which versions."""
    return [
        HERE / "requirements" / f"{contender.environment}.txt",
        _located(contender.name)[1],
        *(path for name in SHARED_FILES if (path := HERE / "contenders" / f"{name}.py").exists()),
    ]


def _located(name: str) -> tuple[Contender, Path]:
    files = sorted(contender_files(), key=lambda path: name not in path.read_text("utf-8"))
    for path in files:
        for contender in importlib.import_module(f"contenders.{path.stem}").CONTENDERS:
            if contender.name == name:
                return contender, path
    raise LookupError(f"no contender {name!r}; there are: {', '.join(contenders())}")


if __name__ == "__main__":
    # Not this module but its namesake: contender files import `contender`, and there must be one
    # class `Contender` only. A spawned worker imports this file again, and comes not here.
    sys.path.insert(0, str(HERE.parent))
    from measure import main

    raise SystemExit(main())
