# SPDX-License-Identifier: Apache-2.0
"""What does a loader do when something goes wrong?

Question
    Samples that cannot be read, workers that die or hang, a main process that is killed or
    interrupted, scarce files and shared memory. For each fault and loader: did it raise, go on or
    hang; how many of the good samples had arrived by then; how long did it take; does the message
    name the sample and the signal; how long do workers outlive the loop; what is left behind.

Method
    torch               `torch.utils.data.DataLoader`
    penstock            `penstock.torch.DataLoader`
    penstock, replace   the same with `on_error="replace"`
    penstock, skip      the same with `on_error="skip"`

    All get the same dataset and arguments: 256 samples of 64 KB, a millisecond each, in batches of
    8, in order, by two forked workers. Faults that lie in one sample lie in sample 100. The row
    about reads that fail now and then gives the two policies `retries=2`, all else is default.

    Each cell is a training in a process, session and folder of its own. It reports every batch as
    it comes, so that one that hangs has told how far it came. It counts as hung 30 s after its
    start. The contents of every batch are compared with what they must be. "Gone" is when the
    benchmark, which looks every 20 ms, no longer sees a process of the main process's session,
    counted from the error, the end of the epoch, `break`, Ctrl-C or kill. The main process goes on
    living meanwhile, and lets go of the loader; only the killed one does not. Ctrl-C is SIGINT to
    the whole process group, as a terminal sends it. Left behind is what still runs 5 s after the
    main process's end, and what is in /dev/shm that was not there before.

Left out
    The start of the interpreter and imports. Other start methods than fork.

Machine
    As docs/reliability.md says below its table.

Command
    python benchmarks/reliability.py --save

Result
    docs/reliability.md; `--save` writes its table, and results/reliability.json, which has the
    messages in full.

What it does not show
    How often a fault that depends on the moment does what it did here: where a killed worker held a
    lock, for instance. Seconds are of one run.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from _runner import as_table, check, data_loader, machine_facts, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy.typing as npt

_BAD: Final = 100
_NUM_SAMPLES: Final = 256
_NUM_VALUES: Final = 16 * 1024  # float32, so 64 KB
_BATCH_SIZE: Final = 8
_STOP_AFTER: Final = 4  # batches, where the loop or the main process is to be ended
_STUCK_S: Final = 60.0  # longer than anything here is waited for
_DEADLINE_S: Final = 30.0
_GONE_WITHIN_S: Final = 12.0  # torch gives each of two workers 5 s
_LEFT_AFTER_S: Final = 5.0
_LOOK_EVERY_S: Final = 0.02
_MAX_OPEN_FILES: Final = 64
_MARK: Final = "REPORT "

_HERE: Final = Path(__file__).parent
_PAGE: Final = _HERE.parent / "docs" / "reliability.md"
_BEGIN: Final = "<!-- benchmarks/reliability.py --save writes what follows -->"
_END: Final = "<!-- up to here -->"


def read(index: int) -> npt.NDArray[np.float32]:
    """Return what a file would hold: shape (16384,), float32, all `index`; takes a millisecond."""
    time.sleep(0.001)
    return np.full(_NUM_VALUES, index, np.float32)


class Photos:
    """A dataset whose samples are read by a function, in which a fault may lie."""

    def __init__(self, read_one: Callable[[int], npt.NDArray[np.float32]]) -> None:
        """Keep the function."""
        self._read = read_one

    def __len__(self) -> int:
        """Return the number of samples."""
        return _NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the index, and pixels that say it again."""
        return {"index": index, "pixels": self._read(index)}

    def describe(self, index: int) -> str:
        """Return the sample's file."""
        return f"photo-{index}.jpg"


class OddError(Exception):
    """An exception that cannot be made from a message alone."""

    def __init__(self, path: str, *, offset: int) -> None:
        """Say where a file is broken."""
        super().__init__(f"{path} is broken at byte {offset}")


