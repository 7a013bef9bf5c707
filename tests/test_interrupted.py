# SPDX-License-Identifier: Apache-2.0
"""A loop that Ctrl-C hits between any two bytecodes has the state of just what it got."""

from __future__ import annotations

import dis
import json
import os
import sys

import numpy as np
import pytest
import torch
from tests.device.fake import FakeAccelerator
from tests.transport.fake_page_lock import FakePageLock

import penstock
import penstock.torch as ours
from penstock import Loader
from penstock.data import IterableDataset, shard
from penstock.engine.stream import BatchStream, SerialStream
from penstock.epochs import EpochIterator
from penstock.sampling import BatchSampler, RandomSampler
from penstock.torch import loader as torch_loader

LENGTH, BATCH = 6, 2
NUM_BATCHES = LENGTH // BATCH
# One place in so many is tried; of the last ones before the loop has the batch, all, and all of
# the code that hands it out.
THIN, LAST = 60, 20
HANDING_OUT = {
    BatchStream.batches.__code__,
    SerialStream._plain_batches.__code__,
    EpochIterator.__next__.fget.__code__,
}
# What is counted is counted here; what interrupts a call from here comes out of that call.
COUNTING = tuple(
    os.path.join(penstock.__path__[0], *name.split("/"))
    for name in (
        "engine/backends/",
        "engine/stream.py",
        "engine/worker_stream.py",
        "engine/plan.py",
        "engine/fault_log.py",
        "engine/scheduler.py",
        "indices.py",
        "loader.py",
        "epochs.py",
        "torch/draws.py",
        "torch/loader.py",
    )
)


class Rows:
    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return np.array(index)


class Places:
    """Knows its place."""

    start = position = 0

    def __iter__(self):
        begin, self.start = self.start, 0
        for self.position, number in enumerate(shard(range(LENGTH)), start=1):
            if self.position > begin:
                yield np.array(number)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.start = state["position"]


class Numbers(Places, IterableDataset):
    pass


class TorchNumbers(Places, torch.utils.data.IterableDataset):
    pass


class Tracer:
    """Follows each bytecode of this thread in the modules that count.

    Raises KeyboardInterrupt before the first one at `place`, as the handler of a signal may.
    """

    def __init__(self, place=None, modules=COUNTING):
        self.place = place
        self.modules = modules
        self.seen = {}
        self.has_raised = False

    def __call__(self, frame, event, arg):
        is_ignored = frame.f_code.co_name == "__del__"  # what is raised there, Python drops
        if is_ignored or not frame.f_code.co_filename.startswith(self.modules):
            return None
        frame.f_trace = self.follow  # Python 3.13 heeds the next line after it alone
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self.follow

    def follow(self, frame, event, arg):
        if event == "opcode":
            place = frame.f_code, frame.f_lasti
            self.seen[place] = None
            if place == self.place:
                self.has_raised = True
                raise KeyboardInterrupt
        return self.follow


def run(loader, step, tracer):
    """Loop over an epoch with the tracer at work while batch `step` is asked for."""
    got = []
    outer = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # else Python 3.12's first tracer follows no opcode
    try:
        for batch in begun(loader, step, tracer):
            sys.settrace(outer)
            got.append(batch)
            if len(got) == step:
                sys.settrace(tracer)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(outer)
    return got


def begun(loader, step, tracer):
    batches = iter(loader)
    if step == 0:
        sys.settrace(tracer)
    return batches


def samples(batches):
    return [int(index) for batch in batches for index in np.asarray(batch).ravel()]


def check_every_place(loader, step, *, twin=None, stride=1, last=LAST, arrived=lambda: None):
    """Interrupt at every place on the way to a batch; go on from the state each time.

    Args:
        loader: Iterated and interrupted, over and over.
        step: The batch that is on its way.
        twin: Goes on from the state; None is `loader` itself.
        stride: Leaves places out, other than the last ones before the loop has the batch.
        last: How many are never left out.
        arrived: Called before batches are looked into.
    """
    twin = loader if twin is None else twin
    is_ordered = loader.seed is not None and loader.in_order
    loader.set_epoch(0)
    dry = Tracer()
    got = run(loader, step, dry)
    arrived()
    expected = samples(got)
    assert sorted(expected) == list(range(LENGTH))
    places = list(dry.seen)
    assert len(places) > 2 * last
    chosen = {*places[::stride], *places[-last:]}
    if stride <= THIN:  # processes run the same code there
        chosen.update(place for place in places if place[0] in HANDING_OUT)
    tracers = [Tracer(place) for place in places if place in chosen]
    for tracer in tracers:
        loader.set_epoch(0)
        got = run(loader, step, tracer)
        where = describe(tracer.place)
        state = json.loads(json.dumps(loader.state_dict()))
        assert state["epoch"] == 0 or len(got) == NUM_BATCHES, where
        if state["epoch"] == 0:
            ahead = sum(stop - start for start, stop in state.get("ahead", ()))
            assert state["batches"] + ahead == len(got), where
            assert state.get("failed", [0, 0]) == [0, BATCH * len(got) * ("failed" in state)], where
            twin.load_state_dict(state)
            rest = list(twin)
            arrived()
            whole = samples(got) + samples(rest)
            if is_ordered:
                assert whole == expected, where
            assert sorted(whole) == list(range(LENGTH)), where
    # What depends on who is first may have gone another way.
    assert sum(tracer.has_raised for tracer in tracers) > 0.5 * len(tracers)


