# SPDX-License-Identifier: Apache-2.0
"""The life, the faults and the end of workers that are threads."""

from __future__ import annotations

import gc
import io
import os
import re
import subprocess
import sys
import textwrap
import threading
import weakref

import numpy as np
import pytest
from tests.support.processes import holds_in_child

from penstock import FaultPolicy, Loader, get_worker_info, sample_rng
from penstock.data import IterableDataset
from penstock.engine.backends.thread import ThreadBackend, _leave
from penstock.engine.plan import Epoch, Plan, WorkerSpec
from penstock.engine.scheduler import TaskDone, WorkerLost, WorkerReady
from penstock.engine.task import Task
from penstock.errors import ConfigError, WorkerDied, WorkerTimeout


class Numbers:
    """Sample i is `make(i)`."""

    def __init__(self, make=float, length=24):
        self.make = make
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.make(index)


def threads_left():
    return [t for t in threading.enumerate() if t.name.startswith("penstock-")]


@pytest.fixture(autouse=True)
def no_thread_left():
    before = set(threads_left())  # of a test that failed
    yield
    if set(threads_left()) - before:
        gc.collect()
    assert set(threads_left()) <= before


def loader_of(make, **options):
    options = {"num_workers": 2, "backend": "thread", **options}
    return Loader(Numbers(make), 4, **options)


def opened(dataset, num_workers=2, max_workers=0, **options):
    spec = WorkerSpec(dataset, isinstance(dataset, IterableDataset), is_batched=True, **options)
    plan = Plan(
        spec, base_seed=0, num_workers=num_workers, max_workers=max_workers, backend="thread"
    )
    backend = ThreadBackend(plan)
    backend.start()
    backend.begin_epoch(Epoch(0, iter(())))
    return backend


def outcome_of(backend, worker_id, step, indices):
    backend.submit(worker_id, Task(backend._table.generation, step, indices))
    (event,) = backend.events(30.0)
    assert isinstance(event, TaskDone)
    return event.outcome


class Held:
    """Makes samples that wait until `free` is set."""

    def __init__(self):
        self.begun, self.free, self.made = threading.Event(), threading.Event(), []

    def __call__(self, index):
        self.begun.set()
        self.free.wait()
        self.made.append(index)
        return float(index)


# Errors


class Odd(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one} {other}")


def test_an_exception_comes_as_it_is_with_worker_epoch_step_and_sample():
    lock = threading.Lock()  # neither class nor argument can be pickled

    def make(index):
        if index == 9:
            raise Odd(1, lock)
        return float(index)

    batches = iter(loader_of(make))
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(Odd) as caught:
        next(batches)
    notes = "\n".join(caught.value.__notes__)
    assert "while reading sample 9" in notes
    assert re.search(r"in worker ([01]) \(thread penstock-\1\), epoch 0, step 2", notes)
    assert "make" in {entry.name for entry in caught.traceback}
    assert next(batches).tolist() == [12, 13, 14, 15]  # it goes on
    assert len(list(batches)) == 2


def test_an_exception_does_not_keep_the_samples_of_its_batch():
    held = []

    def make(index):
        if index == 2:
            raise KeyError(index)
        array = np.full(4, index)
        held.append(weakref.ref(array))
        return array

    gc.disable()
    try:
        batches = iter(loader_of(make))
        with pytest.raises(KeyError):
            next(batches)
        list(batches)
        assert [ref() for ref in held] == [None] * len(held)
    finally:
        gc.enable()


def test_a_shared_dataset_is_notified_of_an_epoch_once_and_what_it_raises_is_raised_at_once():
    noted = []

    class Moody(Numbers):
        def set_epoch(self, epoch):
            noted.append((epoch, sample_rng().integers(1 << 30)))
            if epoch == 1:
                raise Odd("epoch", epoch)

    loader = Loader(Moody(), 4, num_workers=3, backend="thread", persistent_workers=True, seed=5)
    assert len(list(loader)) == 6
    with pytest.raises(Odd, match="epoch 1") as caught:
        iter(loader)
    assert "while epoch 1 began" in caught.value.__notes__
    loader.set_epoch(2)
    assert len(list(loader)) == 6
    threads, noted = noted, []
    loader = Loader(Moody(), 4, seed=5)
    list(loader)
    loader.set_epoch(2)
    list(loader)
    assert [*noted[:1], *noted[1:]] == [threads[0], threads[2]]


# Deaths


