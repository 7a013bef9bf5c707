# SPDX-License-Identifier: Apache-2.0
"""Workers that die are replaced, and nothing of it shows in the data."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from tests.process import deadly_datasets
from tests.process.deadly_datasets import Kept, Noise, Stream
from tests.support.comparing import assert_same
from tests.support.processes import but_of_forks

import penstock.torch
from penstock import FaultPolicy, Loader
from penstock.data import IterableDataset, shard
from penstock.errors import WorkerDied, WorkerTimeout

ROOT = Path(__file__).parents[2]


class Deadly(Noise):
    """Sample 13 ends its worker; every attempt is noted in a file."""

    def __init__(self, log, how="exit"):
        super().__init__()
        self.log = log
        self.how = how

    def describe(self, index):
        return f"{index}.jpg"

    def __getitem__(self, index):
        if index == 13:
            with open(self.log, "a") as file:
                file.write("x")
            if self.how == "exit":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def kill(stream, worker_id=0):
    """End a worker now, and know that it has ended."""
    process = stream.backend.processes[worker_id]
    os.kill(process.pid, signal.SIGKILL)
    process.join()


@pytest.mark.parametrize(
    ("dataset", "method"),
    [
        (Noise, "fork"),
        (Noise, "spawn"),
        (Noise, "forkserver"),
        (Stream, "fork"),
        (Stream, "spawn"),
        (Kept, "fork"),
        (Kept, "forkserver"),
    ],
)
def test_a_worker_killed_from_outside_does_not_show_in_the_data(dataset, method):
    options = {
        "batch_size": 4, "num_workers": 2, "multiprocessing_context": method, "seed": 5,
    }  # fmt: skip
    expected = list(Loader(dataset(), **options))
    loader = Loader(dataset(), **options, on_error="skip")
    stream = iter(loader)
    batches = [next(stream), next(stream), next(stream)]
    kill(stream, 0)
    batches += [next(stream), next(stream)]
    kill(stream, 1)
    batches += stream
    assert_same(expected, batches)
    assert loader.failures == []


@pytest.mark.parametrize("persistent", [False, True])
def test_a_sample_that_ended_workers_in_one_epoch_ends_none_in_the_next(tmp_path, persistent):
    log = tmp_path / "tries"
    loader = Loader(
        Deadly(log), batch_size=4, num_workers=2, on_error="skip", persistent_workers=persistent
    )
    for epoch in range(3):
        with pytest.warns(UserWarning, match=f"epoch {epoch}: 1 bad sample left out"):
            indices = [int(row[0]) for batch in loader for row in batch]
        assert indices == [i for i in range(48) if i != 13]
        assert log.stat().st_size == 2
    assert [(f.index, f.name, f.epoch) for f in loader.failures] == [
        (13, "13.jpg", epoch) for epoch in range(3)
    ]
    assert all(isinstance(f.error, WorkerDied) for f in loader.failures)
    if persistent:
        loader._stream.close()


@pytest.mark.parametrize(("how", "tries"), [("exit", 2), ("SIGKILL", 3)])
def test_a_signal_that_may_come_from_outside_takes_a_death_more(tmp_path, how, tries):
    log = tmp_path / "tries"
    loader = Loader(Deadly(log, how), batch_size=4, num_workers=2, on_error="replace")
    with pytest.warns(UserWarning, match="1 bad sample"):
        batches = list(loader)
    assert log.stat().st_size == tries
    assert [len(batch) for batch in batches] == [4] * 12
    expected = list(Loader(Noise(), batch_size=4))
    others = np.concatenate(batches)[:, 0] == np.concatenate(expected)[:, 0]
    assert np.flatnonzero(~others).tolist() == [13]
    np.testing.assert_array_equal(np.concatenate(batches)[others], np.concatenate(expected)[others])


def test_when_respawns_are_spent_the_death_is_raised():
    loader = Loader(
        Noise(400), batch_size=4, num_workers=2, on_error=FaultPolicy("skip", max_respawns=2)
    )
    stream = iter(loader)
    for _ in range(2):
        process = stream.backend.processes[0]
        kill(stream)
        while stream.backend.processes[0] is process:  # it is replaced when a batch is waited for
            next(stream)
    kill(stream)
    with pytest.raises(WorkerDied, match="killed by SIGKILL"):
        list(stream)


def test_a_worker_is_replaced_though_hardly_a_descriptor_is_left():
    loader = Loader(Noise(), batch_size=4, num_workers=2, on_error="skip")
    stream = iter(loader)
    batches = [next(stream)]
    kill(stream)
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Those of the dead worker are free again, and one that starts takes some more for a moment.
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 7, old[1]))
    try:
        batches += stream
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old)
    assert_same(list(Loader(Noise(), batch_size=4)), batches)


def test_a_policy_that_raises_still_replaces_a_worker_killed_from_outside(tmp_path):
    expected = list(Loader(Noise(), batch_size=4))
    loader = Loader(Noise(), batch_size=4, num_workers=2, on_error=FaultPolicy("raise"))
    stream = iter(loader)
    batches = [next(stream)]
    kill(stream)
    batches += stream
    assert_same(expected, batches)
    loader = Loader(
        Deadly(tmp_path / "tries"), batch_size=4, num_workers=2, on_error=FaultPolicy("raise")
    )
    with pytest.raises(WorkerDied, match=r"code 3 while reading sample 13 \(13.jpg\) of step 3"):
        list(loader)


def test_a_worker_that_dies_while_it_starts_is_replaced_until_respawns_are_spent(tmp_path):
    log = tmp_path / "starts"

    def start(worker_id):
        with log.open("a") as file:
            file.write("x")
        os._exit(4)

    loader = Loader(
        Noise(), num_workers=1, worker_init_fn=start, on_error=FaultPolicy("skip", max_respawns=2)
    )
    with pytest.raises(WorkerDied, match="code 4 while it was starting"):
        list(loader)
    assert log.stat().st_size == 3


class Rare(torch.utils.data.Dataset):
    """Draws of a process-wide generator, which tell one worker's life from another's."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.rand(1).item()