def _raise() -> None:
    raise ValueError("premature end of file")


def _raise_odd() -> None:
    raise OddError("the file", offset=7)


def _raise_unpicklable() -> None:
    class LocalError(Exception):
        pass

    raise LocalError("premature end of file")


def _raise_memory_error() -> None:
    np.empty(2**60, np.uint8)


def _read_null_pointer() -> None:
    ctypes.string_at(0)


def _at_bad(action: Callable[[], object], index: int) -> npt.NDArray[np.float32]:
    if index == _BAD:
        action()
    return read(index)


def _read_short(index: int) -> npt.NDArray[np.float32]:
    return read(index)[: 1000 if index == _BAD else None]


def _read_at_the_second_try(index: int) -> npt.NDArray[np.float32]:
    if index % 10 == 3:
        with contextlib.suppress(FileExistsError):
            Path(f"tried-{index}").touch(exist_ok=False)
            raise ConnectionResetError("connection reset by peer")
    return read(index)


def _read_until_stuck(index: int) -> npt.NDArray[np.float32]:
    if index >= _STOP_AFTER * _BATCH_SIZE:
        time.sleep(_STUCK_S)
    return read(index)


def _kill_a_worker(_: object) -> None:
    import multiprocessing

    worker = min(multiprocessing.active_children(), key=lambda process: process.pid or 0)
    worker.kill()


def _press_ctrl_c(_: object) -> None:
    _tell(ended=time.monotonic())
    os.killpg(0, signal.SIGINT)


