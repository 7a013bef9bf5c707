# SPDX-License-Identifier: Apache-2.0
"""examples/yolo: boxes stay on their pixels, batches are rectangles, workers change nothing."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import cv2
import numpy as np
import pytest
from tests.examples.programs import imported, run
from tests.vision.rectangles import is_colour, scene

from penstock.torch import DataLoader
from penstock.vision import Letterbox, YOLODetection

FOLDER = Path(__file__).parents[2] / "examples" / "yolo"
MODULES = ("data", "model", "sheets", "targets", "train")
SIZES = ((90, 150), (150, 90), (96, 96), (60, 150), (130, 140))  # height, width
STRIDE_PX = 16


@pytest.fixture(scope="module")
def example():
    """The example's modules."""
    with imported(FOLDER, MODULES) as modules:
        yield modules


@pytest.fixture(scope="module")
def cells(data_dir, tmp_path_factory):
    """Real photos as YOLO's files, and what `convert` said."""
    folder = tmp_path_factory.mktemp("yolo") / "bccd"
    command = ("convert", data_dir / "bccd", folder, "--to", "yolo", "--images", "link")
    printed = run("-m", "penstock", *command)
    for split, count in (("train", 72), ("val", 16)):  # the rest would take the same path
        for path in sorted((folder / "images" / split).iterdir())[count:]:
            path.unlink()
            (folder / "labels" / split / path.name).with_suffix(".txt").unlink()
    return folder, printed


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """YOLO's files of coloured rectangles that do not touch, in images of five shapes."""
    folder = tmp_path_factory.mktemp("scenes")
    for split, count in (("train", 12), ("val", 15)):
        (folder / "images" / split).mkdir(parents=True)
        (folder / "labels" / split).mkdir(parents=True)
        for number in range(count):
            sample = scene(number, SIZES[number % len(SIZES)])
            image = str(folder / "images" / split / f"{number}.png")
            assert cv2.imwrite(image, sample["image"][..., ::-1])
            lines = yolo_lines(sample)
            (folder / "labels" / split / f"{number}.txt").write_text("\n".join(lines))
    names = "".join(f"  {number}: colour {number}\n" for number in range(6))
    (folder / "data.yaml").write_text(f"train: images/train\nval: images/val\nnames:\n{names}")
    return folder


def yolo_lines(sample):
    height, width = sample["image"].shape[:2]
    for (x1, y1, x2, y2), label in zip(sample["boxes"].tolist(), sample["labels"], strict=True):
        centre = (x1 + x2) / 2 / width, (y1 + y2) / 2 / height
        yield f"{label} {centre[0]} {centre[1]} {(x2 - x1) / width} {(y2 - y1) / height}"


def plain(example, **others):
    """The recipe without what changes colours."""
    return example["data"].Recipe(
        size_px=128, epochs=3, close_mosaic=1, mixup=0, hsv=(0, 0, 0), pixels=0, **others
    )


def training_samples(example, folder, recipe, epoch, num_workers=1):
    """The images of an epoch's batches, and their boxes in pixels as the targets say."""
    dataset = example["data"].training_set(folder, recipe)
    loader = example["data"].training_loader(dataset, 4, num_workers, seed=5)
    loader.set_epoch(epoch)
    return [sample for batch in loader for sample in example["sheets"].samples_of(batch)]


def coloured_as_labelled(sample):
    """How many boxes have the colour of their class in their middle; and how many there are."""
    middles = ((sample["boxes"][:, :2] + sample["boxes"][:, 2:]) / 2).astype(int)
    right = [
        bool(is_colour(sample["image"][y, x], label))
        for (x, y), label in zip(middles.tolist(), sample["labels"].tolist(), strict=True)
    ]
    return sum(right), len(right)


@pytest.mark.parametrize("epoch", [0, 2])
def test_boxes_lie_on_their_objects_after_all_augmentations(example, scenes, epoch):
    samples = training_samples(example, scenes, plain(example), epoch)
    right, count = np.sum([coloured_as_labelled(sample) for sample in samples], axis=0)
    assert right == count
    assert count > 40
    assert {sample["image"].shape for sample in samples} == {(128, 128, 3)}


@pytest.mark.parametrize("persistent", [False, True])
def test_the_last_epochs_have_whole_images_also_of_workers_that_stay(example, scenes, persistent):
    loader = DataLoader(
        example["data"].training_set(scenes, plain(example)),
        batch_size=4,
        num_workers=1,
        collate_fn=example["targets"].YOLOCollate(STRIDE_PX),
        persistent_workers=persistent,
        seed=5,
    )
    has_partners = []
    for _ in range(3):
        samples = [sample for batch in loader for sample in example["sheets"].samples_of(batch)]
        # A photo has each class once; what is there twice came from another one.
        twice = [len(set(s["labels"].tolist())) < len(s["labels"]) for s in samples]
        has_partners.append(any(twice))
    assert has_partners == [True, True, False]


