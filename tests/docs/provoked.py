# SPDX-License-Identifier: Apache-2.0
"""Small programs, each of which gets the code to say what docs/troubleshooting.md quotes."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import numpy as np
import pytest
from tests.support.processes import python

from penstock import Loader
from penstock.data import IterableDataset
from penstock.sampling import ClassBalancedSampler, RandomSampler

ROOT = Path(__file__).parents[2]


class Photos:
    """64 samples, of which one does something else."""

    def __init__(self, odd, at=13):
        self.odd = odd
        self.at = at

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == self.at or self.at is None:
            self.odd()
        return np.full((4, 4), index, np.float32)

    def describe(self, index):
        return f"{index}.jpg"


def load(dataset, batch_size=4, num_workers=2, backend="process", **options):
    if backend == "process" and num_workers:  # Python 3.14's own choice pickles all of it
        options = {"multiprocessing_context": "fork", **options}
    return list(Loader(dataset, batch_size, num_workers=num_workers, backend=backend, **options))


def load_photos(odd, at=13, **options):
    return lambda: load(Photos(odd, at), **options)


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def crash():
    ctypes.string_at(0)


def leave():
    os._exit(3)


def hang():
    threading.Event().wait()


def dawdle():
    time.sleep(0.05)  # 64 of them are a batch that takes longer than its timeout


class Jittered:
    """A dataset whose seed is its own."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index + self.rng.normal()


def be_bad():
    raise ValueError("premature end of file")


class Made:
    """8 samples, each made by a function."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.make(index)


class HoldsAFile:
    def __init__(self):
        self.file = open(os.devnull)  # noqa: SIM115 - as datasets do that cannot be pickled

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index


def send_a_lambda_without_cloudpickle():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cloudpickle", None)
        load(range(8), collate_fn=lambda batch: batch, multiprocessing_context="spawn")


def load_a_file():
    dataset = HoldsAFile()
    with dataset.file:
        load(dataset, multiprocessing_context="forkserver")


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(20)


class Noisy:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return random.random()


class Printed:
    """Samples whose contents have a fingerprint."""

    def __init__(self, fingerprint):
        self.fingerprint = fingerprint

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index


def state_of(dataset, **options):
    loader = Loader(dataset, batch_size=4, **options)
    batches = iter(loader)
    next(batches)
    return loader.state_dict()


def load_another_batch_size():
    state = Loader(range(100), batch_size=8).state_dict()
    Loader(range(100), batch_size=16).load_state_dict(state)


def load_while_running():
    loader = Loader(range(100), batch_size=8)
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(loader.state_dict())


def load_what_was_edited():
    loader = Loader(np.arange(64), 4)
    loader.load_state_dict({**loader.state_dict(), "batches": 5, "samples": 8})


def end_an_epoch():
    pytest.importorskip("torch")
    from penstock.torch import DataLoader

    list(DataLoader(Photos(lambda: next(iter([]))), 4))


def load_something_else():
    Loader(range(100)).load_state_dict({"model": 1})


def choose_another_epoch():
    loader = Loader(range(100), batch_size=4)
    loader.load_state_dict(state_of(range(100)))
    loader.set_epoch(3)


def load_of_other_data():
    Loader(Printed("b"), batch_size=4).load_state_dict(state_of(Printed("a")))


def load_a_stream():
    loader = Loader(Stream(), batch_size=4)
    loader.load_state_dict(state_of(Stream()))
    list(loader)


def open_what_is_not_there():
    stores = pytest.importorskip("penstock.stores")
    len(stores.open_store("lmdb:photos.lmdb"))


def read_a_damaged_record():
    stores = pytest.importorskip("penstock.stores")
    arrays = [np.arange(5000) + first for first in range(4)]
    stores.pack([(array,) for array in arrays], "lmdb:photos.lmdb", num_workers=0)
    path = Path("photos.lmdb")
    content = bytearray(path.read_bytes())
    content[content.index(arrays[2][:64].tobytes()) + 4000] ^= 1
    path.write_bytes(content)
    with contextlib.closing(stores.LMDBDataset(path)) as dataset:
        for position in range(len(dataset)):
            dataset[position]


def ask_a_server_that_is_not_there():
    pytest.importorskip("pymongo")
    stores = pytest.importorskip("penstock.stores")
    len(stores.open_store("mongodb://127.0.0.1:9/lab.photos"))


@contextlib.contextmanager
def limited(what, number):
    before = resource.getrlimit(what)
    resource.setrlimit(what, (number, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def make_large_batches_under_a_small_limit():
    with limited(resource.RLIMIT_FSIZE, 1_000_000):
        load(Made(lambda index: np.zeros(60_000_000, np.uint8)), batch_size=1, num_workers=1)


def run_out_of_files():
    dataset = Made(lambda index: np.zeros(100_000))
    batches = iter(Loader(dataset, num_workers=2, multiprocessing_context="fork"))
    next(batches)
    opened = []
    with limited(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) + 1):
        try:
            with contextlib.suppress(OSError):
                while True:
                    opened.append(os.open(os.devnull, os.O_RDONLY))
            list(batches)
        finally:
            for descriptor in opened:
                os.close(descriptor)


def start_workers_with_few_files():
    with limited(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) + 10):
        load(range(8), num_workers=4)


def export_without_prometheus():
    own = "penstock.integrations.prometheus"
    names = (own, "prometheus_client", "prometheus_client.core")
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(dict.fromkeys(names))
    del sys.modules[own]
    try:
        importlib.import_module(own)
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def fork_with_openmp():
    """Start threads of scikit-learn's OpenMP, without scikit-learn, whose import takes seconds."""
    pytest.importorskip("sklearn")
    return said_in_a_process("""
        import ctypes, glob, importlib.util, os
        os.environ["OMP_WAIT_POLICY"] = "passive"  # a thread that spins shows no wait
        (folder,) = importlib.util.find_spec("sklearn").submodule_search_locations
        (library,) = glob.glob(f"{folder}/../scikit_learn.libs/libgomp*")
        ctypes.CDLL(library).GOMP_parallel(ctypes.CDLL(None).free, None, 3, 0)  # free(NULL)
        import warnings
        from penstock import Loader
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            list(Loader(range(8), num_workers=1, multiprocessing_context="fork"))
        print(caught[0].message)
    """)


