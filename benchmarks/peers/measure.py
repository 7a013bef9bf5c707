# SPDX-License-Identifier: Apache-2.0
"""One contender does one work in this process, and its figures are printed.

photos, packed, tiny, transport   an epoch that is checked in every number, and one more, as fast
                                  as the timed ones; then these: whole epochs, at least two and
                                  until 3 s have passed
pack                              seconds of packing, bytes on disk
first                             seconds from the call of `photos` to the first batch, without
                                  an index that an earlier run may have left
paths                             greatest memory of the process tree, less what it was before
resume-save, resume-restore       two processes: one stops, the next goes on
killed, corrupt                   a process below this one loads, and this one tells what it did
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import hashlib
import importlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import works
from _meter import Meter, Reading, tree_memory_bytes
from contender import MOST_SAID, Contender, Epoch, Job, find, sources

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["MARK", "end_descendants", "main", "worker_processes"]

MARK: Final = "READING "
_PROGRESS: Final = "PROGRESS "
_LEAST_EPOCHS: Final = 2
_LOOK_EVERY_S: Final = 0.25
_KILL_AFTER: Final = 3  # batches
_HANG_S: Final = 30.0
_FAULTS: Final = ("killed", "corrupt")
_START_S: Final = 120.0  # until the first batch: imports of hundreds of MB from a cold disk
_PR_SET_CHILD_SUBREAPER: Final = 36


class Task:
    """A contender, a work and its size."""

    def __init__(self, contender: Contender, options: argparse.Namespace) -> None:
        """Make the job."""
        self.contender = contender
        self.work: str = options.work
        self.options = options
        self.size = works.size_of(self.work, smoke=options.smoke)
        self.data: Path = options.data / "smoke" if options.smoke else options.data
        own = works.slug(contender.name)
        # What was packed by an older version of the peer or of its contender is packed anew.
        self.packed = self.data / "packed" / own / _key_of(contender)
        self.place = self.data / "resume" / own
        self.photos = self.data / ("corrupt" if self.work == "corrupt" else "photos")

    def job(self) -> Job:
        """Return what the contender's function gets."""
        return Job(
            photos=self.photos,
            packed=self.packed,
            batch_size=self.size.batch_size,
            num_workers=self.size.num_workers,
            num_samples=self.size.num_samples,
            seed=7,
            tolerant=self.options.tolerant,
        )

    def function(self, name: str) -> Callable[[Job], Any]:
        """Return a function of the contender, which has it."""
        function: Callable[[Job], Any] | None = getattr(self.contender, name)
        if function is None:
            reason = self.contender.absent.get(name, "it has no function for it")
            raise ValueError(f"{self.contender.name} has no part in {name!r}: {reason}")
        return function

    def photo_epoch(self) -> Epoch:
        """Return epochs of photos: from the files, or from the packed format where that is all."""
        if self.contender.photos is not None:
            return self.contender.photos(self.job())
        return self.function("packed")(self.job())


# ---------------------------------------------------------------- speed


def consumer_of(task: Task) -> works.Consumer:
    """Return who reads and checks."""
    if task.work == "tiny":
        return works.RowConsumer(task.size.num_samples, task.size.batch_size)
    if task.work == "transport":
        return works.BigBatchConsumer(task.size.num_samples)
    return works.PhotoConsumer(task.photos, task.size.batch_size)


def run_epochs(task: Task) -> dict[str, Any]:
    """Read two checked epochs, then timed ones."""
    if task.work == "packed":
        _pack(task)
    consumer = consumer_of(task)
    epoch = task.function(task.work)(task.job())
    if task.options.memory_only:  # unchecked: checks take memory, too
        for number in range(2):  # as peers may keep more once they have started
            consumer.take(epoch(number))
        return {}
    consumer.first(epoch(0))
    # Meanwhile a peer that runs on from epoch to epoch has filled its queues: it empties them here.
    consumer.second(epoch(1))
    num_samples = num_batches = num_epochs = 0
    with Meter() as meter:
        while num_epochs < _LEAST_EPOCHS or meter.elapsed_s() < task.size.least_s:
            num_epochs += 1
            counts = consumer.take(epoch(1 + num_epochs))
            num_samples += counts[0]
            num_batches += counts[1]
    more = {"CPU ms/sample": meter.cpu_s / num_samples * 1e3, "epochs": num_epochs}
    reading = Reading.of(meter, num_samples / meter.wall_s, num_batches, more)
    return _figures(reading, f"{consumer.unit}/s")


