# SPDX-License-Identifier: Apache-2.0
"""Batches without workers: one after the other, in the caller's thread, whatever goes wrong."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from penstock import Loader
from penstock.data import IterableDataset
from penstock.engine.fault_log import FaultLog
from penstock.engine.plan import Epoch, Given, Plan, Progress, WorkerSpec
from penstock.engine.stream import SerialStream
from penstock.epochs import EpochIterator
from penstock.faults import policy_of


class Rows:
    """Sample k is k; a negative one raises."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index < 0:
            raise ValueError(f"sample {index}")
        return np.array(index)


class Numbers(IterableDataset):
    def __iter__(self):
        yield from (np.array(k) for k in range(5))


class Sampler:
    """Gives single indices as batches; what is an exception it raises, and goes on."""

    def __init__(self, *given):
        self._given = iter(given)

    def __iter__(self):
        return self

    def __next__(self):
        index = next(self._given)
        if isinstance(index, Exception):
            raise index
        return [index]


def iterate(*indices, dataset=None, policy="raise", given=None, **options):
    dataset = Rows() if dataset is None else dataset
    is_iterable = isinstance(dataset, IterableDataset)
    spec = WorkerSpec(dataset, is_iterable, is_batched=True, faults=policy_of(policy), **options)
    progress = Progress(given or Given(), given or Given())
    stream = SerialStream(
        Plan(spec, 0),
        Epoch(0, Sampler(*indices), progress),
        FaultLog(spec.faults, dataset),
    )
    return EpochIterator(stream)


def outcomes(batches):
    """Return what each call of next() gives: numbers, or the text of what it raises."""
    found = []
    while True:
        try:
            found.append([int(k) for k in next(batches)])
        except StopIteration:
            return found
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")


def test_batches_come_in_order_and_are_counted():
    batches = iterate(3, 1, 4)
    assert [int(batch[0]) for batch in batches] == [3, 1, 4]
    progress = batches.epoch.progress
    assert (progress.given.num_steps, progress.is_over) == (3, True)
    assert next(batches, "end") == "end"


def test_a_sample_that_raises_costs_its_batch_alone_and_is_named():
    batches = iterate(0, -1, 2)
    assert outcomes(batches) == [[0], "ValueError: sample -1", [2]]
    assert batches.epoch.progress.given.num_steps == 3
    batches = iterate(-7)
    with pytest.raises(ValueError, match="sample -7") as raised:
        next(batches)
    assert raised.value.__notes__[0].startswith("while reading sample -7")
    assert raised.value.__notes__[-1] == "in epoch 0, step 0"


def test_an_error_of_the_sampler_is_raised_and_the_batches_after_it_come():
    batches = iterate(0, KeyError("lost"), 2)
    assert outcomes(batches) == [[0], "KeyError: 'lost'", [2]]
    assert batches.epoch.progress.given.num_steps == 2


def test_a_state_with_batches_given_ahead_gives_the_others():
    given = Given(num_steps=1, ahead=((2, 4),))
    # What was given is drawn again, and not made.
    batches = iterate(1, -2, -3, 4, given=given)
    assert outcomes(batches) == [[1], [4]]
    assert batches.epoch.progress.given == Given(num_steps=5)


def test_a_batch_is_the_loops_alone():
    batches = iterate(0, 1, dataset=[np.zeros(3), np.ones(3)])
    batch = weakref.ref(next(batches))
    gc.disable()  # nothing is to keep it in a cycle
    try:
        assert batch() is None
    finally:
        gc.enable()


def test_closing_ends_the_iterator_of_a_stream():
    ended = []

    class Closes(IterableDataset):
        def __iter__(self):
            try:
                yield from (np.array(k) for k in range(5))
            finally:
                ended.append(True)

    batches = iterate(*[None] * 9, dataset=Closes())
    asked = batches.__next__
    next(batches)
    batches.close()
    assert ended == [True]
    assert next(batches, "end") == "end"
    with pytest.raises(StopIteration):
        asked()


def test_what_interrupts_a_sample_ends_the_stream():
    class Interrupted(Rows):
        def __getitem__(self, index):
            if index == 1:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    batches = iterate(0, 1, 2, dataset=Interrupted())
    assert int(next(batches)[0]) == 0
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert batches.epoch.progress.given.num_steps == 1
    assert batches.epoch.progress.is_closed
    assert next(batches, "end") == "end"


def test_an_epoch_that_cannot_begin_leaves_nothing_behind():
    class Moody(list):
        def set_epoch(self, epoch):
            raise LookupError(epoch)

    dataset = Moody([1.0, 2.0])
    gone = weakref.ref(dataset)
    loader = Loader(dataset, 1)
    gc.disable()
    try:
        with pytest.raises(LookupError):
            iter(loader)
        del loader, dataset
        assert gone() is None
    finally:
        gc.enable()