def describe(place):
    code, offset = place
    return f"interrupted in {code.co_qualname} at bytecode {offset}"


def make(kind, dataset, **options):
    loader_of = {"Loader": Loader, "DataLoader": ours.DataLoader}[kind.split()[0]]
    if kind != "DataLoader unseeded":
        options["seed"] = 7
    if dataset == "map":
        return loader_of(Rows(), batch_size=BATCH, shuffle=True, **options)
    return loader_of(Numbers() if kind == "Loader" else TorchNumbers(), batch_size=BATCH, **options)


KINDS = [
    ("Loader", "map"),
    ("Loader", "stream"),
    ("DataLoader", "map"),
    ("DataLoader unseeded", "map"),
    ("DataLoader", "stream"),
]
END = NUM_BATCHES  # where the loop is to hear that there is no more


def whole_sweep(*cases, stride=1):
    return [pytest.param(*case, stride, 60, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(
    ("kind", "dataset", "step", "stride", "last"),
    [
        *((*kind, 1, THIN, LAST) for kind in KINDS),
        ("Loader", "map", 0, THIN, LAST),
        ("Loader", "stream", END, THIN, LAST),
        *whole_sweep(*((*kind, step) for kind in KINDS for step in (0, 1, END))),
    ],
)
def test_without_workers(kind, dataset, step, stride, last):
    check_every_place(make(kind, dataset), step, stride=stride, last=last)


@pytest.mark.parametrize(
    ("kind", "dataset", "backend", "persistent", "stride", "last"),
    [
        ("Loader", "map", "thread", False, THIN, LAST),
        ("Loader", "stream", "thread", True, THIN, LAST),
        ("DataLoader unseeded", "map", "thread", True, THIN, LAST),
        ("DataLoader", "stream", "process", False, 8 * THIN, 10),  # 20 ms to start a worker
        ("DataLoader", "map", "process", True, 8 * THIN, 10),
        *whole_sweep(*((*kind, "thread", kept) for kind in KINDS for kept in (False, True))),
        *whole_sweep(
            *((*kind, "process", kept) for kind in KINDS for kept in (False, True)), stride=8
        ),
    ],
)
def test_with_workers(kind, dataset, backend, persistent, stride, last):
    loader = make(
        kind,
        dataset,
        num_workers=1,  # a stream's state is that of as many workers
        backend=backend,
        persistent_workers=persistent,
        multiprocessing_context="fork" if backend == "process" else None,
    )
    check_every_place(loader, 1, twin=make(kind, dataset), stride=stride, last=last)


def test_out_of_order():
    loader = make("Loader", "map", num_workers=2, backend="thread", in_order=False)
    check_every_place(loader, 1, twin=make("Loader", "map"), stride=THIN)


def test_the_budget_of_bad_samples_is_of_the_batches_given():
    loader = make("Loader", "map", on_error="skip")
    check_every_place(loader, 1, stride=THIN)


def handles_signals(place):
    """Whether CPython looks for signals before a bytecode: after calls, resumes and jumps back."""
    code, offset = place
    found = list(dis.get_instructions(code))
    number = [instruction.offset for instruction in found].index(offset)
    before = ("CALL", "RESUME", "JUMP_BACKWARD")
    return number > 0 and found[number - 1].opname.startswith(before)


@pytest.mark.parametrize(
    "make_sampler",
    [
        lambda: RandomSampler(range(LENGTH), seed=7),
        lambda: BatchSampler(RandomSampler(range(LENGTH), seed=7), BATCH, False),
        lambda: BatchSampler([3, 1, 4, 0, 5, 2], BATCH, False),
    ],
    ids=["indices", "batches", "batches of a list"],
)
def test_a_sampler_by_itself_counts_what_a_loop_over_it_has(make_sampler):
    modules = os.path.join(penstock.__path__[0], "sampling", "")
    expected = list(make_sampler())
    dry = Tracer(modules=modules)
    run(make_sampler(), 1, dry)
    places = list(filter(handles_signals, dry.seen))
    for place in places:
        sampler = make_sampler()
        got = run(sampler, 1, Tracer(place, modules))
        again = make_sampler()
        again.load_state_dict(sampler.state_dict())
        rest = [] if len(got) == len(expected) else list(again)
        assert got + rest == expected, describe(place)
    assert places


@pytest.mark.parametrize("num_workers", [0, 1])
def test_on_the_way_to_a_device(monkeypatch, num_workers):
    accelerator = FakeAccelerator()
    monkeypatch.setattr(torch_loader, "open_accelerator", lambda _: accelerator)
    monkeypatch.setattr(torch_loader, "page_lock_for", lambda _: FakePageLock())
    loader = make("DataLoader", "map", device="auto", num_workers=num_workers, backend="thread")
    twin = make("DataLoader", "map")
    check_every_place(loader, 1, twin=twin, stride=THIN, arrived=accelerator.drain)
