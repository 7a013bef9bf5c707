# SPDX-License-Identifier: Apache-2.0
"""mmengine's `Runner` on Penstock's loader, and the loader's state in its checkpoints.

`Runner.build_dataloader` makes torch's own loader of a config, whatever the config says. The runner
here makes ours of the same config. It is found by `runner_type`, and the hook by its `type`, once
this module is imported, as `custom_imports` of a config does.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import os
import pickle
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import torch
import torch.utils.data
from mmengine.dataset import worker_init_fn as mmengines_init
from mmengine.dist import get_rank, get_world_size
from mmengine.hooks import Hook
from mmengine.logging import HistoryBuffer
from mmengine.registry import HOOKS, RUNNERS
from mmengine.runner import Runner

from penstock.deprecation import removed_arguments
from penstock.errors import ConfigError
from penstock.faults import FaultPolicy
from penstock.integrations.dealing import init_for
from penstock.torch.loader import DataLoader, added_arguments

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["PenstockHook", "PenstockRunner"]

T_co = TypeVar("T_co", covariant=True)

_OURS: Final = frozenset(added_arguments())
# What mmengine makes objects of, or takes out, before it calls the loader.
_BUILT: Final = (
    "dataset", "sampler", "batch_sampler", "collate_fn", "worker_init_fn", "num_batch_per_epoch",
    "disable_subprocess_warning",
)  # fmt: skip
_STATE: Final = "penstock_loader"  # key in a checkpoint


def _statistic(owner: object, name: str) -> object:
    """Stand in for `getattr` in a checkpoint, which names the statistics of a history by it."""
    if owner is not HistoryBuffer or name.startswith("_"):
        raise pickle.UnpicklingError(f"a checkpoint of mmengine's asks for {name!r} of {owner!r}")
    return getattr(owner, name)


# What mmengine's checkpoints hold besides tensors and plain values: the histories of its log, which
# are numpy's arrays and scalars. Those are pickled as calls of functions whose names have changed.
_IN_CHECKPOINTS: Final = (
    HistoryBuffer,
    (_statistic, "builtins.getattr"),
    np.ndarray,
    np.dtype,
    np.empty(0).__reduce__()[0],
    np.float64(0).__reduce__()[0],
    *(type(np.dtype(name)) for name in ("float32", "float64", "int32", "int64", "bool")),
)


class _LazyLoader(DataLoader[T_co]):
    """A loader whose iterator begins with the first batch that is asked for.

    mmengine's `IterBasedTrainLoop` makes its iterator when it is built, before a checkpoint is
    loaded: workers would read batches that the state says were given, and `InfiniteSampler`, which
    has one order for all its life, would have given away its beginning.
    """

    _is_lazy = True

    def __iter__(self) -> Any:  # noqa: ANN401
        return self._later() if self._is_lazy else super().__iter__()

    def _later(self) -> Iterator[T_co]:
        yield from super().__iter__()

    def _iter_on(self, *target: Any) -> Any:  # noqa: ANN401
        self._is_lazy = False  # the target holds while the iterator is made, and no longer
        try:
            return super()._iter_on(*target)
        finally:
            self._is_lazy = True


def _endless(loader: DataLoader[Any], num_given: int) -> Iterator[Any]:
    """Yield the batches of one epoch after the other, for `IterBasedTrainLoop`.

    On resume the loop takes as many batches as it has trained with, to drop them. The loader's
    state counts them already, so they cost nothing here.

    Raises:
        ConfigError: the loader has no batches.
    """
    yield from itertools.repeat(None, num_given)
    num_empty = 0
    while num_empty < 2:  # of a resumed epoch nothing may be left
        num_empty += 1
        for batch in loader:
            num_empty = 0
            yield batch
            del batch  # its memory is free for the next one
        loader.set_epoch(loader.epoch)  # reaches samplers of mmengine's as well
    raise ConfigError("an epoch of the train loader has no batches: check drop_last and batch_size")


@RUNNERS.register_module()
class PenstockRunner(Runner):  # type: ignore[misc]  # mmengine has no types
    """mmengine's `Runner`, whose loaders are Penstock's.

    In a config:

        custom_imports = dict(imports=["penstock.integrations.mmengine"])
        runner_type = "PenstockRunner"

    The config of a loader stays as it is, and may have Penstock's own arguments besides, such as
    `seed`, `on_error`, `backend` or `num_workers="auto"`.
    """

    @staticmethod
    def build_dataloader(
        dataloader: torch.utils.data.DataLoader[Any] | dict[str, Any],
        seed: int | None = None,
        diff_rank_seed: bool = False,
    ) -> torch.utils.data.DataLoader[Any]:
        """Return a `penstock.torch.DataLoader`, built of a config as mmengine builds torch's.

        Dataset, sampler, batch sampler, `collate_fn`, `worker_init_fn` and `num_batch_per_epoch`
        mean what they mean there. Beyond that:

        - `seed="runner"` takes the seed of the runner, the same on all ranks; a number is taken as
          it is. Without, the batches are those of mmengine's own loader, bit for bit.
        - `on_error` may be a dict, of the arguments of `penstock.FaultPolicy`.
        - The type of `collate_fn` may be a class: an object of it is made of the other keys. That
          is how a `penstock.collate.CollateInto` comes in.

        Args:
            dataloader: Config of a loader; a loader is returned as it is.
            seed: Of the runner; for the sampler, and the workers' generators.
            diff_rank_seed: Whether it differs from rank to rank.

        Raises:
            ConfigError: `seed="runner"`, and the runner has no seed; or what the loader refuses.
        """
        if isinstance(dataloader, torch.utils.data.DataLoader):
            return dataloader
        theirs = copy.copy(dataloader)
        ours = {key: theirs.pop(key) for key in list(theirs) if key in _OURS}
        if isinstance(on_error := ours.get("on_error"), dict):
            ours["on_error"] = FaultPolicy(**on_error)
        if ours.get("seed") == "runner":
            if seed is None:
                raise ConfigError('seed="runner" takes the seed of the runner, which has none.')
            # mmengine has added the rank.
            ours["seed"] = seed - get_rank() if diff_rank_seed else seed
        num_workers = theirs.get("num_workers", 0)
        if not isinstance(num_workers, int):  # "auto", or an Auto
            # mmengine keeps the seeds of its workers apart by it; it may be any large enough.
            theirs["num_workers"] = os.cpu_count() or 1
        return _on_our_engine(theirs, ours, num_workers, seed, diff_rank_seed)

    def load_checkpoint(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - mmengine's
        """Load a checkpoint as mmengine does, which torch from 2.6 on refuses by itself.

        By then `torch.load` makes tensors and plain values only, and mmengine's checkpoints hold
        the histories of its log, of numpy arrays. These are allowed here, by name. That is no wall
        against a file that was made to do harm, since numpy believes what it says of an array's
        type: load checkpoints that you trust.
        """
        with torch.serialization.safe_globals(list(_IN_CHECKPOINTS)):
            return super().load_checkpoint(*args, **options)


def _on_our_engine(
    theirs: Mapping[str, Any],
    ours: Mapping[str, Any],
    num_workers: int | str,
    seed: int | None,
    diff_rank_seed: bool,
) -> DataLoader[Any]:
    """Have mmengine build all parts, and torch's loader of them; make ours of the parts."""
    plain = Runner.build_dataloader(theirs, seed, diff_rank_seed)
    settings = {key: value for key, value in theirs.items() if key not in _BUILT}
    settings["num_workers"] = num_workers
    if theirs.get("batch_sampler") is not None:
        settings["batch_sampler"] = plain.batch_sampler
        settings.pop("batch_size", None)
    elif theirs["sampler"] is not None:
        settings["sampler"] = plain.sampler
    backend = ours.get("backend", "process")
    settings["worker_init_fn"] = init_for(backend, plain.worker_init_fn, mmengines_init)
    # A loader without a seed draws from torch's generator when an iterator is made: at the same
    # moment as mmengine's, so that weights that are drawn later are the same.
    kind = DataLoader if ours.get("seed") is None else _LazyLoader
    collate_fn = _collate_fn(plain.collate_fn)
    return kind(plain.dataset, collate_fn=collate_fn, **settings, **ours)


