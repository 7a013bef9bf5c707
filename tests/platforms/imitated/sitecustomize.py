# SPDX-License-Identifier: Apache-2.0
"""Linux without what another system lacks: IMITATED is "win32" or "darwin".

With this folder on PYTHONPATH a program, and each Python that it starts, begins here. What both
systems have is imported first (penstock's own imports of the standard library, numpy, and what
IMPORTED_FIRST names); then sys.platform is changed, and what the system lacks is taken away. The
names are those that typeshed's stubs have for Linux alone.

Not imitated: another file system (paths with backslashes, open files that cannot be replaced),
another C library, other speeds.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import faulthandler
import importlib
import io
import mmap
import os
import re
import select
import signal
import socket
import sys
import sysconfig
import time
import traceback
import types
from multiprocessing import context
from pathlib import Path

SYSTEM = os.environ["IMITATED"]
SOURCE = Path(__file__).parents[3] / "src/penstock"
IMPORT = re.compile(r"^ *(?:from|import) ([\w.]+)", re.MULTILINE)
TICK_NS = 15_625_000  # of the clocks of Windows

ABSENT_MODULES = frozenset(
    ("_posixshmem", "crypt", "curses", "fcntl", "grp", "nis", "posix", "pty", "pwd", "readline",
     "resource", "spwd", "syslog", "termios", "tty")
)  # fmt: skip
# By module, all names that match the one pattern and not the other.
ABSENT_NAMES = {
    "win32": {
        os: (
            r"[A-Z]+_?[A-Z_\d]*|(set|get)e?(res)?[ug]id|sched_.*|posix_.*|p?(read|write)v?|.*xattr"
            r"|eventfd.*|wait.*|f(ork.*|chdir|chmod|chown|datasync|pathconf|statvfs|walk)|.*conf"
            r"|statvfs|get(pgid|pgrp|sid|groups|grouplist|loadavg|priority|random)|killpg|mkfifo"
            r"|mknod|nice|memfd_create|pidfd_open|pipe2|register_at_fork|sendfile|set(pgid|sid)"
            r"|(get|set)_blocking|splice|spawn.*p|sync|uname|ch(own|root)|lchown|lockf|ttyname",
            r"[FRWX]_OK|EX_OK|O_(APPEND|CREAT|EXCL|RDONLY|RDWR|TRUNC|WRONLY)|P_(NOWAITO?|WAIT)"
            r"|SEEK_(SET|CUR|END)|TMP_MAX|read|write|waitpid|waitstatus_to_exitcode",
        ),
        signal: (
            r"[A-Z]+_?[A-Z_\d]*|alarm|.*itimer|p(ause|idfd|thread).*|sig[iptw]\w+",
            r"NSIG|SIG(ABRT|FPE|ILL|INT|SEGV|TERM|_DFL|_IGN)",
        ),
        socket: (
            r"(AF|PF)_(UNIX|PACKET)|SCM_.*|CMSG_.*|MSG_(CMSG.*|DONTWAIT|NOSIGNAL)|.*_fds",
            "-",
        ),
        select: (r"E?POLL.*|e?poll|PIPE_BUF", "-"),
        mmap: (r"(MAP|MADV|PROT)_.*", "-"),
        time: (r"CLOCK_.*|clock_.*|pthread.*|tzset", "-"),
        faulthandler: (r"(un)?register", "-"),
    },
    "darwin": {
        os: (
            r"memfd_create|MFD_.*|pidfd_open|P_PIDFD|sched_.*affinity|sched_.*param|eventfd.*"
            r"|EFD_.*|posix_f.*|POSIX_F.*|pipe2|splice|fdatasync|.*xattr|getrandom|waitid"
            r"|O_(DIRECT|LARGEFILE|NOATIME|PATH|RSYNC|TMPFILE)",
            "-",
        ),
        signal: (r"SIGRTM.*|SIG(CLD|POLL|PWR|STKFLT)|pidfd_send_signal|sig(timed|waitinfo).*", "-"),
        socket: (r"MSG_(CMSG.*|MORE)|SOCK_(CLOEXEC|NONBLOCK)|SCM_CRED.*|AF_(NETLINK|PACKET)", "-"),
        select: (r"epoll|EPOLL.*", "-"),
        mmap: (r"MAP_(POPULATE|STACK)|MADV_.*HUGE.*", "-"),
    },
}
PATHS = __name__, "genericpath", "pathlib", "posixpath"  # penstock asks them for paths
ABSENT_FILES = re.compile(r"/proc\b|/sys\b" + (r"|/dev/fd\b" if SYSTEM == "win32" else ""))


def import_first():
    """Import what the system has: on it the standard library and others would begin otherwise."""
    names = {name for path in SOURCE.rglob("*.py") for name in IMPORT.findall(path.read_text())}
    library = {name for name in names if name.partition(".")[0] in sys.stdlib_module_names}
    for name in sorted(library - {*ABSENT_MODULES}):
        importlib.import_module(name)
    for name in ("numpy.random", *os.environ.get("IMPORTED_FIRST", "").split()):
        importlib.import_module(name)
    sysconfig.get_config_vars()  # read once, from a module that is called after the system


def leave_to_others():
    """Leave what is going to be taken away to the modules that are there: they need it on Linux."""
    whole = {module: types.SimpleNamespace(**vars(module)) for module in ABSENT_NAMES[SYSTEM]}
    for name, module in list(sys.modules.items()):
        for own, value in list(vars(module).items()):
            if (
                type(value) is types.ModuleType
                and value in whole
                and name.split(".")[0] not in PATHS
            ):
                vars(module)[own] = whole[value]


def take_away():
    """Take away what the system lacks."""
    sys.platform = SYSTEM
    sys.modules.update(dict.fromkeys(ABSENT_MODULES if SYSTEM == "win32" else ()))
    for module, (lacks, has) in ABSENT_NAMES[SYSTEM].items():
        for name in list(vars(module)):
            if re.fullmatch(lacks, name) and not re.fullmatch(has, name):
                delattr(module, name)
    for module, names in ((os, "open stat listdir scandir"), (io, "open"), (builtins, "open")):
        for name in names.split():
            setattr(module, name, without_files(getattr(module, name)))
    default = context._default_context
    default._default_context = context._concrete_contexts["spawn"]
    if SYSTEM == "win32":
        del context._concrete_contexts["fork"], context._concrete_contexts["forkserver"]


def without_files(function):
    """Return a function of a path that finds nothing where Linux alone has something."""

    def instead(path=".", *rest, **options):
        if isinstance(path, str | os.PathLike) and ABSENT_FILES.match(os.fspath(path)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        return function(path, *rest, **options)

    return instead


def be_windows():
    """Do as Windows does where it has the function, and it does something else."""
    os.O_BINARY = 0x8000  # as on Windows; Linux takes it for O_LARGEFILE
    open_there, load = os.open, ctypes.CDLL.__init__

    def open_here(path, flags, *rest, **options):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        fd = open_there(path, flags, *rest, **options)
        is_ours = sys._getframe(1).f_globals["__name__"].startswith("penstock")
        assert flags & os.O_BINARY or not is_ours, f"{path} is opened as text"
        return fd

    def load_here(library, name, *rest, **options):
        if name is None:
            raise TypeError("bad argument type for built-in operation")
        load(library, name, *rest, **options)

    def coarse(clock, tick):
        return lambda: clock() // tick * tick

    os.open, ctypes.CDLL.__init__ = open_here, load_here
    for name in ("monotonic", "perf_counter", "process_time", "thread_time"):
        setattr(time, name, coarse(getattr(time, name), TICK_NS / 1e9))
        setattr(time, f"{name}_ns", coarse(getattr(time, f"{name}_ns"), TICK_NS))


def be_macos():
    """Refuse what macOS does not do with a segment of shared memory: it is mapped, and no more."""
    seek, link = os.lseek, os.readlink

    def seek_here(fd, *rest):
        if link(f"/proc/self/fd/{fd}").startswith("/dev/shm"):
            raise OSError(errno.ESPIPE, os.strerror(errno.ESPIPE))
        return seek(fd, *rest)

    os.lseek = seek_here


try:
    import_first()
    leave_to_others()
    take_away()
    {"win32": be_windows, "darwin": be_macos}[SYSTEM]()
except BaseException:  # Python would go on
    traceback.print_exc()
    os._exit(70)
