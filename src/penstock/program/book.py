# SPDX-License-Identifier: Apache-2.0
"""The summary of a process under `penstock run`: its loaders, by the line that made them."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import sys
import weakref
from dataclasses import dataclass, field, fields
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.distributed import current_rank
from penstock.errors import ConfigError, PenstockError
from penstock.forks import Owner
from penstock.insight import monitor
from penstock.insight.plain import plain_text
from penstock.insight.stats import Span
from penstock.lines import counted, duration, percent, say
from penstock.program.options import Options
from penstock.program.saved import SavedLoader, SavedRun, Usage, write_run
from penstock.worker_info import get_worker_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.insight.monitor import Accounts, Monitor
    from penstock.insight.recording import Recording
    from penstock.insight.stats import Stats
    from penstock.program.stock import StockMonitor


_TOLD_APART_BY: Final = ("dataset", "num_workers", "batch_size", "sampler", "batch_sampler")


def begin() -> None:
    """Replace torch's `DataLoader` in this process, or with `--engine torch` measure it.

    To be called once the process has imported torch.
    """
    options = Options.of_environment()
    # Now and not at the end: an import may call `exec`, and by the last `exec` Python decides
    # whether it ends by SIGINT after a KeyboardInterrupt.
    if options.report or options.trace:
        import penstock.insight.report
        import penstock.insight.trace  # noqa: F401
    book = Book(options)
    monitor.watchers.append(book.add)
    if os.getpid() == options.pid:
        atexit.register(book.say_what_is_missing)
    if options.engine == "penstock":
        from penstock.torch.replacement import install

        install(**options.settings)
    else:
        from penstock.program.stock import watch

        watch(book.add)


@dataclass(slots=True)
class Account:
    """The measurements of all loaders of one kind that one line of the program made."""

    made_at: str  # the line, as "train.py:31"
    taken: list[str]  # settings of `penstock run` that apply to these loaders
    settings: dict[str, Any]  # arguments of the first loader, by name
    run: Span = field(default_factory=Span)  # sums over all loaders
    stats: Stats | None = None  # of the loader that ran longest
    recording: Recording | None = None  # of the same, if a report or a trace is to be written
    loaders: int = 0
    first_batch_s: float = 0.0  # of the first loader that ended with a batch
    failure: str = ""  # the first bad sample that was left out or replaced

    def close(self, accounts: Accounts, *, is_recorded: bool) -> None:
        """Add the measurements of a loader, which has ended."""
        stats = accounts.stats()
        self.failure = self.failure or next((plain_text(str(f)) for f in accounts.failures()), "")
        self.first_batch_s = self.first_batch_s or stats.first_batch_s
        if self.stats is None or stats.run.seconds > self.stats.run.seconds:
            self.stats = stats
            self.recording = accounts.recording() if is_recorded else None
        names = [f.name for f in fields(Span)]
        self.run = Span(**{n: getattr(self.run, n) + getattr(stats.run, n) for n in names})

    def saved(self) -> SavedLoader:
        """Return the figures that `--save` writes."""
        assert self.stats is not None
        return SavedLoader(
            made_at=plain_text(self.made_at),
            dataset=plain_text(self.settings["dataset"]),
            num_workers=self.stats.num_workers,
            loaders=self.loaders,
            first_batch_s=self.first_batch_s,
            run=self.run,
        )

    def lines(self) -> list[str]:
        """Return the paragraph of the summary."""
        assert self.stats is not None
        verdict, run = self.stats.verdict, self.run
        made = counted(self.loaders, "loader") if self.loaders > 1 else "a loader"
        lines = [
            f"penstock run: {self.made_at}: {made} of {self.settings['dataset']}, "
            f"{counted(self.stats.num_workers, 'worker')}, {counted(run.batches, 'batch')}. "
            f"Waited {duration(run.wait_s)} of {duration(run.seconds)} "
            f"({percent(run.wait_share)}) for data."
        ]
        if run.failed:
            bad = counted(run.failed, "bad sample")
            lines.append(f"  {bad}, left out or replaced. The first: {self.failure}")
        which = "The one that ran longest: " if self.loaders > 1 else ""
        lines.append(f"  {which}{verdict.text}")
        if verdict.remedy:
            lines.append(f"  In {self.made_at}: {verdict.remedy}")
        return lines


class _Opened:
    """An account that is open for as long as the monitor lives that this was handed to.

    It is no `weakref.finalize`: what that calls is kept by Python, and would keep the dataset, and
    through it a loader that the dataset knows.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close: Callable[[], None] | None = close

    def close(self) -> None:
        """Close it, unless it is closed."""
        close, self._close = self._close, None
        if close is not None:
            close()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # Python takes its modules apart
            self.close()


