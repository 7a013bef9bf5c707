# SPDX-License-Identifier: Apache-2.0
"""`penstock view` writes the sheet of a batch, from every kind of source."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

from penstock.cli import main

cv2 = pytest.importorskip("cv2")
pytest.importorskip("rich")

from penstock.vision.drawing import class_colour  # noqa: E402 - it needs the above

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

def dark_cell(sample):
    return {**sample, "image": sample["image"] // 20}

def misspelt(sample):
    return sample["imge"]

number = 3

def dark(image):
    return image // 20
"""


@pytest.fixture
def here(tmp_path, write_module):
    write_module("viewed_cells", DATASET)
    return tmp_path


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
    sheet = viewed(here, "viewed_cells:Cells", "-n", 4, "--columns", 2, "--tile", 120)
    assert has_colour(sheet, 0)
    assert capsys.readouterr().out.endswith(
        f"sheet.png: 4 images, {sheet.shape[1]} x {sheet.shape[0]}\n"
    )


def test_the_seed_decides_images_and_augmentation(here):
    command = "viewed_cells:Cells", "--transform", "viewed_cells:brighter", "-n", 4, "--tile", 64
    first, again = viewed(here, *command, "--seed", 5), viewed(here, *command, "--seed", 5)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, viewed(here, *command, "--seed", 6))


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


@pytest.mark.parametrize("name", ["Darker", "dark_cell"])
def test_a_transform_is_given_or_made(here, name):
    arguments = ["--transform", f"viewed_cells:{name}", "--tile", 64]
    assert viewed(here, "viewed_cells:Cells", *arguments)[8 + 5, 8 + 60].max() <= 9


