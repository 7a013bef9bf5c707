# SPDX-License-Identifier: Apache-2.0
"""Forks of the main process and of workers, children that others reap, and workers' last words."""

from __future__ import annotations

import errno
import json
import os
import sys
import textwrap
from multiprocessing import popen_fork

import numpy as np
import pytest
from tests.process.faulty_datasets import Ends, Forking, Rows
from tests.support.processes import completed, holds_in_child

from penstock import Loader
from penstock.errors import ConfigError, WorkerDied
from penstock.torch import DataLoader

METHODS = ("fork", "forkserver", "spawn")
LOADERS = (Loader, DataLoader)
# A forked child can start workers by fork and spawn, whatever the default is.
BACKENDS = {
    "process": {"backend": "process", "multiprocessing_context": "fork"},
    "thread": {"backend": "thread"},
}


def firsts(batches):
    return [batch[:, 0].tolist() for batch in batches]


ALL = [[4.0 * k, 4 * k + 1, 4 * k + 2, 4 * k + 3] for k in range(16)]


# A dataset that forks


@pytest.mark.parametrize("how", ["sys.exit", "raises"])
@pytest.mark.parametrize("make", LOADERS)
def test_a_child_of_the_dataset_ends_without_its_worker(make, how):
    assert firsts(make(Forking(how), batch_size=4, num_workers=2)) == ALL


class Statuses(Rows):
    """Sample 5 gives the exit status of a child that leaves in some way, as its first value."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if index == 5:
            pid = os.fork()
            if pid == 0:
                os.closerange(2, 3)  # where its traceback goes
                if self.how == "returns":
                    return sample
                raise {"3": SystemExit(3), "None": SystemExit, "raises": ValueError}[self.how]
            sample = np.full_like(sample, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return sample


@pytest.mark.parametrize(("how", "status"), [("3", 3), ("None", 0), ("raises", 1), ("returns", 0)])
def test_a_child_of_the_dataset_ends_without_its_thread(how, status):
    loader = Loader(Statuses(how), batch_size=4, num_workers=1, backend="thread")
    assert firsts(loader) == [ALL[0], [4.0, status, 6.0, 7.0], *ALL[2:]]


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM])
def test_a_process_that_the_system_does_not_start_is_an_error_with_its_limits(monkeypatch, number):
    def launch(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(popen_fork.Popen, "_launch", launch)  # its own leaves pipes open then
    with pytest.raises(ConfigError, match=r"process of worker 0: .* pids\.max"):
        list(Loader(Rows(), 4, num_workers=1, multiprocessing_context="fork"))


# A forked copy of a loader


@pytest.mark.parametrize("make", LOADERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loader_with_persistent_workers_has_its_own_in_a_forked_child(make, backend):
    options = BACKENDS[backend]
    loader = make(Rows(), batch_size=4, num_workers=2, persistent_workers=True, **options)
    assert firsts(loader) == ALL
    backend = iter(loader).backend

    def work():
        ok = firsts(loader) == ALL and firsts(loader) == ALL
        iter(loader).close()
        return ok

    assert holds_in_child(work)
    assert firsts(loader) == ALL
    assert iter(loader).backend is backend


@pytest.mark.parametrize("make", LOADERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_iterator_cannot_go_on_in_a_forked_child_and_says_so(make, backend):
    loader = make(Rows(), batch_size=4, num_workers=2, **BACKENDS[backend])
    batches = iter(loader)
    next(batches)
    owner = os.getpid()

    def work():
        for _ in range(2):
            with pytest.raises(WorkerDied, match=f"pid {owner}.*iterate the loader anew here"):
                next(batches)
        return firsts(loader) == ALL

    assert holds_in_child(work)
    assert firsts(batches) == ALL[1:]


# Exit statuses that someone else takes

PROGRAM = """
    import json, os, signal, sys, time
    sys.path[:0] = PATH
    from penstock import Loader
    from penstock.errors import ConfigError, WorkerDied
    from tests.process.faulty_datasets import Rows

    def reap(*_):
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass

    class Killed(Rows):
        def __getitem__(self, index):
            if index == 13:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    if HOW == "ignored":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    elif HOW == "reaped":
        signal.signal(signal.SIGCHLD, reap)
