# SPDX-License-Identifier: Apache-2.0
"""Machines that lack something: an epoch is right, or ends with an error that says what is lacking.

Each row is a program of its own. `PENSTOCK_SHOW=1` prints what each wrote.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass

import pytest

TIMEOUT_S = 60
PROGRAM = """
import os, resource, signal, sys, threading, time
import numpy as np
import numpy.random  # which numpy loads late, and not within such limits
import penstock
from penstock import Loader
from penstock.errors import PenstockError

class Rows:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return np.full(20_000, index, np.float32)

def epoch(**options):
    options = {"batch_size": 4, "num_workers": 2} | options
    held = list(Loader(Rows(), **options))
    assert [int(batch[3, -1]) for batch in held] == list(range(3, 64, 4)), "other batches"

def tell(text):
    os.write(told, text.encode())
"""
ENDING = """
try:
    epoch(**OPTIONS)
except PenstockError as error:
    tell(f"{type(error).__name__}: {error}")
except Exception as error:
    tell(f"not ours: {type(error).__name__}: {error}")
else:
    tell("ok")
for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF):
    signal.setitimer(timer, 0)  # else its signal ends an interpreter that has no handlers any more
"""


@dataclass
class Row:
    """One environment.

    Attributes:
        before: Python that runs before the epoch.
        shell: A shell command that runs before the program, in a mount namespace of its own.
        said: What has to be told: "ok", or what the error begins with; any of several.
        options: Of the loader.
        slow: Whether it runs with `make slow` only.
    """

    before: str = ""
    shell: str = ""
    said: tuple[str, ...] = ("ok",)
    options: str = "{}"
    slow: bool = True


def limit(name, value):
    return f"resource.setrlimit(resource.RLIMIT_{name}, ({value}, {value}))"


def closed(*numbers):
    return "\n".join(f"os.close({number})" for number in numbers)


EVERY_50_MS = "signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)"
FREE_ADDRESSES = "int(open('/proc/self/statm').read().split()[0]) * 4096"
ROWS = {
    # /dev/shm: nothing of ours lies there.
    "tiny /dev/shm": Row(shell="mount -t tmpfs -o size=4k t /dev/shm"),
    "full /dev/shm": Row(
        shell="mount -t tmpfs -o size=64k t /dev/shm; cat /dev/zero > /dev/shm/x 2>/dev/null; true"
    ),
    "read-only /dev/shm": Row(shell="mount -t tmpfs -o ro t /dev/shm", slow=False),
    "/dev/shm without a place for a name": Row(
        shell="mount -t tmpfs -o nr_inodes=1 t /dev/shm", options="{'num_workers': 3}"
    ),
    "absent /dev/shm": Row(
        shell="mount -t tmpfs t /dev && mknod /dev/null c 1 3 && mknod /dev/urandom c 1 9"
    ),
    "absent /dev/shm, spawn": Row(
        shell="mount -t tmpfs t /dev && mknod /dev/null c 1 3 && mknod /dev/urandom c 1 9",
        options="{'multiprocessing_context': 'fork', 'persistent_workers': True}",
    ),
    "empty /dev": Row(shell="mount -t tmpfs t /dev"),
    "no /proc": Row(shell="mount -t tmpfs t /proc"),
    "no /sys": Row(shell="mount -t tmpfs t /sys"),
    "no memfd_create": Row("del os.memfd_create"),
    # Limits.
    **{
        f"RLIMIT_NOFILE {number}": Row(
            limit("NOFILE", number), said=said
        )
        for number, said in (
            (12, ("WorkerError", "TransportError", "ConfigError")),
            (20, ("WorkerError", "ConfigError", "ok")),
            (32, ("ok",)),
            (64, ("ok",)),
        )
    },
    "RLIMIT_FSIZE 0": Row(limit("FSIZE", 0), said=("ok", "TransportError")),
    "RLIMIT_FSIZE 64 KiB": Row(limit("FSIZE", 65536), said=("ok", "TransportError")),
    "RLIMIT_CORE 0": Row(limit("CORE", 0)),
    "RLIMIT_STACK 1 MiB": Row(limit("STACK", 1 << 20)),
    "RLIMIT_MEMLOCK 0": Row(limit("MEMLOCK", 0)),
    "RLIMIT_SIGPENDING 0": Row(limit("SIGPENDING", 0)),
    "RLIMIT_MSGQUEUE 0": Row(limit("MSGQUEUE", 0)),
    "RLIMIT_NICE, nice 19": Row("os.nice(19)"),
    "RLIMIT_AS, 64 MiB left": Row(
        limit("AS", f"{FREE_ADDRESSES} + (64 << 20)"), said=("ok", "TransportError"), slow=False
    ),
    "RLIMIT_AS, 2 MiB left": Row(
        limit("AS", f"{FREE_ADDRESSES} + (2 << 20)"),
        said=("TransportError", "WorkerDied", "WorkerError", "not ours: MemoryError"),
    ),
    "RLIMIT_DATA, 8 MiB": Row(
        limit("DATA", 8 << 20),
        said=("ok", "TransportError", "WorkerDied", "not ours: MemoryError"),
    ),
    # Descriptors 0 to 2, which what is opened next would take.
    **{
        f"closed {numbers}, {method}": Row(
            closed(*numbers),
            options=f"{{'multiprocessing_context': {method!r}}}",
            slow=(numbers, method) != ((0, 1, 2), "fork"),
        )
        for numbers in ((0,), (1,), (2,), (0, 1, 2))
        for method in ("fork", "forkserver", "spawn")
    },
    "sys.stdin, stdout and stderr None": Row("sys.stdin = sys.stdout = sys.stderr = None"),
    "stderr full": Row("os.dup2(os.open('/dev/full', os.O_WRONLY), 2)"),
    "stdout a broken pipe": Row("r, w = os.pipe(); os.close(r); os.dup2(w, 1)"),
    # Signals.
    "SIGALRM every 10 ms": Row(
        f"signal.signal(signal.SIGALRM, lambda *_: None)\n{EVERY_50_MS}", slow=False
    ),
    "SIGALRM every 10 ms, calls not restarted": Row(
        "signal.signal(signal.SIGALRM, lambda *_: None)\n"
        f"signal.siginterrupt(signal.SIGALRM, True)\n{EVERY_50_MS}"
    ),
    "SIGPROF every 10 ms": Row(
        "signal.signal(signal.SIGPROF, lambda *_: None)\n"
        "signal.setitimer(signal.ITIMER_PROF, 0.01, 0.01)"
    ),
    "SIGPIPE by default": Row("signal.signal(signal.SIGPIPE, signal.SIG_DFL)"),
    "SIGTERM ignored": Row("signal.signal(signal.SIGTERM, signal.SIG_IGN)"),
    "SIGINT ignored": Row("signal.signal(signal.SIGINT, signal.SIG_IGN)"),
    "SIGHUP ignored": Row("signal.signal(signal.SIGHUP, signal.SIG_IGN)"),
    "all signals blocked": Row(
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())", slow=False
    ),
    "a wakeup descriptor": Row(
        "r, w = os.pipe(); os.set_blocking(w, False); signal.set_wakeup_fd(w)"
    ),
    "stopped and continued": Row(
        "command = f'kill -STOP {os.getpid()}; sleep 1; kill -CONT {os.getpid()}'\n"
        "threading.Timer(0.3, os.system, (command,)).start()",
        options="{'persistent_workers': True, 'timeout': 20}",
    ),
    # Processes and clocks.
    "a session of its own": Row("os.setsid() if os.getpgrp() != os.getpid() else None"),
    "no environment": Row("os.environ.clear()"),
    "HOME nowhere": Row("os.environ.update(HOME='/nowhere', TMPDIR='/nowhere')"),
    "the working folder is gone": Row(
        "import tempfile; f = tempfile.mkdtemp(); os.chdir(f); os.rmdir(f)", slow=False
    ),
    "umask 0777": Row("os.umask(0o777)"),
    "one core": Row("os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"),
    "another locale": Row("os.environ.update(LC_ALL='tr_TR.UTF-8')"),
    "a recursion limit of 120": Row("sys.setrecursionlimit(120)"),
    "gc off": Row("import gc; gc.disable()"),
    "tracing": Row("sys.settrace(lambda *_: None)"),
    "faulthandler off": Row("import faulthandler; faulthandler.disable()"),
    "a daemon thread that prints": Row(
        "threading.Thread(target=lambda: [print('.', file=sys.stderr) for _ in range(999)],"
        " daemon=True).start()"
    ),
    "from a thread": Row(
        "real = epoch\n"
        "def epoch(**options):\n"
        "    thread = threading.Thread(target=real, kwargs=options)\n"
        "    thread.start(); thread.join()"
    ),
    "from 4 threads": Row(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "real = epoch\n"
        "def epoch(**options):\n"
        "    with ThreadPoolExecutor(4) as pool:\n"
        "        list(pool.map(lambda _: real(**options), range(4)))"
    ),
    "atexit": Row("import atexit; atexit.register(tell, '.')", said=("ok.",)),
    "threads, RLIMIT_NOFILE 20": Row(limit("NOFILE", 20), options="{'backend': 'thread'}"),
    "threads, closed 0 1 2": Row(closed(0, 1, 2), options="{'backend': 'thread'}"),
    "threads, SIGALRM every 10 ms": Row(
        f"signal.signal(signal.SIGALRM, lambda *_: None)\n{EVERY_50_MS}",
        options="{'backend': 'thread'}",
    ),
    "serial, closed 0 1 2": Row(closed(0, 1, 2), options="{'num_workers': 0}"),
}  # fmt: skip


def program_of(row):
    """Return the program of a row; spawned workers import it as their main module."""
    body = "told = os.dup(1)\n" + row.before + "\n" + ENDING.replace("OPTIONS", row.options)
    return f"{PROGRAM}\nif __name__ == '__main__':\n{textwrap.indent(body, '    ')}"


def told_by(row, folder):
    """Run a row's program; return what it told, its exit code and its stderr."""
    script = folder / "program.py"
    script.write_text(program_of(row))
    command = [sys.executable, str(script)]
    if row.shell:
        if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
            pytest.skip("no permission to make a mount namespace of our own")
        command = ["unshare", "-m", "sh", "-c", f'{row.shell}\nexec "$0" "$@"', *command]
    environment = os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment
    )
    return done.stdout, done.returncode, done.stderr


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if row.slow else []) for n, row in ROWS.items()],
)
def test_an_epoch_is_right_or_says_what_is_lacking(name, tmp_path):
    row = ROWS[name]
    said, code, errors = told_by(row, tmp_path)
    assert said.startswith(row.said), f"{said!r}, exit {code}, stderr:\n{errors[-3000:]}"
    assert code == 0, errors[-3000:]


