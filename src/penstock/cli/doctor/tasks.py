# SPDX-License-Identifier: Apache-2.0
"""Tasks that `penstock doctor` runs in child processes."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import warnings
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np

from penstock.cli.reasons import reason_in_code
from penstock.loader import Loader

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TRIAL_WORKERS", "main"]

TRIAL_WORKERS: Final = 2
_TRIAL_BATCHES: Final = 4
_BATCH_SIZE: Final = 4
_SAMPLE_FLOATS: Final = 65_536  # 256 kB: a batch is far above what travels in a message


def main(told_fd: int, task: str, arguments: Sequence[str]) -> None:
    """Do a task and write what there is to tell to a descriptor, a JSON object a line."""
    _TASKS[task](os.fdopen(told_fd, "w"), arguments)


def _say(tell: IO[str], **facts: object) -> None:
    tell.write(json.dumps(facts) + "\n")
    tell.flush()


def _import_all(tell: IO[str], modules: Sequence[str]) -> None:
    """Import modules one after the other; tell before and after each."""
    for module in modules:
        _say(tell, importing=module)
        try:
            importlib.import_module(module)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # an exit as well: it is told, and the next one's turn
            _say(tell, failed=module, reason=reason_in_code(error))
        else:
            _say(tell, imported=module)
            if module == "torch":
                _say(tell, device=_device())
    os._exit(0)  # how a library ends a process is not asked: some crash, or wait for their threads


def _device() -> dict[str, object]:
    """Return what torch says of itself and of its accelerator, after a computation on that."""
    import torch

    facts: dict[str, object] = {
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "kind": None,
        "devices": [],
        "error": None,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if torch.accelerator.is_available():
                accelerator = torch.accelerator.current_accelerator()
                assert accelerator is not None
                facts["kind"] = accelerator.type
                facts["devices"] = _devices(torch.get_device_module(accelerator))
                torch.ones(8, device=accelerator).sum().item()
            elif torch.version.cuda or torch.version.hip:
                torch.cuda.init()
        except Exception as error:
            facts["error"] = reason_in_code(error)
    facts["warnings"] = [" ".join(str(warning.message).split()) for warning in caught]
    return facts


def _devices(module: Any) -> list[dict[str, object]]:  # noqa: ANN401 - torch.cuda, torch.mps ...
    if not hasattr(module, "get_device_properties"):
        return [{"name": module.__name__, "total_bytes": None}]
    found = [module.get_device_properties(index) for index in range(module.device_count())]
    return [{"name": each.name, "total_bytes": int(each.total_memory)} for each in found]


class _TrialDataset:
    """Sample i is full of the number i."""

    def __len__(self) -> int:
        return _TRIAL_BATCHES * _BATCH_SIZE

    def __getitem__(self, index: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.full(_SAMPLE_FLOATS, index, np.float32)


def _deliver(tell: IO[str], arguments: Sequence[str]) -> None:
    """Let two workers deliver batches, and look at every number of them."""
    start_s = time.monotonic()
    first_s = None
    num_bytes = 0
    try:
        loader: Loader[Any] = Loader(
            _TrialDataset(),
            batch_size=_BATCH_SIZE,
            num_workers=TRIAL_WORKERS,
            timeout=float(arguments[0]),
        )
        for step, batch in enumerate(loader):
            first_s = first_s or time.monotonic() - start_s
            num_bytes += batch.nbytes
            wanted = np.arange(step * _BATCH_SIZE, (step + 1) * _BATCH_SIZE)
            if not np.array_equal(batch, np.broadcast_to(wanted[:, None], batch.shape)):
                raise AssertionError(f"batch {step} is not what the workers wrote")
    except Exception as error:
        _say(tell, failed=" ".join(f"{type(error).__name__}: {error}".split()))
        sys.exit(1)
    _say(tell, delivered=len(loader), num_bytes=num_bytes, first_s=first_s)


_TASKS: Final = {"import": _import_all, "deliver": _deliver}
