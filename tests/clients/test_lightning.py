# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer and Fabric on a Penstock loader: whose engine, which batches, which state."""

from __future__ import annotations

import inspect
import threading
from multiprocessing.context import SpawnContext
from pathlib import Path

import lightning
import pytest
import torch
from lightning.fabric.utilities import data as fabric_data
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import data as trainer_data
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from tests.distributed.launching import TORCHRUN, environment
from tests.support.processes import completed
from tests.torch.comparing import assert_same
from torch.utils.data import Dataset, SequentialSampler

import penstock.torch
from penstock.errors import ConfigError
from penstock.integrations.lightning import ExactResume
from penstock.sampling import (
    BalancedBatchSampler,
    BucketBatchSampler,
    ClassBalancedSampler,
)
from penstock.torch.loader import _LoaderIterator

pytestmark = [
    # Advice about this machine and these tiny runs.
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning"),
    # Who saved a checkpoint need not be there when it is loaded.
    pytest.mark.filterwarnings(
        "ignore:Be aware that when using `ckpt_path`, callbacks:UserWarning"
    ),
    # Lightning's own use of torch.
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:DeprecationWarning"),
]

NUM_SAMPLES, BATCH_SIZE, NUM_BATCHES = 20, 4, 5


class Noisy(Dataset):
    """Index, and random numbers drawn while the sample is made."""

    labels = [0] * 15 + [1] * 5

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return index, torch.rand(2)


class Model(lightning.LightningModule):
    """Keeps the batches that it trains on."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.seen = []

    def training_step(self, batch, batch_index):
        self.seen.append((self.current_epoch, batch_index, batch))
        noise = batch["a"][1] if isinstance(batch, dict) else batch[1]
        return self.layer(noise).mean()

    def predict_step(self, batch, batch_index):
        return batch[0]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader_of(dataset=None, **options):
    options = {"batch_size": BATCH_SIZE, "shuffle": True, "num_workers": 2, "seed": 7, **options}
    return penstock.torch.DataLoader(Noisy() if dataset is None else dataset, **options)


def trainer_of(folder, callbacks=(), **options):
    options = {"max_epochs": 3, "logger": False, **options}
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def epochs_of(loader, num_epochs):
    """What a plain loop over the loader gets, as the model above notes it."""
    return [(e, i, b) for e in range(num_epochs) for i, b in enumerate(loader)]


# What a loader keeps when it is made anew.


def double(batch):
    return batch


def collate(samples):
    return samples


def init_worker(worker_id):
    pass


class Threads(SpawnContext):
    Process = threading.Thread


WORKERS = {"num_workers": 2}
ARGUMENTS = {
    "dataset": {},
    "batch_size": {"batch_size": 3},
    "shuffle": {"shuffle": True},
    "sampler": {"sampler": SequentialSampler(Noisy())},
    "batch_sampler": {"batch_sampler": torch.utils.data.BatchSampler(range(20), 4, True)},
    "num_workers": WORKERS,
    "num_workers, auto": {"num_workers": "auto"},
    "collate_fn": {"collate_fn": collate},
    "pin_memory": {"pin_memory": True},
    "drop_last": {"drop_last": True},
    "timeout": {"timeout": 5.0, **WORKERS},
    "worker_init_fn": {"worker_init_fn": init_worker},
    "multiprocessing_context": {"multiprocessing_context": "spawn", **WORKERS},
    "multiprocessing_context, of threads": {"multiprocessing_context": Threads(), **WORKERS},
    "generator": {"generator": torch.Generator()},
    "prefetch_factor": {"prefetch_factor": 3, **WORKERS},
    "persistent_workers": {"persistent_workers": True, **WORKERS},
    "pin_memory_device": {"pin_memory_device": "cuda"},
    "in_order": {"in_order": False, **WORKERS},
    "seed": {"seed": 7},
    "global_rng": {"seed": 7, "global_rng": False},
    "on_error": {"on_error": "skip"},
    "on_error, in detail": {"on_error": penstock.FaultPolicy("replace", max_respawns=1)},
    "backend": {"backend": "thread", **WORKERS},
    "num_workers, auto with limits": {"num_workers": penstock.Auto(cpu=1.5, memory=2**30)},
    "progress": {"progress": "train"},
    "monitor": {"monitor": "full"},
    "device": {"device": "cpu"},
    "device_transform": {"device": "cpu", "device_transform": double},
    "backend, of Ray": {"backend": penstock.Ray("10.0.0.1:6379", num_cpus=2), **WORKERS},
}


def test_no_argument_of_the_loader_is_left_out_below():
    names = {name.partition(",")[0] for name in ARGUMENTS}
    assert names == set(inspect.signature(penstock.torch.DataLoader).parameters)


@pytest.mark.parametrize("kind", ["Trainer", "Fabric"])
@pytest.mark.parametrize("is_from_hook", [False, True], ids=["given", "from a hook"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_loader_that_is_made_anew_for_a_sampler_keeps_every_argument(name, kind, is_from_hook):
    if name == "backend, of Ray":
        pytest.importorskip("ray")
    dataset = Noisy()
    module = {"Trainer": trainer_data, "Fabric": fabric_data}[kind]
    if is_from_hook:  # what Lightning does while it calls `train_dataloader`
        with (
            fabric_data._replace_dunder_methods(torch.utils.data.DataLoader, "dataset"),
            fabric_data._replace_dunder_methods(torch.utils.data.BatchSampler),
        ):
            loader = penstock.torch.DataLoader(dataset, **ARGUMENTS[name])
    else:
        loader = penstock.torch.DataLoader(dataset, **ARGUMENTS[name])
    sampler = torch.utils.data.DistributedSampler(dataset, 2, 1)
    again = module._update_dataloader(loader, sampler)
    assert type(again) is penstock.torch.DataLoader
    assert again is not loader
    assert again.sampler is sampler
    if name in ("sampler", "batch_sampler"):  # it is these that are exchanged
        return
    for attribute in ARGUMENTS[name].keys() - {"shuffle"}:
        assert getattr(again, attribute) == getattr(loader, attribute)
    # And what the engine makes of it.
    assert again._plan(1, None) == loader._plan(1, None)
    options = vars(loader._options)
    if loader.num_workers != "auto" and not is_from_hook:
        options = {**options, "prefetch_factor": loader.prefetch_factor}  # torch's default, in full
        options["multiprocessing_context"] = loader.multiprocessing_context
    assert vars(again._options) == options
    assert again._monitor._arguments == (dataset, again._options)
    assert again._seed == loader._seed
    assert again._target_device == loader._target_device
    assert again._device_transform is loader._device_transform


class Passing(penstock.torch.DataLoader):
    """As most subclasses are."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class Collecting(penstock.torch.DataLoader):
    """Has an argument of its own, and a default that is not torch's."""

    def __init__(self, parts, *args, batch_size=10, **kwargs):
        super().__init__([item for part in parts for item in part], *args, batch_size, **kwargs)