def _die(_: object) -> None:
    time.sleep(0.5)  # until workers have done what they were told, and wait, or are stuck
    _tell(ended=time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


class Leave(Exception):
    """Raised to leave the loop as `break` does."""


def _leave(_: object) -> None:
    _tell(ended=time.monotonic())
    raise Leave


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        read_one: How samples are read.
        action: What happens in the main process after `_STOP_AFTER` batches; None is nothing.
        options: More arguments for the loader.
        retries: For the policies.
        num_bad: Samples that nobody can make.
        signal_words: One of them is in a message that names the signal; empty if there is none.
        holds: Whether the main process keeps all batches, and may open few files.
        small_memory: Whether /dev/shm has 1 MB.
        ends_loop: Whether the loop is to end early.
    """

    read_one: Callable[[int], npt.NDArray[np.float32]] = read
    action: Callable[[object], None] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    retries: int = 0
    num_bad: int = 0
    signal_words: tuple[str, ...] = ()
    holds: bool = False
    small_memory: bool = False
    ends_loop: bool = False


def _bad_sample(
    action: Callable[[], object], signal_words: tuple[str, ...] = (), **options: object
) -> Fault:
    return Fault(partial(_at_bad, action), num_bad=1, signal_words=signal_words, options=options)


_KILLED: Final = ("SIGKILL", "Killed")
FAULTS: Final[Mapping[str, Fault]] = {
    "a sample raises": _bad_sample(_raise),
    "... an exception with an odd constructor": _bad_sample(_raise_odd),
    "... an exception that cannot be pickled": _bad_sample(_raise_unpicklable),
    "... MemoryError": _bad_sample(_raise_memory_error),
    "a sample has another shape": Fault(_read_short, num_bad=1),
    "one read in ten fails, the next succeeds": Fault(_read_at_the_second_try, retries=2),
    "a sample calls sys.exit(0)": _bad_sample(partial(sys.exit, 0)),
    "a sample calls os._exit(3)": _bad_sample(partial(os._exit, 3)),
    "a sample crashes its worker (SIGSEGV)": _bad_sample(
        _read_null_pointer, ("SIGSEGV", "Segmentation fault")
    ),
    "a sample gets its worker killed (SIGKILL)": _bad_sample(
        lambda: os.kill(os.getpid(), signal.SIGKILL), _KILLED
    ),
    "a worker is killed once, from outside": Fault(action=_kill_a_worker, signal_words=_KILLED),
    "a sample hangs, timeout=2": _bad_sample(partial(time.sleep, _STUCK_S), timeout=2),
    "all batches kept, ulimit -n 64": Fault(holds=True),
    "/dev/shm of 1 MB": Fault(small_memory=True),
    "break, workers in slow samples": Fault(_read_until_stuck, _leave, ends_loop=True),
    "Ctrl-C, workers in slow samples": Fault(_read_until_stuck, _press_ctrl_c, ends_loop=True),
    "kill -9 of the main process, workers idle": Fault(action=_die, ends_loop=True),
    "kill -9 of the main process, workers in slow samples": Fault(
        _read_until_stuck, _die, ends_loop=True
    ),
}
_SMOKE_FAULTS: Final = (
    "... an exception with an odd constructor",
    "a sample calls os._exit(3)",
    "kill -9 of the main process, workers idle",
)


def loader_of(name: str, fault: Fault) -> Any:  # noqa: ANN401 - one of two classes
    """Return a loader, new, with nothing but what the fault needs beside the common arguments."""
    arguments: dict[str, Any] = {
        "batch_size": _BATCH_SIZE,
        "num_workers": 2,
        "multiprocessing_context": "fork",
        **fault.options,
    }
    library, _, on_error = name.partition(", ")
    if on_error and fault.retries:
        from penstock import FaultPolicy

        arguments["on_error"] = FaultPolicy(on_error, retries=fault.retries)  # type: ignore[arg-type]
    elif on_error:
        arguments["on_error"] = on_error
    loader = data_loader("torch" if library == "torch" else "penstock")
    if library == "penstock":
        # Imported with the first workers, and compiled where no byte code may be kept: 0.3 s.
        import penstock.engine.backends.process  # noqa: F401
    return loader(Photos(fault.read_one), **arguments)


LOADERS: Final = ("torch", "penstock", "penstock, replace", "penstock, skip")


# The main process of one cell.


def train(fault: Fault, loader_name: str) -> None:
    """Run one epoch, and report on standard output what happens."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("always")
    loader = loader_of(loader_name, fault)
    if fault.holds:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_OPEN_FILES, _MAX_OPEN_FILES))
    _tell(began=time.monotonic())
    try:
        with warnings.catch_warnings(record=True) as caught:
            _loop(loader, fault)
    except Leave:
        _tell(left=True)
    except BaseException as error:
        _tell(ended=time.monotonic(), error=type(error).__name__, text=_whole_text(error))
    else:
        _tell(ended=time.monotonic())
    _tell(
        warned=[str(warning.message) for warning in caught],
        failures=len(getattr(loader, "failures", [])),
    )
    del loader
    gc.collect()  # torch's error holds itself, and with it the iterator
    sys.stdin.read()  # lives on until the benchmark has seen what becomes of the workers


def _loop(loader: Any, fault: Fault) -> None:  # noqa: ANN401
    kept = []
    for number, batch in enumerate(loader, start=1):
        indices = batch["index"].tolist()
        pixels = batch["pixels"]
        right = [[float(index)] for index in indices]
        check(pixels[:, :1].tolist() == right, f"pixels of {indices}")
        check(bool((pixels == pixels[:, :1]).all()), f"pixels of {indices} are mixed")
        _tell(batch=indices)
        if fault.holds:
            kept.append(batch)
        if number == _STOP_AFTER and fault.action is not None:
            fault.action(loader)


def _tell(**facts: object) -> None:
    # One write, so that a process that is killed tells all or nothing.
    os.write(1, (_MARK + json.dumps(facts) + "\n").encode())


def _whole_text(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error))
    # Of the paths of source files only the last two parts: the rest is this machine's.
    return re.sub(r'(File ")[^"]*/([^"/]+/[^"/]+")', r"\1.../\2", text)


