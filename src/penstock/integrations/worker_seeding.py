# SPDX-License-Identifier: Apache-2.0
"""Which `worker_init_fn` of a client's own threads are to call: none that seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.engine.backends import traits_of
from penstock.options import backend_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.options import Ray

__all__ = ["init_for"]


def init_for(
    backend: str | Ray,
    given: Callable[..., Any] | None,
    seeder: Callable[..., Any],
) -> Callable[..., Any] | None:
    """Return a loader's `worker_init_fn`, or None where it would seed the main process.

    A client's own seeds the global generators of a worker. Threads share them with the main
    process, whose dropout would draw the same numbers in every epoch.

    Args:
        backend: What workers are.
        given: As the client set it.
        seeder: The client's own, which `given` may be a `partial` of. A user's stays.
    """
    function = getattr(given, "func", given)
    return (
        None
        if traits_of(backend_name(backend)).shares_interpreter and function is seeder
        else given
    )
