# SPDX-License-Identifier: Apache-2.0
"""The drop-in gives, bit for bit, what torch's own loader gives under the same seeds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.utils.data as theirs
from tests.torch.comparing import assert_same
from tests.torch.datasets_for_tests import (
    ArrayBatches,
    Arrays,
    Asking,
    Augmented,
    Counting,
    CountingStream,
    EagerSampler,
    EvenlySharded,
    Examples,
    LazySampler,
    Marked,
    RandomStream,
    Rows,
    RowsByBatch,
    ShardedStream,
    SizedStream,
    Stepped,
    Stream,
    Tensors,
    Tree,
    WorkerReport,
    collate_as_they_are,
    collate_examples,
    collate_ragged,
    collate_read_only,
    collate_with_extras,
    double,
    mark_worker,
    seed_worker,
)

import penstock.torch as ours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SEED = 20_240


# How a loader is used: each yields what the user sees. After each the generators are compared.


def one_epoch(loader: Any) -> Iterator[object]:
    yield list(loader)


def two_epochs(loader: Any) -> Iterator[object]:
    yield list(loader)
    yield list(loader)


def three_epochs(loader: Any) -> Iterator[object]:
    yield from two_epochs(loader)
    yield list(loader)


def break_then_again(loader: Any) -> Iterator[object]:
    seen = []
    for batch in loader:
        seen.append(batch)
        if len(seen) == 2:
            break
    yield seen
    yield list(loader)
    yield list(loader)


def interleaved(loader: Any) -> Iterator[object]:
    first = iter(loader)
    yield next(first)
    second = iter(loader)
    yield next(second)
    yield next(first)
    yield list(second)
    yield list(first)


def consumer_draws(loader: Any) -> Iterator[object]:
    for _ in range(2):
        yield [(batch, torch.rand(2), random.random(), np.random.rand()) for batch in loader]


def seeded_each_epoch(loader: Any) -> Iterator[object]:
    for seed in (5, 6, 5):
        torch.manual_seed(seed)
        yield list(loader)


def set_epochs(loader: Any) -> Iterator[object]:
    for epoch in (0, 3):
        loader.sampler.set_epoch(epoch)
        yield list(loader)


def length_too(loader: Any) -> Iterator[object]:
    yield len(loader)
    yield list(loader)
    yield len(loader)


@dataclass(frozen=True)
class Case:
    """One combination of arguments.

    An option that is a `Late` is made on each side anew, from the library (torch.utils.data or
    penstock.torch) and the dataset.
    """

    name: str
    dataset: Callable[[Any], Any]
    options: dict[str, Any] = field(default_factory=dict)
    use: Callable[[Any], Iterator[object]] = two_epochs
    own_generator: bool = False


@dataclass(frozen=True)
class Late:
    make: Callable[[Any, Any], object]


def case(name: str, dataset: Any, use: Any = two_epochs, *, own_generator: bool = False, **options):
    make = dataset if not isinstance(dataset, type) else lambda _: dataset()
    return Case(name, make, options, use, own_generator)


def distributed(**options: Any) -> Late:
    return Late(lambda lib, data: lib.DistributedSampler(data, 3, 1, **options))


def tensors(lib: Any) -> object:
    return lib.TensorDataset(torch.arange(24_000.0).view(24, 1000), torch.arange(24))


def transposed_tensors(lib: Any) -> object:
    return lib.TensorDataset(torch.arange(24_000.0).view(1000, 24).T, torch.arange(48)[::2])


def combined(lib: Any) -> object:
    rows = lib.TensorDataset(torch.randn(15, 40, 40), torch.randn(15, 2).to(torch.bfloat16))
    halves = lib.random_split(rows, [0.6, 0.4], generator=torch.Generator().manual_seed(4))
    return lib.ConcatDataset([lib.Subset(rows, [3, 1, 4, 1, 5]), *halves])


def stacked(lib: Any) -> object:
    return lib.StackDataset(image=Rows(24), pair=tensors(lib))


def stacked_tuple(lib: Any) -> object:
    return lib.StackDataset(Rows(24), lib.Subset(Rows(40), range(10, 34)))


def chained(lib: Any) -> object:
    return lib.ChainDataset([EvenlySharded(10), EvenlySharded(7)])


EAGER = Late(lambda _, data: EagerSampler(len(data)))
LAZY = Late(lambda _, data: LazySampler(len(data)))


def for_workers(name: str, dataset: Any, use: Any = two_epochs, workers=(0, 1, 3), **options):
    return [case(f"{name}, {n} workers", dataset, use, num_workers=n, **options) for n in workers]


CASES = [
    # order; tests/torch/test_sampler_matrix.py has all kinds of samplers
    *for_workers("defaults", Rows),
    *for_workers("batch with a rest", Rows, batch_size=4),
    *for_workers("drop_last", Rows, batch_size=4, drop_last=True),
    *for_workers("batch divides", lambda _: Rows(20), batch_size=5, workers=(0, 3)),
    *for_workers("batch larger than dataset", lambda _: Rows(3), batch_size=8, workers=(0, 3)),
    *for_workers(
        "larger, dropped", lambda _: Rows(3), batch_size=8, drop_last=True, workers=(0, 3)
    ),
    *for_workers("empty dataset", lambda _: Rows(0), batch_size=8, workers=(0, 3)),
    *for_workers("shuffle", Rows, batch_size=4, shuffle=True),
    *for_workers("shuffle, own generator", Rows, batch_size=4, shuffle=True, own_generator=True),
    *for_workers("own generator, no shuffle", Augmented, batch_size=4, own_generator=True),
    *for_workers(
        "distributed", Rows, set_epochs, batch_size=3, sampler=distributed(), workers=(0, 3)
    ),
    case(
        "distributed, dropping", Rows, set_epochs, sampler=distributed(drop_last=True), batch_size=2
    ),
    case(
        "distributed, in order", Rows, set_epochs, sampler=distributed(shuffle=False), batch_size=2
    ),
    *for_workers("sampler that draws eagerly", Rows, batch_size=4, sampler=EAGER),
    *for_workers("sampler that draws lazily", Rows, batch_size=4, sampler=LAZY),
    *for_workers("int32 batches", Asking, batch_sampler=ArrayBatches(np.int32), workers=(0, 1)),
    *for_workers("int64 batches", Asking, batch_sampler=ArrayBatches(np.int64), workers=(0, 1)),
    *for_workers("unbatched", Rows, batch_size=None),
    *for_workers("unbatched, shuffled", Rows, batch_size=None, shuffle=True, workers=(0, 3)),
    *for_workers("unbatched tree", Tree, batch_size=None, workers=(0, 3)),
    *for_workers(
        "unbatched, with collate", Rows, batch_size=None, collate_fn=double, workers=(0, 3)
    ),
    # what a batch holds; a second epoch has the same
    *for_workers("tree", Tree, one_epoch, batch_size=4, shuffle=True),
    *for_workers("numpy dtypes", Arrays, one_epoch, batch_size=4, workers=(0, 3)),
    *for_workers("tensor dtypes and layouts", Tensors, one_epoch, batch_size=4, workers=(0, 3)),
    *for_workers("tensors with gaps", Stepped, one_epoch, batch_size=4, workers=(0, 3)),
    *for_workers("unbatched layouts", Tensors, one_epoch, batch_size=None, workers=(0, 3)),
    *for_workers(
        "dataclasses",
        Examples,
        one_epoch,
        batch_size=4,
        collate_fn=collate_examples,
        workers=(0, 3),
    ),
    *for_workers(
        "samples as they are", Tensors, one_epoch, batch_size=4, collate_fn=collate_as_they_are
    ),
    *for_workers(
        "dataclasses as they are", Examples, one_epoch, batch_size=4, collate_fn=collate_as_they_are
    ),
    *for_workers("collate that draws", Augmented, batch_size=4, collate_fn=collate_with_extras),
    *for_workers(
        "ragged batches", Rows, one_epoch, batch_size=4, collate_fn=collate_ragged, workers=(0, 3)
    ),
    *for_workers(
        "read-only arrays",
        Rows,
        one_epoch,
        batch_size=4,
        collate_fn=collate_read_only,
        workers=(0, 1),
    ),
    # datasets
    *for_workers("__getitems__", RowsByBatch, one_epoch, batch_size=4, shuffle=True),
    *for_workers(
        "__getitems__, unbatched", RowsByBatch, one_epoch, batch_size=None, workers=(0, 1)
    ),
    *for_workers("TensorDataset", tensors, one_epoch, batch_size=5, shuffle=True),
    *for_workers(
        "TensorDataset, unbatched",
        tensors,
        one_epoch,
        batch_size=None,
        shuffle=True,
        workers=(0, 3),
    ),
    *for_workers(
        "TensorDataset, strided", transposed_tensors, one_epoch, batch_size=5, workers=(0, 3)
    ),
    *for_workers(
        "Subset, ConcatDataset, random_split", combined, one_epoch, batch_size=4, shuffle=True
    ),
    *for_workers(
        "StackDataset of a dict", stacked, one_epoch, batch_size=5, shuffle=True, workers=(0, 3)
    ),
    *for_workers(
        "StackDataset of a tuple",
        stacked_tuple,
        one_epoch,
        batch_size=5,
        shuffle=True,
        workers=(0, 3),
    ),
    *for_workers(
        "torch's TensorDataset", lambda _: tensors(theirs), one_epoch, batch_size=5, workers=(0, 3)
    ),
    *for_workers(
        "torch's combination", lambda _: combined(theirs), one_epoch, batch_size=4, workers=(0, 3)
    ),
    *for_workers(
        "added datasets", lambda _: Rows(5) + Rows(9), one_epoch, batch_size=4, workers=(0, 3)
    ),
    # iterable
    *for_workers("stream", Stream, batch_size=4),
    *for_workers("stream, drop_last", Stream, batch_size=4, drop_last=True),
    *for_workers("stream, unbatched", Stream, batch_size=None),
    *for_workers("stream with a length", SizedStream, length_too, batch_size=4, workers=(0,)),
    *for_workers("uneven shards", ShardedStream, batch_size=4, workers=(0, 3)),
    *for_workers(
        "uneven shards, drop_last", ShardedStream, batch_size=4, drop_last=True, workers=(0, 3)
    ),
    *for_workers("uneven shards, unbatched", ShardedStream, batch_size=None, workers=(3,)),
    *for_workers(
        "uneven shards, persistent",
        ShardedStream,
        three_epochs,
        batch_size=2,
        persistent_workers=True,
        workers=(3,),
        prefetch_factor=5,
    ),
    *for_workers("even shards", EvenlySharded, batch_size=3, workers=(0, 1, 3)),
    *for_workers("ChainDataset", chained, batch_size=3, workers=(0, 3)),
    *for_workers("random stream", RandomStream, batch_size=4),
    *for_workers("empty stream", lambda _: Stream(0), batch_size=4, workers=(0, 3)),
    *for_workers(
        "stream that counts its epochs",
        CountingStream,
        three_epochs,
        batch_size=4,
        persistent_workers=True,
        workers=(1, 3),
    ),
    *for_workers(
        "stream that counts, not persistent", CountingStream, batch_size=4, workers=(0, 3)
    ),
    # randomness
    *for_workers("augmentation", Augmented, batch_size=4, shuffle=True),
    *for_workers("augmentation, seeded", Augmented, seeded_each_epoch, batch_size=4, shuffle=True),
    *for_workers("consumer draws", Augmented, consumer_draws, batch_size=4, shuffle=True),
    *for_workers("consumer draws, lazy sampler", Rows, consumer_draws, sampler=LAZY, batch_size=2),
    *for_workers(
        "worker_init_fn", Marked, batch_size=4, worker_init_fn=mark_worker, workers=(1, 3)
    ),
    *for_workers("worker_init_fn seeds", Augmented, batch_size=4, worker_init_fn=seed_worker),
    *for_workers("worker info", WorkerReport, batch_size=4, own_generator=True, workers=(1, 3)),
    # workers
    *for_workers(
        "persistent",
        Augmented,
        three_epochs,
        batch_size=4,
        shuffle=True,
        persistent_workers=True,
        workers=(1, 3),
    ),
    *for_workers(
        "persistent, worker state",
        Counting,
        three_epochs,
        batch_size=3,
        persistent_workers=True,
        workers=(1, 3),
    ),
    *for_workers(
        "persistent, lazy sampler",
        Rows,
        three_epochs,
        batch_size=3,
        persistent_workers=True,
        sampler=LAZY,
        workers=(3,),
    ),
    *for_workers(
        "persistent, eager sampler",
        Rows,
        three_epochs,
        batch_size=3,
        persistent_workers=True,
        sampler=EAGER,
        workers=(3,),
    ),
    *for_workers("worker state", Counting, batch_size=3, workers=(0, 3)),
    *[
        case(
            f"prefetch {factor}, {n} workers",
            Augmented,
            batch_size=2,
            shuffle=True,
            num_workers=n,
            prefetch_factor=factor,
        )
        for factor in (1, 5)
        for n in (1, 3)
    ],
    case(
        "prefetch 5, lazy sampler",
        Rows,
        consumer_draws,
        sampler=LAZY,
        num_workers=3,
        prefetch_factor=5,
    ),
    case(
        "prefetch 1, lazy sampler",
        Rows,
        consumer_draws,
        sampler=LAZY,
        num_workers=3,
        prefetch_factor=1,
    ),
    case("prefetch beyond the epoch", Rows, batch_size=9, num_workers=3, prefetch_factor=9),
    *for_workers("break, then again", Augmented, break_then_again, batch_size=3, shuffle=True),
    *for_workers(
        "break, lazy sampler", Rows, break_then_again, batch_size=3, sampler=LAZY, workers=(0, 3)
    ),
    *for_workers(
        "break, persistent",
        Augmented,
        break_then_again,
        batch_size=3,
        shuffle=True,
        persistent_workers=True,
        workers=(1, 3),
    ),
    *for_workers(
        "break in a stream, persistent",
        ShardedStream,
        break_then_again,
        batch_size=2,
        persistent_workers=True,
        workers=(3,),
    ),
    *for_workers("two iterators at once", Augmented, interleaved, batch_size=4, shuffle=True),
    *for_workers(
        "two iterators of a stream", RandomStream, interleaved, batch_size=4, workers=(0, 3)
    ),
    case("a timeout that is not reached", Rows, batch_size=4, num_workers=1, timeout=60),
    # start methods: torch's own workers take seconds to start, so few cases
    case(
        "spawn, tree",
        Tree,
        one_epoch,
        batch_size=4,
        shuffle=True,
        num_workers=1,
        multiprocessing_context="spawn",
    ),
    case(
        "spawn, augmentation, persistent",
        Augmented,
        batch_size=4,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        worker_init_fn=seed_worker,
        multiprocessing_context="spawn",
    ),
    case(
        "spawn, random stream, persistent",
        RandomStream,
        batch_size=4,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="spawn",
    ),
    case(
        "forkserver, combination, persistent",
        combined,
        batch_size=4,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="forkserver",
    ),
    case(
        "forkserver, uneven shards, persistent",
        ShardedStream,
        batch_size=4,
        num_workers=3,
        persistent_workers=True,
        multiprocessing_context="forkserver",
    ),
    *for_workers(
        "fork, by name", Augmented, workers=(3,), batch_size=4, multiprocessing_context="fork"
    ),
]


def run(lib: Any, combination: Case) -> list[object]:
    """Return all that a user can see of a loader of `lib`: batches and the generators' states."""
    torch.manual_seed(SEED)
    np.random.seed(SEED)
    random.seed(SEED)
    dataset = combination.dataset(lib)
    generator = torch.Generator().manual_seed(77) if combination.own_generator else None
    options = {
        name: value.make(lib, dataset) if isinstance(value, Late) else value
        for name, value in combination.options.items()
    }
    loader = lib.DataLoader(dataset, generator=generator, **options)
    seen: list[object] = [states(generator)]
    for part in combination.use(loader):
        seen.append(part)
        seen.append(states(generator))
    return seen


def states(generator: torch.Generator | None) -> dict[str, object]:
    _, keys, *position = np.random.get_state()
    return {
        "global": torch.get_rng_state(),
        "own": None if generator is None else generator.get_state(),
        "python": random.getstate(),
        "numpy": (keys.tobytes(), position),
    }


@pytest.mark.parametrize("combination", CASES, ids=lambda c: c.name)
def test_the_drop_in_gives_what_torch_gives(combination: Case) -> None:
    assert_same(run(theirs, combination), run(ours, combination))


def test_every_combination_has_a_name_of_its_own() -> None:
    names = [c.name for c in CASES]
    assert len(set(names)) == len(names) >= 80
