# SPDX-License-Identifier: Apache-2.0
"""`ImageFolder`: what torchvision's has, and what is better here."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

from penstock import vision
from penstock.data import Subset
from penstock.data.names import describe_sample
from penstock.errors import StoreError
from penstock.stores import StoreDataset, open_store, pack
from penstock.stores.folder.listing import IMAGE_SUFFIXES
from penstock.vision import ImageFolder

cv2 = pytest.importorskip("cv2")
Image = pytest.importorskip("PIL.Image")


def write_image(path, value=0, height=4, width=6):
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(os.fspath(path), np.full((height, width, 3), value, np.uint8))


@pytest.fixture
def root(tmp_path):
    for number, name in enumerate(("dog/2.png", "cat/1.png", "cat/deep/0.png", "cat/3.jpg")):
        write_image(tmp_path / "images" / name, 10 * number)
    (tmp_path / "images" / "cat" / "notes.txt").write_text("no image")
    return tmp_path / "images"


def test_it_has_what_torchvisions_has(root):
    dataset = ImageFolder(root)
    paths = [f"{root}/{name}" for name in ("cat/1.png", "cat/3.jpg", "cat/deep/0.png", "dog/2.png")]
    assert dataset.classes == ["cat", "dog"]
    assert dataset.class_to_idx == {"cat": 0, "dog": 1}
    assert dataset.samples == dataset.imgs == list(zip(paths, [0, 0, 0, 1], strict=True))
    assert dataset.targets == [0, 0, 0, 1]
    assert dataset.labels.tolist() == dataset.targets
    assert dataset.root == root
    assert len(dataset) == 4


def reference_listing(root):
    """The order of torchvision's own code: classes, then os.walk sorted, then names."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    return [
        (os.path.join(folder, name), label)
        for label, target in enumerate(classes)
        for folder, _, names in sorted(os.walk(root / target, followlinks=True))
        for name in sorted(names)
        if name.lower().endswith(IMAGE_SUFFIXES)
    ]


def test_samples_are_in_torchvisions_order_whatever_folders_are_called(tmp_path):
    for name in (
        "b",
        "a-x/1",
        "a/x",
        "a/sub/x",
        "a/sub-1/x",
        "a/sub/deep/x",
        "a/x/x",
        "é/1",
        "B/1",
    ):
        write_image(tmp_path / "c" / f"{name}.png")
        write_image(tmp_path / f"{name}" / "UPPER.PNG")
    dataset = ImageFolder(tmp_path)
    assert dataset.samples == reference_listing(tmp_path)
    assert len(dataset) == 18


def test_real_photos_are_in_torchvisions_order(data_dir):
    root = data_dir / "clothing" / "train"
    dataset = ImageFolder(root)
    assert dataset.samples == reference_listing(root)
    assert len(dataset.classes) == 10
    image, label = dataset[0]
    assert (image.dtype, image.ndim, image.shape[2], label) == (np.uint8, 3, 3, 0)


def test_transforms_take_image_and_class(root):
    dataset = ImageFolder(root, np.max, target_transform=str)  # by position, as torchvision's
    assert dataset[1][1] == "0"
    assert dataset[3] == (0, "1")


def test_labels_cannot_be_written_to_and_the_lists_make_no_samples(root):
    dataset = ImageFolder(root, transform=np.max)
    with pytest.raises(ValueError, match="read-only"):
        dataset.labels[3] = 7
    dataset.targets[3] = 7
    assert dataset[3] == (0, 1)
    labels = dataset.labels.copy()
    labels[3] = 7
    assert dataset[3] == (0, 1)


