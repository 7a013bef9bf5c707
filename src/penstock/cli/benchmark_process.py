# SPDX-License-Identifier: Apache-2.0
"""Benchmark process: one of the compared loaders, with CPU time and memory of its own.

Guarantees
    An epoch runs only when asked for: while one process works, the other's workers wait.
    A process ends when its owner closes the pipe, or is gone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import time
import traceback
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import cv2
import torch
import torch.utils.data

import penstock.torch
from penstock.cli.images import ImageFiles
from penstock.errors import PenstockError, WorkerDied, WorkerError
from penstock.lines import amount
from penstock.usage import cpu_seconds, memory_bytes

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

__all__ = ["BenchmarkProcess", "BenchmarkWork", "EpochResult", "LoaderName"]

# What torch, or multiprocessing's locks below it, say where /dev/shm is full.
_NO_SHM: Final = re.compile(r"No space left on device|shared memory \(shm\)|out of shared memory")

LoaderName = Literal["torch", "penstock"]

# A timed epoch reads one value in 1,021: at 4 bytes each about one from every 4 KiB page, so the
# pages have to be there, as for a training step. (A prime: they come from all rows and columns.)
_SPARSE_STEP: Final = 1021
_MAX_MEMORY_SAMPLES: Final = 50  # reading the size of a process takes some 10 ms


@dataclass(frozen=True, slots=True)
class BenchmarkWork:
    """What both loaders load.

    Attributes:
        paths: Image files.
        size_px: Height and width of an image in a batch.
        batch_size: Images in a batch.
        num_workers: Worker processes of each loader.
    """

    paths: list[Path]
    size_px: int
    batch_size: int
    num_workers: int


@dataclass(frozen=True, slots=True)
class EpochResult:
    """What an epoch gave and cost.

    Attributes:
        num_samples: Samples delivered.
        checksum: CRC-32 over the batches as delivered; in a timed epoch over a part of them.
        wall_s: Seconds from `iter()` to the end.
        cpu_s: CPU seconds of main process and workers, or None where the system does not tell.
        peak_bytes: Highest memory of main process and workers between batches; None in a timed
            epoch.
    """

    num_samples: int
    checksum: int
    wall_s: float
    cpu_s: float | None
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class _Request:
    seed: int
    is_check: bool


@dataclass(frozen=True, slots=True)
class _Failure:
    text: str


class BenchmarkProcess:
    """A loader in a process of its own, which runs an epoch on request.

    Concurrency:
        One thread.
    """

    def __init__(self, name: LoaderName, work: BenchmarkWork) -> None:
        """Prepare for `work`; entering the context starts the process."""
        self.name = name
        self._work = work

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        self._pipe, other_end = context.Pipe()
        self._process = context.Process(
            target=_serve_epochs, args=(other_end, self.name, self._work)
        )
        self._process.start()
        other_end.close()  # or a dead process would never show as a closed pipe
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join()
        self._process.close()

    def request(self, seed: int, *, is_check: bool = False) -> None:
        """Let an epoch begin; `result` waits for its end.

        Args:
            seed: Given to `torch.manual_seed` and `random.seed` before it.
            is_check: Whether to read every byte and measure memory instead of taking the time.
        """
        self._exchange(lambda: self._pipe.send(_Request(seed, is_check)))

    def result(self) -> EpochResult:
        """Return the result of the epoch that was asked for, when it is over.

        Raises:
            WorkerDied: the process is gone.
            PenstockError: there is no room in /dev/shm for torch's batches.
            WorkerError: the loader or the dataset raised; the message holds its traceback.
        """
        message = self._exchange(self._pipe.recv)
        if isinstance(message, _Failure):
            if self.name == "torch" and _NO_SHM.search(message.text):
                raise _no_shm(self._work, message.text)
            raise WorkerError(f"the {self.name} loader failed:\n{message.text}")
        assert isinstance(message, EpochResult)
        return message

    def _exchange(self, step: Any) -> object:  # noqa: ANN401 - one of the pipe's two methods
        try:
            return step()
        except (EOFError, ConnectionError) as error:
            self._process.join()
            raise WorkerDied(
                f"the process of the {self.name} loader ended with exit code "
                f"{self._process.exitcode}; a negative one is the signal that ended it. "
                "-9 often means that memory ran out: try fewer workers or a smaller batch size."
            ) from error


def _no_shm(work: BenchmarkWork, text: str) -> PenstockError:
    """Return the error of a /dev/shm that is full, for the caller to raise."""
    room = "how much it has cannot be told"
    with contextlib.suppress(OSError):
        disk = os.statvfs("/dev/shm")
        free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        room = f"{amount(free)} of {amount(size)} are free"
    # As torch works ahead if nothing is said: two batches for each worker, and one in use.
    batch_bytes = 4 * 3 * work.size_px**2 * work.batch_size
    needed = amount((2 * work.num_workers + 1) * batch_bytes)
    return PenstockError(
        f"torch's loader ended: {text.strip().splitlines()[-1]}\nIts batches lie in /dev/shm, some "
        f"{needed} with these options, and {room}. Make it larger (docker run --shm-size=8g), "
        "remove what lies there, or lower --batch-size, --size or --workers. Penstock's batches do "
        "not lie there. `penstock doctor` shows it."
    )


def _serve_epochs(pipe: Connection, name: LoaderName, work: BenchmarkWork) -> None:
    """Run epochs on request: the main function of a benchmark process."""
    try:
        loader = _open_loader(name, work)
        while True:
            request = pipe.recv()
            pipe.send(_run_epoch(loader, request))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return  # the owner is done, or gone, or both of us were interrupted
    except Exception:  # whatever it is, the owner has to hear of it
        pipe.send(_Failure(traceback.format_exc()))


def _open_loader(name: LoaderName, work: BenchmarkWork) -> torch.utils.data.DataLoader[Any]:
    _use_one_thread(0)
    loader_class = {"torch": torch.utils.data.DataLoader, "penstock": penstock.torch.DataLoader}
    return loader_class[name](
        ImageFiles(work.paths, work.size_px),
        batch_size=work.batch_size,
        shuffle=True,
        num_workers=work.num_workers,
        persistent_workers=work.num_workers > 0,
        worker_init_fn=_use_one_thread,
    )


def _use_one_thread(_worker_id: int) -> None:
    cv2.setNumThreads(
        1
    )  # workers share the cores; OpenCV's own threads would only get in their way


def _run_epoch(loader: torch.utils.data.DataLoader[Any], request: _Request) -> EpochResult:
    torch.manual_seed(request.seed)
    random.seed(request.seed)  # without workers the dataset draws from this process' own
    memory_step = max(1, len(loader) // _MAX_MEMORY_SAMPLES)
    num_samples, checksum, peak_bytes = 0, 0, None
    cpu_before = cpu_seconds(os.getpid())
    start = time.perf_counter()
    for step, (images, labels) in enumerate(loader):
        num_samples += len(labels)
        values = images if request.is_check else images.view(-1)[::_SPARSE_STEP].contiguous()
        checksum = zlib.crc32(labels.numpy(), zlib.crc32(values.numpy(), checksum))
        if request.is_check and step % memory_step == 0:
            peak_bytes = max(peak_bytes or 0, memory_bytes(os.getpid()) or 0) or None
    wall_s = time.perf_counter() - start
    cpu_after = cpu_seconds(os.getpid())
    cpu_s = None if cpu_before is None or cpu_after is None else cpu_after - cpu_before
    return EpochResult(num_samples, checksum, wall_s, cpu_s, peak_bytes)
