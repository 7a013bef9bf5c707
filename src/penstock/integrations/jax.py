# SPDX-License-Identifier: Apache-2.0
"""Batches of `penstock.Loader` on JAX's devices, sharded, and put there ahead of the loop.

On a CPU, `jax.device_put` may take NumPy's memory as it is, also with `may_alias=False`. It keeps
the array, and with it the slot of shared memory that the array lies in, for as long as the jax
array lives; so a batch that is held is never written over. Where no process lies between, without
workers or with threads, the array may be one of the dataset itself, and what a `transform` returns
may be its own; both are copied first.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from penstock.integrations.ahead_of_loop import AheadOfLoop
from penstock.randomness.keys import checked_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["to_devices"]


def to_devices(loader: Any, sharding: Any = None, **options: Any) -> DeviceBatches:  # noqa: ANN401
    """Return an iterable over a loader's batches as jax arrays, whose state goes into checkpoints.

    Each `iter()` is an epoch of the loader. Trees (dicts, lists, tuples) stay as they are; arrays
    of numbers in them become jax arrays, anything else (text, say) stays what it is. JAX makes
    int32 of int64 and float32 of float64, unless `jax_enable_x64` is set.

    Args:
        loader: A `penstock.Loader`.
        sharding: A `jax.sharding.Sharding`, a device, or a tree of them: where arrays go.
            `NamedSharding(mesh, PartitionSpec("data"))` splits the first axis over the mesh's
            devices. A tree, a prefix of the batch's, says it for each part. None, or a None in a
            tree: JAX's default device. With a sharding over several processes each gives its own
            part of the batch: let its loader read its own share, by
            `penstock.sampling.DistributedSampler(…, jax.process_count(),
            jax.process_index())`.
        **options: `prefetch`, 2 unless given: batches that are put on the devices ahead of the one
            that the loop has. They take memory there, and do not count in `state_dict`.
            `transform`: called with each batch before it goes, to leave columns out, say, or to
            pad. What it returns is copied, so it may fill the same buffer every time.

    Raises:
        ConfigError: `prefetch` is negative.

    Example:
        >>> import numpy as np
        >>> from penstock import Loader
        >>> loader = Loader(np.arange(6, dtype=np.float32), batch_size=4)
        >>> [float(batch.sum()) for batch in to_devices(loader)]
        [6.0, 9.0]
    """
    return DeviceBatches(loader, sharding, **options)


class DeviceBatches(AheadOfLoop):
    """A loader's batches as jax arrays; make one with `to_devices`.

    A batch is the caller's until dropped. It may be donated (`jax.jit(…, donate_argnums=…)`).

    Concurrency:
        One thread, which is the one that iterates.
    """

    def __init__(
        self,
        loader: Any,  # noqa: ANN401
        sharding: Any = None,  # noqa: ANN401
        *,
        prefetch: int = 2,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        """See `to_devices`."""
        super().__init__(loader, transform)
        self.sharding = sharding
        self.prefetch = checked_count("prefetch", prefetch)

    def __iter__(self) -> Iterator[Any]:
        """Begin the loader's next epoch.

        Raises:
            ValueError: JAX's: an axis of a batch that is to be split does not divide by its
                devices.
        """
        # Not a generator function: the epoch begins, and its state counts, with this call.
        batches = iter(self.loader)
        self._given = self.loader.state_dict()
        return self._batches(batches)

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        ahead: deque[tuple[Any, Mapping[str, Any]]] = deque()  # and the state behind each
        for batch in batches:
            if self.transform is not None:
                batch = self.transform(batch)
            ahead.append((self._put(batch), self.loader.state_dict()))
            del batch  # the jax arrays alone are to keep its memory
            if len(ahead) > self.prefetch:
                yield self._handed(*ahead.popleft())
        while ahead:
            yield self._handed(*ahead.popleft())
        self._given = None

    def _handed(self, batch: Any, state: Mapping[str, Any]) -> Any:  # noqa: ANN401
        self._given = state
        return batch

    def _put(self, batch: Any) -> Any:  # noqa: ANN401
        is_shared = self._is_shared

        def put(leaf: Any, sharding: Any) -> Any:  # noqa: ANN401
            if is_shared and isinstance(leaf, np.ndarray):  # of text, too: it waits for the loop
                leaf = leaf.copy()
            if not isinstance(leaf, np.ndarray | np.generic) or leaf.dtype.kind not in "biufc":
                return leaf
            if isinstance(sharding, jax.sharding.Sharding) and not sharding.is_fully_addressable:
                return jax.make_array_from_process_local_data(sharding, leaf)
            try:
                return jax.device_put(leaf, sharding)
            except ValueError as error:
                error.add_note(
                    "give the loader drop_last=True or a batch_size that divides, let transform= "
                    "pad the batch, or give this array a sharding that keeps it whole"
                )
                raise

        def put_part(sharding: Any, part: Any) -> Any:  # noqa: ANN401
            return jax.tree_util.tree_map(lambda leaf: put(leaf, sharding), part)

        return jax.tree_util.tree_map(
            put_part, self.sharding, batch, is_leaf=lambda sharding: sharding is None
        )