def test_the_folder_of_one_class_says_which_folder_to_name(root):
    with pytest.raises(StoreError) as caught:
        ImageFolder(root / "dog")
    assert str(caught.value) == (
        f"{root}/dog has 1 image(s) in itself, '2.png' for one, but no class folders. If it is the "
        "folder of one class, name the one above it. If its images have no classes, "
        f'StoreDataset(open_store("{root}/dog", layout="flat")) reads them without.'
    )
    (root / "dog" / "sub").mkdir()
    with pytest.raises(StoreError, match="but no image in its subfolders") as caught:
        ImageFolder(root / "dog")
    assert f'StoreDataset(open_store("{root}/dog", layout="flat"))' in str(caught.value)
    assert len(StoreDataset(open_store(root / "dog", layout="flat"))) == 1


def test_an_error_names_the_file(root):
    (root / "cat" / "1.png").write_bytes(b"")
    (root / "dog" / "2.png").unlink()
    os.mkfifo(root / "dog" / "2.png")
    dataset = ImageFolder(root)
    assert dataset.describe(0) == f"{root}/cat/1.png"
    assert describe_sample(Subset(dataset, [3]), 0) == f"{root}/dog/2.png"
    with pytest.raises(ValueError, match="the file is empty") as caught:
        dataset[0]
    assert any("cat/1.png" in note for note in caught.value.__notes__)
    with pytest.raises(StoreError, match=r"cannot read .*/dog/2\.png: not a regular file"):
        dataset[3]


def test_a_copy_by_pickle_leaves_the_long_lists_behind(root):
    dataset = ImageFolder(root)
    before = len(pickle.dumps(dataset))
    lists = dataset.samples, dataset.targets
    assert dataset.samples is lists[0]  # not made again for every image of a loop
    assert len(pickle.dumps(dataset)) == before
    copy = pickle.loads(pickle.dumps(dataset))
    assert (copy.samples, copy.targets) == lists
    assert copy[2][1] == 0


def test_a_folder_that_cannot_be_read_says_what_is_wrong(tmp_path):
    with pytest.raises(StoreError, match="nowhere does not exist"):
        ImageFolder(tmp_path / "nowhere")
    (tmp_path / "cat").mkdir()
    with pytest.raises(StoreError, match=r"no image in .* Looked for files ending in \.bmp"):
        ImageFolder(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="is a file, not a folder"):
        ImageFolder(tmp_path / "file")


@pytest.mark.parametrize(
    "name", [".ipynb_checkpoints", ".idea", "__MACOSX", "@eaDir", "lost+found", "__pycache__"]
)
def test_hidden_and_system_folders_are_no_classes_at_any_depth(root, name):
    before = ImageFolder(root)
    write_image(root / name / "1.png")
    (root / "cat" / name).mkdir()
    assert ImageFolder(root).class_to_idx == {"cat": 0, "dog": 1}
    write_image(root / "cat" / name / "thumbnail.png")
    assert ImageFolder(root).samples == before.samples


def test_a_class_folder_without_an_image_is_torchvisions_error_unless_it_is_allowed(root):
    (root / "cow").mkdir()
    (root / "bird" / "deep").mkdir(parents=True)
    known = ", ".join(IMAGE_SUFFIXES)
    with pytest.raises(FileNotFoundError) as caught:
        ImageFolder(root)
    assert str(caught.value).startswith(
        f"Found no valid file for the classes bird, cow. Supported extensions are: {known}"
    )
    assert "allow_empty=True" in str(caught.value)
    dataset = ImageFolder(root, allow_empty=True)
    assert dataset.class_to_idx == {"bird": 0, "cat": 1, "cow": 2, "dog": 3}
    assert dataset.targets == [1, 1, 1, 3]


VOC_XML = "<annotation><object><name>cat</name></object></annotation>"
IMGLAB_XML = "<?xml version='1.0'?>\n<dataset><images><image file='1.png'/></images></dataset>"


def annotated(root, images="images/1.png", **files):
    write_image(root / images)
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


YOLO_LINE = "0 .5 .5 1 1"


