# SPDX-License-Identifier: Apache-2.0
"""A callback for what Lightning leaves open when it resumes a training: the ends of epochs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from penstock.torch import DataLoader, StatefulDataLoader

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ExactResume"]


class ExactResume(Callback):  # type: ignore[misc,unused-ignore]  # Any, where mypy follows nothing
    """Lets a training go on with the right epoch when its checkpoint is from the end of one.

    Lightning saves the states of its loaders, and in the middle of an epoch it needs no help. But
    the states in a checkpoint that was saved at the end of an epoch are not loaded, so that a
    loader with `seed=` would begin with epoch 0 again. And after a checkpoint from the last step of
    an epoch (`every_n_train_steps`) the rest of that epoch, which is nothing, would be taken for a
    whole epoch: the next one would be left out. Here both begin the next epoch.

    It is needed in the `Trainer` that resumes, and touches no loaders but Penstock's.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[ExactResume()], logger=False, accelerator="cpu")
    """

    def __init__(self) -> None:
        """Know of no checkpoint yet."""
        self._states: list[dict[str, Any]] = []

    def on_load_checkpoint(
        self, trainer: object, pl_module: object, checkpoint: Mapping[str, Any]
    ) -> None:
        """Note where the loaders were."""
        fit_loop = checkpoint.get("loops", {}).get("fit_loop", {})
        self._states = fit_loop.get("state_dict", {}).get("combined_loader", [])

    def on_train_start(self, trainer: Any, pl_module: object) -> None:  # noqa: ANN401
        """Begin the next epoch if that of the checkpoint was over.

        This is the first moment at which there are loaders, and Lightning has begun to iterate them
        already; no batch was taken yet.
        """
        states, self._states = self._states, []
        loaders = CombinedLoader(trainer.train_dataloader).flattened
        stateful = [loader for loader in loaders if hasattr(loader, "state_dict")]
        if len(states) != len(stateful) or not _is_at_an_end(trainer.fit_loop):
            return
        for loader, state in zip(stateful, states, strict=True):
            # Lightning knows the last batch as such, and does not ask for one more: then the epoch
            # of the state is the old one, with all its batches given.
            if isinstance(loader, StatefulDataLoader):
                loader.load_state_dict({**state, "_iterator_finished": True})
            elif isinstance(loader, DataLoader):
                loader.set_epoch(state["epoch"] + bool(state["batches"]))
        iter(trainer.fit_loop._data_fetcher)


def _is_at_an_end(fit_loop: Any) -> bool:  # noqa: ANN401
    """Whether Lightning is going to ask for the first batch of another epoch.

    What it "restarts" is an epoch under way. Two things look like one: a checkpoint from the last
    step, after which it goes on with the next epoch; and, with `max_steps`, one from the end of an
    epoch, where it asks once more for what is left, and our loader says rightly: nothing.
    """
    batches = fit_loop.epoch_loop
    is_after_last = batches.restarted_on_train_batch_end and batches.batch_progress.is_last_batch
    return bool(is_after_last or not fit_loop.restarting)
