# SPDX-License-Identifier: Apache-2.0
"""How many rows per second come out of a Hugging Face dataset, shuffled?

Question
    A `datasets.Dataset` lies in an Arrow file that is mapped into memory: 32 numbers and a sequence
    of 64 tokens per row. How fast is it read in shuffled batches of 256, as it is and through
    `from_huggingface`?

Method
    torch     `torch.utils.data.DataLoader` on the dataset in its formats "torch" and "numpy". It
              calls `__getitems__`, and collates the rows.
    penstock  `penstock.torch.DataLoader` on the same dataset in the same formats ("as it is"), and
              on `penstock.integrations.huggingface.from_huggingface(dataset)`.

    Numbers are columns by themselves (float32), tokens a list column (int64), as `map` with a
    tokenizer leaves it. The file has pieces of 1,000 rows, as datasets writes them. Each with 0 and
    with 2 workers, which live on after a warm-up of whole batches that are checked row by row. A
    timed epoch is a whole one. The consumer takes the length of each batch.

Left out
    Writing the file; the start of the workers; the training step. The file is in the page cache.

Machine
    (not measured yet)

Command
    python benchmarks/huggingface.py --save

Result
    (not measured yet)

What it does not show
    Text, images, lists of different lengths. Files larger than memory, where the disk decides.
    Datasets with a transform, which are read row by row by both.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from _meter import Meter
from _runner import Benchmark, Reading, check, data_loader

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Size:
    """Rows of the table, rows per piece of the file and per batch, and how much is read."""

    num_rows: int
    rows_per_piece: int
    batch_size: int
    num_warmup_batches: int
    num_epochs: int


NUM_NUMBERS = 32
NUM_TOKENS = 64


def _dataset(size: Size, folder: str) -> Any:  # noqa: ANN401
    import datasets
    import numpy as np

    datasets.disable_progress_bars()
    rows = np.arange(size.num_rows)
    features = datasets.Features(
        {
            "row": datasets.Value("int64"),
            **{f"x{k}": datasets.Value("float32") for k in range(NUM_NUMBERS)},
            "tokens": datasets.List(datasets.Value("int64")),
        }
    )
    path = str(Path(folder) / "table.arrow")
    with datasets.arrow_writer.ArrowWriter(path=path, features=features) as writer:
        for piece in np.split(rows, range(size.rows_per_piece, size.num_rows, size.rows_per_piece)):
            columns = {f"x{k}": (piece + k).astype(np.float32) for k in range(NUM_NUMBERS)}
            tokens = list(piece[:, None] + np.arange(NUM_TOKENS))
            writer.write_batch({"row": piece, **columns, "tokens": tokens})
        writer.finalize()
    return datasets.Dataset.from_file(path)


def read(
    size: Size,
    library: Literal["torch", "penstock"],
    form: Literal["torch", "numpy", "from_huggingface"],
    num_workers: int,
) -> Reading:
    """Read whole epochs after a checked warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = _dataset(size, folder)
        if form == "from_huggingface":
            from penstock.integrations.huggingface import from_huggingface

            source = from_huggingface(dataset)
        else:
            source = dataset.with_format(form)
        loader = data_loader(library)(
            source,
            batch_size=size.batch_size,
            shuffle=True,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
        )
        _warm_up(loader, size)
        num_samples = num_batches = 0
        with Meter() as meter:
            for _ in range(size.num_epochs):
                for batch in loader:
                    num_samples += len(batch["row"])
                    num_batches += 1
        check(num_samples == size.num_epochs * size.num_rows, f"{num_samples} samples came")
        return Reading.of(meter, num_samples / meter.wall_s / 1e3, num_batches)


def _warm_up(loader: Iterable[Any], size: Size) -> None:
    import torch

    seen = []
    for step, batch in enumerate(loader):
        rows = batch["row"]
        check(rows.dtype == torch.int64, f"batch {step} has rows of {rows.dtype}")
        for k in range(NUM_NUMBERS):
            check(torch.equal(batch[f"x{k}"], (rows + k).float()), f"batch {step} has another x{k}")
        tokens = rows[:, None] + torch.arange(NUM_TOKENS)
        check(torch.equal(batch["tokens"], tokens), f"batch {step} has other tokens")
        seen.append(rows)
        if step + 1 == size.num_warmup_batches:
            break
    rows = torch.cat(seen)
    check(len(rows.unique()) == len(rows), "a row came twice")
    check(not torch.equal(rows, torch.arange(len(rows))), "the order is not shuffled")


def _contenders() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for num_workers in (0, 2):
        for library, form, name in (
            ("torch", "torch", "torch, format torch"),
            ("torch", "numpy", "torch, format numpy"),
            ("penstock", "torch", "penstock, as it is, format torch"),
            ("penstock", "numpy", "penstock, as it is, format numpy"),
            ("penstock", "from_huggingface", "penstock, from_huggingface"),
        ):
            found[f"{name}, {num_workers} workers"] = partial(
                read, library=library, form=form, num_workers=num_workers
            )
    return found


BENCHMARK = Benchmark(
    file=__file__,
    unit="k samples/s",
    better="higher",
    contenders=_contenders(),
    full=Size(
        num_rows=100_000, rows_per_piece=1000, batch_size=256, num_warmup_batches=20, num_epochs=1
    ),
    smoke=Size(
        num_rows=1_000, rows_per_piece=100, batch_size=64, num_warmup_batches=8, num_epochs=1
    ),
    targets=(),
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