class Book:
    """The accounts of a process; prints the summary and writes the files when the process ends.

    It holds no reference to a loader.
    """

    def __init__(self, options: Options) -> None:
        """Make a book without accounts."""
        self._options = options
        self._owner: Owner | None = None
        self._accounts: dict[tuple[str, ...], Account] = {}
        self._open: weakref.WeakKeyDictionary[_Opened, None] = weakref.WeakKeyDictionary()
        self._usage: Usage | None = None
        self._is_another_rank = False

    def add(self, monitor: Monitor | StockMonitor, loader: Any) -> object:  # noqa: ANN401 - of either kind
        """Add a loader, whose first epoch begins; its account ends with the object returned."""
        if get_worker_info() is not None:  # a loader inside a dataset
            return None
        if self._owner is None or not self._owner.is_here:  # the process's first, also after a fork
            self._owner, self._accounts, self._usage = Owner(), {}, None
            self._open = weakref.WeakKeyDictionary()  # in their order
            # Runs after the program's own handlers. Not atexit: a child of multiprocessing ends by
            # os._exit, which skips it.
            util.Finalize(None, self.end, exitpriority=-1)
            # At the end as well, when a process group may be there, or this one gone.
            self._is_another_rank = _is_another_rank()
            if self._options.save and not self._is_another_rank:
                self._usage = Usage(self._options)
        settings = self._options.settings.items()
        # As texts: a subclass may have anything by these names.
        taken = [name for name, value in settings if str(getattr(loader, name, None)) == str(value)]
        accounts = monitor.accounts(loader)
        # One line may make the loaders of training and of validation.
        kind = monitor.made_at, *(_kind(accounts.settings.get(name)) for name in _TOLD_APART_BY)
        account = self._accounts.setdefault(
            kind, Account(monitor.made_at, taken, accounts.settings)
        )
        account.loaders += 1
        is_recorded = bool(self._options.report or self._options.trace)
        opened = _Opened(functools.partial(account.close, accounts, is_recorded=is_recorded))
        self._open[opened] = None
        return opened

    def say_what_is_missing(self) -> None:
        """Print which requested files are not written because no loader gave a batch."""
        wanted = (self._options.report, self._options.trace, self._options.save)
        missing = [path for path in wanted if path and self._free(path) == Path(path)]
        if self._owner is None and missing and not self._options.quiet:
            files = ", ".join(missing)
            say(f"penstock run: no DataLoader gave a batch, so not written: {files}", err=True)

    def end(self) -> None:
        """Write the requested files and print the summary."""
        used = None if self._usage is None else self._usage.end()  # without the cost of the report
        for opened in list(self._open):
            opened.close()
        if not self._accounts or self._is_another_rank or _is_another_rank():
            return
        accounts = [a for a in self._accounts.values() if a.run.batches]
        lines = [line for account in accounts for line in account.lines()]
        lines += self._uses_of_settings(accounts)
        lines += self._files(accounts, used)
        for line in lines if not self._options.quiet else ():
            say(line, err=True)

    def _files(self, accounts: list[Account], used: dict[str, Any] | None) -> Iterator[str]:
        """Write the files, and yield a line for each."""
        options = self._options
        if options.save is not None and used is not None:
            loaders = [account.saved() for account in accounts]
            run = SavedRun(engine=options.engine, program=options.program, loaders=loaders, **used)
            yield self._written(options.save, "figures of this run", write_run, run)
        if options.report or options.trace:
            from penstock.insight.report import write_report
            from penstock.insight.trace import write_trace

            longest = sorted(accounts, key=lambda account: -account.run.seconds)
            for option, write in (("report", write_report), ("trace", write_trace)):
                path = getattr(options, option)
                for account in longest if path else ():
                    what = f"{option} of {account.made_at}"
                    yield self._written(path, what, write, account.recording)

    def _written(self, path: Any, what: str, write: Callable[..., object], content: object) -> str:  # noqa: ANN401
        try:
            free = self._free(path)
            write(content, free)
        except (OSError, PenstockError) as error:  # the others may be written all the same
            return f"penstock run: {error}"
        return f"penstock run: {what}: {free}"

    def _uses_of_settings(self, accounts: list[Account]) -> list[str]:
        lines = []
        for name, value in self._options.settings.items():
            took = dict.fromkeys(a.made_at for a in accounts if name in a.taken)
            own = dict.fromkeys(a.made_at for a in accounts if name not in a.taken)
            text = f"penstock run: {name}={value} applied in {', '.join(took) or 'no loader'}"
            kept = f"; the program's own value kept in {', '.join(own)}" if own else ""
            lines.append(text + kept)
        return lines

    def _free(self, path: str) -> Path:
        """Return the path, or a numbered one if this run has written to it already."""
        first = free = Path(path)
        for number in itertools.count(2):
            if not free.is_file() or free.stat().st_mtime < self._options.started:
                break
            free = first.with_stem(f"{first.stem}-{number}")
        return free


def _kind(setting: object) -> str:
    return str(setting).partition("(")[0]  # a sampler of another epoch may have another seed


def _is_another_rank() -> bool:
    try:
        return current_rank().rank > 0
    except ConfigError:
        return False
