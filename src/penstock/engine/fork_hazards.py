# SPDX-License-Identifier: Apache-2.0
"""What makes fork dangerous here: threads of native libraries, and a device that is in use.

A forked worker is a copy of the main process with one thread. A library that had threads of its own
believes that they still run: the worker waits for their answer, or for a lock that one of them
held, and waits for ever.

Whose thread is it? The system does not say, so the thread's stack is read. Its outermost frames
lie in the C library, which starts every thread; the next one lies in the library that owns it:

    inner   ... wait in libc | cv2.abi3.so | start_thread in libc | thread block   outer
                               ^ the owner

Guarantees
    A library that is only loaded is never named: a thread of it has to run now. A thread that
    cannot be told (it is on a processor, another kind of C library or system) is not counted.
    Nothing is imported, changed or stopped.

What is no hazard
    OpenBLAS, and the OpenMP of LLVM and Intel: they renew themselves in a forked child. The GNU
    OpenMP in torch's own folder: workers run torch with one thread, which needs no pool. (Another
    library that ends up with torch's copy cannot be told from torch.)
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

__all__ = [
    "Library",
    "busy_device",
    "hazard_of",
    "opencv_at_rest",
    "running_hazards",
    "warn_of_fork",
]

_MAX_LOOKS: Final = 4  # at threads that are running just now: pools spin a moment before they sleep
_LOOK_AGAIN_S: Final = 0.001
_STACK_BYTES: Final = 8192  # idle threads use 500 to 600; the thread block above takes up to 4096


class Library(NamedTuple):
    """A library whose threads do not survive a fork."""

    title: str
    file_pattern: str  # of the file's name
    consequence: str  # of what happens in a worker
    remedy: str  # what else to do than to choose another start method


_OPENCV: Final = Library(
    "OpenCV",
    r"cv2\b.*\.so|libopencv_\w+\.so",
    "cv2.setNumThreads(1) in a worker can wait for ever for threads that do not exist there, and "
    "so can any call that needs a lock that one of them held",
    "cv2.setNumThreads(1) before the fork helps as well: it ends the threads (0 does not)",
)
_GNU_OPENMP: Final = Library(
    "GNU OpenMP",
    r"libgomp\b.*\.so",
    "the first parallel loop in a worker waits for ever for threads that do not exist there",
    "training that computes with one thread (OMP_NUM_THREADS=1) helps as well",
)
_GRPC: Final = Library(
    "gRPC",
    r"cygrpc\b.*\.so|libgrpc(\+\+|_unsecure)?\.so|libgpr\.so",
    "a call in a worker can wait for ever for threads that do not exist there, or for a lock that "
    "one of them held",
    "opening channels in the workers only (worker_init_fn) helps as well",
)
_HAZARDS: Final = (_OPENCV, _GNU_OPENMP, _GRPC)

# The C and C++ libraries start threads for all others, and wait for them: they own none.
_STARTS_THREADS: Final = re.compile(r"libc[.-]|libpthread[.-]|ld-|libstdc\+\+\.|libc\+\+")
_IS_OPENMP: Final = re.compile(r"lib(gomp|i?omp5?)\b.*\.so")
_IN_TORCH: Final = re.compile(r"/torch(/lib|\.libs)/")
# Two cheap looks at /proc/self/maps, which has 1,300 lines with torch and scikit-learn: whether it
# is worth more, and (beginning with letters, which makes it four times as fast) what is code.
_MAYBE_HAZARD: Final = re.compile(
    rb"(?<!/torch/lib)(?<!/torch\.libs)/(cv2[^/\n]*\.so|libopencv_|libgomp|cygrpc|libgrpc|libgpr)"
)
_EXECUTABLE: Final = re.compile(rb" r-xp [^/\n]*(/.*)")

_has_warned = False


def warn_of_fork(*, stacklevel: int = 2) -> None:
    """Warn, once in the life of this process, if workers that are forked now may hang or fail.

    To be called right before worker processes are forked. The warning is a `RuntimeWarning`, and
    names the library, how many threads of it run, and what to do.

    It costs 20 us while there are only Python's threads, below 1 ms where other threads run but no
    library that is a hazard is loaded, 1 to 3 ms where one is, and 40 us more for each thread.

    Args:
        stacklevel: As of `warnings.warn` in place of this call: 1 is the line that calls, 2 the
            caller of that function.

    Reference:
        https://github.com/opencv/opencv/issues/5150,
        https://gcc.gnu.org/bugzilla/show_bug.cgi?id=60035 (GNU OpenMP).
    """
    global _has_warned
    if _has_warned:
        return
    with opencv_at_rest():
        threads = running_hazards()
    if message := _message(threads, busy_device(sys.modules)):
        _has_warned = True
        warnings.warn(message, RuntimeWarning, stacklevel=stacklevel + 1)


@contextlib.contextmanager
def opencv_at_rest() -> Iterator[None]:
    """End OpenCV's idle threads for the block, in which processes may then be forked.

    They start again with the next call that uses them. Threads that are at work just then, for
    another thread of Python, go on; `running_hazards` counts those.
    """
    cv2: Any = sys.modules.get("cv2")
    number = cv2.getNumThreads() if hasattr(cv2, "setNumThreads") else 1
    if number <= 1:
        yield
        return
    cv2.setNumThreads(1)
    try:
        yield
    finally:
        cv2.setNumThreads(number)


def _message(threads: Mapping[Library, int], device: str | None) -> str | None:
    if not threads and device is None:
        return None
    sentences = ["Workers are about to be forked, and that is not safe here."]
    for library, count in threads.items():
        running = "1 thread" if count == 1 else f"{count} threads"
        sentences.append(f"{running} of {library.title} run: {library.consequence}.")
    if device is not None:
        sentences.append(f"torch has initialised {device}: a forked worker that touches it fails.")
    sentences.append('Choose multiprocessing_context="forkserver" (or "spawn").')
    sentences += [f"For {library.title}, {library.remedy}." for library in threads]
    return " ".join(sentences)


def busy_device(modules: Mapping[str, object]) -> str | None:
    """Return the name of the device that torch has initialised in this process, or None.

    Args:
        modules: `sys.modules`; what is not there is not imported.
    """
    for name, title in (("torch.cuda", "CUDA"), ("torch.xpu", "XPU")):
        is_initialized = getattr(modules.get(name), "is_initialized", None)
        if is_initialized is not None and is_initialized():
            return title
    return None


def running_hazards() -> dict[Library, int]:
    """Return the libraries whose threads run now and would not survive a fork, with their number.

    Empty also where the system does not let a process read its own threads (not Linux).
    """
    with contextlib.suppress(OSError):
        tids = _native_threads()
        if tids:
            with open("/proc/self/maps", "rb") as maps:
                text = maps.read()
            if _MAYBE_HAZARD.search(text):
                return _count_owners(tids, _Code(text))
    return {}


def _native_threads() -> list[int]:
    of_python = {thread.native_id for thread in threading.enumerate()}
    return [tid for tid in map(int, os.listdir("/proc/self/task")) if tid not in of_python]


def _count_owners(tids: list[int], code: _Code) -> dict[Library, int]:
    shared_openmp = _is_openmp_shared_with_torch(code.paths)
    counts: Counter[Library] = Counter()
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for path in _owners(tids, code, memory.fileno()):
            library = hazard_of(path)
            if library is not None and not (shared_openmp and library is _GNU_OPENMP):
                counts[library] += 1
    return dict(counts)


def hazard_of(path: str) -> Library | None:
    """Return which hazard the file at `path` is, None if it is none.

    Example:
        >>> hazard_of("/env/site-packages/cv2/cv2.abi3.so").title
        'OpenCV'
        >>> hazard_of("/env/site-packages/torch/lib/libgomp.so.1") is None
        True
    """
    if _IN_TORCH.search(path):
        return None
    name = path.rpartition("/")[2]
    for library in _HAZARDS:
        if re.match(library.file_pattern, name):
            return library
    return None


def _is_openmp_shared_with_torch(paths: Iterable[str]) -> bool:
    """Whether torch runs on an OpenMP that is not its own, as conda installs it.

    Threads of that may be torch's, and then are no hazard; nobody can tell.
    """
    is_loaded = False
    for path in paths:
        name = path.rpartition("/")[2]
        is_loaded = is_loaded or name.startswith("libtorch_cpu.so")
        if _IS_OPENMP.match(name) and _IN_TORCH.search(path):
            return False
    return is_loaded


class _Code:
    """Where the code of each loaded file lies."""

    def __init__(self, maps: bytes) -> None:
        ranges: list[list[int]] = []
        self.paths: list[str] = []
        for line in _EXECUTABLE.finditer(maps):  # in the order of addresses
            addresses = maps[maps.rfind(b"\n", 0, line.start()) + 1 : line.start()]
            ranges.append([int(address, 16) for address in addresses.split(b"-")])
            self.paths.append(os.fsdecode(line[1]))
        self._starts, self._stops = np.array(ranges, np.uintp).reshape(-1, 2).T

    def find(self, words: npt.NDArray[np.uintp]) -> npt.NDArray[np.intp]:
        """Return for each word the position in `paths` of the file that it points to, or -1."""
        found = np.searchsorted(self._starts, words, "right") - 1
        return np.where((found >= 0) & (words < self._stops[found]), found, -1)


def _owners(tids: Sequence[int], code: _Code, memory_fd: int) -> Iterator[str]:
    """Yield the path of each thread's owner, for the threads that can be told."""
    for look in range(_MAX_LOOKS):
        if look:
            time.sleep(_LOOK_AGAIN_S)
        pointers = {tid: _stack_pointer(tid) for tid in tids}
        for pointer in filter(None, pointers.values()):
            with contextlib.suppress(OSError):  # ended meanwhile
                stack = os.pread(memory_fd, _STACK_BYTES, pointer)
                if owner := _owner(stack, pointer, code):
                    yield owner
        tids = [tid for tid, pointer in pointers.items() if pointer == 0]
        if not tids:
            return