def spawn_without_a_guard():
    script = Path("unguarded.py")
    script.write_text(
        "from penstock import Loader\n"
        "for batch in Loader(range(8), batch_size=4, num_workers=1,"
        " multiprocessing_context='spawn'):\n    pass\n"
    )
    done = python(script)
    found = [line for line in done.stderr.splitlines() if line.startswith("penstock.errors.")]
    return found[-1].partition(": ")[2]


def said_in_a_process(program):
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def be_one_of_two_ranks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "1")
        patch.setenv("WORLD_SIZE", "2")
        list(Loader(range(8), sampler=RandomSampler(range(8))))


def take_a_sampler_of_a_shorter_dataset():
    list(Loader(range(16), sampler=ClassBalancedSampler([0, 1] * 4)))


def weigh_large_batches():
    from penstock.system_limits import SystemMemory, memory_warning

    return memory_warning(500_000_000, 16, SystemMemory(available_bytes=3_000_000_000))


class Slow:
    """Samples of which one waits until it may go on."""

    def __init__(self):
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 4:
            self.begun.set()
            self.go_on.wait()
        return index


def leave_a_thread_behind():
    dataset = Slow()
    loader = Loader(dataset, batch_size=4, num_workers=2, backend="thread")
    batches = iter(loader)
    next(batches)
    dataset.begun.wait()
    try:
        batches.close()
    finally:
        dataset.go_on.set()
        for thread in threading.enumerate():
            if thread.name.startswith("penstock"):
                thread.join(10)


def show_with_its_traceback():
    try:
        load(Made(lambda index: np.zeros((3, 224 + index % 2))))
    except Exception as error:
        return "".join(traceback.format_exception_only(error))


def show_an_exception_of_a_dataset():
    try:
        load_photos(be_bad)()
    except Exception as error:
        return "".join(traceback.format_exception_only(error))


# By the section's heading: what its quotations are made by, in the order of the page.
PROGRAMS = {
    "": [show_with_its_traceback],
    "WorkerDied": [load_photos(be_killed), load_photos(leave)],
    "WorkerTimeout": [
        load_photos(hang, timeout=1),
        load_photos(dawdle, at=None, batch_size=64, timeout=1),
    ],
    "CollateError": [
        lambda: load(Made(lambda index: np.zeros((3, 224 + index % 2)))),
        lambda: load(Made(lambda index: [0] * (3 + index % 2))),
    ],
    "TooManyFailures": [
        load_photos(be_bad, at=None, num_workers=0, on_error="skip"),
        load_photos(be_bad, at=None, num_workers=0, on_error="replace"),
    ],
    "UnpicklableError": [
        send_a_lambda_without_cloudpickle,
        load_a_file,
    ],
    "ConfigError": [
        lambda: Loader(range(4), prefetch_factor=4),
        lambda: Loader(range(4), sampler=[1, 2], shuffle=True),
    ],
    "StateError": [
        load_another_batch_size,
        load_while_running,
        load_something_else,
        load_what_was_edited,
    ],
    "StoreError": [open_what_is_not_there, read_a_damaged_record],
    "StoreUnreachable": [ask_a_server_that_is_not_there],
    "TransportError": [make_large_batches_under_a_small_limit, run_out_of_files],
    "MissingExtraError": [export_without_prometheus],
    "An exception of your own code": [show_an_exception_of_a_dataset],
    "Workers are about to be forked": [fork_with_openmp],
    "Workers began with the same sample": [lambda: load(Stream())],
    "Batches need more memory than is left": [weigh_large_batches],
    "Bad samples were left out": [load_photos(be_bad, on_error="skip")],
    "A sample ended the epoch": [end_an_epoch],
    "A batch is slow": [
        load_photos(dawdle, at=None, batch_size=64, timeout=1, on_error="replace"),
    ],
    "The dataset keeps a generator": [lambda: Loader(Jittered(), seed=7)],
    "Random numbers of the whole process": [lambda: load(Noisy(), backend="thread")],
    "Threads did not end": [leave_a_thread_behind],
    "Every rank gets the same": [be_one_of_two_ranks],
    "The sampler was made for another length": [take_a_sampler_of_a_shorter_dataset],
    "The state was dropped": [choose_another_epoch],
    "The state is of other data": [load_of_other_data],
    "A stream is read again": [load_a_stream],
    "Too many open files": [start_workers_with_few_files],
    "spawn and the main script": [spawn_without_a_guard],
}
