# SPDX-License-Identifier: Apache-2.0
"""What one process of an Accelerate program sees: run by each process, compared by the tests.

    torchrun --nproc-per-node=2 -m tests.clients.accelerate_run FOLDER

writes `rank<r>.json` into FOLDER: for each of `SCENARIOS` what it returned.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.nn  # see tests.distributed.launching.TORCHRUN
import torch.utils.data
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

from penstock.errors import ConfigError
from penstock.integrations.accelerate import prepare, skip_first_batches
from penstock.sampling import BalancedBatchSampler, ClassBalancedSampler, DistributedSampler
from penstock.torch import DataLoader

# 21 samples in batches of 4: neither 1 nor 2 processes divide them evenly.
LENGTH, BATCH_SIZE, SEED = 21, 4, 7
LABELS = [index % 3 for index in range(LENGTH)]


class Numbered(torch.utils.data.Dataset):
    """Gives its index and a random number; notes which indices were read.

    In a list, of this process alone; or in a file, of workers too.
    """

    def __init__(self, length=LENGTH, file=None):
        self.length = length
        self.read = []
        self.file = file
        self.labels = LABELS[:length]

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.file is None:
            self.read.append(index)
        else:
            with self.file.open("a") as notes:
                notes.write(f"{index}\n")
        return index, torch.rand(())


class Counting(torch.utils.data.IterableDataset):
    """A stream that knows nothing of ranks."""

    def __len__(self):
        return LENGTH

    def __iter__(self):
        return iter(range(LENGTH))


class EveryThird:
    """A sampler of one's own."""

    def __len__(self):
        return LENGTH

    def __iter__(self):
        return iter(torch.randperm(LENGTH).tolist())


class Pairs:
    """A batch sampler of one's own."""

    batch_size, drop_last = 2, False

    def __len__(self):
        return 10

    def __iter__(self):
        return iter(torch.randperm(20).view(10, 2).tolist())


def accelerator_with(**settings):
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**settings))


def plain(batch):
    return [part.tolist() for part in batch] if isinstance(batch, list) else batch.tolist()


def epoch_of(loader, accelerator):
    """Batches, flags, and what all processes together give a metric, of one epoch."""
    noted = {"batches": [], "ends": [], "remainders": [], "gathered": []}
    for batch in loader:
        noted["batches"].append(plain(batch))
        noted["ends"].append(accelerator.gradient_state.end_of_dataloader)
        noted["remainders"].append(accelerator.gradient_state.remainder)
        indices = batch[0] if isinstance(batch, list) else batch
        if accelerator.even_batches:
            noted["gathered"] += accelerator.gather_for_metrics(indices).tolist()
    return noted


def seeded(accelerator=None, *, seed=SEED, num_workers=0, num_epochs=2, **arguments):
    accelerator = accelerator or accelerator_with()
    arguments = {"batch_size": BATCH_SIZE, "shuffle": True, **arguments}
    if "batch_sampler" in arguments:
        del arguments["batch_size"], arguments["shuffle"]
    if "sampler" in arguments:
        del arguments["shuffle"]
    loader = DataLoader(Numbered(), seed=seed, num_workers=num_workers, **arguments)
    loader = prepare(accelerator, loader)
    return {
        "epochs": [epoch_of(loader, accelerator) for _ in range(num_epochs)],
        "length": len(loader),
        "total_batch_size": loader.total_batch_size,
    }


def split():
    return seeded(accelerator_with(split_batches=True), batch_size=2 * BATCH_SIZE)


def uneven():
    return seeded(accelerator_with(even_batches=False))


def in_workers():
    return seeded(num_workers=2)


def with_drop_last():
    return seeded(drop_last=True)


def with_balance():
    return seeded(sampler=DistributedSampler(ClassBalancedSampler(LABELS, num_samples=19, seed=3)))


def with_balance_and_no_seed():
    sampler = DistributedSampler(ClassBalancedSampler(LABELS, num_samples=19, seed=3))
    return seeded(sampler=sampler, seed=None)


def with_batches_that_deal_themselves_and_no_seed():
    batches = BalancedBatchSampler(LABELS, p_classes=2, k_samples=2, seed=5)
    return seeded(batch_sampler=batches, seed=None)


def with_anybodys_sampler():
    return seeded(sampler=EveryThird())


def with_anybodys_batches():
    return seeded(batch_sampler=Pairs())


def with_batches_that_deal_themselves():
    return seeded(batch_sampler=BalancedBatchSampler(LABELS, p_classes=2, k_samples=2, seed=5))


def unseeded(kind, **settings):
    """The epochs of a loader without `seed=`: `kind` is which of the two loaders prepares it."""
    noted = {}
    for shuffle in (False, True):
        set_seed(11)
        accelerator = accelerator_with(**settings)
        loader = kind(Numbered(), batch_size=BATCH_SIZE, shuffle=shuffle)
        ours = isinstance(loader, DataLoader)
        loader = prepare(accelerator, loader) if ours else accelerator.prepare(loader)
        noted[str(shuffle)] = [epoch_of(loader, accelerator) for _ in range(2)]
        noted[f"{shuffle} size"] = loader.total_batch_size
    return noted


def without_seed():
    """Ours and Accelerate's, with the same settings."""
    return [
        [unseeded(kind, **settings) for kind in (DataLoader, torch.utils.data.DataLoader)]
        for settings in (
            {},
            {"use_seedable_sampler": True},
            {"split_batches": True},
            {"even_batches": False},
        )
    ]


