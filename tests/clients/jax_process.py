# SPDX-License-Identifier: Apache-2.0
"""One of two processes whose devices are one mesh; test_jax.py starts both."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from penstock import Loader
from penstock.integrations.jax import to_devices
from penstock.sampling import DistributedSampler, RandomSampler


def main(number: int, port: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=number)
    rows = np.arange(40, dtype=np.float32)
    sampler = DistributedSampler(
        RandomSampler(rows, seed=1), jax.process_count(), jax.process_index()
    )
    sharding = NamedSharding(jax.make_mesh((4,), ("data",)), PartitionSpec("data"))
    total = jax.jit(jnp.sum)
    sums = []
    for batch in to_devices(Loader(rows, batch_size=4, sampler=sampler), sharding):
        assert batch.shape == (8,), batch.shape  # of both processes
        sums.append(float(total(batch)))
    assert sum(sums) == rows.sum(), sums
    sys.stdout.write(f"{len(sums)} batches of both\n")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
