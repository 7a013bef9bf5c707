# SPDX-License-Identifier: Apache-2.0
"""What `penstock doctor` tries in processes of their own, since a library may crash, hang or exit.

doctor ── starts ──▶ process: one JSON object a line into a file, as far as it gets
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.cli.reasons import reason_in_code
from penstock.loader import Loader
from penstock.system_limits import format_bytes, signal_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Device", "Imported", "deliver_batches", "import_modules", "main"]

_IMPORT_LIMIT_S: Final = 120.0  # a network folder may take a minute to give torch's files
# A batch takes milliseconds and the start of two workers below a second; a machine under heavy load
# may take ten times as long.
_BATCH_LIMIT_S: Final = 30.0
_LOOK_S: Final = 0.2
_NUM_BATCHES: Final = 4
_BATCH_SIZE: Final = 4


class Device(NamedTuple):
    """What torch says of its accelerator.

    Attributes:
        build: What torch is built for, as "CUDA 13.0" or "the CPU".
        names: Of the devices, each with its memory.
        error: What a computation on one, or the search for one, raised; "" for nothing.
    """

    build: str
    names: list[str]
    error: str


class Imported(NamedTuple):
    """What came of importing modules.

    Attributes:
        reasons: By module, why it cannot be imported; "" if it can.
        device: None if torch is not among those that can.
    """

    reasons: dict[str, str]
    device: Device | None


def import_modules(modules: Sequence[str], stop: threading.Event | None = None) -> Imported:
    """Import modules one after the other; where the process ends, the next ones get another.

    Args:
        modules: Their names.
        stop: Ends the process before its time, and no other is started.
    """
    stop = stop or threading.Event()
    reasons: dict[str, str] = {}
    device = None
    rest = list(modules)
    while rest and not stop.is_set():
        lines, failure = _run("_import_all", rest, _IMPORT_LIMIT_S, stop)
        at = rest[0]  # where not even the process started
        for line in lines:
            at = line.get("module", at)
            if "reason" in line:
                reasons[at] = line["reason"]
            elif "device" in line:
                device = Device(*line["device"])
        if at not in reasons:
            reasons[at] = f"its process {failure or 'ended without a word.'}"
        rest = [module for module in rest if module not in reasons]
    return Imported(reasons, device)


def deliver_batches(
    limit_s: float = _BATCH_LIMIT_S, stop: threading.Event | None = None
) -> tuple[bool, str]:
    """Let two workers deliver batches; return whether they did, and in a sentence what happened.

    Args:
        limit_s: Seconds that a batch may take.
        stop: Ends them before their time.
    """
    stop = stop or threading.Event()
    # The loader's own time limit comes first: its error says where a worker is stuck.
    lines, failure = _run("_deliver", [limit_s], limit_s + _BATCH_LIMIT_S, stop)
    if lines:
        return lines[-1]["is_delivered"], lines[-1]["found"]
    return False, f"the loader's process {failure or 'ended without a word'}"


def _run(
    task: str, arguments: Sequence[Any], limit_s: float, stop: threading.Event
) -> tuple[list[dict[str, Any]], str]:
    """Run a function of this module in a new process.

    Returns:
        What it wrote, and "" if it came to its end, otherwise what happened instead.
    """
    # Files and not pipes: a library may leave a process behind that holds a pipe open.
    try:
        with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as printed:
            # By its path and not by -m: the current folder may have files of any name.
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; "
                f"main({told.fileno()}, {task!r}, {list(arguments)!r})"
            )
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                pass_fds=[told.fileno()],
            )
            failure = _end_of(process, limit_s, stop)
            told.seek(0)
            printed.seek(0)
            lines = told.read().splitlines()
            last = printed.read().decode(errors="replace").strip().rpartition("\n")[2]
    except OSError as error:  # a limit, which is just what the doctor is asked about
        return [], f"could not be started: {error}"
    facts = []
    for line in lines:
        with contextlib.suppress(ValueError):  # a line that was cut off
            facts.append(json.loads(line))
    return facts, failure and f"{failure}. {last}".rstrip(" ")


def _end_of(process: subprocess.Popen[bytes], limit_s: float, stop: threading.Event) -> str:
    """Return "" if a process came to its end, otherwise what happened instead."""
    until_s = time.monotonic() + limit_s
    status = None
    try:
        while status is None:
            if stop.is_set() or time.monotonic() > until_s:
                return f"did not end within {limit_s:g} s"
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(_LOOK_S)
    finally:
        process.kill()
        process.wait()
    if status < 0:
        return f"was killed by {signal_name(-status)}"
    return f"exited with status {status}" if status else ""


def main(told_fd: int, task: str, arguments: Sequence[Any]) -> None:
    """Run a function of this module, in a process of its own.

    Args:
        told_fd: Where to write what is found, a JSON object a line.
        task: Its name.
        arguments: For it.
    """
    with open(told_fd, "w") as told:

        def tell(**facts: object) -> None:
            told.write(json.dumps(facts) + "\n")
            told.flush()

        globals()[task](tell, *arguments)
        os._exit(0)  # how a library ends a process is not asked: some crash, or wait for threads


def _import_all(tell: Callable[..., None], *modules: str) -> None:
    for module in modules:
        tell(module=module)
        try:
            importlib.import_module(module)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # an exit as well
            tell(module=module, reason=reason_in_code(error))
        else:
            if module == "torch":
                tell(device=_device())
            tell(module=module, reason="")


def _device() -> Device:
    """Return what torch says of itself and of its accelerator, after a computation on that."""
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
    build = f"ROCm {torch.version.hip}" if torch.version.hip else build
    names: list[str] = []
    try:
        if torch.accelerator.is_available():
            accelerator = torch.accelerator.current_accelerator()
            assert accelerator is not None
            names += _names(accelerator.type, torch.get_device_module(accelerator))
            torch.ones(8, device=accelerator).sum().item()
        elif build != "the CPU":
            torch.cuda.init()
    except Exception as error:
        return Device(build, names, reason_in_code(error))
    return Device(build, names, "")


def _names(kind: str, module: Any) -> list[str]:  # noqa: ANN401 - torch.cuda, torch.mps ...
    if not hasattr(module, "get_device_properties"):
        return [kind]
    found = [module.get_device_properties(index) for index in range(module.device_count())]
    return [f"{kind}: {each.name} ({format_bytes(int(each.total_memory))})" for each in found]


class _TrialDataset:
    """Sample i is full of the number i."""

    def __len__(self) -> int:
        return _NUM_BATCHES * _BATCH_SIZE

    def __getitem__(self, index: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.full(65_536, index, np.float32)  # a batch is far above what a message carries


def _deliver(tell: Callable[..., None], limit_s: float) -> None:
    """Let two workers deliver batches, and look at every number of them."""
    start_s = time.monotonic()
    first_s = 0.0
    try:
        loader: Loader[Any] = Loader(
            _TrialDataset(), batch_size=_BATCH_SIZE, num_workers=2, timeout=limit_s
        )
        for step, batch in enumerate(loader):
            first_s = first_s or time.monotonic() - start_s
            wanted = np.arange(step * _BATCH_SIZE, (step + 1) * _BATCH_SIZE)
            if not np.array_equal(batch, np.broadcast_to(wanted[:, None], batch.shape)):
                raise AssertionError(f"batch {step} is not what the workers wrote")
    except Exception as error:
        tell(is_delivered=False, found=" ".join(f"{type(error).__name__}: {error}".split()))
        return
    found = f"2 workers delivered {len(loader)} batches; the first after {first_s:.2f} s"
    method = multiprocessing.get_context().get_start_method()
    tell(is_delivered=True, found=f"{found} (start method {method})")
