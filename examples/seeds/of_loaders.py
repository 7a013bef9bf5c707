# SPDX-License-Identifier: Apache-2.0
"""docs/reproducibility.md, "A loader with seed=": claims about `DataLoader(..., seed=7)`."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import torch
import torch.utils.data
from datasets import Both, Globals, Own, Sized, Stream
from proof import Proof, Size, both, claim, distinct, equal

import penstock
from penstock.data import ArrayDataset
from penstock.sampling import ClassBalancedSampler, DistributedSampler, IndexSampler
from penstock.torch import DataLoader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

PAGE = "reproducibility.md"
BATCH = 8


def loader(dataset: Any, **options: Any) -> DataLoader[Any]:  # noqa: ANN401
    """Return a shuffling loader with a seed, unless the options say otherwise."""
    if not {"sampler", "batch_sampler"} & options.keys() and isinstance(dataset, Sized):
        options.setdefault("shuffle", True)
    if "batch_sampler" not in options:
        options.setdefault("batch_size", BATCH)
    return DataLoader(dataset, **{"seed": 7, **options})


def batches(dataset: Any, **options: Any) -> list[Any]:  # noqa: ANN401
    """Return the first epoch of a loader."""
    return list(loader(dataset, **options))


def rows(found: list[Any]) -> list[Any]:
    """Return the samples of an epoch, sorted by their first number."""
    return sorted(np.concatenate(found).tolist())


@contextlib.contextmanager
def as_rank(rank: int, num_ranks: int) -> Iterator[None]:
    """Be one process of several, as far as torchrun's variables say so."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks))
    try:
        yield
    finally:
        del os.environ["RANK"], os.environ["WORLD_SIZE"]


@claim(PAGE, "The number of workers does not show in the batches")
def of_workers(size: Size) -> Proof:
    data = Both(size.samples)
    return equal(**{f"{n} workers": batches(data, num_workers=n) for n in size.workers})


@claim(PAGE, "The start method does not show")
def of_start_methods(size: Size) -> Proof:
    data, methods = Both(size.samples), ("fork", "spawn", "forkserver")
    made = {name: batches(data, num_workers=1, multiprocessing_context=name) for name in methods}
    return equal(no_workers=batches(data), **made)


@claim(PAGE, "prefetch_factor does not show, nor do persistent workers")
def of_prefetching(size: Size) -> Proof:
    data = Both(size.samples)
    made = {f"prefetch {n}": batches(data, num_workers=2, prefetch_factor=n) for n in (1, 2, 7)}
    return equal(persistent=batches(data, num_workers=2, persistent_workers=True), **made)


@claim(PAGE, "Threads and processes make the same, of sample_rng")
def of_backends(size: Size) -> Proof:
    data = Own(size.samples)
    made = {kind: batches(data, num_workers=2, backend=kind) for kind in ("process", "thread")}
    return equal(no_workers=batches(data), **made)


@claim(PAGE, "Threads neither seed random, numpy.random and torch nor put them back")
def of_globals_in_threads(size: Size) -> Proof:
    drawn = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the dataset draws from them
        for seed in (1, 2):
            with penstock.seeded(seed):
                made = batches(Globals(size.samples), num_workers=1, backend="thread")
            drawn[f"threads, amid seed {seed}"] = made
    return distinct(no_workers=batches(Globals(size.samples)), **drawn)


@claim(PAGE, "Nor does the process that makes a batch show: one is killed, another does it again")
def of_deaths(size: Size) -> Proof:
    data = Both(size.samples)
    made = {}
    with tempfile.TemporaryDirectory() as folder:
        for policy in ("skip", "replace"):
            mortal = datasets.DiesOnce(size.samples, Path(folder, policy))
            made[policy] = batches(mortal, num_workers=2, on_error=policy)
            assert mortal.mark.exists()
    return equal(undisturbed=batches(data), **made)


@claim(PAGE, "Dataset, sampler, seed and epoch decide: others, other batches")
def of_seed_and_epoch(size: Size) -> Proof:
    one = loader(Both(size.samples))
    epochs = {f"epoch {epoch}": list(one) for epoch in range(2)}
    sampler = torch.utils.data.SequentialSampler(range(size.samples))
    sequential = batches(Both(size.samples), sampler=sampler)
    return distinct(**epochs, seed_8=batches(Both(size.samples), seed=8), sequential=sequential)


