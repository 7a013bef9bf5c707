# SPDX-License-Identifier: Apache-2.0
"""Seeded streams drawn at random give one epoch, who makes it and however often it is begun."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import warnings

import numpy as np
import pytest

import penstock.torch
from penstock import FaultPolicy, Loader, sample_rng
from penstock.data import IterableDataset, shard


@dataclasses.dataclass
class Stream(IterableDataset):
    """Items 0 … length - 1 with their draws, in the order of a shuffle before `shard`.

    Attributes:
        shuffle: Which generator shuffles: "random", "numpy", or "" for none.
        draws: Which generators a sample draws from.
        deadly: The item that kills its worker, once; None for no item.
        marker: The file that says that it has.
    """

    length: int
    shuffle: str
    draws: tuple[str, ...]
    deadly: int | None = None
    marker: str = ""
    at: int = 0  # samples given
    start: int = 0  # samples to pass over

    def __iter__(self):
        items = np.arange(self.length).tolist()
        if self.shuffle == "random":
            random.shuffle(items)
        elif self.shuffle == "numpy":
            np.random.shuffle(items)
        start, self.start = self.start, 0
        self.at = start
        for item in itertools.islice(shard(items), start, None):
            self.at += 1
            if item == self.deadly and not os.path.exists(self.marker):
                open(self.marker, "x").close()
                os.kill(os.getpid(), 9)
            yield np.array([item, *(DRAWS[name]() for name in self.draws)])


class Resumable(Stream):
    """The same with a state; a `Stream` is read again from its start."""

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.start = state["at"]


DRAWS = {
    "sample": lambda: sample_rng().random(),
    "random": random.random,
    "numpy": np.random.random,
    "normal": np.random.standard_normal,
}


def batches_of(loader):
    return [np.asarray(batch).tolist() for batch in loader]


def resumed(make, cut):
    """The batches of an epoch that one loader begins and another ends, from batch `cut` on."""
    loader = make()
    before = [np.asarray(batch).tolist() for batch in itertools.islice(iter(loader), cut)]
    state = loader.state_dict()
    again = make()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*are read once more and dropped")
        again.load_state_dict(state)
    return before + batches_of(again)


def variants(rng, stream, options, num_batches, tmp_path):
    """Name and batches of the same epoch, made in other ways."""
    workers = rng.choice([1, 2, 3])

    def make(loader_of=Loader, stream=stream, **others):
        return loader_of(stream, **{**options, "num_workers": workers, **others})

    yield f"{workers} processes", batches_of(make())
    yield "the drop-in", batches_of(make(penstock.torch.DataLoader))
    cut, num_workers = rng.randint(0, num_batches), rng.choice([0, workers])
    kind = rng.choice([Stream, Resumable])
    begun = kind(stream.length, stream.shuffle, stream.draws)
    yield (
        f"{kind.__name__} resumed at {cut} with {num_workers} workers",
        resumed(lambda: make(stream=begun, num_workers=num_workers), cut),
    )
    if not stream.shuffle and not {"random", "numpy", "normal"} & set(stream.draws):
        yield f"{workers} threads", batches_of(make(backend="thread"))
    if stream.length:
        marker = str(tmp_path / f"{rng.random()}")
        deadly = dataclasses.replace(stream, deadly=rng.randrange(stream.length), marker=marker)
        policy = FaultPolicy(max_respawns=2)
        yield f"killed at {deadly.deadly}", batches_of(make(stream=deadly, on_error=policy))
        assert os.path.exists(marker)


def ranks_together(stream, options, monkeypatch, ranks):
    """All ranks' batches, each step's samples put together in the order of the stream."""
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    of_rank = []
    for rank in range(ranks):
        monkeypatch.setenv("RANK", str(rank))
        of_rank.append(batches_of(Loader(stream, **options)))
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("RANK")
    return [
        sample
        for step in itertools.zip_longest(*of_rank, fillvalue=[])
        for together in itertools.zip_longest(*step)
        for sample in together
        if sample is not None
    ]


@pytest.mark.parametrize("num_streams", [6, pytest.param(300, marks=pytest.mark.slow)])
def test_whoever_makes_a_stream_and_however_often_it_is_begun_its_epoch_is_the_same(
    num_streams, tmp_path, monkeypatch, record_property
):
    num_variants = 0
    for number in range(num_streams):
        rng = random.Random(number)
        stream = Stream(
            length=rng.choice([0, 1, rng.randint(2, 60)]),
            shuffle=rng.choice(["", "random", "numpy"]),
            draws=tuple(rng.sample(sorted(DRAWS), rng.randint(0, 3))),
        )
        options = {
            "batch_size": rng.randint(1, 7),
            "drop_last": rng.random() < 0.3,
            "seed": rng.randrange(2**32),
        }
        expected = batches_of(Loader(stream, **options))
        items = [int(sample[0]) for batch in expected for sample in batch]
        left_out = stream.length % options["batch_size"] if options["drop_last"] else 0
        assert len(set(items)) == len(items) == stream.length - left_out
        for name, batches in variants(rng, stream, options, len(expected), tmp_path):
            assert batches == expected, f"stream {number}, {stream}, {options}: {name}"
            num_variants += 1
        if not options["drop_last"]:
            whole = [sample for batch in expected for sample in batch]
            together = ranks_together(stream, options, monkeypatch, rng.choice([2, 3]))
            assert together == whole, f"stream {number}, {stream}, {options}: ranks"
            num_variants += 1
    record_property("variants", num_variants)
