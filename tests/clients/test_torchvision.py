# SPDX-License-Identifier: Apache-2.0
"""torchvision: v2 transforms under seeds, tv_tensors through shared memory, its data sets."""

from __future__ import annotations

import collections
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.utils.data
from tests.clients.torchvision_operators import declare_missing
from tests.vision.rectangles import Scenes, check_objects

import penstock
from penstock.data import Subset
from penstock.sampling import ClassBalancedSampler
from penstock.torch import DataLoader
from penstock.vision import Compose, HorizontalFlip, Torchvision, detection_collate

declare_missing()  # before the first import of torchvision

from torchvision import tv_tensors  # noqa: E402
from torchvision.datasets import ImageFolder  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

MAPS = Path("/proc/self/maps")
AUGMENT = v2.Compose(
    [
        v2.RandomPhotometricDistort(p=0.5),
        v2.RandomResizedCrop((32, 40), scale=(0.3, 1.0), antialias=True),
        v2.RandomHorizontalFlip(),
        v2.SanitizeBoundingBoxes(min_size=2),
        v2.ToDtype(torch.float32, scale=True),
    ]
)


class Marked(torch.utils.data.Dataset):
    """Images with boxes, masks and key points, as torchvision's users have them."""

    def __init__(self, transform=AUGMENT, box_format="XYXY"):
        self.transform = transform
        self.box_format = box_format

    def __len__(self):
        return 12

    def __getitem__(self, index):
        made = np.random.default_rng(index)
        count = index % 4  # 0: an image without objects
        corners = made.uniform(0, 48, (count, 2, 2))
        corners.sort(axis=1)
        boxes = tv_tensors.BoundingBoxes(
            torch.tensor(corners.reshape(-1, 4), dtype=torch.float32),
            format="XYXY",
            canvas_size=(48, 64),
            clamping_mode="hard",
        )
        boxes = v2.functional.convert_bounding_box_format(boxes, new_format=self.box_format)
        image = tv_tensors.Image(made.integers(0, 256, (3, 48, 64), np.uint8))
        masks = tv_tensors.Mask(made.integers(0, 2, (count, 48, 64), np.uint8))
        target = {"boxes": boxes, "labels": torch.arange(count), "masks": masks, "index": index}
        return self.transform(image, target)


def as_lists(samples):
    return tuple(zip(*samples, strict=True))