def resumed(folder, *, seed, num_workers=0, **settings):
    """What comes after a checkpoint in mid-epoch: in the run itself, and in one that resumes."""
    set_seed(13)

    def made(file=None):
        accelerator = accelerator_with(**settings)
        data = Numbered(file=file)
        loader = DataLoader(data, batch_size=2, shuffle=True, seed=seed, num_workers=num_workers)
        other = DataLoader(Numbered(5), batch_size=2, seed=seed)
        return accelerator, prepare(accelerator, loader), prepare(accelerator, other)

    accelerator, loader, other = made()
    list(loader)
    batches = iter(loader)
    [next(batches) for _ in range(3)]
    few = iter(other)
    next(few)
    accelerator.save_state(folder)
    expected = [plain(batch)[0] for batch in batches], [plain(batch)[0] for batch in few]
    later = [plain(batch) for batch in loader] if seed is not None else None
    accelerator.free_memory()

    set_seed(99)
    notes = folder / f"read{accelerator.process_index}.txt"
    accelerator, loader, other = made(notes)
    accelerator.load_state(folder)
    epoch = loader.epoch
    got = [plain(batch)[0] for batch in loader], [plain(batch)[0] for batch in other]
    num_read = len(notes.read_text().split())
    return {
        "expected": expected,
        "got": got,
        "epoch": epoch,
        "num_read": num_read,
        "same_later": later == ([plain(b) for b in loader] if seed is not None else None),
    }


def fourth(accelerator):
    """A loader whose batches of all processes together have four samples."""
    loader = DataLoader(
        Numbered(), batch_size=4 // accelerator.num_processes, shuffle=True, seed=SEED
    )
    return prepare(accelerator, loader)


def left_in_mid_epoch(folder):
    """Save a state after two batches of epoch 1; return what came after, here."""
    accelerator = accelerator_with()
    loader = fourth(accelerator)
    list(loader)
    batches = iter(loader)
    [next(batches) for _ in range(2)]
    accelerator.save_state(folder)
    rest = [plain(batch) for batch in batches]
    accelerator.free_memory()
    return rest


def taken_over(folder):
    """What comes after a state that another number of processes has saved."""
    accelerator = accelerator_with()
    loader = fourth(accelerator)
    accelerator.load_state(folder)
    rest = [plain(batch) for batch in loader]
    accelerator.free_memory()
    return rest


def skipped():
    accelerator = accelerator_with()
    data = Numbered()
    loader = prepare(accelerator, DataLoader(data, batch_size=2, shuffle=True, seed=SEED))
    whole = [plain(batch) for batch in loader]
    loader.set_epoch(0)
    del data.read[:]
    rest = [plain(batch) for batch in skip_first_batches(loader, 4)]
    num_read = len(data.read)
    return {"same": rest == whole[4:], "num_read": num_read, "later": len(list(loader))}


def stream(**settings):
    accelerator = accelerator_with(**settings)
    loader = prepare(accelerator, DataLoader(Counting(), batch_size=2, seed=SEED))
    return epoch_of(loader, accelerator)


def refused():
    """What is said of what cannot be had."""

    def message(accelerator, *arguments, **named):
        try:
            prepare(accelerator, DataLoader(*arguments, **named))
        except (ConfigError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    sampler = torch.utils.data.DistributedSampler(Numbered(), accelerator_with().num_processes, 0)
    return {
        "dispatch": message(accelerator_with(dispatch_batches=True), Numbered(), seed=1),
        "unbatched": message(accelerator_with(), Numbered(), batch_size=None),
        "shared": message(accelerator_with(), Numbered(), sampler=sampler),
        "split": message(accelerator_with(split_batches=True), Numbered(), batch_size=3),
    }


SCENARIOS = (
    seeded, split, uneven, in_workers, with_drop_last, with_balance, with_balance_and_no_seed,
    with_batches_that_deal_themselves_and_no_seed, with_anybodys_sampler,
    with_anybodys_batches, with_batches_that_deal_themselves, without_seed, skipped, stream,
    refused,
)  # fmt: skip


def all_scenarios(folder):
    noted = {scenario.__name__: scenario() for scenario in SCENARIOS}
    if (folder / "of_one").exists():
        noted["left_in_mid_epoch"] = left_in_mid_epoch(folder / "of_two")
        noted["taken_over"] = taken_over(folder / "of_one")
    noted["resumed"] = resumed(folder / "seeded", seed=SEED)
    noted["resumed_in_workers"] = resumed(folder / "workers", seed=SEED, num_workers=1)
    noted["resumed_without_seed"] = resumed(folder / "unseeded", seed=None)
    noted["resumed_seedable"] = resumed(folder / "seedable", seed=None, use_seedable_sampler=True)
    noted["split_stream"] = stream(split_batches=True)
    return noted


if __name__ == "__main__":
    warnings.simplefilter("error")
    folder = Path(sys.argv[1])
    accelerator = Accelerator(cpu=True)
    noted = all_scenarios(folder)
    (folder / f"rank{accelerator.process_index}.json").write_text(json.dumps(noted))
    accelerator.wait_for_everyone()
    gc.collect()  # see tests.distributed.launching.TORCHRUN
    accelerator.end_training()