@pytest.mark.parametrize("end", [lambda: sys.exit(3), lambda: sys.exit(0)])
def test_a_system_exit_is_a_death_that_says_where(end):
    given = threading.Event()

    def make(index):
        if index == 9:
            given.wait(30)  # a death is noted at once, whatever others are still making
            end()
        return float(index)

    batches = iter(loader_of(make))
    assert len([next(batches) for _ in range(2)]) == 2
    given.set()
    with pytest.raises(WorkerDied, match=r"ended with SystemExit: [03]") as caught:
        next(batches)
    text = str(caught.value)
    assert re.search(r"\(thread penstock-([01])\) exited unexpectedly: worker \1 ended", text)
    assert "while reading sample 9 of step 2, epoch 0" in text
    assert "in make" in text
    assert "sys.exit" in text


def test_a_thread_that_is_stuck_is_named_when_time_is_up():
    free, at_eight, at_twelve = threading.Event(), threading.Event(), threading.Event()

    def make(index):
        if index == 5:
            free.wait()
        if index == 8:
            at_eight.set()
        if index == 12:
            at_twelve.set()
        return float(index)

    batches = iter(loader_of(make, timeout=0.3))
    assert at_eight.wait(30)  # step 0 is made
    next(batches)
    with pytest.raises(WorkerTimeout, match="while reading sample 5 of step 1") as caught:
        next(batches)
    assert "free.wait()" in str(caught.value)
    free.set()
    assert at_twelve.wait(30)  # step 1 is made
    assert next(batches).tolist() == [4, 5, 6, 7]


def test_a_stuck_thread_is_given_up_and_its_late_answer_dropped():
    free, stuck = threading.Event(), []

    def make(index):
        if index == 5 and not stuck:
            stuck.append(threading.current_thread())
            free.wait()
        return float(index)

    policy = FaultPolicy("raise", max_respawns=20)  # a slow machine may need some
    batches = iter(loader_of(make, timeout=0.3, on_error=policy))
    values = [next(batches).tolist() for _ in range(3)]
    free.set()
    stuck[0].join(30)
    assert not stuck[0].is_alive()
    values += [batch.tolist() for batch in batches]
    assert [x for batch in values for x in batch] == list(range(24))


def test_a_death_by_force_tells_the_stack():
    make = Held()
    backend = opened(Numbers(make))
    backend.submit(1, Task(1, 0, [3, 4]))
    assert make.begun.wait(30)
    assert "free.wait()" in backend.diagnose(1, with_stacks=True).words
    assert "free.wait()" not in backend.diagnose(1, with_stacks=False).words
    backend.kill(1, "the test says so")
    backend.kill(1, "and says it again")
    (death,) = backend.events(30.0)
    assert isinstance(death, WorkerLost)
    assert (death.worker_id, death.step, death.sample) == (1, 0, 3)
    assert "given up, as the test says so, while reading sample 3 of step 0" in death.reason
    assert "free.wait()" in death.advice
    assert backend.events(0) == []
    worker = backend._table.workers[1].thread
    make.free.set()
    worker.join(30)
    backend.close()


# Ends


@pytest.mark.parametrize("ends", [True, False])
def test_closing_and_a_new_epoch_break_a_batch_off_at_its_next_sample(ends):
    make = Held()
    backend = opened(Numbers(make), num_workers=1)
    backend.submit(0, Task(1, 0, [0, 1, 2, 3]))
    backend.submit(0, Task(1, 1, [4]))
    assert make.begun.wait(30)
    if ends:
        backend._table.workers[0].stop()  # as `close` does before it waits
    else:
        backend.begin_epoch(Epoch(1, iter(())))
    make.free.set()
    if not ends:
        assert outcome_of(backend, 0, 0, [7]).batch().tolist() == [7]
    backend.close()
    assert make.made == ([0] if ends else [0, 7])


def test_what_does_not_end_is_left_behind_and_said(monkeypatch):
    monkeypatch.setattr("penstock.engine.backends.thread._GRACE_S", 0.05)
    make = Held()
    backend = opened(Numbers(make), num_workers=2)
    backend.submit(1, Task(1, 0, [0, 1]))
    assert make.begun.wait(30)
    thread = backend._table.workers[1].thread
    backend._table.workers[0].stop()
    backend._table.workers[0].thread.join(30)
    with pytest.warns(RuntimeWarning, match=r"1 worker thread.* left behind") as caught:
        backend.close()
    assert "free.wait()" in str(caught[0].message)
    assert thread.daemon
    backend.close()
    make.free.set()
    thread.join(30)


