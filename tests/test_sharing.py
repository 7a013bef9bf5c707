# SPDX-License-Identifier: Apache-2.0
"""Open things that stores share: one of each in a process, closed when its last user lets go."""

from __future__ import annotations

import gc

import pytest
from tests.support.processes import holds_in_child

from penstock.sharing import Pool


class Thing:
    num_open = 0

    def __init__(self):
        Thing.num_open += 1

    def close(self):
        Thing.num_open -= 1


@pytest.fixture(params=[True, False], ids=["local", "of a server"])
def pool(request):
    Thing.num_open = 0
    return Pool(Thing.close, is_local=request.param)


def test_one_is_made_for_all_and_closed_with_the_last_user(pool):
    one, other, another = (pool.acquire(key, Thing) for key in ("a", "a", "b"))
    assert one.thing is other.thing
    assert Thing.num_open == 2
    for lease in (another, one, one):  # given back twice, and counted once
        lease.close()
        assert Thing.num_open == 1
    assert other.is_usable
    assert not one.is_usable
    other.close()
    assert Thing.num_open == 0


def test_what_is_in_use_is_closed_after_that(pool):
    lease = pool.acquire("a", Thing)
    for _ in range(2):  # the second time it was closed before, as by another thread
        with lease.using():
            lease.close()
            assert Thing.num_open == 1
        assert Thing.num_open == 0


def test_a_user_that_is_dropped_counts_no_more(pool):
    kept, dropped = pool.acquire("a", Thing), pool.acquire("b", Thing)
    cycle = [dropped]
    cycle.append(cycle)
    with pool._lock:  # as if the collector ran in the thread that has it
        del dropped, cycle
        gc.collect()
        assert Thing.num_open == 2
    kept.close()
    assert Thing.num_open == 0


def test_an_error_of_the_maker_keeps_nothing(pool):
    with pytest.raises(ZeroDivisionError):
        pool.acquire("a", lambda: 1 / 0)
    pool.acquire("a", Thing).close()
    assert Thing.num_open == 0


def test_a_forked_child_begins_with_none_and_the_parent_keeps_its_own(pool):
    lease = pool.acquire("a", Thing)

    def is_right():
        is_none = not lease.is_usable and Thing.num_open == (0 if pool._is_local else 1)
        anew = pool.acquire("a", Thing)
        lease.close()
        return is_none and anew.thing is not lease.thing and anew.is_usable

    assert holds_in_child(is_right)
    assert lease.is_usable
    lease.close()
    assert Thing.num_open == 0
