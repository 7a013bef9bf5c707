# SPDX-License-Identifier: Apache-2.0
"""`convert`: nothing is lost in silence, nothing is replaced, nothing is half written."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import pytest

from penstock.errors import ConfigError, StoreError
from penstock.vision.annotations.imglab import read_imglab
from penstock.vision.annotations.lists import LandmarkColumns, landmark_lines
from penstock.vision.annotations.voc_folder import read_voc_folder
from penstock.vision.annotations.yolo import read_yolo
from penstock.vision.convert import Source, convert

pytest.importorskip("PIL.Image")

from tests.vision.annotation_files import (
    painted,
    voc_object,
    write_photo,
    write_split,
    write_voc_image,
)


def picture(path, size=(40, 30), orientation=None):
    return write_photo(path, painted(*size[::-1]), orientation)


def one(name="cat", inner="", box=(2, 3, 20, 15)):
    return voc_object(name, box, inner)


def voc(root, **objects):
    for name, xml in objects.items():
        write_voc_image(root, name, xml)
    return root


@pytest.fixture
def source(tmp_path):
    return voc(tmp_path / "voc", a=one() + one("dog", box=(1, 1, 40, 30)), b=one("dog"), c="")


def files_of(folder):
    return sorted(os.path.relpath(p, folder) for p in Path(folder).rglob("*") if p.is_file())


def without_source(images):
    return [(i.key, i.width_px, i.height_px, repr(i.objects)) for i in images]


def test_boxes_of_voc_come_back_from_yolo(source, tmp_path):
    report = convert(source, tmp_path / "yolo", target_format="yolo")
    assert (report.num_images, report.num_objects, report.losses) == (3, 3, {})
    assert files_of(report.path) == [
        "data.yaml", "images/train/a.jpg", "images/train/b.jpg", "images/train/c.jpg",
        "labels/train/a.txt", "labels/train/b.txt", "labels/train/c.txt",
    ]  # fmt: skip
    convert(report.path, tmp_path / "again", target_format="voc", strict=True)
    assert without_source(read_voc_folder(tmp_path / "again")) == without_source(
        read_voc_folder(source)
    )
    assert files_of(tmp_path / "again/ImageSets") == ["Main/train.txt"]


def test_splits_are_kept_where_the_form_has_them(source, tmp_path):
    parts = {"train": "ba", "val": "c", "trainval": "abc", "cat_val": ["c -1"]}
    for name, keys in parts.items():
        write_split(source, name, *keys)
    report = convert(source, tmp_path / "yolo", target_format="yolo")
    assert report.losses == {"split that shares images with another": 1}
    assert "'trainval' is left out" in report.notes[0]
    assert [i.key for i in read_yolo(tmp_path / "yolo")[0]] == ["a", "b"]
    assert [i.key for i in read_yolo(tmp_path / "yolo", "val")[0]] == ["c"]
    convert(source, tmp_path / "voc2", target_format="voc")
    assert [i.key for i in read_voc_folder(tmp_path / "voc2", "train")] == ["b", "a"]
    assert len(read_voc_folder(tmp_path / "voc2", "trainval")) == 3
    part = Source(source, options={"split": "val"})
    report = convert(part, tmp_path / "val", target_format="voc")
    assert report.num_images == 1


@pytest.mark.parametrize(
    ("form", "lost"),
    [
        ("yolo", {"difficult": 1, "pose": 1, "parts": 1, "attribute 'age'": 1,
                  "names of landmarks": 1, "object without a box": 1}),
        ("imglab", {"pose": 1, "parts": 1, "fraction of a pixel": 1, "object without a box": 1,
                    "order of landmarks": 1}),
        ("landmarks", {"difficult": 1, "pose": 1, "parts": 1, "attribute 'age'": 1,
                       "names of landmarks": 1, "image without objects": 1}),
        ("image-list", {"difficult": 1, "pose": 1, "parts": 1, "attribute 'age'": 1, "box": 1,
                        "names of landmarks": 1, "landmarks": 1,
                        "image without a class, or with several": 1}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("strict", [False, True])
def test_what_a_form_cannot_say_is_counted_or_an_error(tmp_path, form, lost, strict):
    points = "<landmarks><r x='1.5' y='2'/><l x='3' y='2'/></landmarks>"
    inner = "<pose>Left</pose><difficult>1</difficult><age>7</age><part><name>e</name></part>"
    source = voc(tmp_path / "voc", a=one(inner=inner + points) + one(box=None), b="")
    if strict:
        with pytest.raises(StoreError, match=f"{form} has no place for some of it: .*parts"):
            convert(source, tmp_path / "to", target_format=form, strict=True)
        assert os.listdir(tmp_path) == ["voc"]
    else:
        assert convert(source, tmp_path / "to", target_format=form).losses == lost


def test_lists_and_xml_of_the_same_images_become_one_set(tmp_path):
    """Detection from VOC, landmarks and classes from lists: all from one XML data set."""
    root = voc(tmp_path / "voc", a=one("face"), b=one("face") + one("face", box=(1, 1, 9, 9)))
    for name in ("a", "b", "c"):
        picture(root / f"JPEGImages/{name}.jpg")
    (tmp_path / "points.txt").write_text(
        "voc\\JPEGImages\\a.jpg 4 5 6 7\r\nvoc/JPEGImages/b.jpg 1 2 3 4 0 0 9 9\r\n".replace(
            "4 5 6 7\r", "4 5 6 7 1 2 20 15\r"
        )
    )
    (tmp_path / "classes.txt").write_text("voc/JPEGImages/c.jpg cat\nvoc/JPEGImages/a.jpg face\n")
    with pytest.warns(UserWarning, match="no file in Annotations"):
        report = convert(
            [
                root,
                Source(tmp_path / "points.txt", "landmarks", {"layout": "xyxy", "has_box": True}),
                Source(tmp_path / "classes.txt", "image-list"),
            ],
            tmp_path / "one",
            target_format="voc",
            strict=True,
        )
    assert (report.num_images, report.num_objects, report.num_joined) == (3, 4, 3)
    a, b, c = read_voc_folder(tmp_path / "one")
    assert [(o.class_name, o.box_xyxy_px, o.landmarks_xy_px) for o in a.objects] == [
        ("face", (1, 2, 20, 15), ((4, 5), (6, 7)))
    ]
    assert [o.landmarks_xy_px for o in b.objects] == [(), ((1, 2), (3, 4))]
    assert [(o.class_name, o.box_xyxy_px) for o in c.objects] == [("cat", None)]
    assert (c.width_px, c.height_px) == (40, 30)


def test_sources_of_other_frames_are_not_put_together(tmp_path):
    root = voc(tmp_path / "voc", a=one())
    other = tmp_path / "a.xml"
    other.write_text(
        "<dataset><images><image file='voc/JPEGImages/a.jpg' width='9' height='9'/></images>"
        "</dataset>"
    )
    with pytest.raises(StoreError, match=r"40 x 30 px .* 9 x 9: their boxes are not of one frame"):
        convert([root, other], tmp_path / "one", target_format="voc")


def test_a_landmark_list_comes_back_from_xml_and_its_lines_are_one_image(tmp_path):
    picture(tmp_path / "p/x.jpg")
    (tmp_path / "l.txt").write_text("p/x.jpg 1 2 3.5 4 f\np/x.jpg 5 6 nan nan m\n")
    options = {"classes": ("sex",), "layout": "xyxy"}
    listed = Source(tmp_path / "l.txt", "landmarks", options)
    report = convert(listed, tmp_path / "voc", target_format="voc")
    assert report.notes == ("2 objects had no class, and are called 'object'",)
    (image,) = read_voc_folder(tmp_path / "voc")
    assert (image.key, len(image.objects)) == ("x", 2)
    convert(
        tmp_path / "voc",
        tmp_path / "again.txt",
        target_format="landmarks",
        columns=LandmarkColumns(layout="xyxy", classes=("sex",)),
    )
    text = (tmp_path / "again.txt").read_text()
    assert text == ("voc/JPEGImages/x.jpg 1 2 3.5 4 f\nvoc/JPEGImages/x.jpg 5 6 nan nan m\n")
    assert len(list(landmark_lines(tmp_path / "again.txt", **options))) == 2


def test_images_are_copied_linked_or_left(source, tmp_path):
    for how in ("copy", "link", "reference"):
        report = convert(source, tmp_path / how, target_format="voc", images=how)
        image = tmp_path / how / "JPEGImages/a.jpg"
        assert image.exists() == (how != "reference")
        assert image.is_symlink() == (how == "link")
        assert bool(report.notes) == (how == "reference")
    convert(source, tmp_path / "sub/x.xml", target_format="imglab")
    assert read_imglab(tmp_path / "sub/x.xml")[0].key == "../voc/JPEGImages/a.jpg"
    assert all(image.path.is_file() for image in read_imglab(tmp_path / "sub/x.xml"))
    for form, how in (("yolo", "reference"), ("imglab", "copy")):
        with pytest.raises(ConfigError, match=f"images for {form} is .*, not '{how}'"):
            convert(source, tmp_path / "no", target_format=form, images=how)


@pytest.mark.parametrize("form", ["voc", "imglab"])
def test_what_is_there_is_never_replaced(source, tmp_path, form):
    if form == "voc":  # an empty folder is filled
        (tmp_path / "empty").mkdir()
        convert(source, tmp_path / "empty", target_format=form)
        assert len(read_voc_folder(tmp_path / "empty")) == 3
    (tmp_path / "there").mkdir()
    (tmp_path / "there/mine").touch()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("there", "file", "dangling"):
        with pytest.raises(StoreError, match="is there already, and is not replaced"):
            convert(source, tmp_path / name, target_format=form)
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(ConfigError, match="which is read: name another"):
        convert(source, source / "new", target_format=form)


@pytest.mark.parametrize("form", ["voc", "imglab", "yolo"])
def test_no_file_is_written_without_a_size_in_silence(tmp_path, form):
    source = tmp_path / "voc"
    write_voc_image(source, "a", one(), size=None)
    photo = source / "JPEGImages/a.jpg"
    photo.write_bytes(photo.read_bytes()[:10])
    with pytest.raises(StoreError, match=r"cannot read the size of .*a\.jpg"):
        convert(source, tmp_path / "to", target_format=form)
    if form != "yolo":
        photo.unlink()
        report = convert(source, tmp_path / "to", target_format=form, images="reference")
        assert report.losses == {"size of a missing image": 1}


def test_images_are_copied_under_a_suffix_by_which_they_are_found_again(source, tmp_path):
    odd = source / "JPEGImages/b.data"
    (source / "JPEGImages/b.jpg").rename(odd)
    (tmp_path / "l.txt").write_text("voc/JPEGImages/b.data 1 2\n")
    with pytest.raises(StoreError, match=r"b\.data has no suffix of an image"):
        convert(Source(tmp_path / "l.txt", "landmarks"), tmp_path / "to", target_format="yolo")


@pytest.mark.parametrize("form", ["voc", "imglab"])
def test_what_comes_there_while_sources_are_read_is_not_replaced_either(source, tmp_path, form):
    place = tmp_path / "new"

    class Slow(Source):
        def checked_form(self):
            if form == "voc":
                place.mkdir()
            (place / "mine" if form == "voc" else place).write_text("mine")
            return super().checked_form()

    with pytest.raises(StoreError, match=r"cannot write .*new: (File exists|Directory not empty)"):
        convert(Slow(source), place, target_format=form)
    assert files_of(tmp_path / "new") == (["mine"] if form == "voc" else [])
    assert (place / "mine" if form == "voc" else place).read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["new", "voc"]


def test_what_fails_on_the_way_leaves_nothing(source, tmp_path):
    (source / "JPEGImages/c.jpg").unlink()
    before = sorted(os.listdir(tmp_path))
    for form in ("voc", "yolo"):
        with pytest.raises(StoreError, match=r"c\.xml: its image .*c\.jpg is not there"):
            convert(source, tmp_path / "deep/new", target_format=form, images="copy")
        assert not list((tmp_path / "deep").iterdir())
    assert sorted({*os.listdir(tmp_path)} - {"deep"}) == before


@pytest.mark.parametrize(
    "name", ["../../evil", "../evil", "/tmp/evil", "a/../../../evil", "..\\..\\evil", "./evil"]
)
def test_no_key_leads_out_of_the_folder(tmp_path, name):
    inside = tmp_path / "in/side"
    picture(inside / "evil.jpg")
    (inside / "l.txt").write_text(f"{name}.jpg 1 2\n")
    listed = Source(inside / "l.txt", "landmarks")
    for follow_links, said in ((False, "1 of 1 files are outside of"), (True, "is not there")):
        found = pytest.raises(StoreError, match=rf"{said}.*evil\.jpg|evil\.jpg {said}")
        with contextlib.nullcontext() if name == "./evil" else found:
            place = inside / f"{follow_links}"
            convert(listed, place, target_format="voc", follow_links=follow_links)
    convert(listed, inside / "p", target_format="voc", images="reference")
    assert files_of(inside / "p") == ["Annotations/evil.xml"]
    assert sorted(os.listdir(tmp_path)) == ["in"]
    assert os.listdir(tmp_path / "in") == ["side"]


def test_names_are_whole_paths_where_the_last_parts_are_the_same(tmp_path):
    for place in ("x/1.jpg", "y/1.jpg", "x_1.jpg"):
        picture(tmp_path / place)
    (tmp_path / "l.txt").write_text("x/1.jpg a\ny/1.jpg b\n")
    listed = Source(tmp_path / "l.txt", "image-list")
    convert(listed, tmp_path / "one", target_format="voc")
    assert [image.key for image in read_voc_folder(tmp_path / "one")] == ["x_1", "y_1"]
    (tmp_path / "l.txt").write_text("x/1.jpg a\ny/1.jpg b\nX_1.jpg c\n")
    with pytest.raises(StoreError, match="would both be called 'X_1'"):
        convert(listed, tmp_path / "two", target_format="voc")


def test_an_image_of_yolo_may_be_called_otherwise_in_a_list_than_in_its_folder(tmp_path):
    picture(tmp_path / "yolo/images/train/a.jpg")
    (tmp_path / "yolo/images/train/a.txt").write_text("0 .5 .5 1 1")
    (tmp_path / "yolo/all.txt").write_text("./images/train/a.jpg\n")
    (tmp_path / "yolo/data.yaml").write_text("{train: images/train, all: all.txt, names: [x]}")
    report = convert(tmp_path / "yolo", tmp_path / "voc", target_format="voc")
    assert report.box_counts.total == 1  # once, though it is in two splits
    for split in ("train", "all"):
        assert [image.key for image in read_voc_folder(tmp_path / "voc", split)] == ["a"]


@pytest.mark.parametrize(
    "name", ["ä ö", "it's", "a&b<c>", "x'\"y", "日本", "a;b|c$(d)", "-rf", "%s"]
)
@pytest.mark.parametrize("form", ["voc", "yolo", "imglab", "landmarks"])
def test_odd_names_stay_what_they_are(tmp_path, name, form):
    source = voc(tmp_path / "voc", **{name: one()})
    target = tmp_path / "to.x"
    convert(source, target, target_format=form)
    back = {"voc": None, "yolo": None, "imglab": "imglab", "landmarks": "landmarks"}[form]
    options = {"has_box": True, "classes": ("class",)} if form == "landmarks" else {}
    convert(Source(target, back, options), tmp_path / "back", target_format="voc")
    (image,) = read_voc_folder(tmp_path / "back")
    assert image.key == name
    assert [(o.class_name, o.box_xyxy_px) for o in image.objects] == [("cat", (1, 2, 20, 15))]


def test_an_annotation_of_the_image_before_its_turn_is_no_yolo(tmp_path):
    source = voc(tmp_path / "voc", a=one())
    picture(source / "JPEGImages/a.jpg", orientation=6)  # 30 x 40 as it is seen
    for form in ("yolo", "landmarks"):
        with pytest.raises(
            StoreError, match=rf"40 x 30 px .* 30 x 40 as it is seen: {form} cannot"
        ):
            convert(source, tmp_path / "to", target_format=form)
    convert(source, tmp_path / "to", target_format="voc", strict=True)
    assert read_voc_folder(tmp_path / "to")[0].width_px == 40


def test_yolo_keeps_the_numbers_of_its_classes_and_voc_tells_that_it_cannot(tmp_path):
    picture(tmp_path / "yolo/images/train/a.jpg")
    (tmp_path / "yolo/labels/train").mkdir(parents=True)
    (tmp_path / "yolo/labels/train/a.txt").write_text("0 .5 .5 1 1\n2 .5 .5 .5 .5")
    (tmp_path / "yolo/data.yaml").write_text("train: images/train\nnames: [z, m, a]")
    report = convert(tmp_path / "yolo", tmp_path / "voc", target_format="voc")
    assert report.losses == {"number of a class": 2, "class without objects": 1}
    convert(tmp_path / "yolo", tmp_path / "again", target_format="yolo", strict=True)
    assert read_yolo(tmp_path / "again")[1] == ("z", "m", "a")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target_format": "csv"}, "target_format is 'voc' or 'imglab' or 'yolo'"),
        ({"form": "csv"}, "the format is one of voc"),
        ({"images": "move"}, "images for voc is 'copy' or 'link' or 'reference', not 'move'"),
        ({"options": {"polygons": "box"}}, "voc has no option 'polygons'; it has split, origin"),
    ],
)
def test_arguments_that_cannot_be(source, tmp_path, arguments, message):
    said = {name: arguments.pop(name) for name in ("form", "options") if name in arguments}
    with pytest.raises(ConfigError, match=message):
        convert(Source(source, **said), tmp_path / "to", **{"target_format": "voc", **arguments})
    with pytest.raises(ConfigError, match="src names nothing"):
        convert([], tmp_path / "to", target_format="voc")


def test_forms_that_cannot_be_found_out(tmp_path):
    (tmp_path / "l.txt").touch()
    (tmp_path / "empty").mkdir()
    for name, error, message in (
        ("l.txt", ConfigError, "name the format, 'landmarks' or 'image-list'"),
        ("empty", StoreError, "is no data set of a form that is known here"),
        ("no", StoreError, "is not there"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            convert(tmp_path / name, tmp_path / "to", target_format="voc")


@pytest.mark.parametrize(("form", "place"), [("yolo", "yolo"), ("coco", "all.json")])
def test_real_blood_cells_through_another_form_and_back(data_dir, tmp_path, form, place):
    convert(data_dir / "bccd", tmp_path / place, target_format=form)
    convert(tmp_path / place, tmp_path / "voc", target_format="voc", images="link")
    before, after = read_voc_folder(data_dir / "bccd"), read_voc_folder(tmp_path / "voc")
    assert [image.key for image in after] == [image.key for image in before]
    for one_image, other in zip(before, after, strict=True):
        assert [(o.class_name, o.box_xyxy_px) for o in other.objects] == [
            (o.class_name, o.box_xyxy_px) for o in one_image.objects
        ]
    if form == "yolo":
        assert len(read_voc_folder(tmp_path / "voc", "train")) == 205


def test_real_faces_through_every_form_and_back(data_dir, tmp_path):
    file = data_dir / "faces/training_with_face_landmarks.xml"
    first = read_imglab(file)
    convert(file, tmp_path / "voc", target_format="voc", default_class="face")
    convert(tmp_path / "voc", tmp_path / "yolo", target_format="yolo")
    convert(tmp_path / "yolo", tmp_path / "all.json", target_format="coco")
    convert(tmp_path / "all.json", tmp_path / "list.txt", target_format="landmarks")
    listed = Source(tmp_path / "list.txt", "landmarks", {"has_box": True, "classes": ("class",)})
    convert(listed, tmp_path / "imglab.xml", target_format="imglab", strict=True)
    first, last = (
        sorted(of, key=lambda i: i.path.name)
        for of in (first, read_imglab(tmp_path / "imglab.xml"))
    )
    assert [i.path.name for i in last] == [i.path.name for i in first]
    for one_image, other in zip(first, last, strict=True):
        for a, b in zip(one_image.objects, other.objects, strict=True):
            assert (a.box_xyxy_px, a.landmarks_xy_px) == (b.box_xyxy_px, b.landmarks_xy_px)
            assert (a.landmark_names, b.class_name) == (b.landmark_names, "face")


def test_repeats_stay_in_a_split_and_are_counted_where_there_is_no_place(source, tmp_path):
    write_split(source, "val", *"bab")
    report = convert(source, tmp_path / "again", target_format="voc", strict=True)
    assert report.losses == {}
    assert (tmp_path / "again/ImageSets/Main/val.txt").read_text() == "b\na\nb\n"
    report = convert(source, tmp_path / "list.txt", target_format="imglab")
    assert report.losses == {"repeat of an image": 1, "split": 1}
    listed = tmp_path / "l.txt"
    listed.write_text("voc/JPEGImages/a.jpg cat\n" * 3 + "voc/JPEGImages/c.jpg fox\n")
    report = convert(Source(listed, "image-list"), tmp_path / "made", target_format="voc")
    assert (report.num_images, report.losses) == (2, {"repeat of an image": 2})
