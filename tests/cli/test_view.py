# SPDX-License-Identifier: Apache-2.0
"""`penstock view` writes the sheet of a batch, from every kind of source."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from penstock.cli import main

cv2 = pytest.importorskip("cv2")
pytest.importorskip("rich")

from penstock.vision.looking.drawing import class_colour  # noqa: E402 - it needs the above

DATASET = """
import numpy as np
from penstock import sample_rng

class Cells:
    class_names = ("cell",)
    def __len__(self):
        return 9
    def __getitem__(self, index):
        image = np.full((40, 60, 3), 20 * index, np.uint8)
        boxes = np.array([[10, 10, 30, 30]], np.float32)
        return {"image": image, "boxes": boxes, "labels": np.array([0]), "image_id": str(index)}

def brighter(sample):
    more = sample_rng().integers(100, 128, dtype=np.uint8)
    return {**sample, "image": sample["image"] // 2 + more}

class Darker:
    def __call__(self, sample):
        return {**sample, "image": sample["image"] // 20}

number = 3

def dark(image):
    return image // 20
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "viewed_cells.py").write_text(DATASET)
    yield tmp_path
    sys.modules.pop("viewed_cells", None)


def viewed(folder, source, *arguments):
    path = folder / "sheet.png"
    assert main(["view", str(source), "-o", str(path), *map(str, arguments)]) == 0
    return cv2.imread(str(path))[..., ::-1]


def has_colour(sheet, label):
    return bool((sheet == class_colour(label)).all(axis=2).any())


def save(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), image)


def test_a_dataset_by_name_with_its_boxes(here, capsys):
    sheet = viewed(here, "viewed_cells:Cells", "-n", 4, "--columns", 2, "--tile", 120, "--in-order")
    assert has_colour(sheet, 0)
    assert (sheet[8 + 70, 8 + 110] == 0).all()
    assert (sheet[8 + 70, 8 + 128 + 110] == 20).all()
    assert capsys.readouterr().out.endswith(
        f"sheet.png: 4 images, {sheet.shape[1]} x {sheet.shape[0]}\n"
    )


def test_the_seed_decides_images_and_augmentation(here):
    command = "viewed_cells:Cells", "--transform", "viewed_cells:brighter", "-n", 4, "--tile", 64
    first, again = viewed(here, *command, "--seed", 5), viewed(here, *command, "--seed", 5)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, viewed(here, *command, "--seed", 6))
    assert not np.array_equal(first, viewed(here, *command, "--seed", 5, "--epoch", 1))


def test_what_is_shown_is_the_loaders_first_batch(here):
    from penstock import Loader

    sys.path.insert(0, str(here))
    try:
        import viewed_cells
    finally:
        sys.path.remove(str(here))
    loader = Loader(viewed_cells.Cells(), 3, shuffle=True, seed=4, collate_fn=list)
    batch = next(iter(loader))
    sheet = viewed(here, "viewed_cells:Cells", "-n", 3, "--seed", 4, "--tile", 120, "--columns", 3)
    shown = [sheet[8 + 70, 8 + n * 128 + 110, 0] for n in range(3)]
    assert shown == [sample["image"][0, 0, 0] for sample in batch]


def test_a_class_as_transform_is_made(here):
    sheet = viewed(here, "viewed_cells:Cells", "--transform", "viewed_cells:Darker", "--tile", 64)
    assert sheet[8 + 5, 8 + 60].max() <= 9


def test_an_image_folder_with_a_transform_of_images(here):
    for name in ("cat", "dog"):
        save(here / "photos" / name / "1.png", np.full((30, 40, 3), 200, np.uint8))
    plain = viewed(here, "photos", "--in-order", "--tile", 80)
    assert (plain[8 + 10, 8 + 10] == 200).all()
    dark = viewed(here, "photos", "--in-order", "--tile", 80, "--transform", "viewed_cells:dark")
    assert (dark[8 + 10, 8 + 10] == 10).all()


def test_a_voc_folder_its_split_and_a_mosaic(data_dir, here):
    source = data_dir / "bccd"
    sheet = viewed(here, source, "--split", "val", "-n", 2, "--tile", 200)
    assert has_colour(sheet, 1)
    canvas = viewed(here, source, "--mosaic", 320, "-n", 1, "--tile", 300)
    assert (canvas == 114).all(axis=2).mean() > 0.05  # what no image covers
    assert has_colour(canvas, 1)


def test_imglab_landmarks(data_dir, here):
    source = data_dir / "faces" / "training_with_face_landmarks.xml"
    sheet = viewed(here, source, "-n", 1, "--tile", 400)
    assert has_colour(sheet, 0)


def test_yolo_lists_and_stores(here):
    for name in ("a", "b"):
        save(here / "data" / "images" / "train" / f"{name}.png", np.full((40, 60, 3), 9, np.uint8))
        labels = here / "data" / "labels" / "train" / f"{name}.txt"
        labels.parent.mkdir(parents=True, exist_ok=True)
        labels.write_text("0 0.5 0.5 0.5 0.5\n")
    (here / "cells.yaml").write_text("path: data\ntrain: images/train\nnames: [cell]\n")
    assert has_colour(viewed(here, "cells.yaml", "--tile", 120), 0)
    images = here / "data" / "images" / "train"
    (here / "classes.txt").write_text(f"{images}/a.png 0\n{images}/b.png 1\n")
    assert viewed(here, "classes.txt", "--tile", 64).shape[1] == 2 * 72 + 8
    (here / "faces.txt").write_text(f"{images}/a.png 10 20 30 12 14 16\n")
    assert has_colour(viewed(here, "faces.txt", "--tile", 120), 0)
    assert main(["pack", str(images), "photos.lmdb"]) == 0
    assert viewed(here, "photos.lmdb", "--tile", 64).shape[1] == 2 * 72 + 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "-o", "a.png"], "nowhere does not exist"),
        (["viewed_cells:Cells", "-o", "no/folder/a.png"], "name a file in a folder that exists"),
        (
            ["viewed_cells:Cells", "-o", "a.png", "--transform", "viewed_cells"],
            "is not module:name",
        ),
        (
            ["viewed_cells:Cells", "-o", "a.png", "--transform", "viewed_cells:number"],
            "of type int",
        ),
        (["viewed_cells:Cells", "-o", "a.png", "--transform", "viewed_cells:no"], "has no no"),
        (["viewed_cells:Cells", "-o", "a.png", "--split", "val"], "--split is not for"),
        (["list.xml", "-o", "a.png", "--split", "val"], "--split is for folders"),
    ],
    ids=["source", "output", "form", "callable", "name", "split", "list"],
)
def test_mistakes_are_told(here, capsys, arguments, message):
    (here / "list.xml").write_text("<dataset/>")
    assert main(["view", *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not (here / "a.png").exists()