def test_validation_batches_are_rectangles_with_less_padding_than_squares(example, scenes):
    dataset = YOLODetection(scenes, "val")
    area_px, seen = 0, []
    loader = example["data"].validation_loader(scenes, 128, 3, 1)
    for images, targets, notes in loader:
        height, width = images.shape[2:]
        assert height % STRIDE_PX == width % STRIDE_PX == 0
        assert max(height, width) == 128
        assert images.shape[0] == len(notes)
        area_px += images.shape[0] * height * width
        for sample in example["sheets"].samples_of((images, targets, notes)):
            right, count = coloured_as_labelled(sample)
            assert right == count == 6
            key = sample["image_id"]
            original = next(s for s in dataset if s["image_id"] == key)
            restored = Letterbox.undo(sample["boxes"], sample["letterbox"])
            assert restored == pytest.approx(original["boxes"], abs=0.01)
            seen.append(key)
    assert len(set(seen)) == len(seen) == 15
    assert [note["image_id"] for _, _, notes in loader for note in notes] == seen
    # Without any padding the five shapes take 0.73 of squares.
    assert area_px < 0.85 * 15 * 128 * 128


def test_targets_name_the_image_and_share_its_size(example):
    collate = example["targets"].YOLOCollate(32)
    samples = [
        {
            "image": np.full((40, 50, 3), 255, np.uint8),
            "boxes": np.array([[10, 20, 30, 36], [0, 0, 50, 40]], np.float32),
            "labels": np.array([2, 0]),
            "image_id": "a",
        },
        {
            "image": np.zeros((33, 90, 3), np.uint8),
            "boxes": np.zeros((0, 4), np.float32),
            "labels": np.zeros(0, np.int64),
            "image_id": "b",
        },
        {
            "image": np.zeros((40, 60, 3), np.uint8),
            "boxes": np.array([[1, 2, 3, 4]], np.float32),
            "labels": np.array([1]),
            "image_id": "c",
        },
    ]
    images, targets, notes = collate(samples)
    assert images.shape == (3, 3, 64, 96)
    assert images[0, :, :40, :50].min() == 1
    assert images[0, 0, 41, 0] == np.float32(114 / 255)
    assert targets.dtype == np.float32
    assert targets.tolist() == [
        pytest.approx([0, 2, 20 / 96, 28 / 64, 20 / 96, 16 / 64]),
        pytest.approx([0, 0, 25 / 96, 20 / 64, 50 / 96, 40 / 64]),
        pytest.approx([2, 1, 2 / 96, 3 / 64, 2 / 96, 2 / 64]),
    ]
    assert [note["image_id"] for note in notes] == ["a", "b", "c"]
    (box,) = example["targets"].boxes_px(targets[:1], 64, 96)
    assert box == pytest.approx([10, 20, 30, 36])


def test_the_same_batches_come_for_any_number_of_workers(scenes):
    printed = [
        run(FOLDER / "train.py", scenes, "--verify", "--size", 64, "--seed", seed).splitlines()
        for seed in (7, 8)
    ]
    digests = [[line.split("workers: ")[1] for line in lines] for lines in printed]
    assert [len(set(found)) for found in digests] == [1, 1]
    assert [line[0] for line in printed[0]] == ["0", "1", "2"]
    training = [re.search(r"training (\w{16})", found[0])[1] for found in digests]
    validation = [re.search(r"validation (\w{16})", found[0])[1] for found in digests]
    assert training[0] != training[1]  # of another seed
    assert validation[0] == validation[1]


def test_sheets_show_the_batches(cells, tmp_path):
    printed = run(FOLDER / "sheets.py", cells[0], "-o", tmp_path, "--size", 128, "--tile", 128)
    names = ("train-mosaic", "train-whole", "validation")
    for name, line in zip(names, printed.splitlines(), strict=True):
        images, boxes = map(int, re.search(r": (\d+) images, (\d+) boxes", line).groups())
        assert images == 9
        assert boxes > 9
        sheet = cv2.imread(str(tmp_path / f"{name}.png"))
        assert sheet.shape[1] == 3 * 128 + 4 * 8
        assert len(np.unique(sheet.reshape(-1, 3), axis=0)) > 1000


def test_the_readme_shows_what_convert_says_and_its_view_works(cells, tmp_path):
    readme = (FOLDER / "README.md").read_text()
    for line in cells[1].splitlines():
        assert line.replace(str(cells[0]), "build/yolo/bccd") in readme
    command = re.search(r"^\$ penstock (view build/yolo/bccd .*)$", readme, re.MULTILINE)[1]
    command = command.replace("build/yolo/bccd", str(cells[0]))
    command = command.replace("build/yolo/", f"{tmp_path}/")
    run("-m", "penstock", *shlex.split(command, comments=True))
    (sheet,) = tmp_path.glob("*.png")
    assert cv2.imread(str(sheet)).std() > 10
