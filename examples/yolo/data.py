# SPDX-License-Identifier: Apache-2.0
"""YOLO's text files to batches: mosaic, mixup and Albumentations, or letterboxed rectangles."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import albumentations as A
from targets import YOLOCollate

import penstock
from penstock.sampling import BucketBatchSampler
from penstock.vision import (
    Albumentations,
    Compose,
    HorizontalFlip,
    Letterbox,
    MixUp,
    Mosaic,
    RandomHSV,
    RandomPerspective,
    YOLODetection,
)

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.torch import DataLoader

STRIDE_PX = 16  # of the network's coarsest level: a batch's height and width are multiples of it


@dataclass(frozen=True)
class Recipe:
    """How training images are made; probabilities, and gains of colours."""

    size_px: int = 320
    epochs: int = 12
    close_mosaic: int = 3  # so many epochs at the end, or half, have neither mosaic nor mixup
    mosaic: float = 1.0
    mixup: float = 0.1
    scale: float = 0.5
    hsv: tuple[float, float, float] = (0.015, 0.7, 0.4)
    pixels: float = 0.2  # of one of Albumentations' changes of pixels

    @property
    def until_epoch(self) -> int:
        """The first epoch of whole images: half of the epochs, at least, have mosaics."""
        return self.epochs - min(self.close_mosaic, self.epochs // 2)


def training_set(folder: Path, recipe: Recipe) -> MixUp:
    """Return training images of `size_px` x `size_px`, each made of up to eight photos.

    A loader with a seed tells the datasets which epoch it is, in its workers too. So `until_epoch`
    needs no new loader, and no worker that keeps on making mosaics.
    """
    photos = YOLODetection(folder, "train")
    mosaic = Mosaic(
        photos,
        recipe.size_px,
        probability=recipe.mosaic,
        until_epoch=recipe.until_epoch,
        transform=RandomPerspective(recipe.size_px, scale=recipe.scale),
    )
    return MixUp(
        mosaic,
        probability=recipe.mixup,
        until_epoch=recipe.until_epoch,
        transform=Compose(
            Albumentations(albumentations_chain(recipe.pixels)),
            RandomHSV(*recipe.hsv),
            HorizontalFlip(0.5),
        ),
    )


def albumentations_chain(pixels: float) -> A.Compose:
    """Return what Albumentations adds; Penstock hands it boxes, labels and the sample's seed."""
    changes = [A.CLAHE(), A.GaussianBlur(), A.GaussNoise(), A.ToGray()]
    return A.Compose(
        [A.RandomRotate90(p=0.5), A.OneOf(changes, p=pixels)],  # cells have no upper side
        bbox_params=A.BboxParams("pascal_voc", clip=True),
    )


def training_loader(
    dataset: MixUp, batch_size: int, num_workers: int, seed: int
) -> DataLoader[Any]:
    """Return batches of square images, in random order."""
    return penstock.torch.DataLoader(  # not imported above: MindSpore's program needs no torch
        dataset,
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=num_workers,
        collate_fn=YOLOCollate(STRIDE_PX),
        seed=seed,
    )


def validation_loader(
    folder: Path, size_px: int, batch_size: int, num_workers: int
) -> DataLoader[Any]:
    """Return batches of whole images of similar shape, in one order: first the widest ones.

    `Letterbox` with a stride of 1 scales and does not pad. That is left to the collate function,
    which knows the batch: to the next multiple of the stride, instead of to a square.
    """
    photos = YOLODetection(folder, "val", transform=Letterbox(size_px, stride=1))
    return penstock.torch.DataLoader(
        photos,
        batch_sampler=BucketBatchSampler(photos, batch_size, key="aspect_ratio", shuffle=False),
        num_workers=num_workers,
        collate_fn=YOLOCollate(STRIDE_PX),
        seed=0,
    )


def digest(loader: DataLoader[Any], epochs: tuple[int, ...]) -> str:
    """Return a hash of every byte of the batches of some epochs, in their order: 16 digits."""
    result = hashlib.sha256()
    for epoch in epochs:
        loader.set_epoch(epoch)
        for images, targets, notes in loader:
            result.update(repr((images.shape, targets.shape, notes)).encode())
            result.update(images.numpy())
            result.update(targets.numpy())
    return result.hexdigest()[:16]
