# SPDX-License-Identifier: Apache-2.0
"""How many rows per second come out of a Hugging Face dataset, shuffled?

Question
    A `datasets.Dataset` lies in an Arrow file that is mapped into memory: 32 numbers and a sequence
    of 64 tokens per row; or a text and a file of some KB, as sets of documents and of images have
    them. How fast is it read in shuffled batches of 256, as it is and through `from_huggingface`?

Method
    torch     `torch.utils.data.DataLoader` on the dataset in its formats "torch" and "numpy". It
              calls `__getitems__`, and collates the rows.
    penstock  `penstock.torch.DataLoader` on the same dataset in the same formats ("as it is"), and
              on `penstock.integrations.huggingface.from_huggingface(dataset)`.

    Numbers are columns by themselves (float32), tokens a list column (int64), as `map` with a
    tokenizer leaves it. The file has pieces of 1,000 rows, as datasets writes them. Each with 0
    workers, and some with 2, which live on after a warm-up of whole batches that are checked row by
    row. A timed epoch is a whole one. The consumer takes the length of each batch.

    "text and bytes" has a text (string) of 2 KB and bytes (binary) of 16 KB per row, and a tenth of
    the rows.

Left out
    Writing the file; the start of the workers; the training step. The file is in the page cache.

Machine
    2 cores of an Intel Xeon VM, 23.5 GiB, Linux 6.18; Python 3.11.7, torch 2.13.0, datasets 5.2.0;
    2026-11-22, 2 rounds.

Command
    python benchmarks/huggingface.py --rounds 2 --save

Result
    k samples/s (CPU us per batch); "text and bytes" by itself:

                                     0 workers         2 workers      text and bytes
    torch, format torch              5.8 (44,400)      7.2 (62,400)    53 (4,750)
    torch, format numpy              9.4 (27,100)
    penstock, as it is, torch        314  (830)        264 (1,770)    110 (2,300)
    penstock, as it is, numpy        311  (830)
    penstock, from_huggingface       302  (870)        267 (1,760)    195 (1,320)

    54 times torch's loader without workers, 37 times with 2, which only cost here: there is little
    left to divide. Peaks of memory are alike (422 to 427 MB; with 2 workers torch 587, here 473).

What it does not show
    Images that are decoded, which takes longer than all else; lists of different lengths. Files
    larger than memory, where the disk decides. Datasets with a transform, which are read row by row
    by both.
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

    def rows_of(self, holds: Literal["numbers", "bytes"]) -> int:
        return self.num_rows // (10 if holds == "bytes" else 1)


NUM_NUMBERS = 32
NUM_TOKENS = 64
TEXT_BYTES, FILE_BYTES = 2048, 16384


def _dataset(size: Size, folder: str, holds: Literal["numbers", "bytes"]) -> Any:  # noqa: ANN401
    import datasets
    import numpy as np

    datasets.disable_progress_bars()
    value = datasets.Value
    if holds == "bytes":
        features = {"text": value("string"), "file": value("binary")}
    else:
        features = {f"x{k}": value("float32") for k in range(NUM_NUMBERS)}
        features["tokens"] = datasets.List(value("int64"))
    features = datasets.Features({"row": value("int64"), **features})
    rows = np.arange(size.rows_of(holds))
    path = str(Path(folder) / "table.arrow")
    with datasets.arrow_writer.ArrowWriter(path=path, features=features) as writer:
        for piece in np.split(rows, range(size.rows_per_piece, len(rows), size.rows_per_piece)):
            if holds == "bytes":
                files = [_file(row) for row in piece.tolist()]
                columns = {"text": [_text(row) for row in piece.tolist()], "file": files}
            else:
                columns = {f"x{k}": (piece + k).astype(np.float32) for k in range(NUM_NUMBERS)}
                columns["tokens"] = list(piece[:, None] + np.arange(NUM_TOKENS))
            writer.write_batch({"row": piece, **columns})
        writer.finalize()
    return datasets.Dataset.from_file(path)


def _text(row: int) -> str:
    return f"{row:08d}" * (TEXT_BYTES // 8)


def _file(row: int) -> bytes:
    # Not to end in a zero, which the format "torch" takes away.
    return (row.to_bytes(7, "little") + b"\xff") * (FILE_BYTES // 8)


def read(
    size: Size,
    library: Literal["torch", "penstock"],
    form: Literal["torch", "numpy", "from_huggingface"],
    num_workers: int,
    holds: Literal["numbers", "bytes"] = "numbers",
) -> Reading:
    """Read whole epochs after a checked warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = _dataset(size, folder, holds)
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
        check(num_samples == size.num_epochs * size.rows_of(holds), f"{num_samples} samples came")
        return Reading.of(meter, num_samples / meter.wall_s / 1e3, num_batches)


def _warm_up(loader: Iterable[Any], size: Size) -> None:
    import torch

    seen = []
    for step, batch in enumerate(loader):
        rows = batch["row"]
        check(rows.dtype == torch.int64, f"batch {step} has rows of {rows.dtype}")
        if "file" in batch:
            check(batch["text"] == list(map(_text, rows.tolist())), f"batch {step} has other texts")
            check(batch["file"] == list(map(_file, rows.tolist())), f"batch {step} has other files")
        else:
            _check_numbers(batch, step)
        seen.append(rows)
        if step + 1 == size.num_warmup_batches:
            break
    rows = torch.cat(seen)
    check(len(rows.unique()) == len(rows), "a row came twice")
    check(not torch.equal(rows, torch.arange(len(rows))), "the order is not shuffled")


def _check_numbers(batch: dict[str, Any], step: int) -> None:
    import torch

    rows = batch["row"]
    for k in range(NUM_NUMBERS):
        check(torch.equal(batch[f"x{k}"], (rows + k).float()), f"batch {step} has another x{k}")
    tokens = rows[:, None] + torch.arange(NUM_TOKENS)
    check(torch.equal(batch["tokens"], tokens), f"batch {step} has other tokens")


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
            if num_workers and form == "numpy":
                continue
            found[f"{name}, {num_workers} workers"] = partial(
                read, library=library, form=form, num_workers=num_workers
            )
            if form != "numpy" and not num_workers:
                found[f"{name}, 0 workers, text and bytes"] = partial(
                    read, library=library, form=form, num_workers=0, holds="bytes"
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