def test_a_stuck_thread_keeps_no_batches_of_others_once_the_loader_is_closed(monkeypatch):
    monkeypatch.setattr("penstock.engine.backends.thread._GRACE_S", 0.05)
    free, stuck, collated = threading.Event(), threading.Event(), threading.Semaphore(0)
    batches = []

    def make(index):
        if index == 5:
            stuck.set()
            free.wait()
        return float(index)

    def collate(samples):
        batch = np.array(samples)
        batches.append(weakref.ref(batch))
        collated.release()
        return batch

    iterator = iter(loader_of(make, collate_fn=collate))
    next(iterator)
    for _ in range(3):
        assert collated.acquire(timeout=30)
    assert stuck.wait(30)  # one that has yet to reach the sample ends at once
    with pytest.warns(RuntimeWarning, match="left behind"):
        iterator.close()
    del iterator
    gc.collect()
    assert [batch() for batch in batches] == [None] * len(batches)
    free.set()
    for thread in threads_left():
        thread.join(30)


def test_the_iterator_of_a_stream_ends_in_its_own_thread():
    ended = []

    class Stream(IterableDataset):
        def __iter__(self):
            try:
                for k in range(100):
                    yield get_worker_info().id + k / 100
            finally:
                ended.append((threading.current_thread().name, get_worker_info().id))

    batches = iter(Loader(Stream(), 4, num_workers=2, backend="thread"))
    next(batches), next(batches)  # one of each
    del batches
    assert sorted(ended) == [("penstock-0", 0), ("penstock-1", 1)]


def test_a_added_worker_is_ready_when_it_has_begun_and_not_before():
    begun, free = threading.Event(), threading.Event()

    def init(worker_id):
        if worker_id == 2:
            begun.set()
            free.wait()

    backend = opened(Numbers(), worker_init_fn=init)
    backend.add_worker(2)
    assert begun.wait(30)
    assert backend.events(0) == []
    assert outcome_of(backend, 0, 0, [3]).batch().tolist() == [3]
    free.set()
    (event,) = backend.events(30.0)
    assert isinstance(event, WorkerReady)
    assert event.worker_id == 2
    backend.close()


def test_nothing_keeps_a_removed_worker_nor_its_memory():
    backend = opened(Numbers(big))
    outcome_of(backend, 1, 0, [1, 2]).batch()
    worker = backend._table.workers[1]
    thread, gone = worker.thread, [weakref.ref(worker), weakref.ref(worker._output._pool)]
    del worker
    gc.disable()
    try:
        backend.remove_worker(1)
        thread.join(30)
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()
    backend.close()


def test_who_waits_for_a_batch_is_told_that_another_thread_has_closed_the_loader():
    backend = opened(Numbers(), num_workers=1)
    caught = []

    def wait():
        try:
            backend.events(None)
        except WorkerDied as error:
            caught.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    backend.close()
    waiter.join(30)
    assert not waiter.is_alive()
    assert "was closed, by another thread or in a worker" in caught[0]
    with pytest.raises(WorkerDied, match="was closed"):
        backend.events(None)


def test_a_worker_that_closes_the_loader_ends_the_main_processes_wait():
    hold = []

    def make(index):
        if index == 9:
            hold.pop().close()
        return float(index)

    backend = opened(Numbers(make), num_workers=1)
    hold.append(backend)
    worker = backend._table.workers[0].thread
    backend.submit(0, Task(1, 0, [9]))
    with pytest.raises(WorkerDied, match="was closed"):
        backend.events(None)
    backend.close()
    worker.join(30)  # the one that closed it has its own end ahead


def run(code):
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


SLOW = """
    import os, signal, sys, threading, time
    from penstock import Loader
    begun = threading.Event()
    class Slow:
        def __len__(self): return 100
        def __getitem__(self, index):
            begun.set()
            {work}
            return index
    loader = Loader(Slow(), 10, num_workers=3, backend="thread")
    batches = iter(loader)
    begun.wait()
"""


@pytest.mark.parametrize("work", ["time.sleep(0.01)", "threading.Event().wait()"])
def test_the_interpreter_ends_though_threads_are_busy_or_stuck(work):
    code, out, error = run(textwrap.dedent(SLOW.format(work=work)) + "\nprint('the end')")
    assert (code, out, error) == (0, "the end\n", "")


def test_ctrl_c_interrupts_the_wait():
    code = textwrap.dedent(SLOW.format(work="threading.Event().wait()")) + textwrap.dedent("""
        try:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            next(batches)
        except KeyboardInterrupt:
            print("interrupted")
    """)
    assert run(code) == (0, "interrupted\n", "")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12