def noted(tree):
    """What a batch is, to the last bit: classes, attributes, values."""
    if isinstance(tree, torch.Tensor):
        values = tree.as_subclass(torch.Tensor)
        return type(tree), vars(tree), tree.dtype, tuple(tree.shape), values.numpy().tobytes()
    if isinstance(tree, dict):
        return {key: noted(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [noted(value) for value in tree]
    return tree


def batches(loader):
    return [noted(batch) for batch in loader]


def runs_on_penstock(loader):
    return type(iter(loader)).__module__.startswith("penstock.")


def in_a_slot(tensor):
    """Whether a tensor's memory is a slot of Penstock's arena."""
    address = tensor.data_ptr()
    for line in MAPS.read_text().splitlines():
        start, stop = (int(text, 16) for text in line.split()[0].split("-"))
        if start <= address < stop:
            return "memfd:penstock" in line
    return False


@pytest.mark.parametrize("box_format", ["XYXY", "XYWH", "CXCYWH"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_tv_tensors_come_as_from_torchs_loader(num_workers, box_format):
    options = {"batch_size": 4, "num_workers": num_workers, "collate_fn": as_lists}
    found = []
    for make in (torch.utils.data.DataLoader, DataLoader):
        torch.manual_seed(3)
        found.append(batches(make(Marked(box_format=box_format), **options)))
    assert found[0] == found[1]
    kind, attributes, *_ = found[1][0][1][3]["boxes"]
    assert kind is tv_tensors.BoundingBoxes
    assert attributes == {
        "format": tv_tensors.BoundingBoxFormat[box_format],
        "canvas_size": (32, 40),
        "clamping_mode": "hard",
    }
    assert found[1][0][1][3]["masks"][0] is tv_tensors.Mask


@pytest.mark.skipif(not MAPS.exists(), reason="needs Linux")
def test_the_memory_of_tv_tensors_is_the_slot():
    loader = DataLoader(Marked(), batch_size=4, num_workers=1, collate_fn=as_lists)
    images, targets = next(iter(loader))
    assert isinstance(images[1], tv_tensors.Image)
    assert all(map(in_a_slot, images))
    assert isinstance(targets[3]["boxes"], tv_tensors.BoundingBoxes)
    assert not in_a_slot(torch.zeros(3, 32, 40))


def test_default_collate_makes_plain_tensors_as_in_torch():
    samples = [(tv_tensors.Image(torch.full((3, 4, 4), value)), value) for value in (1.0, 2.0)]
    for num_workers in (0, 1):
        options = {"batch_size": 2, "num_workers": num_workers}
        (mine,), (torchs,) = (
            batches(make(samples, **options)) for make in (DataLoader, torch.utils.data.DataLoader)
        )
        assert mine == torchs
        assert mine[0][0] is torch.Tensor


def test_with_a_seed_the_augmentation_is_the_same_for_any_number_of_workers():
    def epoch(num_workers, seed=5, number=0):
        loader = DataLoader(
            Marked(), 4, shuffle=True, num_workers=num_workers, collate_fn=as_lists, seed=seed
        )
        loader.set_epoch(number)
        assert runs_on_penstock(loader)
        return batches(loader)

    first = epoch(0)
    assert epoch(1) == epoch(2) == first
    assert epoch(1, number=1) != first
    assert epoch(1, seed=6) != first


class Mixed:
    """CutMix or MixUp of a batch, as torchvision's documentation has it."""

    def __init__(self):
        self.mix = v2.RandomChoice([v2.CutMix(num_classes=5), v2.MixUp(num_classes=5)])

    def __call__(self, samples):
        return self.mix(*torch.utils.data.default_collate(samples))


def test_cutmix_and_mixup_in_the_collate_function_follow_the_seed():
    pairs = [(torch.full((3, 8, 8), float(n)), n % 5) for n in range(24)]

    def epoch(num_workers, seed=5):
        return batches(DataLoader(pairs, 4, num_workers=num_workers, collate_fn=Mixed(), seed=seed))

    assert epoch(1) == epoch(2) == epoch(0)
    assert epoch(0, seed=6) != epoch(0)
    loader = DataLoader(pairs, 4, num_workers=1, collate_fn=Mixed(), seed=5)
    for number, (images, labels) in enumerate(loader):
        values = torch.zeros(5)
        for value in range(4 * number, 4 * number + 4):
            values[value % 5] = value  # what images of this class are filled with
        assert torch.allclose(labels.sum(1), torch.ones(4))
        assert torch.allclose(images.mean((1, 2, 3)), labels @ values, atol=1e-4)


PHOTO = v2.Compose(
    [
        v2.ToImage(),
        v2.RandomResizedCrop(32, antialias=True),
        v2.RandAugment(),
        v2.ToDtype(torch.float32, scale=True),
        v2.RandomErasing(),
    ]
)


def few_of(dataset, count):
    """Samples from all over a data set whose files lie by class."""
    return Subset(dataset, range(0, len(dataset), len(dataset) // count))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_image_folder_gives_the_batches_of_torchs_loader(data_dir, num_workers):
    photos = few_of(ImageFolder(data_dir / "clothing" / "validation", PHOTO), 16)
    found = []
    for make in (torch.utils.data.DataLoader, DataLoader):
        torch.manual_seed(1)
        loader = make(photos, 8, shuffle=True, num_workers=num_workers)
        found.append(batches(loader))
    assert found[0] == found[1]
    assert len({label for _, labels in found[1] for label in labels[-1]}) > 4


def test_samplers_know_the_classes_of_an_image_folder(data_dir):
    photos = ImageFolder(data_dir / "clothing" / "train", PHOTO)
    assert penstock.labels_of(photos).tolist() == photos.targets
    drawn = [photos.targets[index] for index in ClassBalancedSampler(photos, seed=3)]
    counts = collections.Counter(drawn)
    assert len(counts) == len(photos.classes)
    assert max(counts.values()) < 2 * min(counts.values())  # 24 times as many, in the folder


GEOMETRY = {
    "crop": v2.RandomResizedCrop((80, 90), scale=(0.4, 1.0), antialias=True),
    "zoom": v2.Compose([v2.RandomZoomOut(), v2.Resize((120, 140))]),
    "affine": v2.Compose([v2.RandomAffine(15, (0.1, 0.1)), v2.ClampBoundingBoxes()]),
    "mirror": torch.nn.Sequential(v2.RandomHorizontalFlip(0.5), v2.RandomVerticalFlip(0.5)),
}


@pytest.mark.parametrize("name", GEOMETRY)
def test_boxes_and_landmarks_of_our_samples_follow_their_pixels(name):
    change = v2.Compose([GEOMETRY[name], v2.SanitizeBoundingBoxes(min_size=6)])
    loader = penstock.Loader(
        Scenes(12, transform=Torchvision(change)), batch_size=4, seed=2, collate_fn=list
    )
    samples = [sample for batch in loader for sample in batch]
    for sample in samples:
        check_objects(sample)
    assert sum(len(sample["boxes"]) for sample in samples) > 30


def test_transforms_of_both_make_one_batch_for_any_number_of_workers():
    change = Compose(
        Torchvision(
            v2.Compose([v2.RandomResizedCrop(64, antialias=True), v2.SanitizeBoundingBoxes()])
        ),
        HorizontalFlip(0.5, landmark_order=False),
    )
    dataset = Scenes(12, transform=change)

    def epoch(num_workers):
        loader = DataLoader(
            dataset, 4, num_workers=num_workers, collate_fn=detection_collate, seed=8
        )
        return [noted((images, list(targets))) for images, targets in loader]

    assert epoch(1) == epoch(2) == epoch(0)
    assert epoch(0)[0][0][3] == (4, 3, 64, 64)