# The benchmark.


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one loader did about one fault.

    Attributes:
        fault: Key of `FAULTS`.
        loader: One of `LOADERS`.
        did: "went on" (the epoch was completed), "raised", "hung", "ended" (the loop, by `break`),
            "was killed" (the main process), or "not run".
        error: Type of the exception.
        text: The exception as Python prints it, notes and traceback included.
        num_good: Good samples that had arrived, out of `num_expected`.
        num_expected: Good samples of the dataset.
        num_replaced: Samples that came a second time, in the place of bad ones.
        num_failures: Length of `loader.failures`.
        warned: Warnings.
        seconds: From iter() to the end of the epoch or the error.
        gone_s: From there until the last worker was gone; None if it was not in time.
        names_sample: Whether the text names the bad sample.
        names_signal: Whether it names the signal.
        left_processes: That run 5 s after the main process's end.
        left_files: New names in /dev/shm.
        num_printed: Lines on standard error, the main process's own traceback not among them.
    """

    fault: str
    loader: str
    did: str
    error: str = ""
    text: str = ""
    num_good: int = 0
    num_expected: int = _NUM_SAMPLES
    num_replaced: int = 0
    num_failures: int = 0
    warned: tuple[str, ...] = ()
    seconds: float = 0.0
    gone_s: float | None = None
    names_sample: bool = False
    names_signal: bool = False
    left_processes: int = 0
    left_files: tuple[str, ...] = ()
    num_printed: int = 0

    @property
    def phrase(self) -> str:
        """What it did, in a few words."""
        fault = FAULTS[self.fault]
        if self.did == "not run":
            return f"not run: {self.text}"
        given = f"{self.num_good} of {self.num_expected} good samples"
        if self.num_good == self.num_expected and not fault.ends_loop:
            given = "all good samples"
        if self.did == "hung":
            return f"**hung** (stopped after {_DEADLINE_S:.0f} s), {given}"
        if fault.ends_loop:
            return self._on_workers()
        if self.did == "was killed":
            return f"**the main process itself ended**, without an error, {given}"
        if self.did == "went on":
            return f"{given}, {self.seconds:.1f} s"
        names = [f"sample {'' if self.names_sample else 'not '}named"] if fault.num_bad else []
        if fault.signal_words:
            names.append(f"signal {'' if self.names_signal else 'not '}named")
        return "; ".join([f"`{self.error}` after {self.seconds:.1f} s, {given}", *names])

    def _on_workers(self) -> str:
        if self.gone_s is None:
            text = f"workers **still there** after {_GONE_WITHIN_S:.0f} s"
        else:
            text = f"workers gone after {self.gone_s:.1f} s"
        if self.num_printed:
            text += f", {self.num_printed} lines printed by workers"
        return text

    @property
    def left(self) -> str:
        """What is left behind, in words."""
        found = []
        if self.left_processes:
            found.append(f"{self.left_processes} processes")
        if self.left_files:
            found.append(f"{len(self.left_files)} files in /dev/shm")
        return ", ".join(found) or "nothing"


def run(fault_name: str, loader_name: str) -> Outcome:
    """Run one cell."""
    fault = FAULTS[fault_name]
    command = [sys.executable, __file__, "--cell", fault_name, loader_name]
    if fault.small_memory:
        if (prefix := _with_small_memory()) is None:
            return Outcome(fault_name, loader_name, "not run", text="a mount is not permitted here")
        command = [*prefix, *command]
    before = _shared_files()
    with tempfile.TemporaryDirectory() as folder, _cell(command, Path(folder)) as cell:
        cell.watch()
        gone_s = cell.seconds_until_gone()
        left = cell.end()
        facts, printed = cell.facts(), cell.printed()
    left_files = tuple(sorted(_shared_files() - before))
    outcome = _outcome(fault_name, loader_name, facts, is_over=cell.is_over)
    fields = {**asdict(outcome), "gone_s": gone_s, "num_printed": _count(printed)}
    return Outcome(**{**fields, "left_processes": left, "left_files": left_files})


class _Cell:
    """A main process at work."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._deadline_s = time.monotonic() + _DEADLINE_S
        self.is_over = False

    def facts(self) -> list[dict[str, Any]]:
        """Return what the main process has told so far."""
        lines = (self._folder / "stdout").read_text().splitlines()
        return [json.loads(line.removeprefix(_MARK)) for line in lines if line.startswith(_MARK)]

    def printed(self) -> str:
        """Return what was written to standard error."""
        return (self._folder / "stderr").read_text(errors="replace")

    def _ended_s(self) -> float | None:
        return next((fact["ended"] for fact in self.facts() if "ended" in fact), None)

    def watch(self) -> None:
        """Wait until the main process has said how it ended, or is gone, or hangs."""
        while time.monotonic() < self._deadline_s:
            if self._ended_s() is not None or self._process.poll() is not None:
                self.is_over = True
                return
            time.sleep(_LOOK_EVERY_S)

    def seconds_until_gone(self) -> float | None:
        """Return how long workers outlived the end; None if they were not gone in time."""
        since_s = self._ended_s()
        while since_s is not None and time.monotonic() - since_s < _GONE_WITHIN_S:
            if not self._others():
                return time.monotonic() - since_s
            time.sleep(_LOOK_EVERY_S)
        return None

    def end(self) -> int:
        """Let the main process end; return how many others are left 5 s later, and end those."""
        if self.is_over:
            with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
                self._process.communicate(timeout=_LEFT_AFTER_S * 3)
            stop_s = time.monotonic() + _LEFT_AFTER_S
            while self._others() and time.monotonic() < stop_s:
                time.sleep(_LOOK_EVERY_S)
        others = len(self._others()) if self.is_over else 0
        self.kill()
        return others

    def kill(self) -> None:
        """End every process of the main process's group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _others(self) -> list[int]:
        import psutil

        others = []
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if pid != self._process.pid and os.getsid(pid) == self._process.pid:
                    is_zombie = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
                    others += [] if is_zombie else [pid]
        return others


@contextlib.contextmanager
def _cell(command: Sequence[str], folder: Path) -> Iterator[_Cell]:
    # Files rather than pipes: a worker that is left behind would hold a pipe open.
    with (folder / "stdout").open("wb") as output, (folder / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            cwd=folder,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(_HERE)},
        )
    cell = _Cell(process, folder)
    try:
        yield cell
    finally:
        cell.kill()


def _outcome(
    fault_name: str, loader_name: str, facts: Sequence[Mapping[str, Any]], *, is_over: bool
) -> Outcome:
    fault = FAULTS[fault_name]
    merged: dict[str, Any] = {}
    for fact in facts:
        merged |= fact
    if "began" not in merged:
        raise RuntimeError(f"the main process of {fault_name!r}, {loader_name!r} did not begin")
    given = [index for fact in facts for index in fact.get("batch", [])]
    good = set(given) - ({_BAD} if fault.num_bad else set())
    check("wrong data" not in merged.get("text", ""), merged.get("text", ""))
    text = merged.get("text", "")
    return Outcome(
        fault=fault_name,
        loader=loader_name,
        did=_what_happened(merged, is_over=is_over),
        error=merged.get("error", ""),
        text=text,
        num_good=len(good),
        num_expected=_NUM_SAMPLES - fault.num_bad,
        num_replaced=len(given) - len(set(given)),
        num_failures=merged.get("failures", 0),
        warned=tuple(merged.get("warned", ())),
        seconds=merged.get("ended", merged["began"] + _DEADLINE_S) - merged["began"],
        names_sample=f"photo-{_BAD}.jpg" in text or f"sample {_BAD}" in text,
        names_signal=any(word in text for word in fault.signal_words),
    )


def _what_happened(merged: Mapping[str, Any], *, is_over: bool) -> str:
    if not is_over:
        return "hung"
    if "error" in merged:
        return "raised"
    if "left" in merged:
        return "ended"
    return "went on" if "warned" in merged else "was killed"


def _count(printed: str) -> int:
    return len([line for line in printed.splitlines() if line.strip()])


def _shared_files() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _with_small_memory() -> list[str] | None:
    """Return what to put before a command to run it with a /dev/shm of 1 MB; None if we may not."""
    if shutil.which("unshare") is None:
        return None
    prefix = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm && "
    done = subprocess.run([*prefix, mount + "true"], capture_output=True, check=False)
    return [*prefix, mount + 'exec "$@"', "sh"] if done.returncode == 0 else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; return the exit status: 1 if a batch was wrong, else 0."""
    options = _parser().parse_args(arguments)
    if options.cell:
        fault_name, loader_name = options.cell
        train(FAULTS[fault_name], loader_name)
        return 0
    faults = _SMOKE_FAULTS if options.smoke else tuple(FAULTS)
    if options.only:
        faults = tuple(name for name in faults if any(word in name for word in options.only))
    outcomes = []
    try:
        for fault in faults:
            for loader in LOADERS:
                write(f"{fault}: {loader}", to=sys.stderr)
                outcomes.append(run(fault, loader))
    except (ValueError, RuntimeError) as error:
        write(f"reliability.py: {error}", to=sys.stderr)
        return 1
    _report(outcomes)
    if options.save and (options.smoke or options.only):
        write("not saved: this is a part of the table", to=sys.stderr)
    elif options.save:
        _save(outcomes)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="reliability.py")
    parser.add_argument("--smoke", action="store_true", help="three faults: does it work?")
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="faults with a word in their name"
    )
    parser.add_argument("--save", action="store_true", help="write the results and the page")
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    return parser