@pytest.mark.parametrize(
    ("images", "files", "reader"),
    [
        ("JPEGImages/1.png", {"Annotations__1_xml": VOC_XML}, "VOCDetection('{root}')"),
        ("images/1.png", {"annotations__1_xml": VOC_XML}, "VOCDetection('{root}')"),
        ("images/1.png", {"annots__1_xml": VOC_XML}, "VOCDetection('{root}')"),
        ("photos/a/1.png", {"xml__a__1_xml": VOC_XML}, "VOCDetection('{root}')"),
        ("val/images/1.png", {"val__annots__1_xml": VOC_XML}, "VOCDetection('{root}/val')"),
        ("boxes/images/1.png", {"boxes__all_xml": IMGLAB_XML}, None),
        ("labels/t/1.png", {"labels__1_txt": YOLO_LINE}, None),
        ("images/1.png", {"labels__1_txt": YOLO_LINE}, "YOLODetection('{root}')"),
        (
            "train/images/1.png",
            {"train__labels__1_txt": YOLO_LINE},
            "YOLODetection('{root}/train')",
        ),
        (
            "images/1.png",
            {"lists__train_txt": "images/1.png 1 2 3 4"},
            "LandmarkList('{root}/lists/train.txt')",
        ),
        (
            "images/my 1.png",
            {"lists__train_txt": "# all\nmy 1.png,cat"},
            "ImageList('{root}/lists/train.txt')",
        ),
    ],
)
def test_folders_of_annotations_are_not_taken_for_classes(tmp_path, images, files, reader):
    root = annotated(tmp_path, images, **files)
    if reader is None:  # images in each subfolder: these are classes
        assert len(ImageFolder(root)) == 1
        return
    reader = reader.format(root=root)
    with pytest.raises(StoreError) as caught:
        ImageFolder(root)
    assert "its subfolders are no classes" in str(caught.value)
    assert reader in str(caught.value)
    if "List" not in reader:  # which need root=, too
        assert len(eval(reader, vars(vision))) == 1


@pytest.mark.parametrize(
    ("images", "files", "advice"),
    [
        ("images/1.png", {"boxes__all_xml": IMGLAB_XML}, r"ImglabDetection\('.*/boxes/all.xml'\)"),
        ("images/1.png", {"annots__1_xml": ""}, r"VOCDetection\('/.*'\) reads"),
        ("photos/1.png", {"boxes__1_txt": YOLO_LINE}, "once they are called labels and images"),
        ("train2017/1.png", {"notes__all_json": "{}"}, r"COCODetection\('.*/all.json', IMAGES\)"),
    ],
)
def test_a_store_of_annotations_and_images_is_refused_with_what_to_do(
    tmp_path, images, files, advice
):
    with pytest.raises(StoreError, match=advice):
        StoreDataset(annotated(tmp_path, images, **files))
    with pytest.raises(StoreError, match=advice):
        pack(tmp_path, tmp_path / "packed", num_workers=0)


@pytest.mark.parametrize("file", ["cat/1.xml", "notes/read me.txt", "empty/.hidden.xml"])
def test_class_folders_stay_class_folders_whatever_else_lies_there(tmp_path, file):
    for name in ("cat", "dog", "train"):
        write_image(tmp_path / name / "1.png")
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("some words")
    assert ImageFolder(tmp_path, allow_empty=True).targets[0] == 0


def test_kaggles_layout_is_named_as_what_it_is(data_dir):
    with pytest.raises(StoreError, match=r"annotations beside the images in images.*VOCDetection"):
        ImageFolder(data_dir / "masks")


@pytest.mark.parametrize("labels", ["labels", "labels/train", "train/labels"])
def test_folders_of_yolo_are_not_taken_for_classes(tmp_path, labels):
    write_image(tmp_path / labels.replace("labels", "images") / "1.png")
    write_image(tmp_path / labels / "1.png")
    names = sorted({"images", "labels"} if labels[0] == "l" else {"train"})
    assert ImageFolder(tmp_path).classes == names  # classes, as there is no text file
    (tmp_path / labels / "1.txt").write_text("0 .5 .5 1 1")
    with pytest.raises(StoreError, match=r"labels beside the images in images.* YOLODetection\('/"):
        ImageFolder(tmp_path)
