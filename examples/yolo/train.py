# SPDX-License-Identifier: Apache-2.0
"""Train a tiny detector on a folder in YOLO's form; `--verify` compares numbers of workers.

python examples/yolo/train.py build/yolo/bccd --epochs 12
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from data import Recipe, digest, training_loader, training_set, validation_loader
from model import TinyDetector, detection_loss

import penstock
from penstock.errors import StoreError

if TYPE_CHECKING:
    from penstock.torch import DataLoader

LEARNING_RATE = 2e-3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with data.yaml, images/ and labels/")
    parser.add_argument("--size", type=int, default=Recipe.size_px, help="in pixels")
    parser.add_argument("--epochs", type=int, default=Recipe.epochs)
    parser.add_argument(
        "--close-mosaic",
        type=int,
        default=Recipe.close_mosaic,
        metavar="EPOCHS",
        help="at the end without mosaics; half of all epochs at most",
    )
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--verify", action="store_true", help="print a digest of the batches for 0, 1, 2 workers"
    )
    return parser.parse_args()


def train_epoch(
    model: TinyDetector, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]
) -> float:
    """Return the mean loss of an epoch's batches."""
    losses = []
    model.train()
    for images, targets, _ in loader:
        scores, boxes = model(images)
        total, num_cells = detection_loss(scores, boxes, targets)
        loss = total / max(num_cells, 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return statistics.fmean(losses)


@torch.inference_mode()
def validate(model: TinyDetector, loader: DataLoader[Any]) -> float:
    """Return the loss for each cell that answers for an object: whatever batches they come in."""
    model.eval()
    total, num_cells = 0.0, 0
    for images, targets, _ in loader:
        of_batch, count = detection_loss(*model(images), targets)
        total, num_cells = total + of_batch.item(), num_cells + count
    return total / max(num_cells, 1)


def train(options: argparse.Namespace, recipe: Recipe) -> None:
    """Print the losses of each epoch."""
    seed = penstock.seed_everything(options.seed)  # the network's first weights
    folder, batch_size, workers = options.folder, options.batch_size, options.num_workers
    dataset = training_set(folder, recipe)
    training = training_loader(dataset, batch_size, workers, seed)
    validation = validation_loader(folder, recipe.size_px, batch_size, workers)
    model = TinyDetector(len(dataset.class_names))
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    for epoch in range(recipe.epochs):
        training.set_epoch(epoch)
        loss = train_epoch(model, optimizer, training)
        of_validation = validate(model, validation)
        kind = "mosaic" if epoch < recipe.until_epoch else "whole images"
        print(f"epoch {epoch}: {kind}, loss {loss:.3f}, validation {of_validation:.3f}", flush=True)


def verify(options: argparse.Namespace, recipe: Recipe) -> int:
    """Print what the batches hash to, of the first epoch and the last; 0 if all are equal."""
    folder, batch_size = options.folder, options.batch_size
    dataset, epochs = training_set(folder, recipe), tuple(sorted({0, recipe.epochs - 1}))
    found = set()
    for workers in (0, 1, 2):
        training = training_loader(dataset, batch_size, workers, options.seed)
        validation = validation_loader(folder, recipe.size_px, batch_size, workers)
        digests = digest(training, epochs), digest(validation, (0,))
        print(f"{workers} workers: training {digests[0]}, validation {digests[1]}")
        found.add(digests)
    return int(len(found) > 1)


def main() -> int:
    options = arguments()
    recipe = Recipe(options.size, options.epochs, options.close_mosaic)
    try:
        if options.verify:
            return verify(options, recipe)
        train(options, recipe)
    except StoreError as error:  # the folder is the user's to mend: no traceback
        sys.exit(f"{type(error).__name__}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
