# SPDX-License-Identifier: Apache-2.0
"""`penstock doctor`: what this machine and this environment give a loader, and what to change."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

import penstock
from penstock.cli import options  # noqa: TC001 - typer reads the annotations at run time
from penstock.insight.budgets import cores_allowed
from penstock.lines import counted, format_bytes, say, say_json
from penstock.optional import DISTRIBUTION, install_command
from penstock.redact import without_password
from penstock.system_limits import (
    cores_by_affinity,
    descriptors_needed,
    memory_now,
    num_open_files,
    signal_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_ROOT: Final = Path("/")
_COLUMNS: Final = (9, 15)  # of the mark, of the name
# A process that has imported torch's CPU build has 220 MB resident: this leaves a main process,
# some workers, and their batches.
_COMFORTABLE_BYTES: Final = 2_000_000_000
_IMPORT_LIMIT_S: Final = 120.0  # a network folder may take a minute to give torch's files
_DELIVERY_LIMIT_S: Final = 60.0  # it takes below a second, ten times as long under heavy load
# Where a module is not called like its distribution.
_MODULES: Final = {
    "opencv-python-headless": "cv2",
    "pillow": "PIL",
    "pyyaml": "yaml",
    "opentelemetry-api": "opentelemetry",
}
_NOT_FOR_USERS: Final = ("all", "dev", "dev-torch", "docs", "clients")
# The last line that a trial prints is its result, or what it raised.
_TRIAL: Final = """
import os, sys
sys.path[:] = {path!r}
status = 0
try:
    exec({code!r}, {{}})
except BaseException as error:
    from penstock.cli.reasons import reason_in_code
    print("\\n" + reason_in_code(error))
    status = 1
sys.stdout.flush()
os._exit(status)  # how a library ends a process does not matter: some crash, or wait for threads
"""
_DEVICE: Final = """
import json, torch
build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
build = f"ROCm {torch.version.hip}" if torch.version.hip else build
names, error = [], ""
try:
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        names = [torch.cuda.get_device_name() if kind.type == "cuda" else kind.type]
        torch.ones(8, device=kind).sum().item()
    elif build != "the CPU":
        torch.cuda.init()
except Exception as raised:
    error = f"{type(raised).__name__}: {raised}"