def _report(outcomes: Sequence[Outcome]) -> None:
    rows = [["fault", "loader", "what it did", "workers gone", "left behind"]]
    for outcome in outcomes:
        gone = "-" if outcome.gone_s is None else f"{outcome.gone_s:.1f} s"
        rows.append([outcome.fault, outcome.loader, outcome.phrase, gone, outcome.left])
    write(as_table(rows))


def _save(outcomes: Sequence[Outcome]) -> None:
    machine = machine_facts()
    result = {
        "benchmark": "reliability",
        "machine": machine,
        "outcomes": [{**asdict(outcome), "phrase": outcome.phrase} for outcome in outcomes],
    }
    path = _HERE / "results" / "reliability.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    page = _PAGE.read_text(encoding="utf-8")
    head, rest = page.split(_BEGIN)
    _, tail = rest.split(_END)
    block = f"{_BEGIN}\n\n{_page_table(outcomes)}\n\n{_footnote(machine)}\n\n{_END}"
    _PAGE.write_text(head + block + tail, encoding="utf-8")
    write(f"saved results/{path.name} and docs/{_PAGE.name}", to=sys.stderr)


_COLUMNS: Final = ("torch", "penstock", "penstock, replace")


def _page_table(outcomes: Sequence[Outcome]) -> str:
    found = {(outcome.fault, outcome.loader): outcome for outcome in outcomes}
    lines = ['| | torch | penstock | penstock, `on_error="replace"` |', "|---|---|---|---|"]
    for fault in dict.fromkeys(outcome.fault for outcome in outcomes):
        cells = [found[fault, loader] for loader in _COLUMNS]
        lines.append(f"| {fault} | " + " | ".join(_page_cell(cell) for cell in cells) + " |")
    return "\n".join(lines)


def _page_cell(outcome: Outcome) -> str:
    return outcome.phrase + ("" if outcome.left == "nothing" else f"; left behind: {outcome.left}")


def _footnote(machine: Mapping[str, Any]) -> str:
    return (
        f"{machine['date']}, torch {machine['torch']}, Python {machine['python']}, "
        f"{machine['system']}, {machine['cores']} cores of an {machine['processor']}."
    )


if __name__ == "__main__":
    raise SystemExit(main())
