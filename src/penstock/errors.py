# SPDX-License-Identifier: Apache-2.0
"""Every error Penstock raises itself, by who has to act.

    PenstockError
    ├── ConfigError (ValueError)        the caller: an argument, or two that contradict each other
    │   ├── UnpicklableError            … something that cannot be sent to a spawned worker
    │   └── StateError                  … a saved state that does not fit, or comes too late
    ├── CollateError (RuntimeError)     the data: samples that do not fit into one batch
    ├── TooManyFailures (RuntimeError)  the data: more bad samples than the fault policy allows
    ├── WorkerError (RuntimeError)      the pool
    │   ├── WorkerDied                  … a worker process ended before its work was done
    │   └── WorkerTimeout               … no batch came within `timeout` seconds
    ├── StoreError (RuntimeError)       stored data: a damaged record, a file that is no store
    │   └── StoreUnreachable            … a server that does not answer
    ├── TransportError (RuntimeError)   shared memory, or the channel to a worker
    └── MissingExtraError (ImportError) an optional dependency that is not installed

An exception raised by the user's own code is never wrapped: it keeps its type, and a note says
which sample, worker, epoch and step it came from. A note of each error here names its section of
docs/troubleshooting.md.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "CollateError",
    "ConfigError",
    "MissingExtraError",
    "PenstockError",
    "StateError",
    "StoreError",
    "StoreUnreachable",
    "TooManyFailures",
    "TransportError",
    "UnpicklableError",
    "WorkerDied",
    "WorkerError",
    "WorkerTimeout",
]


class PenstockError(Exception):
    """Root of every error that Penstock raises itself.

    Attributes:
        help_topic: The section of docs/troubleshooting.md, and the word for `penstock explain`: the
            name of the class, of a user's own subclass that of the nearest class of this module.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Take what other exceptions take."""
        super().__init__(*args, **kwargs)
        super().add_note(self._help_note)

    @property
    def help_topic(self) -> str:
        """See the class."""
        return next(cls.__name__ for cls in type(self).__mro__ if cls.__module__ == __name__)

    @property
    def _help_note(self) -> str:
        topic = self.help_topic
        return f"Help: `penstock explain {topic}`, or docs/troubleshooting.md#{topic.lower()}"

    def add_note(self, note: str, /) -> None:
        """Add a note; the one on help stays the last, as where it happened is read first."""
        super().add_note(note)
        if self.__notes__[-2:-1] == [self._help_note]:
            self.__notes__.append(self.__notes__.pop(-2))


class ConfigError(PenstockError, ValueError):
    """An argument is outside its range, or contradicts another one."""


class UnpicklableError(ConfigError, pickle.PicklingError):
    """Something cannot be pickled for a worker; the message names its attribute path."""


class StateError(ConfigError):
    """A state that cannot be loaded: it was saved by another setup, or an epoch is running."""


class CollateError(PenstockError, RuntimeError):
    """Samples of one batch do not fit together; the message names two of them."""

    def __init__(self, template: str, positions: tuple[int, int]) -> None:
        """Take the message, with `{first}` and `{other}` for the samples, and their positions."""
        super().__init__(template, positions)
        self.template = template
        self.positions = positions
        self.names = tuple(f"sample {position} of the batch" for position in positions)

    def name_samples(self, indices: Sequence[object]) -> None:
        """Name the samples by their indices in the dataset, which only the loader knows."""
        self.names = tuple(
            f"sample {indices[position]} (number {position} of the batch)"
            for position in self.positions
        )

    def __str__(self) -> str:
        """Return the message with the best names known."""
        return self.template.format(first=self.names[0], other=self.names[1])


class TooManyFailures(PenstockError, RuntimeError):
    """More samples were bad than the fault policy allows; the message lists the first ten."""


class WorkerError(PenstockError, RuntimeError):
    """The pool of workers cannot go on."""


class WorkerDied(WorkerError):
    """A worker process ended before its work was done."""


class WorkerTimeout(WorkerError):
    """No batch arrived within `timeout` seconds."""


class StoreError(PenstockError, RuntimeError):
    """A record or a store is damaged, missing or out of reach; the message names it."""


class StoreUnreachable(StoreError):
    """A server cannot be reached: nothing is known of the records."""


class TransportError(PenstockError, RuntimeError):
    """Shared memory or a worker's channel failed."""


class MissingExtraError(PenstockError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""
