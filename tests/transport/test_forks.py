# SPDX-License-Identifier: Apache-2.0
"""A fork in one thread while another one takes batches: what the child inherits stays as it is.

Each program steps through one schedule. Its own hooks, registered before Penstock is imported, run
between Penstock's and the fork itself, and hold the forking thread there.
"""

from __future__ import annotations

import sys
import textwrap

import pytest
from tests.support.processes import completed

HEAD = """
    import os, sys, threading, warnings

    # From Python 3.12 on, of a fork beside threads; this is one.
    warnings.filterwarnings("ignore", "This process .* multi-threaded", DeprecationWarning)

    class Gate:
        def __init__(self):
            self.reached, self.opened = threading.Event(), threading.Event()

        def __call__(self):
            if threading.current_thread() is thread:  # workers are forked as well
                self.reached.set()
                assert self.opened.wait(60)

    # The first hook that is registered runs last before a fork, and first after it.
    before, after = Gate(), Gate()
    os.register_at_fork(before=before, after_in_parent=after)
    sys.path[:0] = PATH
    import numpy as np

    go_read, go_write = os.pipe()
    statuses = []

    def fork():
        pid = os.fork()
        if pid == 0:
            os.read(go_read, 1)  # until the parent has used its memory many times over
            os._exit(0 if child_sees_its_own() else 1)
        statuses.append(os.waitpid(pid, 0)[1])

    def begin_fork():
        thread.start()
        assert before.reached.wait(60)

    def fork_now():
        before.opened.set()
        assert after.reached.wait(60)  # the child is there, and the hooks have not said so

    def end():
        after.opened.set()
        os.write(go_write, b"x")
        thread.join()
        print(statuses)

    thread = threading.Thread(target=fork)
"""


def run(body):
    head = textwrap.dedent(HEAD).replace("PATH", repr(sys.path))
    return completed([sys.executable, "-c", head + textwrap.dedent(body)])


@pytest.mark.parametrize("is_held_from_before", [False, True])
def test_a_batch_leased_while_another_thread_forks_is_kept_for_the_child(is_held_from_before):
    done = run(f"""
        from penstock import Loader
        from tests.process.faulty_datasets import Rows

        def child_sees_its_own():
            return bool((held[:, 0] == [4, 5, 6, 7]).all())

        stream = iter(Loader(Rows(), batch_size=4, num_workers=1))
        next(stream)
        if {is_held_from_before}:
            held = next(stream)
        begin_fork()
        if not {is_held_from_before}:
            held = next(stream)
        fork_now()
        del held
        rest = [batch[:, 0].tolist() for batch in stream]
        assert rest == [[4.0 * k, 4 * k + 1, 4 * k + 2, 4 * k + 3] for k in range(2, 16)]
        end()
    """)
    assert (done.stdout, done.stderr) == ("[0]\n", "")


LOCKED_POOL = """
    from penstock.transport.arena import BufferPool
    from tests.transport.fake_page_lock import FakePageLock

    def filled(value):
        array = pool.empty((2_000_000,), np.uint8)
        array[:] = value
        return array

    pool = BufferPool(page_lock=FakePageLock())
"""


def test_pooled_memory_leased_while_another_thread_forks_is_kept_for_the_child():
    done = run(
        LOCKED_POOL
        + """
    def child_sees_its_own():
        return bool((held == 1).all())

    begin_fork()
    held = filled(1)
    fork_now()
    del held
    again = [filled(2) for _ in range(3)]
    end()
    """
    )
    assert (done.stdout, done.stderr) == ("[0]\n", "")


def test_memory_that_is_free_while_another_thread_forks_is_not_used_by_both():
    done = run(
        LOCKED_POOL
        + """
    def child_sees_its_own():
        own = [filled(4) for _ in range(3)]
        os.write(answer_write, b"x")
        os.read(go_read, 1)
        return all((array == 4).all() for array in own)

    answer_read, answer_write = os.pipe()
    begin_fork()
    several = [filled(1) for _ in range(3)]
    del several
    filled(1)  # so the pool has noticed that they came back
    fork_now()
    os.write(go_write, b"x")
    os.read(answer_read, 1)
    again = [filled(3) for _ in range(3)]
    end()
    assert all((array == 3).all() for array in again)
    """
    )
    assert (done.stdout, done.stderr) == ("[0]\n", "")