@claim(PAGE, "penstock.Loader has seed=0 by default")
def of_default_seed(size: Size) -> Proof:
    data = Both(size.samples)
    default, zero = (
        list(penstock.Loader(data, batch_size=BATCH, shuffle=True, **seed))  # type: ignore[arg-type]
        for seed in ({}, {"seed": 0})
    )
    return equal(default=default, seed_0=zero, torch_seed_0=batches(data, seed=0))


@claim(PAGE, "penstock.torch.DataLoader without seed= does what torch's does")
def of_torch(size: Size) -> Proof:
    made = {}
    for n in size.workers:
        for kind in (torch.utils.data.DataLoader, DataLoader):
            torch.manual_seed(3)
            name = f"{kind.__module__.partition('.')[0]}, {n} workers"
            random.seed(3)
            np.random.seed(3)
            one: Any = kind(Globals(size.samples), batch_size=BATCH, shuffle=True, num_workers=n)
            made[name] = [list(one), list(one), torch.get_rng_state()]
    pairs = zip(list(made.items())[::2], list(made.items())[1::2], strict=True)
    return both(*(equal(**dict(pair)) for pair in pairs))


@claim(PAGE, "Epochs are numbered 0, 1, 2; every iter() begins the next, also one that only looks")
def of_epoch_numbers(size: Size) -> Proof:
    one, other = loader(Both(size.samples)), loader(Both(size.samples))
    next(iter(one))
    other.set_epoch(1)
    return both(
        equal(epoch=one.epoch, wanted=0),
        equal(second_iter=list(one), epoch_1=list(other)),
        equal(epoch_after=one.epoch, wanted=2),
    )


@claim(PAGE, "set_epoch chooses the next epoch, for persistent workers too; loader.epoch says it")
def of_set_epoch(size: Size) -> Proof:
    one = loader(Both(size.samples), num_workers=2, persistent_workers=True)
    epochs = [list(one) for _ in range(3)]
    one.set_epoch(1)
    chosen = one.epoch
    return both(equal(epoch=chosen, wanted=1), equal(epoch_1=epochs[1], again=list(one)))


@claim(PAGE, "sampler.set_epoch(e) does the same")
def of_sampler_set_epoch(size: Size) -> Proof:
    by_loader, by_sampler = (
        loader(Both(size.samples), sampler=DistributedSampler(range(size.samples), 1, 0))
        for _ in range(2)
    )
    by_loader.set_epoch(5)
    by_sampler.sampler.set_epoch(5)  # type: ignore[attr-defined]
    return equal(loader=list(by_loader), sampler=list(by_sampler))


@claim(PAGE, "A validation loader that gets set_epoch(0) every time draws the same every time")
def of_validation(size: Size) -> Proof:
    one, epochs = loader(Both(size.samples), shuffle=False, num_workers=2), []
    for _ in range(2):
        one.set_epoch(0)
        epochs.append(list(one))
    return equal(first=epochs[0], second=epochs[1])


@claim(PAGE, "random, numpy.random and torch are seeded anew before each sample")
def of_globals(size: Size) -> Proof:
    drawn = np.concatenate(batches(Globals(size.samples)))[:, 1:]
    return equal(numbers=drawn.size, different_ones=len(np.unique(drawn)))


@claim(PAGE, "... from the position in the epoch's order, not from the index")
def of_positions(size: Size) -> Proof:
    shuffled, plain = (
        np.concatenate(batches(Both(size.samples), shuffle=flag)) for flag in (True, False)
    )
    return both(
        distinct(shuffled_order=shuffled[:, 0], plain_order=plain[:, 0]),
        equal(shuffled_draws=shuffled[:, 1:], plain_draws=plain[:, 1:]),
    )


@claim(PAGE, "Your own draws in the training loop see nothing of it")
def of_trainer(size: Size) -> Proof:
    def draws(steps: Any) -> list[float]:  # noqa: ANN401
        with penstock.seeded(1):
            return [
                value
                for _ in steps
                for value in (random.random(), np.random.randn(), torch.randn(()).item())
            ]

    one = loader(Both(size.samples))
    return equal(loop_over_a_loader=draws(one), over_nothing=draws(range(len(one))))