print("\\n" + json.dumps([build, names, error]))
"""
_DELIVERY: Final = """
import multiprocessing, sys, time
import numpy as np
from penstock import Loader
begun_s = time.monotonic()
samples = np.repeat(np.arange(16.0)[:, None], 65_536, axis=1)  # far above what a message carries
backend = "thread" if sys.platform == "win32" else "process"
batches = list(Loader(samples, 4, num_workers=2, timeout=30, backend=backend))
assert np.array_equal(np.concatenate(batches), samples), "batches are not what the workers wrote"
method, spent_s = multiprocessing.get_context().get_start_method(), time.monotonic() - begun_s
how = "threads" if backend == "thread" else f"start method {method}"
print(f"2 workers delivered 4 batches in {spent_s:.2f} s ({how})")
"""


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
    as_json: options.AsJson = False,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Measure this place instead: s3://BUCKET/PREFIX, gs://, az://, https://HOST/PATH. "
            "It is only read: 200 MB at most, in some 20 s.",
        ),
    ] = None,
) -> None:
    """Check this machine and environment, or measure storage.

    Versions, cores, memory, open files, the libraries of each extra, the device, and whether two
    workers deliver batches. What is not fine is marked ADVICE or PROBLEM, and below it stands what
    to do. Libraries are imported in processes of their own: one that is broken is reported. The
    exit status is 1 if there is a problem, otherwise 0.
    """
    findings = [
        finding._replace(
            found=without_password(finding.found), remedy=without_password(finding.remedy)
        )
        for finding in (_findings() if storage is None else _look_at_storage(storage))
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
    indent = 2 + mark_width + name_width
    for topic, group in groupby(findings, key=lambda finding: finding.topic):
        say(topic)
        for finding in group:
            mark = finding.status.upper() if finding.remedy else finding.status
            say(f"  {mark:<{mark_width}}{finding.name:<{name_width}}{finding.found}")
            if finding.remedy:
                say(f"{'':<{indent}}→ {finding.remedy}")


def _findings() -> Iterator[Finding]:
    yield from _look_at_environment()
    yield from (look_at_cores(), look_at_memory(), look_at_open_files())
    yield look_at_device(*run_trial(_DEVICE, _IMPORT_LIMIT_S))
    for name, needed in extras_of(_own_requirements()).items():
        yield look_at_extra(name, needed)
    yield look_at_delivery(*run_trial(_DELIVERY, _DELIVERY_LIMIT_S))


def _look_at_storage(address: str) -> Iterator[Finding]:
    from penstock.cli.storage import look_at_storage

    return look_at_storage(address)


def run_trial(code: str, limit_s: float) -> tuple[str, str]:
    """Return the last line that code prints in a new process, and what goes wrong, or ""."""
    program = _TRIAL.format(path=sys.path, code=code)
    # Files and not pipes: a library may leave a process behind that holds a pipe open.
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
        try:
            status = subprocess.run(
                [sys.executable, "-P", "-c", program],  # -P: here may be files of any name
                stdin=subprocess.DEVNULL, stdout=printed, stderr=errors, timeout=limit_s,
            ).returncode  # fmt: skip
        except OSError as error:  # a limit, which is just what is looked for
            return "", f"its process could not be started: {error}"
        except subprocess.TimeoutExpired:
            return "", f"its process did not end within {limit_s:g} s"
        last, said = (_last_line(file) for file in (printed, errors))
    if status < 0:
        return last, f"its process was killed by {signal_name(-status)}. {said}".rstrip()
    if status > 1 or (status and not last):
        return last, f"its process exited with status {status}. {said}".rstrip()
    return last, last if status else ""


def _last_line(file: Any) -> str:  # noqa: ANN401
    file.seek(0)
    return str(file.read().decode(errors="replace").strip().rpartition("\n")[2])


def _look_at_environment() -> Iterator[Finding]:
    yield Finding("environment", "penstock", f"{penstock.__version__}, {penstock.__path__[0]}")
    with contextlib.suppress(metadata.PackageNotFoundError):
        found = f"another project's penstock {metadata.version('penstock')} has files there, too"
        remedy = f"pip uninstall penstock {DISTRIBUTION}, then install Penstock again."
        yield Finding("environment", "name", found, remedy)
    found = f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}"
    yield Finding("environment", "Python", found)
    remedy = ""
    if sys.platform != "linux":
        remedy = (
            "Penstock was never run on this system: docs/guide/platforms.md says what to expect."
        )
    yield Finding("environment", "system", platform.platform(), remedy)


def look_at_cores(root: Path = _ROOT) -> Finding:
    """Return how many cores this process may use; `proc` and `sys` are below `root`."""
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
    """Return how much memory there is, and whether the OOM killer has ended processes."""
    now = memory_now(root / "proc", root / "sys/fs/cgroup")
    if now.total_bytes is None or now.available_bytes is None or now.left_bytes is None:
        return Finding("machine", "memory", "not known: this system does not say")
    found = f"{format_bytes(now.available_bytes)} of {format_bytes(now.total_bytes)} available; "
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


def look_at_open_files() -> Finding:
    """Return how many workers the limit of open files allows."""
    num_open = num_open_files()
    if sys.platform == "win32" or num_open is None:
        return Finding("machine", "open files", "not known")
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Finding("machine", "open files", "no limit")
    per_worker = descriptors_needed(1) - descriptors_needed(0)
    num_workers = max((soft - num_open - descriptors_needed(0)) // per_worker, 0)
    most = "no limit" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    enough = counted(num_workers, "worker")
    found = f"limit {soft:,} (at most {most}), {num_open} open: enough for {enough}"
    wanted = max(math.ceil(cores_allowed()), 2)
    needed = num_open + descriptors_needed(wanted)
    remedy = f"{wanted} workers need {needed}: `ulimit -n {max(needed, 1024)}` in the shell."
    if num_workers >= wanted:
        remedy = ""
    return Finding("machine", "open files", found, remedy, is_problem=num_workers < 2)


def look_at_device(printed: str, failure: str, root: Path = _ROOT) -> Finding:
    """Return what torch can copy batches to, by what the trial printed."""
    if failure:
        is_absent = importlib.util.find_spec("torch") is None
        found = "not looked for: no torch here" if is_absent else "torch cannot be imported"
        return Finding("device", "GPU", found)
    build, names, error = json.loads(printed)
    found = f"{', '.join(names)}; torch is built for {build}; "
    if names and not error:
        return Finding("device", "GPU", f"{found}a computation on it worked")
    if names:
        remedy = (
            "torch cannot compute on it. Known causes: a build of torch without this GPU's "
            "architecture, a driver that is too old, another process that has it for itself."
        )
        return Finding("device", "GPU", found + error, remedy, is_problem=True)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = f"none: {error or f'torch is built for {build}'}"
    if visible is not None:
        found += f" (CUDA_VISIBLE_DEVICES={visible!r})"
    drivers = ("proc/driver/nvidia/version", "dev/nvidiactl")
    if visible in ("", "-1") or not any((root / name).exists() for name in drivers):
        return Finding("device", "GPU", found)
    remedy = (
        "This machine has an NVIDIA driver: install a build of torch with CUDA that the driver is "
        "new enough for (nvidia-smi says which), and give a container access to the GPU."
    )
    return Finding("device", "GPU", found, remedy)


def look_at_delivery(printed: str, failure: str) -> Finding:
    """Return whether two workers delivered batches."""
    remedy = (
        "See memory and open files above. num_workers=0 does without workers, "
        'backend="thread" without processes.'
    )
    return Finding("workers", "trial", failure or printed, failure and remedy, is_problem=True)


def _own_requirements() -> list[str]:
    try:
        return metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []


def extras_of(lines: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
    """Return the distributions that each extra needs, with the lowest version; "0" for any.

    Args:
        lines: `Requires-Dist` of Penstock's metadata. What is needed without an extra is "core".

    Example:
        >>> extras_of(["numpy>=1.26", "lmdb>=2.3; extra == 'lmdb'", "ruff; extra == 'dev'"])
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
    return {name: extras[name] for name in sorted(extras) if name not in _NOT_FOR_USERS}