def _collate_fn(built: Any) -> Any:  # noqa: ANN401 - what a user registered
    """Return what mmengine's `partial` stands for: an object of a class, or a bare function."""
    if not isinstance(built, functools.partial):
        return built
    if inspect.isclass(built.func):
        return built()
    return built if built.args or built.keywords else built.func


@HOOKS.register_module()
class PenstockHook(Hook):  # type: ignore[misc]  # mmengine has no types
    """Keeps the state of the train loader in checkpoints, and logs what limits the loader.

    In a config: `custom_hooks = [dict(type="PenstockHook")]`.

    A run that is resumed goes on with the very next batch, in the middle of an epoch too, with both
    of mmengine's loops; nothing that was trained with before is read again. With `seed=` in the
    loader's config, batches are bit for bit what they would have been. Without, their order is, for
    `EpochBasedTrainLoop`; `IterBasedTrainLoop` reads and drops batches, as mmengine does by itself.

    After each epoch the log says in words what limits the loader.
    """

    # After mmengine's own hook has set the sampler's epoch, before those that log and save.
    priority = "NORMAL"

    @removed_arguments(interval="the verdict in the log, or mmengine's own `data_time`")
    def __init__(self) -> None:
        """Keep no state yet."""
        self._state: dict[str, Any] | None = None

    def before_train(self, runner: Runner) -> None:
        """Look whether the train loader has a state that can be kept.

        Raises:
            ConfigError: it is not a loader of Penstock's; or each rank has a stream of its own,
                of which a checkpoint, written by the first rank, would hold one.
        """
        loader = runner.train_dataloader
        if not isinstance(loader, DataLoader):
            raise ConfigError(
                f"PenstockHook keeps the state of a Penstock loader, got {type(loader)}. Set "
                'runner_type="PenstockRunner" in the config, and build the runner by '
                "RUNNERS.build(cfg)"
            )
        if isinstance(loader.dataset, torch.utils.data.IterableDataset) and get_world_size() > 1:
            raise ConfigError(
                f"{type(loader.dataset).__name__} is a stream, whose state differs from rank to "
                "rank, and rank 0 alone writes mmengine's checkpoint. Train without PenstockHook"
            )

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Keep the state of the loader until training begins."""
        self._state = checkpoint.get(_STATE)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Put the state of the train loader into the checkpoint."""
        checkpoint[_STATE] = runner.train_dataloader.state_dict()

    def before_train_epoch(self, runner: Runner) -> None:
        """Go on where the checkpoint was saved, if training goes on from it.

        Raises:
            StateError: the state is one of other data, or of another batch size, sampler or seed.
        """
        state, self._state = self._state, None
        loader, loop = runner.train_dataloader, runner.train_loop
        if not (runner.iter or runner.epoch):  # weights alone were loaded
            state = None
        is_endless = hasattr(loop, "dataloader_iterator")
        if is_endless and not isinstance(loader, _LazyLoader):
            return  # it began before its state was loaded: mmengine reads and drops batches
        if state is not None:
            loader.load_state_dict(state)
        if is_endless:
            loop.dataloader_iterator = _endless(loader, 0 if state is None else runner.iter)

    def after_train(self, runner: Runner) -> None:
        """Let the workers of a loop over iterations go, which would wait for it to go on."""
        loop = runner.train_loop
        if isinstance(getattr(loop, "dataloader_iterator", None), Generator):
            loop.dataloader_iterator = _endless(runner.train_dataloader, 0)

    def after_train_epoch(self, runner: Runner) -> None:
        """Say in words what limits the loader."""
        runner.logger.info("Train loader: %s", runner.train_dataloader.stats().verdict)