def test_without_a_seed_the_new_worker_does_not_draw_again_what_the_dead_one_drew():
    loader = penstock.torch.DataLoader(Rare(), batch_size=2, num_workers=1, on_error="skip")
    iterator = iter(loader)
    drawn = next(iterator).tolist()
    kill(iterator._stream)
    for batch in iterator:
        drawn += batch.tolist()
    assert len(set(drawn)) == 40


class Stuck(Noise):
    """Sample 13 never comes."""

    def __getitem__(self, index):
        if index == 13:
            self.wait_for_nothing()
        return super().__getitem__(index)

    def wait_for_nothing(self):
        signal.pause()  # a signal of another kind would have to end it
        self.wait_for_nothing()


def test_a_timeout_shows_where_the_worker_is_stuck_and_the_stream_goes_on():
    stream = iter(Loader(Stuck(), batch_size=4, num_workers=2, timeout=2))
    for _ in range(3):
        next(stream)
    for _ in range(2):
        with pytest.raises(WorkerTimeout, match="wait_for_nothing"):
            next(stream)


class Slow(Noise):
    """Each sample from `begin` on takes its time, and a batch of them longer than `timeout`."""

    def __init__(self, length=48, begin=0, seconds=0.1):
        super().__init__(length)
        self.begin, self.seconds = begin, seconds

    def __getitem__(self, index):
        if index >= self.begin:
            time.sleep(self.seconds)
        return super().__getitem__(index)


def test_a_slow_batch_is_told_from_a_stuck_worker():
    stream = iter(Loader(Slow(), batch_size=40, num_workers=1, timeout=2))
    with pytest.raises(WorkerTimeout, match="Raise `timeout` if the batch is slow") as caught:
        next(stream)
    assert re.search(
        r"of step 0 \(\d+ of 40 samples in [12]\.\d s, the last 0\.[\d] s ago\)", str(caught.value)
    )


class SlowStream(IterableDataset):
    """Ends its first worker; the one after it has to take the same samples again."""

    def __init__(self, mark):
        self.mark = mark

    def __iter__(self):
        for index in shard(range(60)):
            time.sleep(0.06)
            if index == 40 and not self.mark.exists():
                self.mark.touch()
                os._exit(3)
            yield np.array([index])


