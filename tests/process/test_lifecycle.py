# SPDX-License-Identifier: Apache-2.0
"""Workers come and go, and leave nothing behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings

import numpy as np
import psutil
import pytest
from tests.process.faulty_datasets import Blocking, Noting, Rows
from tests.support.holdings import sizes_of_mapped_slots
from tests.support.processes import completed, told_by

from penstock import Loader, get_worker_info
from penstock.data import IterableDataset
from penstock.engine import stream as stream_module
from penstock.engine.backends import process
from penstock.torch import DataLoader


class UnevenShares(IterableDataset):
    """Worker 1 has nothing, and kills itself a little later."""

    def __iter__(self):
        if get_worker_info().id == 1:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
            return
        for number in range(50):
            if number == 40:
                wait_for_siblings_death()
            yield number


def wait_for_siblings_death():
    siblings = psutil.Process(os.getppid()).children()
    psutil.wait_procs([p for p in siblings if p.pid > os.getpid()], timeout=1.0)


class Labelled(Rows):
    """An image and a label."""

    def __init__(self):
        super().__init__(6000, 2000)

    def __getitem__(self, index):
        return {"image": super().__getitem__(index), "label": index}


def resources():
    gc.collect()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "mappings": len(sizes_of_mapped_slots()),
        "shm": sum("penstock" in name for name in os.listdir("/dev/shm")),
        "children": len(multiprocessing.active_children()),
    }


def assert_rows(batch, first):
    assert (batch == np.arange(first, first + len(batch), dtype=np.float32)[:, None]).all()


def test_ten_thousand_batches_grow_nothing(monkeypatch):
    # However busy the machine is, none is measured: the clock that this takes holds a descriptor.
    monkeypatch.setattr(stream_module, "_LONG_NS", 1 << 62)
    loader = Loader(Rows(20_000, 2048), batch_size=2, num_workers=2)
    stream = iter(loader)
    for _ in range(200):
        next(stream)
    before = resources()
    for step, batch in enumerate(stream, start=200):
        assert batch[1, -1] == 2 * step + 1
        if step in (2000, 5000, 9990):
            del batch
            now = resources()
            assert {k: v for k, v in now.items() if k != "mappings"} == {
                k: v for k, v in before.items() if k != "mappings"
            }
            # prefetch_factor + 2 free slots per worker; and all that is under way may be with the
            # faster of the two, whose free ones are then fewer only after its next task.
            assert now["mappings"] <= 2 * (2 + 2) + 2 * 2
    assert step == 9999
    del stream, batch
    after = resources()
    assert after["mappings"] == after["children"] == 0


class Reporting(Rows):
    """Sets an event as sample `at` is read."""

    def __init__(self, at):
        super().__init__(32)
        self.at = at
        self.is_read = multiprocessing.get_context("fork").Event()

    def __getitem__(self, index):
        if index == self.at:
            self.is_read.set()
        return super().__getitem__(index)


def test_a_message_that_fails_leaves_no_descriptor_of_those_behind_it(monkeypatch):
    monkeypatch.setattr(process, "memory_warning", lambda *_: "too little")
    before = resources()
    dataset = Reporting(28)
    options = {"num_workers": 1, "prefetch_factor": 8, "multiprocessing_context": "fork"}
    stream = iter(Loader(dataset, batch_size=4, **options))
    assert dataset.is_read.wait(30)  # seven messages are there by then, each with a descriptor
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="too little"):
            next(stream)
    del stream
    assert resources() == before


def test_an_early_break_and_a_dropped_iterator_leave_no_worker():
    before = resources()
    for batch in Loader(Rows(), batch_size=2, num_workers=2):
        assert_rows(batch, 0)
        break
    iter(Loader(Rows(), num_workers=2))
    stream = iter(Loader(Rows(), num_workers=2, persistent_workers=True))
    next(stream)
    del batch, stream
    assert resources() == before


def test_workers_whose_loader_is_closed_while_they_start_set_nothing_up(tmp_path):
    noting = Noting(tmp_path / "called")
    loader = Loader(Rows(), num_workers=1, worker_init_fn=noting, multiprocessing_context="spawn")
    iter(loader).close()
    assert not noting.path.exists()


def test_persistent_workers_are_the_same_processes_in_every_epoch():
    loader = Loader(Rows(), batch_size=4, num_workers=2, persistent_workers=True)
    pids = set()
    for _ in range(3):
        stream = iter(loader)
        pids.add(tuple(process.pid for process in loader._stream.backend.processes))
        assert len(list(stream)) == 16
    assert len(pids) == 1
    stream.close()


def test_an_epoch_broken_off_leaves_no_batch_of_it_in_the_next():
    loader = Loader(Rows(), batch_size=4, num_workers=3, persistent_workers=True, prefetch_factor=4)
    for stop_after in (1, 5, 16):
        for step, batch in enumerate(loader):
            assert_rows(batch, 4 * step)
            if step == stop_after:
                break
    loader._stream.close()


def script_of(body):
    """Return a script, with what the tests of this file need at hand."""
    head = f"""
        import faulthandler, sys, os, time, signal, threading
        faulthandler.dump_traceback_later(50)  # where it waits, if it does not end
        sys.path[:0] = {sys.path!r}
        import numpy as np
        from penstock import Loader
        from tests.process.faulty_datasets import Blocking, Rows
    """
    return textwrap.dedent(head) + textwrap.dedent(body)


def run_script(body, **options):
    """Run a script in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", script_of(body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(process):
    return told_by(process, timeout_s=60)