@pytest.mark.parametrize(
    ("kind", "args", "kwargs", "names", "defaults"),
    [
        (Passing, ([1, 2], 2, True), {"seed": 3}, (), {}),
        (Collecting, ([[1], [2]],), {"on_error": "skip"}, ("parts",), {"batch_size": 10}),
        (Collecting, ([[1], [2]],), {"batch_size": 1}, ("parts",), {}),
    ],
)
@pytest.mark.parametrize("is_replaced", [False, True], ids=["torch's", "ours"])
def test_the_record_of_a_subclasss_arguments_is_what_it_was_given(
    kind, args, kwargs, names, defaults, is_replaced
):
    module = penstock.torch if is_replaced else torch.utils.data
    with fabric_data._replace_dunder_methods(module.DataLoader, "dataset"):
        loader = kind(*args, **kwargs)
    assert getattr(loader, "__pl_saved_args") == args
    assert getattr(loader, "__pl_saved_kwargs") == kwargs
    assert getattr(loader, "__pl_saved_arg_names") == names
    assert getattr(loader, "__pl_saved_default_kwargs") == defaults


OURS = inspect.signature(penstock.torch.DataLoader).parameters.keys() - (
    inspect.signature(torch.utils.data.DataLoader).parameters.keys()
)


@pytest.mark.parametrize("module", [trainer_data, fabric_data], ids=["Trainer", "Fabric"])
@pytest.mark.parametrize("name", [n for n in ARGUMENTS if n.partition(",")[0] in OURS])
def test_a_subclass_that_passes_keywords_on_keeps_every_argument_of_ours(name, module):
    if name == "backend, of Ray":
        pytest.importorskip("ray")
    loader = Passing(Noisy(), **ARGUMENTS[name])
    again = module._update_dataloader(loader, torch.utils.data.DistributedSampler(Noisy(), 2, 1))
    assert type(again) is Passing
    for attribute in ARGUMENTS[name]:
        assert getattr(again, attribute) == getattr(loader, attribute)
    assert again._options.backend == loader._options.backend
    assert again._seed == loader._seed