@pytest.mark.parametrize(
    ("make", "batch_size", "timeout", "doing", "replaced"),
    [
        (lambda _: Slow(), 48, 2, r"while reading .* \(\d+ of 48", 0),
        # Quick samples, which are not timed, and then a batch that takes longer than `timeout`.
        (lambda _: Slow(400, 360), 40, 2, r"of step \d \(\d+ of 40", 0),
        (lambda path: SlowStream(path / "dead"), 5, 1, "while it began an epoch", 1),
    ],
)
def test_under_a_policy_a_slow_worker_is_waited_for(
    tmp_path, make, batch_size, timeout, doing, replaced
):
    loader = Loader(
        make(tmp_path), batch_size, num_workers=1, timeout=timeout, on_error=FaultPolicy("raise")
    )
    with pytest.warns(
        RuntimeWarning, match=f"slow and not stuck: it was last seen .*{doing}"
    ) as warned:
        batches = list(loader)
    assert len(but_of_forks(warned)) == 1
    rows = np.concatenate(batches)
    assert rows.reshape(len(rows), -1)[:, 0].tolist() == list(range(len(rows)))
    assert loader.stats().replaced_workers == replaced


def test_what_is_left_of_an_epoch_that_was_given_up_makes_no_worker_stuck():
    loader = Loader(
        Slow(8, 4, 0.5), batch_size=4, num_workers=1, timeout=1.6, persistent_workers=True,
        on_error=FaultPolicy("raise", max_respawns=2),
    )  # fmt: skip
    next(iter(loader))  # the second batch is begun, and nothing will ask for it
    with pytest.warns(RuntimeWarning, match="slow and not stuck: .* samples of an earlier epoch"):
        assert len(list(loader)) == 2
    assert loader.stats().replaced_workers == 0


def segfault():
    ctypes.string_at(0)


class Segfaulting(Noise):
    def __getitem__(self, index):
        if index == 13:
            segfault()
        return super().__getitem__(index)


def test_a_users_own_faulthandler_is_not_needed_and_does_no_harm():
    import faulthandler

    was_enabled = faulthandler.is_enabled()
    with open(os.devnull, "w") as nowhere, warnings.catch_warnings():
        faulthandler.enable(nowhere)
        with pytest.raises(WorkerDied, match="in segfault"):
            list(Loader(Segfaulting(), batch_size=4, num_workers=1))
        faulthandler.disable()
    if was_enabled:
        faulthandler.enable()


class Grandparent(Noise):
    """Sample 5 starts a process that outlives its worker, and ends the worker."""

    def __init__(self, pids):
        super().__init__()
        self.pids = pids

    def __getitem__(self, index):
        if index == 5:
            reading_end, _ = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.read(reading_end, 1)  # for ever: it holds its own writing end
            with open(self.pids, "a") as file:
                file.write(f"{pid}\n")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_death_is_told_while_a_process_that_the_worker_forked_lives_on(tmp_path):
    pids = tmp_path / "pids"
    try:
        with pytest.raises(WorkerDied, match="SIGKILL while reading sample 5"):
            list(Loader(Grandparent(pids), batch_size=4, num_workers=1))
    finally:
        for pid in pids.read_text().split():
            os.kill(int(pid), signal.SIGKILL)


class Lingering(Noise):
    """Sample 5 leaves the worker, of which a thread stays."""

    def __getitem__(self, index):
        if index == 5:
            threading.Thread(target=threading.Event().wait, daemon=False).start()
            sys.exit()
        return super().__getitem__(index)


def test_a_worker_that_does_not_end_after_its_channel_is_ended():
    with pytest.raises(WorkerDied, match="was killed, as it did not end"):
        list(Loader(Lingering(), batch_size=4, num_workers=1))


class Letters:
    """Its keys are letters; 'a' cannot be read, 'b' ends its worker."""

    def __getitem__(self, key):
        if key == "a":
            raise ValueError("no a")
        if key == "b":
            os._exit(3)
        return key


def test_a_replacement_that_ends_workers_is_quarantined_not_the_sample_that_it_stands_for():
    loader = Loader(
        Letters(),
        batch_sampler=[["a", "b", "c"], ["d", "e", "f"]],
        num_workers=1,
        on_error="replace",
    )
    with pytest.warns(UserWarning, match="bad samples replaced"):
        assert list(loader) == [["c", "c", "c"], ["d", "e", "f"]]
    assert {f.index for f in loader.failures} == {"a", "b"}


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_worker_in_native_code_that_holds_the_interpreter_ends_with_the_main_process(method):
    program = subprocess.Popen(
        [sys.executable, "-m", deadly_datasets.__name__, method],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    pids = [int(pid) for pid in program.stdout.readline().split()]
    workers = [psutil.Process(pid) for pid in pids]
    program.kill()
    program.communicate()
    gone, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive
    assert len(gone) == 2
