# SPDX-License-Identifier: Apache-2.0
"""Draw batches as the network gets them, boxes from their targets, into contact sheets.

python examples/yolo/sheets.py build/yolo/bccd -o build/yolo/sheets
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from data import Recipe, training_loader, training_set, validation_loader
from targets import boxes_px

from penstock.vision import contact_sheet

if TYPE_CHECKING:
    from penstock.torch import DataLoader


def samples_of(batch: tuple[Any, Any, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the images of a batch with their boxes in pixels again, as `contact_sheet` wants."""
    images, targets, notes = batch
    pixels = (images.numpy() * 255).round().astype(np.uint8).transpose(0, 2, 3, 1)
    rows = targets.numpy()
    samples = []
    for number, (image, note) in enumerate(zip(pixels, notes, strict=True)):
        own = rows[rows[:, 0] == number]
        boxes = boxes_px(own, *image.shape[:2])
        labels = own[:, 1].astype(np.int64)
        samples.append({"image": image, "boxes": boxes, "labels": labels, **note})
    return samples


def first_samples(loader: DataLoader[Any], epoch: int) -> list[dict[str, Any]]:
    """Return the first batch of an epoch."""
    loader.set_epoch(epoch)
    return samples_of(next(iter(loader)))


def write_sheet(
    samples: list[dict[str, Any]], class_names: tuple[str, ...], path: Path, tile_px: int
) -> None:
    """Write samples with their boxes as PNG."""
    sheet = contact_sheet(samples, class_names, tile_px=tile_px)
    if not cv2.imwrite(str(path), sheet[..., ::-1]):
        raise OSError(f"cannot write {path}")
    print(f"{path}: {len(samples)} images, {sum(len(sample['boxes']) for sample in samples)} boxes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with data.yaml, images/ and labels/")
    parser.add_argument("-o", "--output", type=Path, default=Path("build/yolo/sheets"))
    parser.add_argument("--size", type=int, default=Recipe.size_px, help="in pixels")
    parser.add_argument("--batch-size", type=int, default=9)
    parser.add_argument("--tile", type=int, default=320, help="in pixels")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(options.size)
    dataset = training_set(options.folder, recipe)
    training = training_loader(dataset, options.batch_size, 0, options.seed)
    validation = validation_loader(options.folder, options.size, options.batch_size, 0)
    for name, loader, epoch in (
        ("train-mosaic", training, 0),
        ("train-whole", training, recipe.until_epoch),
        ("validation", validation, 0),
    ):
        path = options.output / f"{name}.png"
        write_sheet(first_samples(loader, epoch), dataset.class_names, path, options.tile)


if __name__ == "__main__":
    main()
