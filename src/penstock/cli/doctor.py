# SPDX-License-Identifier: Apache-2.0
"""`penstock doctor`: what this machine and this environment give a loader, and what to change.

doctor          versions, cores, memory, /dev/shm, open files, storage: read in this process
doctor_trials   libraries, the device, two workers: tried in processes that may crash or hang
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import resource
import shutil
import sys
import sysconfig
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

import penstock
from penstock.cli.doctor_trials import deliver_batches, import_modules
from penstock.insight.budgets import cores_allowed, cores_by_affinity
from penstock.lines import printable, say, say_json
from penstock.optional import install_command
from penstock.plural import counted
from penstock.redact import without_password
from penstock.system_limits import descriptors_needed, format_bytes, memory_now, num_open_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from penstock.cli.doctor_trials import Imported

__all__ = ["doctor"]

_ROOT: Final = Path("/")
_COLUMNS: Final = (9, 15)  # of the mark, of the name

# A process that has imported torch's CPU build has 220 MB resident: this leaves a main process,
# some workers, and their batches.
_COMFORTABLE_BYTES: Final = 2_000_000_000
_SHM_BYTES: Final = 1_000_000_000  # docker gives /dev/shm 64 MB, a machine half of its memory
_READING_S: Final = 1.0
_TOO_SHORT_S: Final = 0.1  # a file or two may happen to wait for another program
_SLOW_FILE_S: Final = 0.005  # a local disk takes 0.1 ms, a network folder 1 to 50 ms
_SLOW_BYTES_PER_S: Final = 50e6  # a hard disk gives 150 MB/s


class Finding(NamedTuple):
    """One row of what `penstock doctor` prints.

    Attributes:
        topic: Heading that it stands under.
        name: What was looked at, in a word or two.
        found: What was found, in a sentence or less.
        remedy: What to do; empty if all is well.
        is_problem: Whether a loader will not work; without it, it may be slow or fail later.
    """

    topic: str
    name: str
    found: str
    remedy: str = ""
    is_problem: bool = False

    @property
    def status(self) -> str:
        """What the row is marked with: "ok", "advice" or "problem"."""
        if not self.remedy:
            return "ok"
        return "problem" if self.is_problem else "advice"


def doctor(
    data: Annotated[
        Path | None,
        typer.Argument(
            metavar="DATA", exists=True, help="A file or folder: how fast its storage is read."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Give one JSON object instead of lines.")
    ] = False,
) -> None:
    """Look at this machine and this environment as a loader meets them.

    Versions, cores, memory, shared memory, open files, the libraries of each extra, the device, and
    whether two workers deliver batches. What is not fine is marked ADVICE or PROBLEM, and below it
    stands what to do. Libraries are imported in a process of their own: one that is broken is
    reported. The exit status is 1 if there is a problem, otherwise 0.
    """
    findings = [
        finding._replace(
            found=without_password(finding.found), remedy=without_password(finding.remedy)
        )
        for finding in _findings(data)
    ]
    counts = {status: sum(f.status == status for f in findings) for status in ("problem", "advice")}
    if as_json:
        names = ("topic", "name", "status", "found", "remedy")
        say_json({
            "penstock": penstock.__version__,
            "num_problems": counts["problem"],
            "num_advice": counts["advice"],
            "findings": [{name: getattr(each, name) for name in names} for each in findings],
        })  # fmt: skip
    else:
        _write(findings)
        say("")
        say(f"problems: {counts['problem']}, advice: {counts['advice']}")
    if counts["problem"]:
        raise typer.Exit(1)


def _write(findings: Iterable[Finding]) -> None:
    mark_width, name_width = _COLUMNS
    for topic, group in groupby(findings, key=lambda finding: finding.topic):
        say(topic)
        for finding in group:
            mark = finding.status.upper() if finding.remedy else finding.status
            _write_row(f"  {mark:<{mark_width}}{finding.name:<{name_width}}{finding.found}")
            if finding.remedy:
                _write_row(f"  {'':<{mark_width + name_width}}→ {finding.remedy}")


def _write_row(row: str) -> None:
    lines = [printable(row)]
    if sys.stdout is not None and sys.stdout.isatty():
        indent = 2 + sum(_COLUMNS)
        width = max(shutil.get_terminal_size().columns, indent + 40)
        after = " " * indent
        lines = textwrap.wrap(lines[0], width, subsequent_indent=after, break_on_hyphens=False)
    for line in lines:
        say(line)


def _findings(data: Path | None) -> Iterator[Finding]:
    extras, modules = extras_of(_own_requirements()), modules_by_distribution()
    found = {modules.get(_installed(name, modules)) for each in extras.values() for name, _ in each}
    names = sorted(
        filter(None, found), key=lambda name: (name != "torch", name)
    )  # it takes longest
    open_files, memory = look_at_open_files(), look_at_memory()  # before anything else is started
    stop = threading.Event()
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stack:
        stack.callback(stop.set)  # Ctrl-C ends an import that hangs
        imports = pool.submit(import_modules, names, stop)
        delivery = pool.submit(deliver_batches, stop=stop)
        yield from look_at_environment()
        yield from (look_at_cores(), memory, look_at_shm(), open_files)
        if data is not None:
            yield look_at_storage(data)
        imported = imports.result()
        yield look_at_device(imported)
        for name, needed in extras.items():
            yield look_at_extra(name, needed, modules, imported.reasons)
        yield look_at_delivery(*delivery.result())


def look_at_environment() -> Iterator[Finding]:
    """Yield what Penstock, Python and the system are."""
    folder = os.path.dirname(penstock.__file__)
    remedy = (
        "" if _own_requirements() else "Its extras are not known: `pip install .` in the clone."
    )
    found = (
        f"{penstock.__version__}, {folder}{': not installed, only on the path' if remedy else ''}"
    )
    yield Finding("environment", "penstock", found, remedy)
    build = ", free-threaded" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    found = f"{platform.python_version()} ({platform.python_implementation()}{build})"
    yield Finding("environment", "Python", f"{found}, {sys.executable}")
    remedy = "" if sys.platform == "linux" else "Penstock is tested on Linux only."
    yield Finding("environment", "system", platform.platform(), remedy)


def look_at_cores(root: Path = _ROOT) -> Finding:
    """Return how many cores this process may use.

    Args:
        root: Below it lie `proc` and `sys`.
    """
    by_affinity = cores_by_affinity()
    usable = cores_allowed(root / "proc", root / "sys/fs/cgroup")
    found = f"{usable:g} usable: {os.cpu_count()} in the machine, {by_affinity:g} by affinity, "
    if usable >= by_affinity:
        return Finding("machine", "cores", f"{found}no lower CPU quota")
    found += f"a CPU quota of {usable:g}"
    most = math.ceil(usable)
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) <= most:
        return Finding("machine", "cores", f"{found}; OMP_NUM_THREADS={wanted}")
    remedy = (
        f"Libraries see {by_affinity:g} cores and start a thread for each; when the quota is used "
        f"up, all of them stop. Set OMP_NUM_THREADS={most}. Of workers that compute take {most} at "
        "most; of those that wait for reads there may be more."
    )
    return Finding("machine", "cores", found, remedy)


def look_at_memory(root: Path = _ROOT) -> Finding:
    """Return how much memory there is, and whether the OOM killer has ended processes.

    Args:
        root: Below it lie `proc` and `sys`.
    """
    now = memory_now(root / "proc", root / "sys/fs/cgroup")
    if now.total_bytes is None or now.available_bytes is None or now.left_bytes is None:
        return Finding("machine", "memory", "not known: this system does not say")
    available, total = format_bytes(now.available_bytes), format_bytes(now.total_bytes)
    found = f"{available} of {total} available; "
    if now.limit_bytes is not None and now.left_in_group_bytes is not None:
        left = format_bytes(now.left_in_group_bytes)
        found += f"the control group has {left} of {format_bytes(now.limit_bytes)} left"
    else:
        found += "no limit of a control group"
    if now.group_oom_kills:
        found += f"; the OOM killer has ended {now.group_oom_kills:,} processes of this group"
    elif now.left_bytes >= _COMFORTABLE_BYTES:
        return Finding("machine", "memory", found)
    remedy = (
        "A process that imports torch takes some 220 MB. End other programs or raise the limit; "
        "fewer workers, a smaller prefetch_factor and smaller batches need less."
    )
    return Finding("machine", "memory", found, remedy)


def look_at_shm(root: Path = _ROOT) -> Finding:
    """Return what /dev/shm has, which torch's own loader needs.

    Args:
        root: Below it lies `dev`.
    """
    try:
        disk = os.statvfs(root / "dev/shm")
    except OSError as error:
        found = f"cannot be used: {error.strerror}"
        remedy = "multiprocessing's locks and torch's own loader need it: mount a tmpfs there."
        return Finding("machine", "/dev/shm", found, "" if sys.platform != "linux" else remedy)
    free_bytes = disk.f_bavail * disk.f_frsize
    size = format_bytes(disk.f_blocks * disk.f_frsize)
    found = f"{format_bytes(free_bytes)} of {size} free; Penstock's batches do not lie there"
    remedy = (
        "Only if torch's own DataLoader or Ray runs here too: docker run --shm-size=8g, or an "
        "emptyDir with medium: Memory in Kubernetes."
    )
    return Finding("machine", "/dev/shm", found, remedy if free_bytes < _SHM_BYTES else "")


def look_at_open_files() -> Finding:
    """Return how many workers the limit of open files allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = num_open_files()
    if soft == resource.RLIM_INFINITY or num_open is None:
        return Finding("machine", "open files", "no limit" if num_open is not None else "not known")
    per_worker = descriptors_needed(1) - descriptors_needed(0)
    num_workers = max((soft - num_open - descriptors_needed(0)) // per_worker, 0)
    enough = counted(num_workers, "worker")
    most = "no limit" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    found = f"limit {soft:,} (at most {most}), {num_open} open: enough for {enough}"
    wanted = max(math.ceil(cores_allowed()), 2)
    needed = num_open + descriptors_needed(wanted)
    remedy = f"{wanted} workers need {needed}: `ulimit -n {max(needed, 1024)}` in the shell."
    if num_workers >= wanted:
        remedy = ""
    return Finding("machine", "open files", found, remedy, is_problem=num_workers < 2)


def look_at_storage(data: Path) -> Finding:
    """Return how fast files are read in a second, without what the page cache has of them."""
    num_files, num_bytes, seconds = 0, 0, 0.0
    for path in [data] if data.is_file() else data.rglob("*"):
        if not path.is_file():
            continue
        begun_s = time.perf_counter()
        try:
            num_bytes += _read(path, begun_s + _READING_S - seconds)
        except OSError as error:
            remedy = "Give this user the right to read it, or leave it out."
            found = f"{path} cannot be read: {error.strerror}"
            return Finding("machine", "storage", found, remedy, is_problem=True)
        num_files += 1
        seconds += time.perf_counter() - begun_s
        if seconds >= _READING_S:
            break
    if not num_bytes:
        return Finding("machine", "storage", f"{data} has no file with content")
    each_s, rate = seconds / num_files, num_bytes / seconds
    found = (
        f"{data}: {counted(num_files, 'file')} at {1000 * each_s:.1f} ms each, "
        f"{format_bytes(round(rate))} a second"
    )
    remedy = (
        "Workers will wait for it: copy the data to a local disk, or put many small files into one "
        "with `penstock pack`. More workers than cores help as well."
    )
    is_slow = seconds > _TOO_SHORT_S and each_s > _SLOW_FILE_S and rate < _SLOW_BYTES_PER_S
    return Finding("machine", "storage", found, remedy if is_slow else "")


def _read(path: Path, until_s: float) -> int:
    """Read a file to its end, or until a time; return the number of bytes."""
    num_bytes = 0
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # Linux
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while part := file.read(1 << 20):
            num_bytes += len(part)
            if time.perf_counter() > until_s:
                break
    return num_bytes


def look_at_device(imported: Imported, root: Path = _ROOT) -> Finding:
    """Return what torch can copy batches to.

    Args:
        imported: What a process found that imported torch.
        root: Below it lie `proc` and `dev`.
    """
    device = imported.device
    if device is None:
        is_broken = "torch" in imported.reasons
        found = "torch cannot be imported" if is_broken else "not looked for: no torch here"
        return Finding("device", "GPU", found)
    build = f"torch is built for {device.build}"
    if device.names and not device.error:
        found = f"{', '.join(device.names)}; {build}; a computation on it worked"
        return Finding("device", "GPU", found)
    if device.names:
        remedy = (
            "torch cannot compute on it. Known causes: a build of torch without this GPU's "
            "architecture, a driver that is too old, another process that has it for itself."
        )
        found = f"{', '.join(device.names)}; {build}; {device.error}"
        return Finding("device", "GPU", found, remedy, is_problem=True)
    found = f"none: {device.error or build}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        found += f" (CUDA_VISIBLE_DEVICES={visible!r})"
    drivers = ("proc/driver/nvidia/version", "dev/nvidiactl")
    is_hidden = visible is not None and not visible.strip().rstrip("1").strip("-")
    if is_hidden or not any((root / name).exists() for name in drivers):
        return Finding("device", "GPU", found)
    remedy = (
        "This machine has an NVIDIA driver: install a build of torch with CUDA that the driver is "
        "new enough for (nvidia-smi says which), and give a container access to the GPU."
    )
    return Finding("device", "GPU", found, remedy)


def look_at_delivery(is_delivered: bool, found: str) -> Finding:
    """Return whether two workers delivered batches; see `deliver_batches`."""
    if is_delivered:
        return Finding("workers", "trial", found)
    remedy = (
        "See memory and open files above. num_workers=0 does without workers, "
        'backend="thread" without processes.'
    )
    return Finding("workers", "trial", found, remedy, is_problem=True)


def _own_requirements() -> list[str]:
    try:
        return metadata.requires("penstock") or []
    except metadata.PackageNotFoundError:
        return []


def extras_of(lines: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
    """Return what each extra needs, of those that "all" has; what all of Penstock needs is "core".

    Args:
        lines: `Requires-Dist` of Penstock's metadata.

    Returns:
        Names of distributions, with the lowest version of each; "0" for any.

    Example:
        >>> lines = ["numpy>=1.26", "lmdb>=2.3; extra == 'all'", "lmdb>=2.3; extra == 'lmdb'"]
        >>> extras_of([*lines, "ruff; extra == 'dev'"])
        {'core': [('numpy', '1.26')], 'lmdb': [('lmdb', '2.3')]}
    """
    extras: dict[str, list[tuple[str, str]]] = {}
    for line in lines:
        wanted, _, marker = line.partition(";")
        name, floor = re.match(r"[\w.-]+", wanted), re.search(r">=\s*([\d.]+)", wanted)
        extra = re.search(r"""extra\s*==\s*['"]([\w.-]+)""", marker)
        assert name is not None, line
        needed = name[0], floor[1] if floor else "0"
        extras.setdefault(extra[1] if extra else "core", []).append(needed)
    of_all = {*extras.pop("all", ()), *extras.get("core", ())}
    return {name: extra for name, extra in sorted(extras.items()) if of_all.issuperset(extra)}


def modules_by_distribution() -> dict[str, str]:
    """Return the module that each installed distribution is imported by."""
    found: dict[str, list[str]] = {}
    for module, names in metadata.packages_distributions().items():
        for name in names:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), []).append(module)
    modules = {}
    for name, all_of_it in found.items():
        own = name.replace("-", "_")
        modules[name] = own if own in all_of_it else min(all_of_it, key=lambda m: (m[0] == "_", m))
    return modules