def run_pack(task: Task) -> dict[str, Any]:
    """Pack the photos anew."""
    shutil.rmtree(task.packed, ignore_errors=True)
    with Meter() as meter:
        _pack(task)
    size_bytes = sum(path.stat().st_size for path in task.packed.rglob("*") if path.is_file())
    given_bytes = sum(os.path.getsize(path) for path, _ in works.labelled_files(task.photos))
    works.check(size_bytes > given_bytes / 2, f"{size_bytes} B packed of {given_bytes} B")
    more = {"MB": size_bytes / 1e6, "MB of the files": given_bytes / 1e6}
    return _figures(Reading.of(meter, meter.wall_s, 0, more), "s")


def run_prepare(task: Task) -> dict[str, Any]:
    """Pack what a work reads, where the contender has to; nothing of it is measured."""
    task.packed.parent.mkdir(parents=True, exist_ok=True)
    _remove_older(task)
    if task.contender.prepare is not None:
        task.contender.prepare(task.job(), task.work)
    return {}


def _pack(task: Task) -> None:
    """Pack the photos, unless they are packed."""
    if task.packed.is_dir():
        return
    half = task.packed.with_name(f".{task.packed.name}-{os.getpid()}")
    task.packed.parent.mkdir(parents=True, exist_ok=True)
    _remove_older(task)
    final, task.packed = task.packed, half
    half.mkdir()
    try:
        task.function("pack")(task.job())
    finally:
        task.packed = final
    half.rename(final)


def _key_of(contender: Contender) -> str:
    """Return a name for what a contender packs: another one when the peer or its file changes."""
    contents = b"".join(path.read_bytes() for path in sources(contender))
    return hashlib.sha256(contents).hexdigest()[:12]


