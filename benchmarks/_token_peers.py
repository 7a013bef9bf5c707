# SPDX-License-Identifier: Apache-2.0
"""Batches of packed rows by others, for token_batches.py: run in an environment that has them.

    python benchmarks/_token_peers.py WAY FOLDER ROW_TOKENS ROWS WORKERS

FOLDER has tokens.npy, and bounds.npy with the documents' offsets in it. Printed: a `Reading`, in
JSON, of an epoch from its ninth batch on.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from _meter import Meter, Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Batches = tuple[Callable[[], Iterator[Any]], Callable[[Any], Any]]

_BINS: Final = 64  # rows that Grain has open at a time
_WARM_UP: Final = 8  # batches that are not timed, in which workers start


class _Documents:
    """The documents of a mapped file, as Grain reads them."""

    def __init__(self, tokens: Any, bounds: Any) -> None:  # noqa: ANN401
        self._tokens, self._bounds = tokens, bounds.tolist()

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        start, stop = self._bounds[index], self._bounds[index + 1]
        return {"input_ids": self._tokens[start:stop].astype(np.int32)}


def grain_batches(tokens: Any, bounds: Any, row_tokens: int, rows: int, workers: int) -> Batches:  # noqa: ANN401
    """Return how to iterate over an epoch, and how to find the tokens in a batch."""
    import grain
    from grain import experimental

    shuffled = grain.MapDataset.source(_Documents(tokens, bounds)).seed(1).shuffle()
    # Read in this thread: others would cost more than the documents here.
    reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    packed = experimental.FirstFitPackIterDataset(
        shuffled.to_iter_dataset(reading),
        length_struct={"input_ids": row_tokens},
        num_packing_bins=_BINS,
    )
    batches = packed.batch(rows)
    if workers:
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    return lambda: iter(batches), lambda batch: batch["input_ids"][
        batch["input_ids_segment_ids"] > 0
    ]


def trl_batches(
    tokens: Any,  # noqa: ANN401
    bounds: Any,  # noqa: ANN401
    row_tokens: int,
    rows: int,
    workers: int,
    columns: str | None,
) -> Batches:
    """Return the same of rows that `pack_dataset` has packed, and SFTTrainer's collator."""
    import datasets
    import pyarrow as pa
    from torch.utils.data import DataLoader
    from trl.data_utils import pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    datasets.disable_progress_bars()
    lists = pa.ListArray.from_arrays(bounds.astype(np.int32), pa.array(tokens, pa.int32()))
    packed = pack_dataset(datasets.Dataset(pa.table({"input_ids": lists})), row_tokens, "bfd")
    loader = DataLoader(
        packed.with_format(columns),
        batch_size=rows,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True),
    )
    return lambda: iter(loader), lambda batch: batch["input_ids"].numpy()


def main() -> None:
    """Check an epoch, and time another one from its ninth batch on."""
    way, folder, *numbers = sys.argv[1:]
    row_tokens, rows, workers = map(int, numbers)
    tokens = np.load(Path(folder, "tokens.npy"), mmap_mode="r")
    bounds = np.load(Path(folder, "bounds.npy"))
    if way == "grain":
        epoch, tokens_in = grain_batches(tokens, bounds, row_tokens, rows, workers)
    else:
        columns = "numpy" if way == "trl-numpy" else None
        epoch, tokens_in = trl_batches(tokens, bounds, row_tokens, rows, workers, columns)

    num_places = num_tokens = total = 0
    for batch in epoch():
        ids = tokens_in(batch)
        num_places += batch["input_ids"].shape[0] * batch["input_ids"].shape[1]
        num_tokens += ids.size
        total += int(ids.sum(dtype=np.int64))
    if num_tokens != len(tokens) or total != int(tokens.sum(dtype=np.int64)):
        raise ValueError(f"{way}: {num_tokens} tokens of {len(tokens)} came, or other ones")

    share = num_tokens / num_places
    warm_up = min(_WARM_UP, num_places // (2 * rows * row_tokens))
    num_places = num_batches = 0
    batches = epoch()
    list(itertools.islice(batches, warm_up))
    with Meter() as meter:
        for batch in batches:
            for values in batch.values():
                _ = values.reshape(-1)[-1].item() if hasattr(values, "reshape") else values
            num_places += batch["input_ids"].shape[0] * batch["input_ids"].shape[1]
            num_batches += 1
    value = num_places * share / meter.wall_s / 1e6
    reading = Reading.of(meter, value, num_batches, {"padding %": 100 * (1 - share)})
    sys.stdout.write(f"{json.dumps(asdict(reading))}\n")


if __name__ == "__main__":
    main()