@claim(PAGE, "sample_rng(k) in get_batch and __getitems__: the same numbers, though all at once")
def of_get_batch(size: Size) -> Proof:
    return equal(
        one_by_one=batches(Own(size.samples)),
        get_batch=batches(datasets.OwnInBatches(size.samples)),
        getitems=batches(datasets.OwnInItems(size.samples), num_workers=2),
    )


@claim(PAGE, "Several transforms in one sample get the same generator and draw on")
def of_two_transforms(size: Size) -> Proof:
    is_same, first, second = (
        torch.cat(column)
        for column in zip(*batches(datasets.TwoTransforms(size.samples)), strict=True)
    )
    return both(equal(same=bool(is_same.all()), wanted=True), distinct(first=first, second=second))


@claim(PAGE, "The global generators are seeded once for a batch in get_batch")
def of_globals_in_batches(size: Size) -> Proof:
    data = datasets.GlobalsInBatches(size.samples)
    one_by_one = [batch[:, :2] for batch in batches(Globals(size.samples))]
    whole = batches(data)
    return both(
        distinct(one_by_one=one_by_one, get_batch=whole),
        equal(get_batch=whole, with_2_workers=batches(data, num_workers=2)),
    )


@claim(
    PAGE, "A get_batch that hands its indices on in another order says renumbered_samples(order)"
)
def of_renumbered(size: Size) -> Proof:
    wanted = batches(Own(size.samples))
    return both(
        equal(wanted=wanted, renumbered=batches(datasets.Sorted(size.samples, says_so=True))),
        distinct(wanted=wanted, silent=batches(datasets.Sorted(size.samples, says_so=False))),
    )


@claim(PAGE, "collate_fn has a stream of its own")
def of_collate(size: Size) -> Proof:
    data = Both(size.samples)
    with_draws, without = batches(data, collate_fn=datasets.draw_in_collate), batches(data)
    of_workers = batches(data, collate_fn=datasets.draw_in_collate, num_workers=2)
    return both(
        equal(samples=without, collate_draws_too=[samples for samples, _ in with_draws]),
        equal(draws_of_collate=with_draws, with_2_workers=of_workers),
    )


@claim(PAGE, "What worker_init_fn draws or seeds has no effect on samples")
def of_worker_init(size: Size) -> Proof:
    data = Both(size.samples)
    seeding = batches(data, num_workers=2, worker_init_fn=datasets.draw_in_worker)
    return equal(without=batches(data, num_workers=2), seeding=seeding)


@claim(PAGE, "A generator that is kept in the dataset is not reached")
def of_kept_generators(size: Size) -> Proof:
    data = datasets.Kept
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not reached
        numbers = np.concatenate(batches(data(size.samples)))
        workers = {f"{n} workers": batches(data(size.samples), num_workers=n) for n in (1, 2)}
    plain = np.random.default_rng(0).random(size.samples)
    return both(equal(kept=numbers, default_rng_0=plain), distinct(**workers))


@claim(PAGE, "sample_rng belongs to the thread that makes the sample")
def of_threads(size: Size) -> Proof:
    one, again = (
        [
            torch.cat(column)
            for column in zip(*batches(datasets.OfOtherThread(size.samples)), strict=True)
        ]
        for _ in range(2)
    )
    return both(
        equal(makers_draws=one[0], made_again=again[0]),
        distinct(other_threads_draws=one[1], drawn_again=again[1]),
    )