def test_a_forked_child_has_no_threads_and_neither_hangs_nor_waits():
    loader = loader_of(float)
    batches = iter(loader)
    next(batches)

    def goes_on_anew():
        nonlocal batches
        with pytest.raises(WorkerDied, match="iterate the loader anew here"):
            list(batches)
        del batches
        return [batch.tolist() for batch in loader][5] == [20, 21, 22, 23]

    assert holds_in_child(goes_on_anew)
    assert len(list(batches)) == 5


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12
@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (None, 0, ""),
        (SystemExit(3), 3, ""),
        (SystemExit("enough"), 1, "SystemExit: enough\n"),
        (ValueError("bad"), 1, "ValueError: bad\n"),
    ],
)
def test_a_child_of_a_worker_ends_with_its_status_though_its_stdout_is_closed(
    error, status, said, tmp_path
):
    noted = tmp_path / "noted"
    child = os.fork()
    if child == 0:
        sys.stdout = io.StringIO()
        sys.stdout.close()
        sys.stderr = noted.open("w")  # with a buffer
        _leave(error)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
    assert noted.read_text() == said


# Memory


def big(index):
    return np.full(200_000, index, np.float32)


def address(array):
    return array.__array_interface__["data"][0]


def test_the_memory_of_a_dropped_batch_is_used_again_and_that_of_a_held_one_is_not():
    backend = opened(Numbers(big), num_workers=1)
    held = outcome_of(backend, 0, 0, [7, 8]).batch()
    dropped = address(outcome_of(backend, 0, 1, [1, 2]).batch())
    used = {address(outcome_of(backend, 0, step, [3, 4]).batch()) for step in range(2, 8)}
    assert used == {dropped}
    assert address(held) != dropped
    backend.close()
    assert (held == np.array([7, 8])[:, None]).all()


def test_batches_are_what_the_collate_function_made():
    made = []

    class Batch:
        def __init__(self, samples):
            self.samples = samples
            self.lock = threading.Lock()  # cannot be pickled
            made.append(self)

    batches = list(loader_of(float, collate_fn=Batch))
    assert set(map(id, batches)) == set(map(id, made))


def test_a_batch_that_is_dropped_is_gone_at_once():
    class Batch:
        def __init__(self, samples):
            self.samples = samples

    gc.disable()
    try:
        batches = iter(loader_of(float, collate_fn=Batch, prefetch_factor=1))
        gone = [weakref.ref(next(batches)) for _ in range(6)]
        assert [ref() for ref in gone] == [None] * 6
        with pytest.raises(StopIteration):
            next(batches)
    finally:
        gc.enable()


# Who am I


def test_each_thread_knows_itself_and_the_main_process_is_no_worker():
    dataset = Numbers(lambda index: get_worker_info().id)
    loader = Loader(dataset, 2, num_workers=3, backend="thread", seed=1)
    infos = []
    loader_with_init = Loader(
        dataset, 2, num_workers=3, backend="thread",
        worker_init_fn=lambda worker_id: infos.append(get_worker_info()),
    )  # fmt: skip
    assert {int(x) for batch in loader for x in batch} <= {0, 1, 2}
    list(loader_with_init)
    assert sorted(info.id for info in infos) == [0, 1, 2]
    assert {info.num_workers for info in infos} == {3}
    assert all(info.dataset is dataset for info in infos)
    assert get_worker_info() is None


def test_a_stream_that_cannot_be_copied_is_refused_for_several_threads():
    class Locked(IterableDataset):
        def __init__(self):
            self.lock = threading.Lock()

        def __iter__(self):
            return iter(range(4))

    with pytest.raises(ConfigError, match=r"Locked cannot be copied .*lock.*__getstate__"):
        iter(Loader(Locked(), 2, num_workers=2, backend="thread"))
    batches = list(Loader(Locked(), 2, num_workers=1, backend="thread"))
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3]]


def test_a_stream_that_deals_itself_out_by_worker_info_is_copied_for_each_thread():
    class Counter(IterableDataset):
        def __init__(self):
            self.data = np.arange(10.0)
            self.number = 0

        def __iter__(self):
            self.number = get_worker_info().id
            return self

        def __next__(self):
            self.number += 2
            if self.number > 11:
                raise StopIteration
            return self.data[self.number - 2]

    dataset = Counter()
    batches = list(Loader(dataset, 1, num_workers=2, backend="thread"))
    assert sorted(float(batch[0]) for batch in batches) == list(range(10))
    assert dataset.number == 0