def _remove_older(task: Task) -> None:
    """Remove what a contender packed with another key."""
    for path in task.packed.parent.iterdir():
        if not path.name.lstrip(".").startswith(task.packed.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def run_first(task: Task) -> dict[str, Any]:
    """Time the way to the first batch."""
    task.packed.parent.mkdir(parents=True, exist_ok=True)
    if task.contender.photos is None:
        _pack(task)
        return _time_first(task)
    # Some peers leave an index of the files beside `packed`: here they have left none yet.
    with tempfile.TemporaryDirectory(dir=task.data) as scratch:
        task.packed = Path(scratch) / "packed"
        return _time_first(task)


def _time_first(task: Task) -> dict[str, Any]:
    with Meter() as meter:
        batches = task.photo_epoch()(0)
        images, labels = next(batches)
        works.touch(images)
    works.check_photos(images, labels, task.size.batch_size)
    return _figures(Reading.of(meter, meter.wall_s, 1), "s")


# ---------------------------------------------------------------- memory


class MemoryWatch:
    """Looks at the memory of the process tree from a thread."""

    def __init__(self) -> None:
        """Look for the first time: what lies there before is not counted."""
        gc.collect()
        self._before_bytes = tree_memory_bytes(os.getpid())
        self._done = threading.Event()
        self._peak_bytes = 0
        self._thread = threading.Thread(target=self._look, name="memory watch", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._done.wait(_LOOK_EVERY_S):
            self.look()

    def look(self) -> None:
        """Look now."""
        self._peak_bytes = max(self._peak_bytes, tree_memory_bytes(os.getpid()))

    def peak_mb(self) -> float:
        """Return the most seen so far, and begin anew."""
        self.look()
        peak_mb = (self._peak_bytes - self._before_bytes) / 1e6
        self._peak_bytes = 0
        return peak_mb

    def end(self) -> None:
        """Look no more."""
        self._done.set()
        self._thread.join()


def run_paths(task: Task) -> dict[str, Any]:
    """Read some of many paths."""
    function = task.function("paths")
    watch = MemoryWatch()
    seen: list[np.ndarray] = []
    num_samples = 0
    try:
        with Meter() as meter:
            batches = function(task.job())(0)
            seen.append(next(batches).copy())
            making_mb = watch.peak_mb()
            for numbers in batches:
                seen.append(numbers.copy())
                num_samples += len(numbers)
                if num_samples >= task.size.num_reads:
                    break
            reading_mb = watch.peak_mb()
    finally:
        watch.end()
    works.check(num_samples >= task.size.num_reads, f"the epoch ended after {num_samples} paths")
    works.check_numbers(np.concatenate(seen), task.size.num_samples)
    more = {"to first batch MB": making_mb, "while reading MB": reading_mb}
    return _figures(Reading.of(meter, max(making_mb, reading_mb), len(seen), more), "MB")


# ---------------------------------------------------------------- resume


def run_resume_save(task: Task) -> dict[str, Any]:
    """Stop after some batches; keep the place and the batch that comes next."""
    shutil.rmtree(task.place, ignore_errors=True)  # nobody goes on from the place of another run
    resumable = task.function("resume")(task.job())
    with Meter() as meter:
        batches = resumable.batches()
        first = next(batches)
        first_s = meter.elapsed_s()
        works.check_rows(first, task.size.batch_size)
        for _ in itertools.islice(batches, task.size.num_reads - 1):
            pass
    start_s = time.perf_counter()
    state = resumable.state()
    state_s = time.perf_counter() - start_s
    task.place.mkdir(parents=True, exist_ok=True)
    (task.place / "state").write_bytes(state)
    np.save(task.place / "next.npy", next(batches))
    more = {
        "state B": len(state),
        "state us": state_s * 1e6,
        "first batch s": first_s,
        "us/batch": (meter.wall_s - first_s) / (task.size.num_reads - 1) * 1e6,
    }
    return _figures(Reading.of(meter, float(len(state)), task.size.num_reads, more), "B")


def run_resume_restore(task: Task) -> dict[str, Any]:
    """Go on from the place that another process kept."""
    state = (task.place / "state").read_bytes()
    right = np.load(task.place / "next.npy")
    resumable = task.function("resume")(task.job())
    with Meter() as meter:
        resumable.restore(state)
        batch = next(resumable.batches())
    works.check_rows(batch, task.size.batch_size)
    is_right = bool(np.array_equal(batch, right))
    return {**_figures(Reading.of(meter, meter.wall_s, 1), "s"), "right": is_right}


# ---------------------------------------------------------------- faults


def load_under_watch(task: Task) -> None:
    """Load an epoch, and tell the process above of each batch."""
    if task.contender.photos is None:
        if task.work == "corrupt":
            # Packed anew: here a peer may already refuse the file.
            task.packed = task.packed.with_name(task.packed.name + "-corrupt")
            shutil.rmtree(task.packed, ignore_errors=True)
        _pack(task)
    _tell(started=True)
    try:
        for step, (_, labels) in enumerate(task.photo_epoch()(0), start=1):
            _tell(labels=labels.tolist())
            if task.work == "killed" and step == _KILL_AFTER:
                pids = (task.contender.worker_pids or worker_processes)()
                _tell(kills=len(pids))
                if not pids:
                    return
                os.kill(busiest(pids), signal.SIGKILL)
    except Exception as error:
        traceback.print_exc()
        _tell(error=_last_line(error))
        raise SystemExit(1) from error
    _tell(done=True)


def _last_line(error: BaseException) -> str:
    """Return type and message in a line: the one that says most to who reads it last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:MOST_SAID]


def _tell(**facts: Any) -> None:  # noqa: ANN401
    line = _PROGRESS + json.dumps({**facts, "at_s": time.monotonic()}) + "\n"
    os.write(1, line.encode())  # past all buffers: this process may be ended at any moment


def worker_processes() -> list[int]:
    """Return the processes below this one that load.

    That is its children, without multiprocessing's resource tracker, and with the children of its
    fork server in the place of that one.
    """
    import psutil

    found = []
    for child in psutil.Process().children():
        command = " ".join(child.cmdline())
        if "multiprocessing.forkserver" in command:
            found += [grandchild.pid for grandchild in child.children()]
        elif "multiprocessing.resource_tracker" not in command and command:
            found.append(child.pid)
    return found


def busiest(pids: Sequence[int]) -> int:
    """Return the process with the most CPU time: a worker, and no helper of the workers."""
    import psutil

    def cpu_s(pid: int) -> float:
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system

    return max(pids, key=cpu_s)


def run_fault(task: Task) -> dict[str, Any]:
    """Watch a process that loads, and tell what it did."""
    command = [sys.executable, *sys.argv, "--loads"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            return {"outcome": _watch(process, task)}
        finally:
            end_descendants(process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _watch(process: subprocess.Popen[bytes], task: Task) -> dict[str, Any]:
    facts, errors = _read_facts(process)
    labels = Counter(label for fact in facts for label in fact.get("labels", ()))
    num_photos = works.PhotoConsumer(task.photos, task.size.batch_size).num_photos
    expected = Counter(range(num_photos))
    named = {name: fact for fact in facts for name in fact}
    since = named.get("kills" if task.work == "killed" else "started", facts[0] if facts else None)
    outcome = {
        "expected": expected.total(),
        "came": labels.total(),
        "lost": (expected - labels).total(),
        "too many": (labels - expected).total(),
        "seconds": facts[-1]["at_s"] - since["at_s"] if since else 0.0,
        "line": "",
    }
    if "kills" in named and named["kills"]["kills"] == 0:
        return {**outcome, "kind": "no worker process"}
    if "done" in named:
        return {**outcome, "kind": "goes on"}
    if "error" in named:
        return {**outcome, "kind": "error", "line": named["error"]["error"]}
    if process.poll() is None:
        return {**outcome, "kind": "hangs", "seconds": _HANG_S}
    line = next((line for line in reversed(errors) if line.strip()), "").strip()[:MOST_SAID]
    if not named or "started" not in named:
        raise RuntimeError(f"it ended before it loaded: {line}")
    return {**outcome, "kind": "ends", "line": line, "exit status": process.returncode}


def _read_facts(process: subprocess.Popen[bytes]) -> tuple[list[dict[str, Any]], list[str]]:
    """Read what the process tells until it is done, ends, or tells nothing for long."""
    facts: list[dict[str, Any]] = []
    errors: list[str] = []
    news = threading.Condition()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            _, mark, fact = line.decode(errors="replace").rpartition(_PROGRESS)
            if mark:
                with news:
                    facts.append(json.loads(fact))
                    news.notify()

    def read_errors() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            errors.append(line.decode(errors="replace"))
            sys.stderr.buffer.write(line)

    threads = [threading.Thread(target=target, daemon=True) for target in (read, read_errors)]
    for thread in threads:
        thread.start()
    num_seen = 0
    last_s = time.monotonic()
    while True:
        with news:
            news.wait(0.1)
            if len(facts) > num_seen:
                num_seen, last_s = len(facts), time.monotonic()
            if facts and not facts[-1].keys().isdisjoint(("done", "error")):
                break
        limit_s = _HANG_S if any("labels" in fact for fact in facts) else _START_S
        if process.poll() is not None or time.monotonic() - last_s > limit_s:
            break
    for thread in threads:  # its last words; a process below it may hold the pipe open
        thread.join(1.0)
    return facts, errors


def end_descendants(pid: int) -> None:
    """End what runs below a process, in whatever session."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


# ---------------------------------------------------------------- the command line


def _figures(reading: Reading, unit: str) -> dict[str, Any]:
    return {
        "value": reading.value,
        "unit": unit,
        "wall_s": reading.wall_s,
        "cpu_s": reading.cpu_s,
        "batches": reading.num_batches,
        "more": reading.more,
    }


_RUNS: Final[dict[str, Callable[[Task], dict[str, Any]]]] = {
    **dict.fromkeys(("photos", "packed", "tiny", "transport"), run_epochs),
    "pack": run_pack,
    "first": run_first,
    "paths": run_paths,
    "resume-save": run_resume_save,
    "resume-restore": run_resume_restore,
    **dict.fromkeys(_FAULTS, run_fault),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; return the exit status."""
    options = _parser().parse_args(arguments)
    task = Task(find(options.contender), options)
    works.prepare(task.data, smoke=options.smoke)
    # Workers that are started anew, by whatever peer, import contender files too.
    os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])
    # A daemon whose parent ends becomes a child of this process, so that its CPU is counted.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if options.work in _FAULTS and not (options.loads or options.prepare):
        figures = run_fault(task)
    else:
        start_s = time.perf_counter()
        for library in task.contender.libraries:
            importlib.import_module(library)
        import_s = time.perf_counter() - start_s
        if options.loads:
            load_under_watch(task)
            return 0
        run = run_prepare if options.prepare else _RUNS[options.work]
        figures = {**run(task), "import_s": import_s}
    print(MARK + json.dumps({"contender": task.contender.name, "work": task.work, **figures}))
    sys.stdout.flush()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="contender.py")
    parser.add_argument("--contender", required=True, metavar="NAME")
    parser.add_argument("--work", required=True, choices=works.WORKS)
    parser.add_argument("--data", required=True, type=lambda text: Path(text).resolve())
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it work?")
    parser.add_argument("--tolerant", action="store_true", help="survive bad samples")
    parser.add_argument(
        "--memory-only", action="store_true", help="two epochs, unchecked: somebody looks at it"
    )
    parser.add_argument(
        "--prepare", action="store_true", help="pack what the work reads, and stop: comes first"
    )
    parser.add_argument("--loads", action="store_true", help=argparse.SUPPRESS)
    return parser