def test_what_cannot_be_read_has_a_line(here, capsys):
    for name in "ab":
        save(here / "photos" / "cat" / f"{name}.png", np.full((30, 40, 3), 200, np.uint8))
    (here / "photos" / "cat" / "b.png").write_bytes(b"")
    assert main(["view", "photos", "-o", "sheet.png", "--tile", "96"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "cat/b.png\tthe file is empty"
    assert shown[1].startswith("sheet.png: 1 image and 1 that cannot be read, ")
    assert (cv2.imread("sheet.png")[8 + 10, 8 + 10] == 200).all()
    (here / "photos" / "cat" / "a.png").write_bytes(b"")  # where there is none, there is no sheet
    assert main(["view", "photos", "-o", "none.png"]) == 1
    assert "the file is empty" in capsys.readouterr().err
    assert not (here / "none.png").exists()


def test_an_error_of_the_users_module_is_told_in_a_line_with_its_file(here, capsys):
    (here / "viewed_wrong.py").write_text("x = 1\nraise RuntimeError('no weights')\n")
    (here / "viewed_typo.py").write_text("x = = 1\n")
    for arguments in (
        ["viewed_wrong:cells"],
        ["viewed_cells:Cells", "--transform", "viewed_wrong:x"],
    ):
        assert main(["view", *arguments, "-o", "a.png"]) == 1
        said = "viewed_wrong.py, line 2: RuntimeError: no weights\n"
        assert capsys.readouterr().err.endswith(said)
    assert main(["view", "viewed_typo:cells", "-o", "a.png"]) == 1
    assert "viewed_typo.py, line 1: SyntaxError: " in capsys.readouterr().err
    line = 1 + DATASET.splitlines().index('    return sample["imge"]')
    arguments = ["--transform", "viewed_cells:misspelt", "-o", "a.png"]
    assert main(["view", "viewed_cells:Cells", *arguments]) == 1
    assert f"viewed_cells.py, line {line}: KeyError: 'imge'\n" in capsys.readouterr().err


LOADERS = """
import numpy as np
from penstock import Loader
from penstock.vision import DetectionCollate, ImagePipeline
from viewed_cells import Cells

class Photos:
    classes = ("cat", "dog")
    def __init__(self):
        self.transform = ImagePipeline.eval(32)
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return self.transform(np.full((48, 48, 3), (200, 40 * index, 10), np.uint8)), index % 2

class Vectors:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return {"x": np.zeros(10, np.float32), "label": index}

photos = Loader(Photos(), 4)
vectors = Loader(Vectors(), 4)
nothing = Loader([], 4)
number = 3

def cells():
    return Loader(Cells(), 2, shuffle=True, seed=3, num_workers=1, collate_fn=DetectionCollate())
"""


@pytest.fixture
def loaders(here, write_module):
    write_module("viewed_loaders", LOADERS)
    return here


def sheet_of(folder, loader, *arguments):
    path = folder / "sheet.png"
    assert main(["view", "--loader", loader, "-o", str(path), *map(str, arguments)]) == 0
    return cv2.imread(str(path))[..., ::-1]


def test_a_loader_by_name_has_its_batches_drawn_as_the_model_gets_them(loaders, capsys):
    arguments = "viewed_loaders:cells", "-n", 5, "--columns", 5, "--tile", 120
    sheet = sheet_of(loaders, *arguments)
    assert "sheet.png: 5 images, " in capsys.readouterr().out
    assert has_colour(sheet, 0)
    sys.path.insert(0, str(loaders))
    try:
        import viewed_loaders

        batches = [images for images, _ in viewed_loaders.cells()]
    finally:
        sys.path.remove(str(loaders))
    greys = [round(255 * float(image[0, 0, 0])) for images in batches for image in images][:5]
    assert [int(sheet[8 + 70, 8 + n * 128 + 110, 0]) for n in range(5)] == greys


def test_images_of_a_loader_are_shown_as_they_were_before_normalising(loaders):
    sheet = sheet_of(loaders, "viewed_loaders:photos", "--columns", 6, "--tile", 64)
    middles = sheet[8 + 32, 8 + 32 :: 72][:6].astype(int)
    assert np.abs(middles - [[200, 40 * n, 10] for n in range(6)]).max() <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--loader", "viewed_loaders:vectors"],
            r"batch\['x'\] is \(4, 10\), batch\['label'\] is \(4,\)",
        ),
        (["--loader", "viewed_loaders:nothing"], "gives no batches"),
        (["--loader", "viewed_loaders:number"], "of type int and cannot be called"),
        (["--loader", "viewed_loaders:photos", "--seed", "3"], "--seed is not for --loader"),
        (["--loader", "viewed_loaders:photos", "--landmarks", "5"], "--landmarks is not for"),
        (["--loader", "viewed_loaders:photos", "viewed_cells:Cells"], "one of the two"),
        ([], "name SRC or --loader"),
    ],
)
def test_what_is_wrong_with_a_loader_is_told(loaders, capsys, arguments, message):
    assert main(["view", *arguments, "-o", "sheet.png"]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (loaders / "sheet.png").exists()


def test_an_image_folder_with_a_transform_of_images(here):
    for name in ("cat", "dog"):
        save(here / "photos" / name / "1.png", np.full((30, 40, 3), 200, np.uint8))
    plain = viewed(here, "photos", "--tile", 80)
    assert (plain[8 + 10, 8 + 10] == 200).all()
    dark = viewed(here, "photos", "--tile", 80, "--transform", "viewed_cells:dark")
    assert (dark[8 + 10, 8 + 10] == 10).all()


def test_a_mosaic_is_cut_as_training_cuts_it(here):
    from penstock import Loader
    from penstock.vision import Mosaic, RandomPerspective, YOLODetection

    for name in "abcd":
        save(here / "data" / "images" / f"{name}.png", np.full((64, 64, 3), 50, np.uint8))
        labels = here / "data" / "labels" / f"{name}.txt"
        labels.parent.mkdir(exist_ok=True)
        labels.write_text("")
    (here / "data" / "data.yaml").write_text("train: images\nnames: [cell]\n")
    sheet = viewed(here, "data", "--mosaic", 64, "-n", 1, "--tile", 64)
    dataset = YOLODetection("data")
    trained = Mosaic(dataset, 64, transform=RandomPerspective(64))
    (sample,) = next(iter(Loader(trained, 1, shuffle=True, seed=0, collate_fn=list)))
    assert np.array_equal(sheet[8 : 8 + 64, 8 : 8 + 64], sample["image"])


@pytest.mark.parametrize("name", ["photo.jpg", "photo", "photo.png.txt"])
def test_what_is_there_is_not_overwritten_by_a_file_of_another_kind(here, capsys, name):
    (here / name).write_bytes(b"mine")
    assert main(["view", "viewed_cells:Cells", "-o", name]) == 1
    said = capsys.readouterr().err
    assert f"--output {name}: a contact sheet is PNG; name a file so, as a.png." in said
    assert (here / name).read_bytes() == b"mine"
    assert main(["view", "viewed_cells:Cells", "-o", "SHEET.PNG", "--tile", "64"]) == 0


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
        (["viewed_cells:Cells", "-o", "a.png", "--split", "val"], "--split is for stores"),
        (["list.xml", "-o", "a.png", "--split", "val"], "--split is for folders"),
    ],
    ids=["source", "output", "form", "callable", "name", "split", "list"],
)
def test_mistakes_are_told(here, capsys, arguments, message):
    (here / "list.xml").write_text("<dataset/>")
    assert main(["view", *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not (here / "a.png").exists()