"""


def run(how, body):
    head = textwrap.dedent(PROGRAM).replace("PATH", repr(sys.path)).replace("HOW", repr(how))
    # As from a supervisor that ignores SIGCHLD; `signal.signal` of this process would not be undone
    # in time for other tests' children.
    ignore = ["env", "--ignore-signal=CHLD"] if how == "inherited" else []
    done = completed([*ignore, sys.executable, "-c", head + textwrap.dedent(body)])
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


HOWS = ("ignored", "inherited", "reaped")


@pytest.mark.parametrize("how", HOWS)
def test_an_epoch_ends_at_once_though_somebody_else_takes_the_exit_statuses(how):
    noted = run(
        how,
        """
        loader = Loader(Rows(), batch_size=4, num_workers=2, persistent_workers=True)
        batches = iter(loader)
        backend, processes = batches.backend, batches.backend.processes
        num_batches = len(list(batches))
        backend.remove_worker(1)
        while len(backend._by_fd) > 2:
            backend.events(0.1)
        begun, cpu = time.monotonic(), time.process_time()
        loader._stream.close()
        ended = time.monotonic() - begun, time.process_time() - cpu
        print(json.dumps([num_batches, *ended, processes[0].is_alive()]))
        """,
    )
    num_batches, wall_s, cpu_s, is_alive = noted
    assert (num_batches, is_alive) == (16, False)
    assert wall_s < 2.0  # 5 s if it has to be killed
    assert cpu_s < 1.0


@pytest.mark.parametrize("how", HOWS)
def test_a_death_whose_exit_status_somebody_else_took_is_told_at_once_and_as_unknown(how):
    noted = run(
        how,
        """
        batches = iter(Loader(Killed(), batch_size=4, num_workers=1))
        got = [next(batches) for _ in range(3)]
        begun = time.monotonic()
        try:
            next(batches)
        except WorkerDied as error:
            print(json.dumps([time.monotonic() - begun, str(error)]))
        """,
    )
    wall_s, message = noted
    assert wall_s < 2.0
    assert "worker 0 ended with an exit status that is unknown while reading sample 13" in message
    assert "SIGCHLD is ignored in this process" in message


# Last words


def death_of(dataset, capfd, **options):
    with pytest.raises(WorkerDied) as caught:
        list(Loader(dataset, batch_size=4, num_workers=1, **options))
    capfd.readouterr()  # what multiprocessing printed
    return str(caught.value)


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_that_leaves_says_where(method, capfd):
    message = death_of(Ends("sys.exit"), capfd, multiprocessing_context=method)
    assert "exited with code 3 while reading sample 13" in message
    assert "sys.exit ends a worker" in message
    assert "Its last words: SystemExit: 3\n" in message
    assert "in leave\n    sys.exit(3)" in message
    assert "__main__" not in message


def test_a_worker_that_says_nothing_is_not_said_to_have_called_sys_exit(capfd):
    message = death_of(Ends("os._exit"), capfd)
    assert "exited with code 3 while reading sample 13" in message
    assert "so it was no exception, nor sys.exit: look for os._exit" in message
    assert "__main__" not in message


@pytest.mark.parametrize(("how", "is_native"), [("SIGABRT", True), ("SIGUSR1", False)])
def test_only_a_signal_of_a_crash_is_laid_to_native_code(how, is_native, capfd):
    message = death_of(Ends(how), capfd)
    assert f"was killed by {how} while reading sample 13" in message
    assert ("native code" in message) == is_native
    assert ("Another process sent it that signal." in message) == (not is_native)


def test_a_worker_whose_descriptors_were_closed_says_so(capfd):
    message = death_of(Ends("closerange"), capfd)
    assert "Bad file descriptor" in message or "closes descriptors" in message
    assert "sys.exit" not in message
    assert "__main__" not in message