def _installed(name: str, modules: Iterable[str]) -> str:
    """Return the name, or another distribution of OpenCV, which all have the same module."""
    if not name.startswith("opencv-"):
        return name
    return next((other for other in modules if other.startswith("opencv-")), name)


def look_at_extra(
    extra: str,
    needed: Iterable[tuple[str, str]],
    modules: Mapping[str, str],
    reasons: Mapping[str, str],
) -> Finding:
    """Return whether an extra's libraries are installed, new enough, and can be imported.

    Args:
        extra: Its name.
        needed: What it needs, see `extras_of`.
        modules: By distribution that is installed.
        reasons: Why a module cannot be imported; "" if it can.
    """
    here, missing, old, broken = [], [], [], []
    for wanted, floor in needed:
        name = _installed(wanted, modules)
        if name not in modules:
            missing.append(name)
            continue
        version, reason = metadata.version(name), reasons.get(modules[name])
        here.append(f"{name} {version}")
        if _numbers(version) < _numbers(floor.removesuffix(".0")):
            old.append(f"{name}>={floor}")
        if reason:
            broken.append(name)
            here.append(f"import {modules[name]}: {reason}")
    found = ", ".join(here)
    if broken:
        remedy = f"Repair what it names, or pip install --force-reinstall {' '.join(broken)}."
        if "torch" in broken:
            remedy += " Give pip the --index-url of torch's build (CPU, CUDA), or it takes another."
        return Finding("extras", extra, found, remedy, is_problem=True)
    if missing:
        how = install_command(extra)
        found = f"not installed ({', '.join(missing)} missing); if you want it: {how}"
        return Finding("extras", extra, found)
    remedy = f"Penstock needs {', '.join(old)}: `pip install -U`." if old else ""
    return Finding("extras", extra, found, remedy)


def _numbers(version: str) -> list[int]:
    """Return the numbers that a version begins with."""
    match = re.match(r"\d+(\.\d+)*", version)
    return list(map(int, match[0].split("."))) if match else []
