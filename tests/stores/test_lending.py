# SPDX-License-Identifier: Apache-2.0
"""What is open is lent to threads, and closed when the last of them gives it back."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.stores.lending import Lending


class Thing:
    """Something that counts how often it was closed."""

    def __init__(self):
        self.pid = os.getpid()
        self.num_closed = 0

    def close(self):
        self.num_closed += 1


def test_one_is_made_for_all_and_closed_once():
    lending, made = Lending(), []

    def make():
        made.append(Thing())
        return made[-1]

    with lending.lent(make) as first, lending.lent(make) as second:
        assert first is second
        lending.close()
        lending.close()
        assert first.num_closed == 0
        with lending.lent(make) as third:  # opened anew
            assert third is not first
    assert (first.num_closed, third.num_closed) == (1, 0)
    lending.close()
    assert [thing.num_closed for thing in made] == [1, 1]


def test_an_error_of_the_reader_gives_it_back_and_one_of_the_maker_keeps_nothing():
    lending = Lending()

    def fail():
        raise OSError("no such file")

    def fail_to_read(lending):
        lending.close()
        raise OSError("cannot read")

    with pytest.raises(OSError, match="no such file"), lending.lent(fail):
        pass
    with pytest.raises(OSError, match="cannot read"), lending.lent(Thing) as thing:
        fail_to_read(lending)
    assert thing.num_closed == 1


def test_threads_that_open_and_close_never_find_it_closed():
    lending, made = Lending(), []

    def make():
        made.append(Thing())
        return made[-1]

    def read(number):
        with lending.lent(make) as thing:
            is_open = thing.num_closed == 0
            if number % 3 == 0:
                lending.close()
            return is_open and thing.num_closed == 0

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(2000)))
    lending.close()
    assert {thing.num_closed for thing in made} == {1}


def test_it_pickles_with_nothing_open():
    lending = Lending()
    with lending.lent(Thing) as thing, pickle.loads(pickle.dumps(lending)).lent(Thing) as other:
        assert other is not thing


def _lend_in_child(lending, thing, sender):
    with lending.lent(Thing) as own:
        sender.send((own.pid == os.getpid(), thing.num_closed))
    lending.close()
    sender.send((own.num_closed, thing.num_closed))


def test_a_forked_child_opens_its_own_also_while_another_thread_opens():
    lending, other = Lending(), Lending()
    is_opening, may_go_on = threading.Event(), threading.Event()

    def make_slowly():
        is_opening.set()
        assert may_go_on.wait(20)
        return Thing()

    def open_slowly():
        with lending.lent(make_slowly) as thing:
            return thing

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with ThreadPoolExecutor(1) as pool, other.lent(Thing) as thing:
        opened = pool.submit(open_slowly)
        assert is_opening.wait(20)
        child = context.Process(target=_lend_in_child, args=(lending, thing, sender))
        child.start()
        sender.close()
        found = [receiver.recv() if receiver.poll(20) else "it hangs" for _ in range(2)]
        may_go_on.set()
        child.kill()
        child.join()
        opened.result(20)
    receiver.close()
    lending.close()
    other.close()
    assert found == [(True, 0), (1, 0)]