@pytest.mark.parametrize("module", [trainer_data, fabric_data], ids=["Trainer", "Fabric"])
@pytest.mark.parametrize(
    "batches",
    [
        BalancedBatchSampler(Noisy(), 2, 2),
        BucketBatchSampler(range(20), 4),
        BucketBatchSampler([[4, 4]] * 20, 4, key="aspect_ratio"),
    ],
    ids=lambda batches: type(batches).__name__,
)
def test_a_batch_sampler_with_an_order_of_its_own_is_not_exchanged_silently(batches, module):
    loader = penstock.torch.DataLoader(Noisy(), batch_sampler=batches)
    sampler = torch.utils.data.DistributedSampler(Noisy(), 2, 1)
    with pytest.raises((ConfigError, TypeError), match=type(batches).__name__ + "|keys should be"):
        module._update_dataloader(loader, sampler)


# Batches.


def test_the_trainer_gets_the_batches_of_a_plain_loop(tmp_path):
    model, loader = Model(), loader_of()
    trainer_of(tmp_path).fit(model, loader)
    assert_same(epochs_of(loader_of(), 3), model.seen)
    assert loader.stats().run.batches == 3 * NUM_BATCHES  # by our engine


def test_without_a_seed_the_batches_are_torchs(tmp_path):
    models = []
    for module in (torch.utils.data, penstock.torch):
        torch.manual_seed(3)
        models.append(Model())
        loader = module.DataLoader(Noisy(), batch_size=BATCH_SIZE, shuffle=True, num_workers=2)
        trainer_of(tmp_path).fit(models[-1], loader)
    assert_same(models[0].seen, models[1].seen)
    assert len(models[0].seen) == 3 * NUM_BATCHES


# Resuming.


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A training of three epochs, and a checkpoint of every step and of every epoch."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    keep = {"filename": "{step}", "save_top_k": -1}
    callbacks = [
        ModelCheckpoint(folder / "steps", every_n_train_steps=1, **keep),
        ModelCheckpoint(folder / "epochs", every_n_epochs=1, **keep),
    ]
    model = Model()
    trainer_of(folder, callbacks).fit(model, loader_of())
    assert_same(epochs_of(loader_of(), 3), model.seen)
    return model.seen, folder


LIMITS = {"max_epochs": {}, "max_steps": {"max_epochs": -1, "max_steps": 3 * NUM_BATCHES}}


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize(
    "name",
    ["steps/step=1", "steps/step=5", "epochs/step=5", "steps/step=7", "epochs/step=10"],
)
def test_a_resumed_training_gets_the_batches_that_were_to_come(uninterrupted, name, limits):
    seen, folder = uninterrupted
    model = Model()
    trainer = trainer_of(folder, [ExactResume()], **LIMITS[limits])
    trainer.fit(model, loader_of(), ckpt_path=folder / f"{name}.ckpt", weights_only=False)
    num_done = int(name.partition("=")[2])
    assert len(model.seen) == 3 * NUM_BATCHES - num_done
    assert_same([b for _, _, b in seen[num_done:]], _batches(model))


