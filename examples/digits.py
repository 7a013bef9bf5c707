# SPDX-License-Identifier: Apache-2.0
"""Train a small network on scanned digits, fed by Penstock; `make demo` runs it.

The 1,797 digits that come with scikit-learn are written out as image files, in one folder per
digit, as a data set of your own would lie there. A plain torch dataset reads and decodes them,
turns and shifts them a little, and `penstock.torch.DataLoader` feeds them to a small
convolutional network. Then the same dataset object is read through torch's own loader and through
Penstock's, in turn.

The exit status is 1 if the network gets 95 % of the test images or fewer right.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
import torch
import torch.utils.data
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

import penstock.torch

if TYPE_CHECKING:
    from collections.abc import Iterable

FOLDER = Path(__file__).parents[1] / "build" / "digits"
SIZE_PX = 32
BATCH_SIZE = 64
NUM_WORKERS = 2
EVERY_FIFTH = 5  # goes into the test set: 360 of 1,797
LEAST_ACCURACY = 0.95
ROUNDS = 5


def write_digits(folder: Path) -> None:
    """Write the digits as <folder>/{train,test}/<digit>/<number>.png, 8 x 8 px, grey."""
    images, labels = load_digits(return_X_y=True)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        part = "test" if number % EVERY_FIFTH == 0 else "train"
        path = folder / part / str(label) / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        grey = np.round(image.reshape(8, 8) * (255 / 16)).astype(np.uint8)  # they hold 0..16
        if not cv2.imwrite(str(path), grey):
            raise OSError(f"cannot write {path}")


class Digits(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Class folders of image files: float32 of shape (1, SIZE_PX, SIZE_PX), and the digit."""

    def __init__(self, folder: Path, *, augment: bool) -> None:
        self.paths = sorted(str(path) for path in folder.glob("*/*.png"))
        self.labels = [int(Path(path).parent.name) for path in self.paths]
        self.augment = augment

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        grey = cv2.imread(self.paths[index], cv2.IMREAD_GRAYSCALE)
        if grey is None:
            raise OSError(f"cannot decode {self.paths[index]}")
        image = cv2.resize(grey, (SIZE_PX, SIZE_PX), interpolation=cv2.INTER_LINEAR)
        if self.augment:
            image = turn_and_shift(image)
        return torch.from_numpy(image.astype(np.float32) / 255).unsqueeze(0), self.labels[index]


def turn_and_shift(image: np.ndarray) -> np.ndarray:
    """Return the image turned by up to 10 degrees and shifted by up to 3 px, at random."""
    middle = (SIZE_PX - 1) / 2
    matrix = cv2.getRotationMatrix2D((middle, middle), random.uniform(-10, 10), 1.0)
    matrix[:, 2] += random.uniform(-3, 3), random.uniform(-3, 3)
    return cv2.warpAffine(image, matrix, (SIZE_PX, SIZE_PX))


def make_network() -> nn.Module:
    def stage(channels: int, out: int) -> list[nn.Module]:
        convolution = nn.Conv2d(channels, out, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2)]

    layers = [*stage(1, 32), *stage(32, 64), *stage(64, 128)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def use_one_thread(_worker_id: int) -> None:
    cv2.setNumThreads(0)


def train(dataset: Digits, num_epochs: int, console: Console) -> nn.Module:
    loader = penstock.torch.DataLoader(
        dataset,
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=NUM_WORKERS,
        persistent_workers=True,
        worker_init_fn=use_one_thread,
    )
    network = make_network()
    num_steps = num_epochs * len(loader)
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=num_steps)
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("training", total=num_steps)
        for epoch in range(num_epochs):
            for images, labels in loader:
                loss = nn.functional.cross_entropy(network(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                bar.advance(task)
            bar.update(task, description=f"epoch {epoch + 1:2}/{num_epochs}, loss {loss:.3f}")
    return network


@torch.inference_mode()
def accuracy(network: nn.Module, dataset: Digits) -> float:
    """Return the share of images that the network names right."""
    network.eval()
    loader = penstock.torch.DataLoader(dataset, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS)
    right = sum(int((network(images).argmax(1) == labels).sum()) for images, labels in loader)
    return right / len(dataset)


def compare(dataset: Digits) -> Table:
    """Read the dataset through both loaders in turn; the workers run before the time is taken."""
    loaders = {
        f"{kind.__module__.partition('.')[0]}: {kind.__qualname__}": kind(
            dataset,
            batch_size=BATCH_SIZE,
            shuffle=True,
            num_workers=NUM_WORKERS,
            persistent_workers=True,
            worker_init_fn=use_one_thread,
        )
        for kind in (torch.utils.data.DataLoader, penstock.torch.DataLoader)
    }
    for loader in loaders.values():
        samples_per_s(loader)
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(ROUNDS):
        for name, loader in loaders.items():
            rates[name].append(samples_per_s(loader))
    return as_table(rates)


def samples_per_s(loader: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    start = time.perf_counter()
    num_samples = sum(len(labels) for _, labels in loader)
    return num_samples / (time.perf_counter() - start)


def as_table(rates: dict[str, list[float]]) -> Table:
    table = Table(title=f"The same dataset object, {NUM_WORKERS} workers, {ROUNDS} rounds in turn")
    table.add_column("loader")
    for heading in ("samples/s (median)", "min - max", "ratio"):
        table.add_column(heading, justify="right")
    base = statistics.median(next(iter(rates.values())))
    for name, values in rates.items():
        median = statistics.median(values)
        spread = f"{min(values):,.0f} - {max(values):,.0f}"
        table.add_row(name, f"{median:,.0f}", spread, f"{median / base:.2f}x")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=24, help="24 take about a minute on 2 cores")
    num_epochs = parser.parse_args().epochs
    if num_epochs < 1:
        parser.error(f"argument --epochs: {num_epochs} is less than 1")
    console = Console()
    torch.manual_seed(0)
    write_digits(FOLDER)
    trained, tested = Digits(FOLDER / "train", augment=True), Digits(FOLDER / "test", augment=False)
    console.print(f"{len(trained):,} training and {len(tested)} test images in {FOLDER}")
    start = time.perf_counter()
    reached = accuracy(train(trained, num_epochs, console), tested)
    console.print(f"trained for {time.perf_counter() - start:.0f} s")
    console.print(f"test accuracy: {reached:.1%} (wanted: more than {LEAST_ACCURACY:.0%})")
    console.print(compare(trained))
    return 0 if reached > LEAST_ACCURACY else 1


if __name__ == "__main__":
    raise SystemExit(main())
