# SPDX-License-Identifier: Apache-2.0
"""docs/reproducibility.md from `seed_everything` on: generators, and workers without a seed."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
from typing import Any

import numpy as np
import torch
import torch.utils.data
from datasets import Globals, Twisters, WorkerSeeds, words_of_numpy, words_of_torch
from of_loaders import as_rank
from proof import Proof, Size, both, claim, distinct, equal

import penstock
from penstock.torch import DataLoader

PAGE = "reproducibility.md"
BASE_SEEDS = (1407639518939636932, 5163590386780219894)  # as the page has them


def states() -> dict[str, Any]:
    """Return the states of the three global generators, with their cached normal numbers."""
    return {
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }


def draws() -> dict[str, float]:
    return {
        "random": random.random(),
        "numpy": np.random.random(),
        "torch": torch.rand((), dtype=torch.float64).item(),
    }


def output(*lines: str, **environment: str) -> str:
    """Return what a new Python prints."""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def seeded_states(seed: int) -> dict[str, Any]:
    with penstock.seeded(seed):
        return states()


@claim(
    PAGE, "On rank 0 seed_everything(7) is random.seed(7), np.random.seed(7), torch.manual_seed(7)"
)
def of_plain_calls(_size: Size) -> Proof:
    with penstock.seeded(0):
        random.seed(7)
        np.random.seed(7)
        torch.manual_seed(7)
        plain = states()
        penstock.seed_everything(7)
        found = states()
    return both(*(equal(**{name: found[name], "plain call": plain[name]}) for name in plain))


@claim(PAGE, "On rank r > 0 random and torch get the same 64 bits, numpy gets 128")
def of_ranks(_size: Size) -> Proof:
    with as_rank(1, 2), penstock.seeded(7):
        found, number = states(), torch.initial_seed()
    with penstock.seeded(0):
        random.seed(number)
        torch.manual_seed(number)
        wanted = states()
    return both(
        equal(random=found["random"], seeded_with_64_bits=wanted["random"]),
        equal(torch=found["torch"], seeded_with_64_bits=wanted["torch"]),
        distinct(rank_1=found["numpy"], rank_0=seeded_states(7)["numpy"]),
    )


@claim(
    PAGE, "No rank draws what another rank draws under a neighbouring seed; with seed + r it would"
)
def of_neighbours(_size: Size) -> Proof:
    drawn: dict[str, set[float]] = {"random": set(), "numpy": set(), "torch": set()}
    for seed in range(5, 10):
        for rank in range(4):
            with as_rank(rank, 4), penstock.seeded(seed):
                for name, value in draws().items():
                    drawn[name].add(value)
    plainly = {random.Random(seed + rank).random() for seed in range(5, 10) for rank in range(4)}
    return both(
        *(equal(**{"seeds x ranks": 20, name: len(found)}) for name, found in drawn.items()),
        distinct(seeds_x_ranks=20, with_seed_plus_r=len(plainly)),
    )


@claim(PAGE, "sample_rng() outside of a loader is mixed from (7, rank)")
def of_sample_rng(_size: Size) -> Proof:
    drawn = []
    for rank in (0, 0, 1):
        with as_rank(rank, 2), penstock.seeded(7):
            drawn.append(penstock.sample_rng().random())
    return both(equal(rank_0=drawn[0], again=drawn[1]), distinct(rank_0=drawn[0], rank_1=drawn[2]))


@claim(PAGE, "PYTHONHASHSEED is 7 for processes started later, on all ranks; not for this one")
def of_hashes(_size: Size) -> Proof:
    before, told = hash("penstock"), {}
    for rank in range(2):
        with as_rank(rank, 2), penstock.seeded(7):
            told[f"rank {rank}"] = output("print(hash('penstock'))")
            here = hash("penstock")
    wanted = output("print(hash('penstock'))", PYTHONHASHSEED="7")
    return both(equal(**told, PYTHONHASHSEED_7=wanted), equal(before=before, here=here))


@claim(PAGE, "Seeds go up to 2^64 - 1; numpy's are mixed from 2^32 on")
def of_large_seeds(_size: Size) -> Proof:
    refused = False
    try:
        penstock.seed_everything(2**64)
    except ValueError:
        refused = True
    largest = seeded_states(2**64 - 1)
    low_words = seeded_states(5)["numpy"]
    return both(
        equal(of_2_to_the_64="refused" if refused else "taken", wanted="refused"),
        distinct(largest=largest["numpy"], seed_0=seeded_states(0)["numpy"]),
        distinct(of_5=low_words, of_5_and_2_to_the_32=seeded_states(5 + 2**32)["numpy"]),
    )


@claim(PAGE, "It returns the seed, the same on all ranks")
def of_returns(_size: Size) -> Proof:
    returned = {}
    for rank in range(2):
        with as_rank(rank, 2), penstock.seeded(0):
            returned[f"rank {rank}"] = penstock.seed_everything(7)
    return equal(**returned, wanted=7)


@claim(PAGE, "What has to be equal on all ranks gets a generator of its own: random_split")
def of_splits(_size: Size) -> Proof:
    own, from_global = {}, {}
    for rank in range(2):
        with as_rank(rank, 2), penstock.seeded(7) as seed:
            generator = torch.Generator().manual_seed(seed)
            part, _ = torch.utils.data.random_split(range(40), [30, 10], generator=generator)  # type: ignore[arg-type, var-annotated]
            own[f"rank {rank}"] = list(part.indices)
            part, _ = torch.utils.data.random_split(range(40), [30, 10])  # type: ignore[arg-type]
            from_global[f"global, rank {rank}"] = list(part.indices)
    return both(equal(**own), distinct(**from_global))


@claim(PAGE, "torch.manual_seed(seed) before the model gives all ranks the same initial weights")
def of_weights(_size: Size) -> Proof:
    weights, without = {}, {}
    for rank in range(2):
        with as_rank(rank, 2), penstock.seeded(7) as seed:
            without[f"without, rank {rank}"] = torch.nn.Linear(8, 8).weight.detach()
            torch.manual_seed(seed)
            weights[f"rank {rank}"] = torch.nn.Linear(8, 8).weight.detach()
    return both(equal(**weights), distinct(**without))


@claim(PAGE, "Torch is not imported for this; if it is imported later, it is seeded then")
def of_late_torch(_size: Size) -> Proof:
    loaded, late = output(
        "import sys, penstock",
        "penstock.seed_everything(7)",
        "print('torch' in sys.modules)",
        "import torch",
        "print(torch.rand(()).item())",
    ).splitlines()
    with penstock.seeded(7):
        here = str(torch.rand(()).item())
    return both(equal(is_imported=loaded, wanted="False"), equal(imported_later=late, here=here))


@claim(PAGE, "The logger penstock says at level INFO which rank got which seeds")
def of_logs(_size: Size) -> Proof:
    records: list[logging.LogRecord] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Handler()
    logger = logging.getLogger("penstock")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with as_rank(1, 2), penstock.seeded(7):
            number = str(torch.initial_seed())
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    told = [
        record.levelname
        for record in records
        if "rank 1" in record.getMessage() and number in record.getMessage()
    ]
    return equal(lines_with_rank_and_seed=" ".join(told), wanted="INFO")


@claim(PAGE, "After penstock.seeded every generator goes on as if the block had not been")
def of_undoing(_size: Size) -> Proof:
    random.gauss(0, 1), np.random.randn(), torch.randn(())  # each caches a second normal number
    before = (
        states(),
        os.environ.get("PYTHONHASHSEED"),
        torch.are_deterministic_algorithms_enabled(),
    )
    try:
        with penstock.seeded(7, deterministic=True):
            random.gauss(0, 1), np.random.randn(), torch.randn(())
            inside = states()
            raise KeyError
    except KeyError:
        after = (
            states(),
            os.environ.get("PYTHONHASHSEED"),
            torch.are_deterministic_algorithms_enabled(),
        )
    return both(
        distinct(before=before[0], inside=inside), equal(before=before, after_an_error=after)
    )


@claim(PAGE, "random is seeded with all bits of an integer, numpy.random with 32 or with words")
def of_bits(_size: Size) -> Proof:
    refused = False
    try:
        np.random.RandomState(2**32)
    except ValueError:
        refused = True
    return both(
        distinct(
            of_5=random.Random(5).random(), of_5_and_2_to_the_32=random.Random(5 + 2**32).random()
        ),
        equal(numpy_with_2_to_the_32="refused" if refused else "taken", wanted="refused"),
        distinct(
            words_5_and_1=np.random.RandomState([5, 1]).random(),
            words_5_and_2=np.random.RandomState([5, 2]).random(),
        ),
    )


@claim(
    PAGE,
    "Twisters: random, numpy.random and torch on the CPU; PCG64: default_rng; Philox: sample_rng",
)
def of_algorithms(_size: Size) -> Proof:
    words = np.array(random.getstate()[1], np.uint32)
    twister: Any = np.random.RandomState()
    twister.set_state(("MT19937", words[:624], int(words[624])))
    with penstock.seeded(0):
        state: Any = np.random.get_state()
        sample = type(penstock.sample_rng().bit_generator).__name__
    default = type(np.random.default_rng().bit_generator).__name__
    return both(
        # numpy's twister, in the state of random's, draws what random does.
        equal(random=random.random(), a_twister=twister.random_sample()),
        equal(numpy=state[0], wanted="MT19937"),
        equal(torch_s_words=len(words_of_torch()), of_a_twister=624),
        equal(default_rng=default, wanted="PCG64"),
        equal(sample_rng=sample, wanted="Philox"),
    )


@claim(PAGE, "torch.manual_seed(5) and (5 + 2**32): the same numbers, another initial_seed()")
def of_low_bits(_size: Size) -> Proof:
    drawn, initial = {}, {}
    for name, seed in (("of 5", 5), ("of 5 + 2**32", 5 + 2**32)):
        with penstock.seeded(0):
            torch.manual_seed(seed)
            drawn[name], initial[f"initial seed {name}"] = torch.rand(100), torch.initial_seed()
    return both(equal(**drawn), distinct(**initial))


@claim(PAGE, "After np.random.seed(5) and torch.manual_seed(5) the twisters agree, word for word")
def of_words(_size: Size) -> Proof:
    with penstock.seeded(0):
        np.random.seed(5)
        torch.manual_seed(5)
        words = {"numpy": words_of_numpy(), "torch": words_of_torch()}
        numbers = {"numpy's number": np.random.random(), "torch's": draws()["torch"]}
    return both(equal(**words), distinct(**numbers))


@claim(PAGE, "Under seed= every sample seeds them apart")
def of_words_in_samples(size: Size) -> Proof:
    words = [
        torch.stack(pair) for pair in DataLoader(Twisters(size.samples), batch_size=None, seed=7)
    ]
    twisters = torch.cat(words).unique(dim=0)
    return equal(twisters=2 * size.samples, different_ones=len(twisters))


@claim(PAGE, "default_rng() without an argument is seeded by the operating system")
def of_default_rng(_size: Size) -> Proof:
    drawn = {}
    for run in ("first", "second"):
        with penstock.seeded(7):
            drawn[run] = np.random.default_rng().random()
    return distinct(**drawn)


@claim(
    PAGE, "A generator on the CPU that is nobody else's draws the same, whatever happens around it"
)
def of_own_generator(_size: Size) -> Proof:
    noise = {}
    for seed in (1, 2):
        with penstock.seeded(seed):
            generator = torch.Generator().manual_seed(7)
            torch.randn(seed)
            noise[f"amid seed {seed}"] = torch.randn(3, 224, 224, generator=generator)
    return equal(**noise)


@claim(PAGE, "The same seed draws other numbers on CUDA; with 64 bits of it")
def of_cuda(_size: Size) -> Proof:
    if not torch.cuda.is_available():
        return Proof("there is no CUDA here", None)
    drawn = {}
    for seed in (5, 5 + 2**32):
        for device in ("cpu", "cuda"):
            generator = torch.Generator(device).manual_seed(seed)
            drawn[device, seed] = torch.rand(100, generator=generator, device=device).cpu()
    return distinct(
        cpu=drawn["cpu", 5], cuda=drawn["cuda", 5], with_2_to_the_32=drawn["cuda", 5 + 2**32]
    )


@claim(PAGE, "A dropout mask drawn so is the same mask, and keeps 0.9 of the mean")
def of_dropout(_size: Size) -> Proof:
    x, masked = torch.ones(100_000), {}
    for name in ("first", "second"):
        generator = torch.Generator().manual_seed(7)
        mask = torch.empty(x.shape).bernoulli_(0.9, generator=generator)
        masked[name] = x * mask / 0.9
    mean = masked["first"].mean().item()
    return both(equal(**masked), equal(mean_to_two_digits=f"{mean:.2f}", wanted="1.00"))


def _seeds_of_workers(kind: Any, num_workers: int = 2) -> list[tuple[int, ...]]:  # noqa: ANN401
    """Return, for two epochs, the seeds of the workers; and what each draws first."""
    one, found = kind(WorkerSeeds(2 * num_workers), num_workers=num_workers), []
    for _ in range(2):
        firsts: dict[int, tuple[Any, ...]] = {}
        for worker, seed, *drawn in one:
            firsts.setdefault(int(worker), (int(seed), *(float(value) for value in drawn)))
        found += [firsts[worker] for worker in sorted(firsts)]
    return found


@claim(
    PAGE, "Without seed=: base_seed of manual_seed(7) as in the table, worker w has base_seed + w"
)
def of_base_seeds(_size: Size) -> Proof:
    wanted, proofs = [base + worker for base in BASE_SEEDS for worker in range(2)], []
    for rank in range(2):
        for kind in (torch.utils.data.DataLoader, DataLoader):
            with as_rank(rank, 2), penstock.seeded(0):
                torch.manual_seed(7)
                found = [seed for seed, *_ in _seeds_of_workers(kind)]
            name = f"{kind.__module__.partition('.')[0]}'s on rank {rank}"
            proofs.append(equal(**{name: found, "table": wanted}))
    return both(*proofs)


@claim(PAGE, "Worker w seeds torch and random with base_seed + w")
def of_worker_draws(_size: Size) -> Proof:
    found = _seeds_of_workers(DataLoader)
    wanted = []
    for seed, *_ in found:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.rand((), dtype=torch.float64, generator=generator).item()
        wanted.append((seed, random.Random(seed).random(), drawn))
    return equal(first_draws_of_workers=found, of_generators_seeded_so=wanted)


@claim(PAGE, "After seed_everything(7) the ranks' base seeds differ")
def of_ranks_base_seeds(_size: Size) -> Proof:
    found = {}
    for rank in range(2):
        with as_rank(rank, 2), penstock.seeded(7):
            found[f"rank {rank}"] = _seeds_of_workers(DataLoader)
    return distinct(**found)


@claim(PAGE, "Without seed= another number of workers gives other augmentations")
def of_other_workers(size: Size) -> Proof:
    found = {}
    for workers in (1, 2):
        with penstock.seeded(7):
            one = DataLoader(Globals(size.samples), batch_size=8, num_workers=workers)
            found[f"{workers} workers"] = list(one)
    return distinct(**found)


def _settings() -> tuple[Any, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


@claim(
    PAGE, "deterministic=True sets four things; seed_everything without it leaves all four alone"
)
def of_deterministic(_size: Size) -> Proof:
    before = _settings()
    with penstock.seeded(7):
        without = _settings()
    with penstock.seeded(7, deterministic=True):
        with_it = _settings()
    return both(
        equal(before=before, without=without, after=_settings()),
        equal(with_it=with_it, wanted=(True, True, False, ":4096:8")),
    )


@claim(PAGE, "It fills torch.empty with NaN, unless that is switched off")
def of_filling(_size: Size) -> Proof:
    with penstock.seeded(7, deterministic=True):
        filled = bool(torch.empty(1000).isnan().all())
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        try:
            unfilled = bool(torch.empty(1 << 20).isnan().all())
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    return both(
        equal(all_NaN=filled, wanted=True), equal(all_NaN_if_switched_off=unfilled, wanted=False)
    )


@claim(PAGE, "It costs an error where an operation has no deterministic form")
def of_refusals(_size: Size) -> Proof:
    def put() -> str:
        try:
            torch.zeros(4).put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))
        except RuntimeError as error:
            return "refused" if "put_" in str(error) else str(error)
        return "done"

    with penstock.seeded(7, deterministic=True):
        strict = put()
    return both(equal(put=strict, wanted="refused"), equal(put_without=put(), wanted="done"))
