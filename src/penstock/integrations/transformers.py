# SPDX-License-Identifier: Apache-2.0
"""Transformers' `Trainer` on Penstock's loaders, and their place in its checkpoints.

trainer = PenstockTrainer(model, args, train_dataset=train, eval_dataset=held_out)
trainer.train(resume_from_checkpoint=True)  # reads nothing of the batches before
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch.utils.data
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
)
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.trainer_utils import seed_worker

from penstock.data.dataset import follows_epochs
from penstock.errors import ConfigError, StateError
from penstock.integrations.accelerate import PreparedLoader, skip_first_batches
from penstock.integrations.dealing import init_for, read_state, write_state
from penstock.torch.loader import DataLoader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["PenstockTrainer", "PenstockTrainerMixin"]

_FILE: Final = "penstock_loader"
# What Trainer sets in its own loaders, from TrainingArguments.
_TAKEN_OVER: Final = (
    "collate_fn", "num_workers", "pin_memory", "worker_init_fn", "multiprocessing_context",
    "prefetch_factor", "persistent_workers", "in_order",
)  # fmt: skip


class PenstockTrainerMixin:
    """Gives a `Trainer` of anybody's the loaders of Penstock: write it before the trainer's class.

    Every loader that the trainer makes for training, evaluation or prediction is made anew on
    Penstock's engine, with the dataset, sampler, collator and settings that it has: whatever
    `TrainingArguments` say of loaders holds. It is seeded by `data_seed`, or else `seed`, so that
    batches and their random numbers, a collator's too, are the same for any number of workers, and
    for any number of processes with the same global batch. With `backend="thread"` that holds of
    `penstock.sample_rng()`, but not of draws from the global generators, which threads share.

    Checkpoints hold the place in the epoch. `train(resume_from_checkpoint=...)` goes on there and
    reads nothing of the batches before; with `ignore_data_skip` the epoch begins anew, as always.

    Example:
        >>> import torch
        >>> from transformers import Trainer, TrainingArguments
        >>> class Reweighted(Trainer):
        ...     "One's own."
        >>> class MyTrainer(PenstockTrainerMixin, Reweighted):
        ...     pass
        >>> args = TrainingArguments(use_cpu=True, report_to="none", per_device_train_batch_size=2)
        >>> rows = [{"x": torch.tensor([float(n)])} for n in range(5)]
        >>> trainer = MyTrainer(torch.nn.Linear(1, 1), args, train_dataset=rows)
        >>> loader = trainer.get_train_dataloader()
        >>> type(loader).__name__, len(loader), loader.seed
        ('PreparedLoader', 3, 42)
    """

    def __init__(
        self,
        *arguments: Any,  # noqa: ANN401 - the trainer's own
        loader_options: Mapping[str, Any] | None = None,
        eval_loader_options: Mapping[str, Any] | None = None,
        **named: Any,  # noqa: ANN401
    ) -> None:
        """As the trainer's, and more.

        Args:
            arguments: The trainer's.
            loader_options: Of the training loader, what no TrainingArguments say, by the names of
                `penstock.torch.DataLoader`: `on_error`, `backend`, `progress`, `num_workers="auto"`
                with its budgets, and others. `seed=None` gives the batches of Transformers' own
                loader, bit for bit.
            eval_loader_options: Of the loaders for evaluation and prediction.
            named: The trainer's.
        """
        self.loader_options = dict(loader_options or {})
        self.eval_loader_options = dict(eval_loader_options or {})
        super().__init__(*arguments, **named)

    def get_train_dataloader(self) -> Any:  # noqa: ANN401 - torch's class by annotation
        """Return the trainer's loader, made anew."""
        loader: Any = super().get_train_dataloader()  # type: ignore[misc]
        return self._made_anew(loader, self.loader_options)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:  # noqa: ANN401
        """Return the trainer's loader, made anew; it begins with epoch 0 every time."""
        loader: Any = super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]
        made = self._made_anew(loader, self.eval_loader_options)
        kept: dict[str, Any] = getattr(self, "_eval_dataloaders", {})  # with persistent workers
        kept.update({name: made for name, known in kept.items() if known is loader})
        if isinstance(made, PreparedLoader):
            made.set_epoch(0)
        return made

    def get_test_dataloader(self, test_dataset: Any) -> Any:  # noqa: ANN401
        """Return the trainer's loader, made anew."""
        loader: Any = super().get_test_dataloader(test_dataset)  # type: ignore[misc]
        return self._made_anew(loader, self.eval_loader_options)

    def _made_anew(self, loader: Any, options: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Return a loader of ours in place of one that Accelerate has prepared; others stay."""
        trainer: Any = self
        if not isinstance(loader, DataLoaderShard | DataLoaderDispatcher):
            return loader
        accelerator = trainer.accelerator
        args = trainer.args
        seed = args.seed if args.data_seed is None else args.data_seed
        if isinstance(loader, DataLoaderDispatcher) and accelerator.num_processes > 1:
            raise ConfigError(
                "of a stream each process reads its own share on this engine. Give "
                "TrainingArguments(accelerator_config={'dispatch_batches': False})."
            )
        taken = {name: getattr(loader, name) for name in _TAKEN_OVER}
        backend = options.get("backend", "process")
        taken["worker_init_fn"] = init_for(backend, taken["worker_init_fn"], seed_worker)
        ours: DataLoader[Any] = DataLoader(
            **{**taken, "seed": seed, **_order_of(loader), **options}
        )
        if any(known is loader for known in accelerator._dataloaders):
            accelerator._dataloaders.remove(loader)  # for `save_state`, which Trainer does not call
        return PreparedLoader(ours, loader, accelerator, getattr(loader, "device", None))

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the loader's place where the generators' states are saved."""
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        trainer: Any = self
        loader = trainer.callback_handler.train_dataloader
        if isinstance(loader, PreparedLoader):
            write_state(output_dir, _FILE, trainer.args.process_index, loader.state_dict())

    def _run_epoch(self, *, train_dataloader: Any, **named: Any) -> Any:  # noqa: ANN401
        """Run an epoch; the first one after a checkpoint goes on where that was saved.

        There Trainer calls `accelerate.skip_first_batches`, which reads the batches to be skipped,
        on torch's engine. It gets a stream that has nothing in their places.
        """
        trainer: Any = self
        folder = named["resume_from_checkpoint"]
        num_given = named["steps_trained_in_current_epoch"]
        is_first = folder is not None and named["epoch"] == named["epochs_trained"]
        is_amid = is_first and num_given > 0 and not trainer.args.ignore_data_skip
        if is_amid and isinstance(train_dataloader, PreparedLoader):
            rank = trainer.args.process_index
            state = read_state(folder, _FILE, rank)
            _go_on(train_dataloader, state, named["epoch"], num_given)
            rest = _Rest(train_dataloader, num_given)
            train_dataloader = torch.utils.data.DataLoader(
                rest, batch_size=None, collate_fn=lambda batch: batch
            )
        return super()._run_epoch(train_dataloader=train_dataloader, **named)  # type: ignore[misc]


class PenstockTrainer(PenstockTrainerMixin, Trainer):  # type: ignore[misc]  # no types there
    """Transformers' `Trainer` with Penstock's loaders; see `PenstockTrainerMixin`."""


class _Rest(IterableDataset[Any]):
    """An epoch's batches from number `num_given` on, and None in place of those before."""

    def __init__(self, loader: PreparedLoader[Any], num_given: int) -> None:
        self._loader = loader
        self._num_given = num_given

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._num_given):
            yield None
        yield from self._loader


