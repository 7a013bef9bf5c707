# SPDX-License-Identifier: Apache-2.0
"""Other packers of documents, for packing.py: run in an environment that has them.

    python benchmarks/_packing_peers.py WAY FOLDER ROW_TOKENS

FOLDER has lengths.npy. Written there: rows.npy, float64 (2, rows), the tokens of each row and the
sum of the squared lengths of its documents, in the order in which rows come. Printed: seconds.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

_BINS: Final = 512  # rows that Grain has open at a time


class _Documents:
    """Documents of given lengths, whose tokens are all 0."""

    def __init__(self, lengths: Any) -> None:  # noqa: ANN401
        self._lengths = lengths.tolist()
        self._zeros = np.zeros(max(self._lengths), np.int32)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": self._zeros[: self._lengths[index]]}


def grain_rows(lengths: Any, row_tokens: int, *, is_best: bool) -> Iterator[Any]:  # noqa: ANN401
    """Yield the lengths of the documents of each row that Grain packs."""
    import grain
    from grain import experimental

    pack: Any = experimental.FirstFitPackIterDataset
    if is_best:
        pack = experimental.BestFitPackIterDataset
    shuffled = grain.MapDataset.source(_Documents(lengths)).seed(1).shuffle()
    # Read in this thread: others would cost more than the documents here.
    reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    rows = pack(
        shuffled.to_iter_dataset(reading),
        length_struct={"tokens": row_tokens},
        num_packing_bins=_BINS,
    )
    for row in rows:
        counts = np.bincount(row["tokens_segment_ids"])
        yield counts[1:]


def trl_rows(lengths: Any, row_tokens: int) -> Iterator[Any]:  # noqa: ANN401
    """Yield the lengths of the documents of each row that TRL packs."""
    import datasets
    import pyarrow as pa
    from trl.data_utils import pack_dataset

    datasets.disable_progress_bars()
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
    tokens = pa.array(np.zeros(offsets[-1], np.int32))
    table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, tokens)})
    packed = pack_dataset(datasets.Dataset(table), row_tokens, "bfd")
    yield from (np.array(row) for row in packed["seq_lengths"])


def main() -> None:
    """Pack, and write what came out."""
    way, folder, row_tokens = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    lengths = np.load(folder / "lengths.npy")

    def rows_of(lengths: Any) -> Iterator[Any]:  # noqa: ANN401
        if way == "trl":
            return trl_rows(lengths, row_tokens)
        return grain_rows(lengths, row_tokens, is_best=way == "grain-best")

    list(rows_of(lengths[:100]))  # imports, and what is done once
    start_s = time.perf_counter()
    rows = list(rows_of(lengths))
    wall_s = time.perf_counter() - start_s
    found = [[row.sum() for row in rows], [(row.astype(np.float64) ** 2).sum() for row in rows]]
    np.save(folder / "rows.npy", np.array(found, np.float64))
    sys.stdout.write(f"{wall_s}\n")


if __name__ == "__main__":
    main()
