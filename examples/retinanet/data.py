# SPDX-License-Identifier: Apache-2.0
"""A folder of VOC XML as batches: what is read, augmented, balanced and collated.

    FOLDER/Annotations/NAME.xml, FOLDER/JPEGImages/NAME.jpg, FOLDER/ImageSets/Main/SPLIT.txt

Classes are what the annotations name, sorted; nothing here knows any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from penstock.sampling import ClassBalancedSampler, RepeatFactorSampler
from penstock.torch import DataLoader
from penstock.vision import (
    AnnotatedImage,
    AnnotatedImages,
    Compose,
    DetectionCollate,
    HorizontalFlip,
    Letterbox,
    Mosaic,
    RandomHSV,
    RandomPerspective,
    VerticalFlip,
    VOCDetection,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

Balance = Literal["repeat", "class", "none"]


def training_set(
    root: Path,
    split: str | None,
    size: tuple[int, int],
    *,
    mosaic_until: int = 0,
    vertical_flip: bool = False,
) -> Any:  # noqa: ANN401 - VOCDetection or Mosaic
    """Return the images of a split, augmented.

    Args:
        root: The folder.
        split: Its images; None is all.
        size: Height and width of what comes out, in pixels.
        mosaic_until: Epochs before this one have a mosaic of four images for each sample; those
            from it on what they have without a mosaic.
        vertical_flip: Whether there is no up in these images: cells, satellites; not faces.
    """
    # A folder may have landmarks, too. A detector does not look at them: which is left is all one.
    mirrored = [HorizontalFlip(landmark_order=False)]
    if vertical_flip:
        mirrored.append(VerticalFlip(landmark_order=False))
    rest = [RandomHSV(hue=0.015, saturation=0.4, value=0.3), *mirrored]
    whole = Compose(Letterbox(size), RandomPerspective(size, translate=0.1, scale=0.25), *rest)
    if not mosaic_until:
        return VOCDetection(root, split, transform=whole)
    return Mosaic(
        VOCDetection(root, split),
        max(size),
        until_epoch=mosaic_until,
        transform=Compose(RandomPerspective(size, translate=0.1, scale=0.5), *rest),
        whole_transform=whole,
    )


def evaluation_set(
    root: Path, split: str | None, size: tuple[int, int], class_names: Sequence[str]
) -> VOCDetection:
    """Return the images of a split as they are, with what `Letterbox.undo` needs in each sample.

    Classes have the numbers that they had in training, whatever this folder names.
    """
    return VOCDetection(root, split, transform=Letterbox(size), class_names=class_names)


def photo_set(files: Sequence[Path], size: tuple[int, int]) -> AnnotatedImages:
    """Return photos that are not annotated, as `evaluation_set` has them; an id is a stem."""
    photos = [AnnotatedImage(file, file.stem, None, None, ()) for file in files]
    return AnnotatedImages(photos, name="the list of photos", transform=Letterbox(size))


def sampler_for(
    dataset: Any,  # noqa: ANN401 - of `training_set`
    balance: Balance,
    *,
    seed: int,
    threshold: float = 0.5,
    alpha: float = 0.5,
) -> RepeatFactorSampler | ClassBalancedSampler | None:
    """Return what shows images with rare classes more often; None for a plain shuffle.

    Args:
        dataset: Knows its labels; no image is read.
        balance: "repeat" shows every image, and those with a class that is in fewer than
            `threshold` of the images sqrt(threshold / share) times; "class" draws a class first,
            by count ** (1 - `alpha`), and then an image that has it.
        seed: Decides the order: the loader's does not reach a sampler.
        threshold: Of "repeat", 0 to 1.
        alpha: Of "class", 0 (as they are) to 1 (all classes alike).
    """
    if balance == "repeat":
        return RepeatFactorSampler(dataset, threshold, seed=seed)
    if balance == "class":
        return ClassBalancedSampler(dataset, alpha, seed=seed)
    return None


def loader_for(
    dataset: Any,  # noqa: ANN401 - any of the above
    batch_size: int,
    *,
    seed: int,
    num_workers: int,
    sampler: RepeatFactorSampler | ClassBalancedSampler | None = None,
    shuffle: bool = False,
    drop_last: bool = False,
    device: torch.device | None = None,
) -> DataLoader[Any]:
    """Return batches of (images, targets): uint8 (batch, height, width, 3), a dict per image.

    The batches of an epoch are a function of seed and epoch: `num_workers` does not change a bit.
    `drop_last` leaves the last batch out if it is not full, unless it is the only one: a batch norm
    that trains on one image takes its mean for that of all.
    """
    num_samples = len(dataset if sampler is None else sampler)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        shuffle=shuffle and sampler is None,
        drop_last=drop_last and num_samples >= batch_size,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        # A quarter of float32's bytes: the network normalises them, on its device.
        collate_fn=DetectionCollate(output="uint8_hwc"),
        seed=seed,
        device=None if device is None or device.type == "cpu" else device,
    )