def look_at_extra(extra: str, needed: Iterable[tuple[str, str]]) -> Finding:
    """Return whether an extra's libraries are installed, new enough, and can be imported."""
    here, missing, old, broken = [], [], [], []
    for name, floor in needed:
        module = _MODULES.get(name.lower(), name.replace("-", "_"))
        if importlib.util.find_spec(module) is None:
            missing.append(name)
            continue
        try:
            about: Any = metadata.metadata(name)
            version = about.get("Version", "0")  # without one: it was cut short
        except metadata.PackageNotFoundError:  # OpenCV has several distributions
            version = floor
        here.append(f"{name} {version}")
        if _numbers(version) < _numbers(floor.removesuffix(".0")):
            old.append(f"{name}>={floor}")
        if failure := run_trial(f"import {module}", _IMPORT_LIMIT_S)[1]:
            broken.append(name)
            here.append(f"import {module}: {failure}")
    found = ", ".join(here)
    if broken:
        remedy = f"Repair what it names, or pip install --force-reinstall {' '.join(broken)}."
        if "torch" in broken:
            remedy += " Give pip the --index-url of torch's build (CPU, CUDA), or it takes another."
        return Finding("extras", extra, found, remedy, is_problem=True)
    if missing == ["simplejpeg"]:
        found += "; OpenCV decodes JPEG files, as simplejpeg is missing"
        remedy = f"docs/decoding.md says what that changes. With it: {install_command(extra)}"
        return Finding("extras", extra, found, remedy)
    if missing:
        how = install_command(extra)
        found = f"not installed ({', '.join(missing)} missing); if you want it: {how}"
        return Finding("extras", extra, found)
    remedy = f"Penstock needs {', '.join(old)}: `pip install -U`." if old else ""
    return Finding("extras", extra, found, remedy)


def _numbers(version: str) -> list[int]:
    match = re.match(r"\d+(\.\d+)*", version)
    return list(map(int, match[0].split("."))) if match else []
