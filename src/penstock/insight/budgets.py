# SPDX-License-Identifier: Apache-2.0
"""What a loader may take: the cores that this process is allowed, and the user's own limits.

Processes that train together on one machine share its cores and its memory: each takes its part.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import ConfigError
from penstock.system_limits import cores_by_affinity, group_folders, read_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PROC: Final = Path("/proc")
_CGROUPS: Final = Path("/sys/fs/cgroup")
# Of torchrun, of Open MPI, and of Slurm's srun, which may write "4(x2)": on each of two machines.
_LOCAL_RANKS: Final = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",
)


def cores_allowed(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> float:
    """Return how many cores may be kept busy: the minimum of CPU affinity and cgroup quota.

    A quota is that of the process's control group or of one above it (`docker run --cpus`, a limit
    in Kubernetes), and may be a fraction. Reads a few files: not for every batch.

    Reference:
        The kernel's admin-guide/cgroup-v2 (`cpu.max`) and scheduler/sched-bwc (version 1).
    """
    return min([cores_by_affinity(), *_quotas(proc / "self" / "cgroup", cgroups)])


def _quotas(memberships: Path, cgroups: Path) -> Iterator[float]:
    """Yield the cores that each control group with a quota allows."""
    for version, folder in group_folders("cpu", memberships, cgroups):
        if version == 1:
            words = [
                read_text(folder / "cpu.cfs_quota_us").strip(),  # -1: none
                read_text(folder / "cpu.cfs_period_us").strip(),
            ]
        else:
            words = read_text(folder / "cpu.max").split()  # "max 100000": none
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):
            quota_us, period_us = map(int, words)
            yield quota_us / period_us


def local_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many processes train together on this machine, this one included.

    torchrun, Open MPI and Slurm's `srun` say so in the environment. What is no whole number above 0
    is passed over.

    Example:
        >>> local_ranks({"LOCAL_WORLD_SIZE": "4"}), local_ranks({})
        (4, 1)
    """
    for name in _LOCAL_RANKS:
        match = re.fullmatch(r"0*([1-9][0-9]{0,5})(\(x[0-9]+\))?", environ.get(name, ""))
        if match is not None:
            return int(match[1])
    return 1


def cores_of_rank() -> float:
    """Return the cores that are this process's own part, among those that train on this machine.

    A launcher that binds each process to cores of its own has divided them already, which shows by
    the launcher having more.
    """
    return cores_allowed() / (1 if _is_bound() else local_ranks())


def _is_bound() -> bool:
    try:
        return os.sched_getaffinity(os.getppid()) > os.sched_getaffinity(0)
    except (AttributeError, OSError):  # another system; no such process any more
        return False


@dataclass(frozen=True, slots=True)
class Auto:
    """A loader's `num_workers="auto"`, with limits: what workers may take together.

    Attributes:
        cpu: Cores that workers may keep busy, above 0. None: what the process is allowed, less what
            the main process uses.
        memory: Bytes for batches under way and for workers, above 0; kept as an int. None: half of
            what is left.

    Raises:
        ConfigError: a limit is no number above 0.

    Example:
        >>> Auto(cpu=0)
        Traceback (most recent call last):
        ...
        penstock.errors.ConfigError: Auto(cpu=) must be a number of cores above 0, got 0; ...
    """

    cpu: float | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        """Check them."""
        for name, unit in (("cpu", "cores"), ("memory", "bytes")):
            value: Any = getattr(self, name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value < math.inf):
                raise ConfigError(
                    f"Auto({name}=) must be a number of {unit} above 0, got {value!r}; None leaves "
                    "it to the loader"
                )
        if self.memory is not None:
            object.__setattr__(self, "memory", int(self.memory))