@pytest.mark.parametrize("dataset", ["Rows()", "Blocking(2)"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_killing_the_main_process_ends_its_workers_within_five_seconds(dataset, method):
    process = run_script(f"""
        if __name__ == "__main__":
            loader = Loader({dataset}, num_workers=3, multiprocessing_context="{method}")
            stream = iter(loader)
            next(stream)
            print(*[p.pid for p in stream.backend.processes], flush=True)
            threading.Event().wait()
    """)
    workers = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
    assert len(workers) == 3
    process.kill()
    _, alive = psutil.wait_procs(workers, timeout=5.0)
    finish(process)
    assert alive == []


def test_control_c_raises_in_the_main_process_only_and_leaves_no_worker():
    process = run_script(
        """
        # A job that a shell runs in the background, as CI may be, inherits SIGINT as ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stream = iter(Loader(Blocking(2), num_workers=2))
        next(stream)
        print(*[p.pid for p in stream.backend.processes], flush=True)
        try:
            for batch in stream:
                print("batch", flush=True)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        """,
        start_new_session=True,
    )
    workers = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
    assert process.stdout.readline() == "batch\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole group
    out, err = finish(process)
    _, alive = psutil.wait_procs(workers, timeout=5.0)
    assert out == "interrupted\n"
    assert "Traceback" not in err
    assert alive == []


def test_control_c_in_the_loops_own_code_does_not_wait_for_a_slow_sample():
    process = run_script(
        """
        import multiprocessing

        signal.signal(signal.SIGINT, signal.default_int_handler)
        begun, begin = os.pipe()

        class Slow:
            def __len__(self):
                return 2

            def __getitem__(self, index):
                if index == 1:
                    os.write(begin, b"x")
                    time.sleep(2.5)  # less than a worker that is not interrupted may take
                return index

        def loop():
            for batch in Loader(Slow(), num_workers=1):
                os.read(begun, 1)  # the worker is at it
                processes.extend(multiprocessing.active_children())
                os.killpg(0, signal.SIGINT)  # as a terminal does
                signal.pause()

        processes = []
        try:
            loop()
        except KeyboardInterrupt:
            pass
        print([process.exitcode for process in processes], flush=True)
        """,
        start_new_session=True,
    )
    out, err = finish(process)
    assert out == f"[{-signal.SIGTERM}]\n"
    assert "Traceback" not in err


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_a_control_c_that_does_not_end_the_wait_is_raised_all_the_same(backend):
    """The kernel gave it to another thread, or it came just before the system call."""
    process = run_script(f"""
        def interrupt():
            num_seen = 0
            while num_seen < 20:  # in a row: it waits, and not only for this thread's turn
                frame = sys._current_frames()[main.ident]
                num_seen = num_seen + 1 if frame.f_code.co_name == "events" else 0
                del frame
                time.sleep(0.001)
            sent.append(time.monotonic())
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)

        sent = []
        main = threading.main_thread()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stream = iter(Loader(Blocking(2), num_workers=2, backend="{backend}"))
        next(stream), next(stream)
        threading.Thread(target=interrupt).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            next(stream)
        except KeyboardInterrupt:
            print(time.monotonic() - sent[0], flush=True)
    """)
    out, err = finish(process)
    assert err == ""
    assert float(out) < 5.0  # a second, and to end the workers


def test_an_interpreter_that_exits_with_live_iterators_ends_cleanly():
    process = run_script("""
        loaders = [Loader(Rows(), num_workers=2, persistent_workers=p) for p in (True, False)]
        streams = [iter(loader) for loader in loaders]
        held = [next(stream) for stream in streams]
        print("ok")
    """)
    out, err = finish(process)
    assert (process.returncode, out, err) == (0, "ok\n", "")


def test_a_forked_child_keeps_seeing_the_batch_it_was_forked_with():
    stream = iter(Loader(Rows(), batch_size=4, num_workers=2))
    batch = next(stream)
    go_read, go_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(go_read, 1)  # until the main process has used its slots many times over
        os._exit(0 if bool((batch[2] == 2).all()) else 1)
    del batch
    assert len(list(stream)) == 15
    os.write(go_write, b"x")
    assert os.waitpid(pid, 0)[1] == 0
    os.close(go_read)
    os.close(go_write)


def test_a_death_that_nobody_asked_about_does_not_hang_the_next_epoch():
    loader = Loader(Rows(), batch_size=4, num_workers=2, persistent_workers=True)
    stream = iter(loader)
    next(stream)
    backend = loader._stream.backend
    process = backend.processes[1]
    os.kill(process.pid, signal.SIGKILL)
    process.join()  # whether or not the backend has heard of it when the next epoch begins
    assert len(list(loader)) == 16
    loader._stream.close()


def test_a_worker_that_dies_after_its_share_of_an_iterable_is_not_missed():
    stream = iter(Loader(UnevenShares(), num_workers=2, batch_size=None, prefetch_factor=1))
    assert sorted(stream) == list(range(50))


def test_keeping_the_labels_does_not_keep_the_images():
    kept = [batch["label"] for batch in Loader(Labelled(), batch_size=600, num_workers=2)]
    assert sum(sizes_of_mapped_slots()) <= len(kept) * 64 * 1024
    assert all((label == np.arange(k * 600, k * 600 + 600)).all() for k, label in enumerate(kept))


def test_sixty_four_open_files_are_enough():
    process = run_script("""
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        held = list(Loader(Rows(400), batch_size=2, num_workers=4))
        assert all((batch[1] == 2 * k + 1).all() for k, batch in enumerate(held))
        print("ok")
    """)
    out, err = finish(process)
    assert (out, err) == ("ok\n", "")


def test_a_dev_shm_of_one_megabyte_is_enough():
    command = (
        "mount -t tmpfs -o size=1m penstock-test /dev/shm "
        "&& df --output=size /dev/shm | tail -1 && exec "
    )
    body = """
        batches = [batch for batch in Loader(Rows(64, 1_000_000), batch_size=4, num_workers=2)]
        assert sum(batch.nbytes for batch in batches) == 256_000_000
        assert all((batch[3] == 4 * k + 3).all() for k, batch in enumerate(batches))
        print("ok")
    """
    probe = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("no permission to make a mount namespace of our own")
    start = ["unshare", "-m", "sh", "-c", command + '"$0" "$@"']
    done = completed([*start, sys.executable, "-c", script_of(body)])
    assert done.stderr == ""
    assert done.stdout.split() == ["1024", "ok"]


class Texts(list):
    """A batch is all of it, whatever is asked for."""

    def get_batch(self, indices, alloc):
        return list(self)


def test_a_worker_blocked_on_sending_and_a_consumer_with_large_tasks_do_not_wait_for_each_other():
    # Tasks of 800 KB and messages of 30 KB: both directions of the sockets fill up.
    texts = Texts(f"{index:06d}" * 50 for index in range(100))
    batches = [[index % 100 for index in range(100_000)] for _ in range(12)]
    loader = Loader(texts, batch_sampler=batches, num_workers=2, prefetch_factor=6)
    assert [batch == texts for batch in loader] == [True] * 12


def test_an_interrupted_wait_leaves_persistent_workers_that_start_anew():
    loader = Loader(
        Blocking(2), batch_size=1, num_workers=1, persistent_workers=True, sampler=[0, 1, 2]
    )
    stream = iter(loader)
    assert_rows(next(stream), 0)
    assert_rows(next(stream), 1)

    def interrupt(*_):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    finally:
        signal.signal(signal.SIGALRM, old)
    assert multiprocessing.active_children() == []
    assert_rows(next(iter(loader)), 0)
    loader._stream.close()


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("loader_class", [Loader, DataLoader])
def test_workers_go_with_the_last_reference_and_not_with_a_garbage_collection(
    loader_class, persistent
):
    loader = loader_class(Rows(), num_workers=2, persistent_workers=persistent)
    stream = iter(loader)
    next(stream)
    gc.disable()
    try:
        del stream, loader
        assert multiprocessing.active_children() == []
    finally:
        gc.enable()
