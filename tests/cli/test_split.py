# SPDX-License-Identifier: Apache-2.0
"""`penstock split` writes lists that the data sets' own readers take."""

from __future__ import annotations

import functools
import json
import os

import pytest

from penstock.cli import main

pytest.importorskip("cv2")
Image = pytest.importorskip("PIL.Image")

from tests.vision.annotation_files import (  # noqa: E402 - it needs the above
    painted,
    voc_object,
    write_voc_image,
)

from penstock import labels_of  # noqa: E402
from penstock.vision import ImageList, LandmarkColumns, LandmarkList, VOCDetection  # noqa: E402

POSES = ["frontal"] * 40 + ["left"] * 10 + ["right"] * 3
INTO = "--into=train=0.8,val=0.1,test=0.1"
EXPECTED = {
    "train": {"frontal": 32, "left": 8, "right": 1},
    "val": {"frontal": 4, "left": 1, "right": 1},
    "test": {"frontal": 4, "left": 1, "right": 1},
}


def photo(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8)).save(path)


def voc_of(folder):
    for number, pose in enumerate(POSES):
        item = voc_object("face", (1, 1, 4, 4), f"<pose>{pose}</pose>")
        write_voc_image(folder, number, item, size=(8, 8), pixels=painted(8, 8))
    read = functools.partial(VOCDetection, attributes={"pose": sorted(set(POSES))})
    return folder, ["--column", "pose"], lambda part: read(folder, part)


def landmarks_of(folder):
    lines = ["# faces"]
    for number, pose in enumerate(POSES):
        photo(folder / f"{number} face.jpg")
        lines.append(f"{number} face.jpg  1 2  3 4  man {pose}")
    (folder / "all.txt").write_text("\n".join(lines))
    options = ["--classes", "gender,pose", "--landmarks", "2", "--column", "pose"]
    return (
        folder / "all.txt",
        options,
        lambda part: LandmarkList(
            folder / f"{part}.txt", LandmarkColumns(num_landmarks=2, classes=["gender", "pose"])
        ),
    )


def images_of(folder):
    lines = ""
    for number, pose in enumerate(POSES):
        photo(folder / f"photos/{number}.jpg")
        lines += f"photos/{number}.jpg {pose}\n"
    (folder / "all.txt").write_text(lines)
    return folder / "all.txt", [], lambda part: ImageList(folder / f"{part}.txt")


def classes_of(folder):
    for number, pose in enumerate(POSES):
        photo(folder / f"{pose}/{number} a.jpg")
    return folder, [], lambda part: ImageList(folder / f"{part}.txt")


@pytest.fixture(params=[voc_of, landmarks_of, images_of, classes_of])
def source(request, tmp_path):
    return request.param(tmp_path / "faces")


def counts_of(dataset):
    column = "pose" if hasattr(dataset, "box_counts") else None
    names = dataset.class_names if column is None else dataset.attribute_names[column]
    labels = labels_of(dataset, column=column).tolist()
    return {name: labels.count(number) for number, name in enumerate(names)}


def test_each_part_has_its_share_of_every_class_and_is_read_by_the_sets_own_reader(source, capsys):
    path, options, read = source
    assert main(["split", str(path), INTO, "--stratify", *options]) == 0
    out = capsys.readouterr().out
    assert "frontal     32    4     4   40\n" in out
    assert "right        1    1     1    3\n" in out
    seen = []
    for part, expected in EXPECTED.items():
        dataset = read(part)
        assert counts_of(dataset) == expected
        dataset[0]  # its paths are right
        seen += [dataset.describe(index) for index in range(len(dataset))]
    assert len(set(seen)) == len(seen) == len(POSES)


def lists_of(path):
    folder = path / "ImageSets/Main" if (path / "Annotations").is_dir() else path
    return [(folder / f"{part}.txt").read_text() for part in EXPECTED]


def test_the_seed_decides_and_nothing_is_replaced_unasked(tmp_path, capsys):
    path, _, _ = voc_of(tmp_path / "faces")
    asked = ["split", str(path), INTO]
    assert main([*asked, "--seed", "1"]) == 0
    first = lists_of(path)
    assert [len(text.split()) for text in first] == [43, 5, 5]
    capsys.readouterr()
    assert main([*asked, "--seed", "2"]) == 1
    assert "train.txt is there already. Replace it with --overwrite." in capsys.readouterr().err
    assert lists_of(path) == first
    assert main([*asked, "--seed", "2", "--overwrite"]) == 0
    assert lists_of(path) != first
    assert main([*asked, "--seed", "1", "--overwrite"]) == 0
    assert lists_of(path) == first


def test_lists_of_an_earlier_split_are_named(source, capsys):
    path, options, _ = source
    again = ["split", str(path), "--into=train=0.8,val=0.2", "--overwrite", "--stratify", *options]
    assert main(again) == 0
    assert capsys.readouterr().err == ""
    assert main(["split", str(path), "--into=whole=1", "--stratify", *options]) == 0
    err = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in err] == [
        "is of another split: 42 of its 42 images are in the new ones too.",
        "is of another split: 11 of its 11 images are in the new ones too.",
    ]
    assert [line.split(" ")[0].rpartition("/")[2] for line in err] == ["train.txt", "val.txt"]