# Of the trainer, and of its ModelCheckpoint, which by itself saves after each validation.
SETTINGS = {
    "at the end of an epoch": ({}, {}),
    "in an epoch": ({}, {"every_n_train_steps": 3}),
    "at a validation in an epoch": ({"val_check_interval": 2}, {}),
    "between two optimizer steps": ({"accumulate_grad_batches": 2}, {"every_n_train_steps": 2}),
    "with a validation before": ({"val_check_interval": 2}, {"every_n_train_steps": 3}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_training_with_validation_resumes_from_a_checkpoint(tmp_path, name):
    class Validated(Model):
        def validation_step(self, batch, batch_index):
            self.validated.append(batch[0].tolist())

    def run(callbacks, path=None):
        model = Validated()
        model.validated = []
        options = {"max_epochs": 2, "num_sanity_val_steps": 0, **settings}
        trainer = trainer_of(tmp_path, callbacks, **options)
        loaders = loader_of(num_workers=1), loader_of(shuffle=False, num_workers=0)
        trainer.fit(model, *loaders, ckpt_path=path, weights_only=False)
        return model

    settings, when = SETTINGS[name]
    keep = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, **when)
    whole = run([keep])
    first = min(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    rest = run([ExactResume()], first)
    assert 0 < len(rest.seen) < len(whole.seen) == 2 * NUM_BATCHES
    assert_same(_batches(whole)[-len(rest.seen) :], _batches(rest))
    assert rest.validated == whole.validated[-len(rest.validated) :]


def test_in_the_middle_of_an_epoch_lightning_needs_no_help(uninterrupted):
    seen, folder = uninterrupted
    model = Model()
    loader = loader_of(num_workers=1, prefetch_factor=4)  # which do not matter
    path = folder / "steps/step=7.ckpt"
    trainer_of(folder).fit(model, loader, ckpt_path=path, weights_only=False)
    assert_same(seen[7:], model.seen)
    state = torch.load(path, weights_only=True)["loops"]["fit_loop"]["state_dict"]
    assert [(s["epoch"], s["batches"]) for s in state["combined_loader"]] == [(1, 2)]


@pytest.mark.parametrize("name", ["step=2", "step=5", "step=7"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader_resumes_in_lightning(tmp_path, num_workers, name):
    class Counted(Noisy):
        count = 0

        def __getitem__(self, index):
            self.count += 1
            return index, torch.tensor([index, self.count], dtype=torch.float32)

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    def run(callbacks, path=None):
        torch.manual_seed(1)  # of the first epoch's order
        options = {"batch_size": BATCH_SIZE, "shuffle": True, "num_workers": num_workers}
        loader, model = penstock.torch.StatefulDataLoader(Counted(), **options), Model()
        trainer_of(tmp_path, callbacks, max_epochs=2).fit(
            model, loader, ckpt_path=path, weights_only=False
        )
        return model

    whole = run([ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)])
    rest = run([ExactResume()], tmp_path / f"{name}.ckpt")
    num_done = int(name.partition("=")[2])
    indices = [[batch[0].tolist() for batch in _batches(model)] for model in (whole, rest)]
    assert indices[1] == indices[0][num_done:]
    num_left = -num_done % NUM_BATCHES  # workers of the next epoch begin with the dataset anew
    assert_same(_batches(whole)[num_done : num_done + num_left], _batches(rest)[:num_left])


def test_combined_loaders_resume_each_where_it_was(tmp_path):
    def loaders():
        combined = {"a": loader_of(), "b": loader_of(range(8), batch_size=2, seed=1, num_workers=0)}
        return CombinedLoader(combined, "max_size_cycle")

    callbacks = [
        ModelCheckpoint(tmp_path / "steps", "{step}", every_n_train_steps=1, save_top_k=-1),
        ModelCheckpoint(tmp_path / "epochs", "{step}", every_n_epochs=1, save_top_k=-1),
    ]
    whole = Model()
    trainer_of(tmp_path, callbacks).fit(whole, loaders())
    for name in ("steps/step=8", "epochs/step=5", "steps/step=5"):
        rest = Model()
        trainer = trainer_of(tmp_path, [ExactResume()])
        path = tmp_path / f"{name}.ckpt"
        trainer.fit(rest, loaders(), ckpt_path=path, weights_only=False)
        assert_same(_batches(whole)[int(name.partition("=")[2]) :], _batches(rest))


def _batches(model):
    return [batch for _, _, batch in model.seen]


# Two processes.


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What both processes of lightning_ranks.py have seen, by name of the training."""
    folder = tmp_path_factory.mktemp("ranks")
    program = Path(__file__).with_name("lightning_ranks.py")
    ran = completed(
        [*TORCHRUN, "--standalone", "--nproc-per-node=2", program, folder],
        env=environment(PYTHONPATH=str(program.parents[2])),
    )
    assert ran.returncode == 0, ran.stderr
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def _indices(seen, epoch):
    return [i for e, _, batch in seen if e == epoch for i in batch[0].tolist()]


@pytest.mark.parametrize(
    "name", ["Trainer, shuffle", "Trainer, hook", "Trainer, torch's weighted sampler"]
)
def test_ranks_get_disjoint_shares_which_every_epoch_has_in_another_order(ranks, name):
    zero, one = (rank[name]["seen"] for rank in ranks)
    epochs = []
    for epoch in range(2):
        shares = _indices(zero, epoch), _indices(one, epoch)
        assert sorted(shares[0] + shares[1]) == list(range(NUM_SAMPLES))
        assert len(shares[0]) == len(shares[1])
        epochs.append(shares)
    assert epochs[0] != epochs[1]


def test_the_loaders_that_lightning_makes_for_ranks_are_ours_and_as_they_were(ranks):
    for rank in ranks:
        for name in ("Trainer, shuffle", "Trainer, hook"):
            assert rank[name]["loader"] == {
                "class": penstock.torch.DataLoader,
                "iterator": _LoaderIterator,
                "sampler": torch.utils.data.DistributedSampler,
                "seed": 7,
                "on_error": "skip",
                "num_workers": "auto" if name == "Trainer, hook" else 1,
            }


def test_ranks_draw_the_random_numbers_of_their_positions_among_all(ranks):
    for number in range(2):
        for seen in (rank["Trainer, shuffle"]["seen"] for rank in ranks):
            assert len(seen) == 6
        merged = _noise_by_position(ranks, "Trainer, shuffle", number)
        # The same as in a single process, where position k has the same numbers in any order.
        alone = [b[1] for e, _, b in epochs_of(loader_of(), 2) if e == number]
        assert torch.equal(merged, torch.cat(alone))


def _noise_by_position(ranks, name, epoch):
    shares = [torch.cat([b[1] for e, _, b in r[name]["seen"] if e == epoch]) for r in ranks]
    return torch.stack(shares, dim=1).flatten(0, 1)  # rank 0, rank 1, rank 0, ...


def test_a_balanced_sampler_is_dealt_out_by_penstock_or_by_lightning(ranks):
    expected = list(ClassBalancedSampler(Noisy(), seed=1))
    zero, one = (_indices(rank["Trainer, balanced and dealt out"]["seen"], 0) for rank in ranks)
    assert [i for pair in zip(zero, one, strict=True) for i in pair] == expected
    zero, one = (_indices(rank["Trainer, balanced"]["seen"], 0) for rank in ranks)
    assert sorted(zero + one) == sorted(expected)  # Lightning shuffles what the sampler gives


def test_a_share_is_not_dealt_out_a_second_time(ranks):
    for rank in ranks:
        for name in ("DealtOut", "InBatches"):
            error = rank[f"dealt out twice, {name}"]
            assert "use_distributed_sampler=False" in error
            assert "its share of 2 already" in error


def test_the_sampler_in_a_batch_sampler_is_dealt_out_each_epoch(ranks):
    sampler = ClassBalancedSampler(Noisy(), seed=1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        expected = list(sampler)
        shares = [_indices(r["Trainer, balanced in batches"]["seen"], epoch) for r in ranks]
        assert sorted(shares[0] + shares[1]) == sorted(expected)  # shuffled by Lightning, as above
        shares = [_indices(r["Trainer, dealt out in batches"]["seen"], epoch) for r in ranks]
        assert [i for pair in zip(*shares, strict=True) for i in pair] == expected
    for rank in ranks:
        sizes = [len(b[0]) for _, _, b in rank["Trainer, balanced in batches"]["seen"]]
        assert sizes == [4, 4, 2] * 2


def test_ranks_resume_exactly_from_the_state_of_rank_0(ranks):
    for rank in ranks:
        whole = rank["Trainer, shuffle"]["seen"]
        for step in (2, 3):  # in the middle, and at the end of the first epoch
            assert_same([b for _, _, b in whole[step:]], rank["resumed"][step])


def test_fabric_deals_out_and_tells_epochs(ranks):
    zero, one = (rank["Fabric"] for rank in ranks)
    for epoch in range(2):
        assert sorted(_indices(zero, epoch) + _indices(one, epoch)) == list(range(NUM_SAMPLES))
    assert _indices(zero, 0) != _indices(zero, 1)
    for rank in ranks:
        assert_same(rank["Fabric"][4:], rank["Fabric, resumed"])
