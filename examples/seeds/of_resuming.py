# SPDX-License-Identifier: Apache-2.0
"""docs/resume.md: claims about `state_dict` and `load_state_dict`."""

from __future__ import annotations

import json
import warnings
from itertools import islice
from typing import Any

import torch
import torch.utils.data
from datasets import Both, Counted, Faulty, Globals, Own, ResumableStream, Stream
from of_loaders import BATCH, Told, batches, loader
from proof import Proof, Size, both, claim, distinct, equal

import penstock
from penstock.errors import StateError, TooManyFailures
from penstock.sampling import ClassBalancedSampler, DistributedSampler, WeightedRandomSampler
from penstock.torch import DataLoader, TensorDataset
from penstock.torch import DistributedSampler as DropInDistributedSampler

PAGE = "resume.md"
GIVEN = 3  # batches before the interruption


def interrupted(one: Any, count: int = GIVEN) -> tuple[list[Any], dict[str, Any]]:  # noqa: ANN401
    """Take some batches, and leave; the batches, and the state as a file would hold it."""
    given = []
    for batch in one:
        given.append(batch)
        if len(given) == count:
            break
    return given, json.loads(json.dumps(one.state_dict()))


def resumed(one: Any, state: dict[str, Any]) -> list[Any]:  # noqa: ANN401
    one.load_state_dict(state)
    return list(one)


def refusal(one: Any, state: dict[str, Any], *values: object) -> str:  # noqa: ANN401
    """Say whether a state is refused, in a message that has the values."""
    try:
        one.load_state_dict(state)
    except StateError as error:
        return "refused" if all(str(value) in str(error) for value in values) else str(error)
    return "taken"


@claim(PAGE, "A run goes on in the middle of an epoch, with another number of workers")
def of_workers(size: Size) -> Proof:
    data = Both(size.samples)
    _, state = interrupted(loader(data, num_workers=2))
    whole = batches(data)
    rest = {f"{n} workers": resumed(loader(data, num_workers=n), state) for n in size.workers}
    return equal(uninterrupted=whole[GIVEN:], **rest)


@claim(PAGE, "... with another start method, prefetching, persistence, in threads or processes")
def of_other_ways(size: Size) -> Proof:
    data = Own(size.samples)
    _, state = interrupted(loader(data, num_workers=1, prefetch_factor=4))
    ways: dict[str, dict[str, Any]] = {
        "forkserver": {"num_workers": 1, "multiprocessing_context": "forkserver"},
        "prefetch 1": {"num_workers": 1, "prefetch_factor": 1},
        "persistent": {"num_workers": 1, "persistent_workers": True},
        "threads": {"num_workers": 2, "backend": "thread"},
    }
    rest = {name: resumed(loader(data, **way), state) for name, way in ways.items()}
    return equal(uninterrupted=batches(data)[GIVEN:], **rest)


@claim(PAGE, "... and a state of in_order=False may be loaded in order")
def of_in_order(size: Size) -> Proof:
    data = Own(size.samples)
    # One worker: with more, batches come as they are ready, and no two runs need agree.
    _, state = interrupted(loader(data, num_workers=1, in_order=False))
    return equal(uninterrupted=batches(data)[GIVEN:], in_order=resumed(loader(data), state))


@claim(PAGE, "The epochs that follow are the same, too")
def of_next_epochs(size: Size) -> Proof:
    one = loader(Both(size.samples))
    whole = [list(one) for _ in range(3)]
    _, state = interrupted(loader(Both(size.samples)))
    again = loader(Both(size.samples), num_workers=2)
    return equal(
        uninterrupted=[whole[0][GIVEN:], *whole[1:]],
        resumed=[resumed(again, state), list(again), list(again)],
    )


@claim(PAGE, "state_dict() counts the batches that the loop was given, not those made ahead")
def of_counting(size: Size) -> Proof:
    one = loader(Both(size.samples), num_workers=2, prefetch_factor=2)
    _, state = interrupted(one)
    return both(
        equal(batches=state["batches"], wanted=GIVEN), equal(epoch=state["epoch"], wanted=0)
    )


@claim(PAGE, "A batch that could not be made counts only once a later one was given")
def of_failed_batches(size: Size) -> Proof:
    one, counted, raised = loader(Faulty(size.samples, {BATCH}), shuffle=False), [], 0
    iterator = iter(one)
    for _ in range(3):
        try:
            next(iterator)
        except OSError:
            raised += 1
        counted.append(one.state_dict()["batches"])
    return both(equal(raised=raised, wanted=1), equal(counted=repr(counted), wanted="[1, 1, 3]"))