def test_all_lines_of_an_image_go_into_one_part(tmp_path):
    lines = [f"{n % 10}.jpg {n} 2 {'man' if n % 3 else 'woman'}" for n in range(30)]
    (tmp_path / "all.txt").write_text("\n".join(lines))
    options = ["--classes", "gender", "--landmarks", "1", "--stratify"]
    assert main(["split", str(tmp_path / "all.txt"), "--into", "a=0.5,b=0.5", *options]) == 0
    parts = [(tmp_path / f"{part}.txt").read_text().splitlines() for part in "ab"]
    assert sorted(parts[0] + parts[1]) == sorted(lines)
    images = [{line.split()[0] for line in part} for part in parts]
    assert not images[0] & images[1]


@pytest.mark.parametrize("make", [landmarks_of, classes_of])
def test_lists_may_go_elsewhere_than_the_data(tmp_path, capsys, make):
    path, options, _ = make(tmp_path / "faces")
    asked = ["split", str(path), "--into", "a=0.5,b=0.5", *options[:4]]
    before = sorted(tmp_path.joinpath("faces").rglob("*"))
    assert main([*asked, "--to", str(tmp_path / "lists")]) == 0
    assert sorted(tmp_path.joinpath("faces").rglob("*")) == before
    root = str(tmp_path / "faces")
    assert f"give the list's reader root={root!r}\n" in capsys.readouterr().out
    part = tmp_path / "lists/a.txt"
    if options:
        dataset = LandmarkList(
            part, LandmarkColumns(num_landmarks=2, classes=["gender", "pose"]), root=root
        )
    else:
        dataset = ImageList(part, root)
    assert len(dataset) == 27
    dataset[0]
    (tmp_path / "file").write_text("")
    assert main([*asked, "--to", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err.startswith(
        f"penstock: cannot write the list {tmp_path / 'file/a.txt'}: "
    )


def test_a_file_name_that_is_no_utf8_is_named_and_nothing_is_written(tmp_path, capsys):
    photo(tmp_path / "cat" / "1.jpg")
    os.rename(tmp_path / "cat" / "1.jpg", os.fsencode(tmp_path) + b"/cat/caf\xe9.jpg")
    photo(tmp_path / "cat" / "2.jpg")
    assert main(["split", str(tmp_path), "--into=train=0.5,val=0.5"]) == 1
    assert "caf\\udce9' cannot be in a list: it is not UTF-8" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["cat"]


def test_classes_whose_names_have_blanks_are_numbered(tmp_path, capsys):
    for name in ("polar bear", "wolf"):
        for number in range(2):
            photo(tmp_path / name / f"{number}.jpg")
    (tmp_path / "yak").mkdir()  # of which there is no photo yet
    assert main(["split", str(tmp_path), "--into", "a=0.5,b=0.5", "--stratify"]) == 0
    assert "ImageList(..., class_names=['polar bear', 'wolf', 'yak'])" in capsys.readouterr().out
    assert sorted(ImageList(tmp_path / "a.txt").labels.tolist()) == [0, 1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--into train=0.8,val=0.1", "the shares sum to 0.9, not to 1."),
        ("--into train=0.8,train=0.2", "'train=0.2' is no part. Give NAME=SHARE for each"),
        ("--into train=1,val=0", "'val=0' is no part"),
        ("--into ../train=1", "'../train=1' is no part"),
        ("--into all=1", "all.txt is the list that is split: call the part something else."),
        ("--into a=1 --column pose", "--column and --class-of say what --stratify goes by"),
        ("--into a=1 --stratify --column hair", "is none of the columns that --classes names"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, capsys, options, said):
    path, columns, _ = landmarks_of(tmp_path)
    columns = columns[:4]
    assert main(["split", str(path), *options.split(), *columns, "--overwrite"]) == 1
    assert said in capsys.readouterr().err


def test_other_sources_are_refused_with_those_that_are_taken(tmp_path, capsys):
    (tmp_path / "a.xml").write_text("<dataset/>")
    assert main(["split", str(tmp_path / "a.xml"), INTO]) == 1
    assert (
        "is not a VOC folder, a folder of class folders, or a txt list" in capsys.readouterr().err
    )


def test_objects_that_training_leaves_out_are_not_counted(tmp_path, capsys):
    folder, options, dataset_of = voc_of(tmp_path / "faces")
    spoiled = folder / f"Annotations/{len(POSES) - 1}.xml"  # of a rare pose
    spoiled.write_text(spoiled.read_text().replace("<xmax>4", "<xmax>1"))
    expected = "bad boxes: 1 zero_area; 1 dropped, as for training\n"
    assert main(["stats", str(folder), *options, "--json"]) == 0
    out, err = capsys.readouterr()
    counts = {c["name"]: c["count"] for c in json.loads(out)["classes"]}
    assert {name: count for name, count in counts.items() if name in POSES} == {
        "frontal": 40, "left": 10, "right": 2,
    }  # fmt: skip
    assert expected in err
    assert main(["split", str(folder), "--into=a=0.5,b=0.5", "--stratify", *options]) == 0
    assert expected in capsys.readouterr().err
    poses = [labels_of(dataset_of(part), column="pose") for part in ("a", "b")]
    rare = [(getattr(each, "values", each) == 2).sum() for each in poses]
    assert rare == [1, 1]
