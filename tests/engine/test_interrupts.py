# SPDX-License-Identifier: Apache-2.0
"""A Ctrl-C that is held back comes at the end of the block, not in it."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from tests.support.datasets import Rows

from penstock import Loader
from penstock.engine.backends import process
from penstock.engine.backends.process import HeldInterrupts
from penstock.engine.task import decode_result


def test_a_ctrl_c_in_the_block_is_raised_at_its_end():
    reached = []
    with pytest.raises(KeyboardInterrupt):  # noqa: SIM117, PT012 - what is in the block is the test
        with HeldInterrupts():
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("the end of the block")
    assert reached == ["the end of the block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_a_ctrl_c_nothing_happens_and_the_handler_is_the_users():
    def handler(*_):
        raise AssertionError("not called")

    before = signal.signal(signal.SIGINT, handler)
    try:
        held = HeldInterrupts()
        for _ in range(2):
            with held:
                pass
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_program_that_ignores_ctrl_c_goes_on_ignoring_it():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with HeldInterrupts():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_it_does_nothing():
    errors = []

    def use():
        try:
            with HeldInterrupts():
                pass
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert errors == []


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_ctrl_c_while_a_message_is_taken_in_loses_no_descriptor_of_it(monkeypatch, nth):
    """The fixture looks after descriptors, mappings and processes."""
    messages = iter(range(1, 1000))

    def decode_under_fire(data):
        if next(messages) == nth:
            signal.raise_signal(signal.SIGINT)
        return decode_result(data)

    monkeypatch.setattr(process, "decode_result", decode_under_fire)
    with pytest.raises(KeyboardInterrupt):
        list(Loader(Rows(400, 6000), batch_size=2, num_workers=2))


_firing = []


def _fire_in_fork():
    if _firing:
        _firing.pop()
        signal.raise_signal(signal.SIGINT)


os.register_at_fork(after_in_parent=_fire_in_fork)


def test_a_ctrl_c_while_workers_are_forked_is_not_lost_and_leaves_none():
    """Python ignores what is raised in a hook of `os.fork`."""
    _firing.append(True)
    with pytest.raises(KeyboardInterrupt):
        list(Loader(Rows(400, 6000), 2, num_workers=2, multiprocessing_context="fork"))
    assert _firing == []