@claim(PAGE, "Two loaders with one seed draw the same numbers at the same positions")
def of_pairs(size: Size) -> Proof:
    short = np.concatenate(batches(Own(size.samples // 2)))
    long = np.concatenate(batches(Own(size.samples)))[: len(short)]
    return both(
        distinct(indices=short[:, 0], of_another_dataset=long[:, 0]),
        equal(draws=short[:, 1], of_the_other=long[:, 1]),
    )


def _stock_samplers(length: int) -> dict[str, Any]:
    stock = torch.utils.data
    return {
        "Random": stock.RandomSampler(range(length)),
        "Weighted": stock.WeightedRandomSampler([1.0 + n for n in range(length)], length),
        "Subset": stock.SubsetRandomSampler(range(0, length, 2)),
    }


@claim(
    PAGE, "The order of torch's samplers is drawn from (seed, epoch), not from a torch.Generator"
)
def of_stock_samplers(size: Size) -> Proof:
    proofs = []
    for name in _stock_samplers(size.samples):
        found = {}
        for number in (1, 2):
            torch.manual_seed(number)
            sampler = _stock_samplers(size.samples)[name]
            found[f"{name}, manual seed {number}"] = batches(Own(size.samples), sampler=sampler)
        other = batches(Own(size.samples), sampler=sampler, seed=8)
        proofs += [
            equal(**found),
            distinct(**{name: next(iter(found.values())), f"{name}, seed 8": other}),
        ]
    return both(*proofs)


@claim(
    PAGE,
    "Samplers of penstock.sampling take the loader's seed; torch's DistributedSampler has its own",
)
def of_sampler_seeds(size: Size) -> Proof:
    labels, proofs = [n % 3 for n in range(size.samples)], []
    makers: dict[str, Any] = {
        "balanced": lambda **seed: ClassBalancedSampler(labels, **seed),
        "distributed": lambda **seed: DistributedSampler(labels, 1, 0, **seed),
        "torch's": lambda **seed: torch.utils.data.DistributedSampler(labels, 1, 0, **seed),  # type: ignore[arg-type]
    }
    for name, make in makers.items():
        taken = 0 if name == "torch's" else 7
        orders = {
            key: torch.cat(batches(list(range(size.samples)), sampler=make(**own), seed=seed))
            for key, own, seed in (
                ("", {}, 7),
                (f", seed {taken}", {"seed": taken}, 8),
                (", seed 1", {"seed": 1}, 7),
            )
        }
        first, same, other = ((f"{name}{key}", order) for key, order in orders.items())
        proofs += [equal(**dict([first, same])), distinct(**dict([first, other]))]
    return both(*proofs)


@claim(PAGE, "More than 2^20 samples are shuffled by a Permutation, computed where it is needed")
def of_permutations(size: Size) -> Proof:
    length = (1 << 20) + 1
    numbers = ArrayDataset(np.arange(length))
    order = torch.cat([part for (part,) in batches(numbers, shuffle=True, batch_size=1 << 16)])
    of_trillions = next(iter(loader(range(10**12), shuffle=True, batch_size=64)))
    return both(
        equal(indices=length, different_ones=len(order.unique())),
        distinct(order=order, sorted=order.sort().values),
        equal(of_a_trillion=64, different_ones=len(of_trillions.unique())),
    )


class Told:
    """A sampler of one's own; how it draws is up to its kind."""

    def __init__(self, length: int, kind: str) -> None:
        self.length, self.kind, self.epochs = length, kind, list[int]()
        generator = torch.Generator()
        generator.manual_seed(random.getrandbits(32))  # another one in each process
        setattr(self, "generator" if kind == "generator" else "dice", generator)

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        if self.kind == "globals":
            return iter(random.sample(range(self.length), self.length))
        generator = getattr(self, "generator" if self.kind == "generator" else "dice")
        return iter(torch.randperm(self.length, generator=generator).tolist())


def _orders_of(kind: str, size: Size) -> dict[str, Any]:
    found = {}
    for number in (1, 2):
        random.seed(number)
        found[f"{kind}, run {number}"] = batches(
            Own(size.samples), sampler=Told(size.samples, kind)
        )
    return found


@claim(PAGE, "A sampler of your own is told the epoch, if it has set_epoch")
def of_told_samplers(size: Size) -> Proof:
    sampler = Told(size.samples, "globals")
    one = loader(Own(size.samples), sampler=sampler)
    for _ in range(3):
        next(iter(one))
    return equal(told=repr(sorted(set(sampler.epochs))), epochs=repr([0, 1, 2]))


@claim(PAGE, "If it draws from the global generators, or its attribute generator, these are seeded")
def of_drawing_samplers(size: Size) -> Proof:
    return both(equal(**_orders_of("globals", size)), equal(**_orders_of("generator", size)))


@claim(
    PAGE, "A generator under another name is not reached: its orders do not follow from the seed"
)
def of_other_names(size: Size) -> Proof:
    return distinct(**_orders_of("dice", size))


class Backwards(IndexSampler):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def __len__(self) -> int:
        return self.length

    def indices(self) -> NDArray[np.int64]:
        return np.arange(self.length)[::-1].copy()


@claim(PAGE, "An IndexSampler defines indices()")
def of_index_samplers(size: Size) -> Proof:
    found = batches(Own(size.samples), sampler=Backwards(size.samples))
    of_list = batches(Own(size.samples), sampler=list(range(size.samples))[::-1])
    return equal(IndexSampler=found, a_list=of_list)


class Turns:
    """A sampler of one's own that says which share it yields."""

    def __init__(self, length: int, num_replicas: int, rank: int) -> None:
        self.length, self.num_replicas, self.rank = length, num_replicas, rank

    def __len__(self) -> int:
        return len(range(self.rank, self.length, self.num_replicas))

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, self.length, self.num_replicas))


def _union(size: Size, kind: Any, num_ranks: int) -> list[Any]:  # noqa: ANN401
    """Return the batches of all ranks, put together as one process would have made them."""
    data = Both(size.samples)
    of_rank = [
        batches(
            data,
            sampler=kind(range(size.samples), num_ranks, rank),
            batch_size=BATCH // num_ranks,
            num_workers=rank,  # any number
        )
        for rank in range(num_ranks)
    ]
    return [torch.stack(parts, dim=1).flatten(0, 1) for parts in zip(*of_rank, strict=True)]


@claim(PAGE, "Ranks together have one process's batches, whichever sampler says the share")
def of_ranks(size: Size) -> Proof:
    kinds = {
        "penstock's": DistributedSampler,
        "torch's": torch.utils.data.DistributedSampler,
        "one's own": lambda data, *share: Turns(len(data), *share),
    }
    proofs = []
    for name, kind in kinds.items():
        unions = {f"{name}, {n} ranks": _union(size, kind, n) for n in (1, 2, 4)}
        proofs.append(equal(**unions))
    return both(*proofs)


@claim(PAGE, "Without a sampler for ranks, every rank gets the same batches")
def of_equal_ranks(size: Size) -> Proof:
    made = {}
    for rank in range(2):
        with as_rank(rank, 2), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that they do, by design of this claim
            made[f"rank {rank}"] = batches(Both(size.samples))
    return equal(**made)


@claim(PAGE, "A Subset per rank gets the same noise for different samples")
def of_subsets(size: Size) -> Proof:
    half = size.samples // 2
    made = [
        np.concatenate(
            batches(
                torch.utils.data.Subset(Both(size.samples), range(k * half, (k + 1) * half)),
                shuffle=True,
            )
        )
        for k in range(2)
    ]
    return both(
        distinct(samples_of_rank_0=made[0][:, 0], of_rank_1=made[1][:, 0]),
        equal(noise_of_rank_0=made[0][:, 1:], noise_of_rank_1=made[1][:, 1:]),
    )


@claim(PAGE, "A stream that shard deals out: batch k is the same for any number of workers")
def of_streams(size: Size) -> Proof:
    data = Stream(size.samples)
    return equal(**{f"{n} workers": batches(data, num_workers=n) for n in size.workers})


@claim(PAGE, 'shard(by="item"): the number of workers shows')
def of_items(size: Size) -> Proof:
    data = Stream(size.samples, by="item")
    made = {f"{n} workers": batches(data, num_workers=n) for n in (1, 2)}
    numbers = {f"items, {name}": [row[0] for row in rows(found)] for name, found in made.items()}
    return both(distinct(**made), equal(**numbers))


@claim(
    PAGE,
    "Before the first item of shard the global generators are the same in all workers and ranks",
)
def of_shuffled_streams(size: Size) -> Proof:
    data, dealt = Stream(size.samples, shuffled=True), []
    for rank in range(2):
        with as_rank(rank, 2):
            dealt += [row[0] for row in rows(batches(data, num_workers=2))]
    return both(
        equal(**{f"{n} workers": batches(data, num_workers=n) for n in size.workers}),
        equal(of_2_ranks=sorted(dealt), each_once=[float(n) for n in range(size.samples)]),
    )


@claim(PAGE, "Two workers that begin with the same sample get you a warning")
def of_undealt_streams(size: Size) -> Proof:
    told = {}
    for name, data in (("undealt", datasets.Undealt(16)), ("dealt", Stream(16))):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batches(data, num_workers=2, batch_size=2)
        told[name] = sum("sample" in str(warning.message) for warning in caught)
    return both(
        equal(warnings=told["undealt"], wanted=1), equal(warnings_if_dealt=told["dealt"], wanted=0)
    )
