# SPDX-License-Identifier: Apache-2.0
"""What is done with a batch between its arrival and the consumer: page-locking, a copy to a device.

arrives ──▶ begin ── as soon as it is there, also before the consumer asks ──▶ finish ──▶ consumer
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

__all__ = ["DeliveryHook"]


class DeliveryHook(Protocol):
    """Works on each batch between its arrival and its delivery.

    Concurrency:
        The consumer's thread.
    """

    @property
    def begins_ahead(self) -> bool:
        """Whether it is worth while to begin with the next batch before it is asked for."""

    def without_autograd(self) -> AbstractContextManager[object]:
        """Return a context in which a batch is begun ahead: the consumer is still at another one.

        What the consumer has switched on for that one is not to reach this one.
        """

    def begin(self, batch: Any, where: Callable[[], str]) -> Any:  # noqa: ANN401 - any batch tree
        """Begin with a batch, without waiting for anything.

        Args:
            batch: As the workers made it.
            where: Says which one it is, for messages: "epoch 0, step 3".

        Returns:
            Something for `finish`.

        Raises:
            Exception: of this batch, which is lost.
        """

    def finish(self, begun: Any) -> Any:  # noqa: ANN401 - what `begin` returned
        """Return what the consumer gets; called in the order of `begin`, and raises as it does."""

    def close(self) -> None:
        """Wait until nothing is under way, and let go of all batches; a second call does nothing.

        What was handed over stays valid.
        """