@claim(PAGE, "With on_error= the budget of bad samples goes on, too")
def of_budgets(size: Size) -> Proof:
    def one() -> DataLoader[Any]:
        data = Faulty(size.samples, {1, BATCH + 1, 4 * BATCH + 1})
        policy = penstock.FaultPolicy("skip", max_failures=2)
        return loader(data, shuffle=False, on_error=policy)

    def ended(given: DataLoader[Any]) -> str:
        try:
            return f"after {len(list(given))} batches"
        except TooManyFailures:
            return "TooManyFailures"

    again = one()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that samples were left out
        again.load_state_dict(interrupted(one())[1])
        return equal(uninterrupted=ended(one()), resumed=ended(again), wanted="TooManyFailures")


@claim(PAGE, "The state is below 1 KB, whatever the dataset's size")
def of_state_size(_size: Size) -> Proof:
    lengths = {"1000 samples": 1000, "a trillion": 10**12}
    below = {}
    for name, length in lengths.items():
        one = loader(range(length), shuffle=True)
        _, state = interrupted(one)
        below[name] = len(json.dumps(state)) < 1024
    return equal(**below, wanted=True)


@claim(PAGE, "After loading, len(loader) is that of a whole epoch")
def of_length(size: Size) -> Proof:
    _, state = interrupted(loader(Both(size.samples)))
    one = loader(Both(size.samples))
    rest = resumed(one, state)
    return both(
        equal(len=len(one), whole=size.samples // BATCH),
        equal(given=len(rest), and_before=size.samples // BATCH - state["batches"]),
    )


@claim(
    PAGE,
    "When the loop has seen the end of an epoch, the state is that of the next one's beginning",
)
def of_ends(size: Size) -> Proof:
    one = loader(Both(size.samples))
    list(one)
    state = one.state_dict()
    return both(
        equal(epoch=state["epoch"], wanted=1),
        equal(batches=state["batches"], wanted=0),
        equal(epoch_1=list(one), resumed=resumed(loader(Both(size.samples)), state)),
    )


@claim(PAGE, "A state that was taken while the last batch was in use: its loop runs zero times")
def of_last_batches(size: Size) -> Proof:
    one = loader(Both(size.samples))
    _, state = interrupted(one, count=len(one))
    again = loader(Both(size.samples))
    return both(
        equal(batches_left=len(resumed(again, state)), wanted=0), equal(next=again.epoch, wanted=1)
    )


@claim(PAGE, "A loop that leaves an epoch early for good says set_epoch(epoch + 1) before saving")
def of_leaving(size: Size) -> Proof:
    one = loader(Both(size.samples))
    interrupted(one)
    one.set_epoch(one.epoch + 1)
    state = one.state_dict()
    whole = loader(Both(size.samples))
    list(whole)
    return equal(epoch_1=list(whole), resumed=resumed(loader(Both(size.samples)), state))


@claim(PAGE, "No sample before the place is read")
def of_reading(size: Size) -> Proof:
    _, state = interrupted(loader(Both(size.samples)))
    data = Counted(size.samples)
    rest = resumed(loader(data), state)
    return equal(read=data.read, given=[int(row[0]) for batch in rest for row in batch])


@claim(
    PAGE, "Nor is an index before it computed: batch 50,000,000 of a billion samples comes at once"
)
def of_indices(_size: Size) -> Proof:
    # Computing what is before would take minutes: that this ends is the proof.
    one = loader(range(10**9), shuffle=True, batch_size=10)
    _, state = interrupted(one)
    state.update(batches=50_000_000, samples=500_000_000)
    one.load_state_dict(state)
    batch = next(iter(one))
    return equal(
        place=one.state_dict()["batches"],
        wanted=50_000_001,
        **{"all": 50_000_001 * (len(batch) == 10)},
    )


@claim(PAGE, "A sampler of your own is iterated up to there")
def of_own_samplers(size: Size) -> Proof:
    def one() -> DataLoader[Any]:
        return loader(Own(size.samples), sampler=Told(size.samples, "generator"))

    _, state = interrupted(one())
    return equal(uninterrupted=list(one())[GIVEN:], resumed=resumed(one(), state))


@claim(PAGE, "While an iterator is running, load_state_dict raises StateError")
def of_running(size: Size) -> Proof:
    one = loader(Both(size.samples))
    _, state = interrupted(one)
    iterator = iter(one)
    next(iterator)
    while_running = refusal(one, state)
    del iterator
    return both(
        equal(while_running=while_running, wanted="refused"),
        equal(afterwards=refusal(one, state), wanted="taken"),
    )


@claim(
    PAGE,
    "So does another dataset length, batch size, kind of sampler, weights, or seed; it is named",
)
def of_refusals(size: Size) -> Proof:
    data, length = Both(size.samples), size.samples
    _, state = interrupted(loader(data))
    weights = [1.0] * length
    _, of_weights = interrupted(loader(data, sampler=WeightedRandomSampler(weights, length)))
    weights[0] = 2.0
    told = {
        "length": refusal(loader(Both(length + 1)), state, length, length + 1),
        "batch size": refusal(loader(data, batch_size=BATCH + 1), state, BATCH, BATCH + 1),
        "kind of sampler": refusal(loader(data, shuffle=False), state, "Random", "Sequential"),
        "weights": refusal(
            loader(data, sampler=WeightedRandomSampler(weights, length)), of_weights
        ),
        "seed": refusal(loader(data, seed=8), state, 7, 8),
    }
    return both(
        equal(**told, wanted="refused"), equal(same=refusal(loader(data), state), wanted="taken")
    )


@claim(
    PAGE, "set_epoch with the state's own epoch keeps the place; another drops it, with a warning"
)
def of_set_epoch(size: Size) -> Proof:
    data, found, told = Both(size.samples), {}, {}
    _, state = interrupted(loader(data))
    for epoch in (0, 1):
        one = loader(data)
        one.load_state_dict(state)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            one.set_epoch(epoch)
            found[epoch] = list(one)
        told[epoch] = len(caught)
    whole = loader(data)
    epochs = [list(whole), list(whole)]
    return both(
        equal(rest_of_epoch_0=epochs[0][GIVEN:], own_epoch=found[0]),
        equal(epoch_1=epochs[1], another=found[1]),
        equal(warnings=repr(told), wanted=repr({0: 0, 1: 1})),
    )


def _of_ranks(size: Size, num_ranks: int) -> list[DataLoader[Any]]:
    return [
        loader(
            Both(size.samples),
            sampler=DistributedSampler(
                WeightedRandomSampler([1.0] * size.samples, size.samples), num_ranks, rank
            ),
            batch_size=BATCH // num_ranks,
        )
        for rank in range(num_ranks)
    ]


def _steps(of_rank: list[list[Any]]) -> list[Any]:
    """Return the global batches, in the order of the sampler that was dealt out."""
    return [torch.stack(parts, dim=1).flatten(0, 1) for parts in zip(*of_rank, strict=True)]


@claim(
    PAGE,
    "1, 2 and 4 ranks: step k has the same samples with the same draws; a run goes on with others",
)
def of_ranks(size: Size) -> Proof:
    whole = {f"{n} ranks": _steps([list(one) for one in _of_ranks(size, n)]) for n in (1, 2, 4)}
    state = interrupted(_of_ranks(size, 4)[0])[1]
    rest = {
        f"saved with 4, goes on with {n}": _steps(
            [resumed(one, state) for one in _of_ranks(size, n)]
        )
        for n in (1, 2)
    }
    return both(equal(**whole), equal(rest_of_1_rank=whole["1 ranks"][GIVEN:], **rest))


@claim(PAGE, "The state holds global_batch_size, and is the same on all ranks after the same step")
def of_rank_states(size: Size) -> Proof:
    states = [interrupted(one)[1] for one in _of_ranks(size, 2)]
    held = states[0]["fingerprint"]["global_batch_size"]
    return both(
        equal(rank_0=json.dumps(states[0]), rank_1=json.dumps(states[1])),
        equal(global_batch_size=held, wanted=BATCH),
    )


@claim(
    PAGE,
    'pad="repeat": the first samples come twice; "drop": the last are left out; "none": once each',
)
def of_padding(_size: Size) -> Proof:
    def dealt(pad: Any) -> str:  # noqa: ANN401
        shares = (DistributedSampler(range(9), 2, k, shuffle=False, pad=pad) for k in range(2))
        return "".join(map(str, sorted(index for share in shares for index in share)))

    return both(
        equal(repeat=dealt("repeat"), wanted="0012345678"),
        equal(drop=dealt("drop"), wanted="01234567"),
        equal(none=dealt("none"), wanted="012345678"),
    )


@claim(PAGE, "penstock.torch.DistributedSampler is torch's, bit for bit")
def of_drop_in(size: Size) -> Proof:
    orders = {}
    kinds: dict[str, Any] = {
        "torch": torch.utils.data.DistributedSampler,
        "penstock": DropInDistributedSampler,
    }
    for name, kind in kinds.items():
        samplers = [kind(range(size.samples + 1), 4, rank, seed=3) for rank in range(4)]
        for sampler in samplers:
            sampler.set_epoch(2)
        orders[name] = [list(sampler) for sampler in samplers]
    return equal(**orders)


@claim(PAGE, "A sampler by itself counts what its iterator gave")
def of_samplers(size: Size) -> Proof:
    labels = [n % 3 for n in range(size.samples)]
    whole = list(ClassBalancedSampler(labels))
    one, other = ClassBalancedSampler(labels), ClassBalancedSampler(labels)
    given = list(islice(iter(one), GIVEN))
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    return equal(uninterrupted=whole, resumed=given + list(other))


@claim(PAGE, "A stream with state_dict and load_state_dict goes on, for each worker")
def of_streams(size: Size) -> Proof:
    found = {}
    for workers in (0, 2):
        data = ResumableStream(size.samples)
        given, state = interrupted(loader(data, num_workers=workers))
        rest = resumed(loader(ResumableStream(size.samples), num_workers=workers), state)
        found[f"{workers} workers, resumed"] = given + rest
    return equal(uninterrupted=batches(ResumableStream(size.samples)), **found)


@claim(
    PAGE, "A stream without them is read again, what was given is dropped, and a warning says so"
)
def of_plain_streams(size: Size) -> Proof:
    _, state = interrupted(loader(Stream(size.samples)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rest = resumed(loader(Stream(size.samples)), state)
    return both(
        equal(uninterrupted=batches(Stream(size.samples))[GIVEN:], resumed=rest),
        equal(warnings=len(caught), wanted=1),
    )


@claim(PAGE, "Of a stream the number of workers has to stay")
def of_stream_workers(size: Size) -> Proof:
    _, state = interrupted(loader(ResumableStream(size.samples), num_workers=2))
    other = loader(ResumableStream(size.samples), num_workers=1)
    try:
        told = "taken" if resumed(other, state) else "empty"
    except StateError:
        told = "refused"
    return equal(another_number=told, wanted="refused")


def _indices(found: list[Any]) -> list[Any]:
    return [batch[:, 0] for batch in found]


@claim(PAGE, "Without seed= the order goes on exactly; random numbers drawn in workers do not")
def of_unseeded(size: Size) -> Proof:
    def one() -> DataLoader[Any]:
        return DataLoader(Globals(size.samples), batch_size=BATCH, shuffle=True, num_workers=2)

    with penstock.seeded(1):
        whole = list(one())
    with penstock.seeded(1):
        _, state = interrupted(one())
    with penstock.seeded(2):
        rest = resumed(one(), state)
    return both(
        equal(order=_indices(whole[GIVEN:]), order_resumed=_indices(rest)),
        distinct(
            draws=[batch[:, 1:] for batch in whole[GIVEN:]],
            resumed=[batch[:, 1:] for batch in rest],
        ),
    )


@claim(
    PAGE, "Without seed= the state holds those of generators: below 5, 15, 19 KB; shuffle=True 1 KB"
)
def of_generator_states(_size: Size) -> Proof:
    def num_bytes(**options: Any) -> int:  # noqa: ANN401
        data = TensorDataset(torch.arange(64.0))
        _, state = interrupted(DataLoader(data, batch_size=4, **options))
        return len(json.dumps(state))

    stock, own = torch.utils.data.SubsetRandomSampler(range(64)), Told(64, "globals")
    below = {
        "shuffle": num_bytes(shuffle=True) < 1024,
        "torch's sampler": 4000 < num_bytes(sampler=stock) < 5000,
        "one's own": 12_000 < num_bytes(sampler=own) < 15_000,
        "and a generator": num_bytes(sampler=own, generator=torch.Generator()) < 19_000,
    }
    return equal(**below, wanted=True)


@claim(
    PAGE, "Resuming draws nothing from torch's global generator: the next epochs are the same, too"
)
def of_global_generator(size: Size) -> Proof:
    def one() -> DataLoader[Any]:
        return DataLoader(Own(size.samples), batch_size=BATCH, shuffle=True)

    with penstock.seeded(1):
        undisturbed = one()
        whole = [list(undisturbed), list(undisturbed)]
    with penstock.seeded(1):
        interrupted_one = one()
        _, state = interrupted(interrupted_one)
        generator = torch.get_rng_state()
    with penstock.seeded(2):
        torch.set_rng_state(generator)
        again = one()
        rest = resumed(again, state)
        following = list(again)
    return both(
        equal(rest=_indices(whole[0][GIVEN:]), resumed=_indices(rest)),
        equal(epoch_1=_indices(whole[1]), epoch_1_resumed=_indices(following)),
    )