FILL_AND_RESUME = """
import subprocess, sys
import numpy as np
from penstock.errors import StoreError
from penstock.stores import open_store, pack

address, disk = sys.argv[1:3]
samples = [np.full(100_000, k, np.uint8) for k in range(60)]
shards = {"num_shards": 3} if sys.argv[3] == "shards" else {}
errors = []
for megabytes in (2, 4, 64):
    subprocess.run(["mount", "-o", f"remount,size={megabytes}m", disk], check=True)
    try:
        pack(samples, address, resume=bool(errors), **shards)
    except (StoreError, OSError) as error:
        errors.append(str(error))
assert len(errors) == 2, errors
assert all("space" in error for error in errors), errors
with open_store(address) as store:
    assert all((r.sample == s).all() for r, s in zip(store.scan(), samples, strict=True))
print("ok")
"""


@pytest.mark.parametrize("kind", ["lmdb", pytest.param("shards", marks=pytest.mark.slow)])
def test_a_pack_that_filled_the_disk_twice_is_resumed(kind, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    address = f"lmdb:{disk}/a"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m t "$3" && exec "$0" -c "$@"',
         sys.executable, FILL_AND_RESUME, address, str(disk), kind],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    if "unshare failed" in done.stderr:
        pytest.skip("no permission to make a mount namespace of our own")
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-3000:]
