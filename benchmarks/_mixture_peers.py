# SPDX-License-Identifier: Apache-2.0
"""Other mixtures of datasets, for mixtures.py: run in an environment that has them.

    python benchmarks/_mixture_peers.py WAY FILE NUM_DRAWS LENGTH,LENGTH... SHARE,SHARE...

Written to FILE: the source of each draw, uint8. Printed: seconds.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator


def grain_draws(lengths: list[int], shares: list[float]) -> Iterator[int]:
    """Yield sources as Grain mixes shuffled ranges of their numbers."""
    import grain

    parts: list[Any] = [
        grain.MapDataset.range(length).seed(source).shuffle().repeat().map(lambda _, s=source: s)
        for source, length in enumerate(lengths)
    ]
    mixed = grain.MapDataset.mix(parts, weights=shares)
    reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    yield from mixed.to_iter_dataset(reading)


def huggingface_draws(lengths: list[int], shares: list[float]) -> Iterator[int]:
    """Yield sources as Hugging Face's streams are interleaved with probabilities."""
    import datasets

    def numbers(source: int, length: int) -> Iterator[dict[str, int]]:
        for _ in range(length):
            yield {"source": source}

    parts = [
        datasets.IterableDataset.from_generator(
            numbers, gen_kwargs={"source": source, "length": length}
        )
        for source, length in enumerate(lengths)
    ]
    mixed = datasets.interleave_datasets(
        parts, probabilities=shares, seed=1, stopping_strategy="all_exhausted"
    )
    yield from (sample["source"] for sample in mixed)


def main() -> None:
    """Draw, and write what came out."""
    way, path, num_draws = sys.argv[1], sys.argv[2], int(sys.argv[3])
    lengths = [int(word) for word in sys.argv[4].split(",")]
    shares = [float(word) for word in sys.argv[5].split(",")]
    draws = grain_draws if way == "grain" else huggingface_draws
    next(draws(lengths, shares))  # imports, and what is done once
    start_s = time.perf_counter()
    drawn = [source for source, _ in zip(draws(lengths, shares), range(num_draws), strict=False)]
    wall_s = time.perf_counter() - start_s
    np.save(path, np.array(drawn, np.uint8))
    sys.stdout.write(f"{wall_s}\n")


if __name__ == "__main__":
    main()