def _stack_pointer(tid: int) -> int | None:
    """Return where the thread's stack ends, 0 if it is running just now, None if it is gone."""
    try:
        with open(f"/proc/self/task/{tid}/syscall", "rb", buffering=0) as file:
            fields = file.read().split()
    except OSError:
        return None
    return 0 if len(fields) < 3 else int(fields[-2], 16)


def _owner(stack: bytes, address: int, code: _Code) -> str | None:
    """Return the path of the library that the thread was started for.

    `stack` holds memory from the thread's stack pointer, which is `address`, upwards.
    """
    word_bytes = np.dtype(np.uintp).itemsize
    words = np.frombuffer(stack, np.uintp, len(stack) // word_bytes)
    found = code.find(words[: _thread_block(words, address)])
    has_start = False
    for position in found[found >= 0][::-1]:
        path = code.paths[int(position)]
        if _STARTS_THREADS.match(path.rpartition("/")[2]):
            has_start = True
        elif has_start:
            return path
        # What lies further out than the C library's start of the thread is no frame: data of the
        # thread block, the start function among them.
    return None


def _thread_block(words: npt.NDArray[np.uintp], address: int) -> int:
    """Return the position of the thread block, where the stack is over; the end if unknown.

    Older kernels join a stack with the memory above it, so what comes next may be anybody's data.
    On x86-64, glibc's block holds its own address in its first and third word.
    """
    for position in np.flatnonzero((words[2:] == words[:-2]) & (words[2:] > address)):
        if int(words[position]) == address + int(position) * words.itemsize:
            return int(position)
    return len(words)