def _order_of(loader: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the dataset of a loader, and the batches of all processes."""
    dataset = loader.dataset
    if not isinstance(dataset, IterableDataset):
        batches = loader.batch_sampler
        is_shard = isinstance(batches, BatchSamplerShard)
        return {"dataset": dataset, "batch_sampler": batches.batch_sampler if is_shard else batches}
    if isinstance(dataset, IterableDatasetShard) and follows_epochs(dataset.dataset):
        dataset = dataset.dataset  # it deals its shards out by itself
    return {"dataset": dataset, "batch_size": loader.batch_size, "drop_last": loader._drop_last}


def _go_on(
    loader: PreparedLoader[Any], state: dict[str, Any] | None, epoch: int, num_given: int
) -> None:
    """Let the next `iter()` go on with batch `num_given` of an epoch."""
    if state is None:  # saved by another trainer
        loader.set_epoch(epoch)
        skip_first_batches(loader, num_given)
        return
    if (state.get("epoch"), state.get("batches")) != (epoch, num_given):
        raise StateError(
            f"the checkpoint was saved in epoch {state.get('epoch')} with {state.get('batches')} "
            f"batches given, but the training goes on in epoch {epoch} after {num_given}: keep the "
            "batch size, gradient_accumulation_steps and dataset of the checkpoint, or begin the "
            "epoch anew with ignore_data_skip=True"
        )
    loader.load_state_dict(state)
