# SPDX-License-Identifier: Apache-2.0
"""examples/landmarks: three kinds of files become one data set, and one loader trains on it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment
from tests.examples.programs import imported, run

from penstock.vision.annotations.imglab import read_imglab
from penstock.vision.annotations.voc_folder import read_voc_folder

FOLDER = Path(__file__).parents[2] / "examples" / "landmarks"
MODULES = ("data", "model", "make_lists")


@pytest.fixture(scope="module")
def example():
    """The example's modules."""
    with imported(FOLDER, MODULES) as modules:
        yield modules


@pytest.fixture(scope="module")
def converted(data_dir, tmp_path_factory):
    """What the README's commands make, and what `convert` said."""
    folder = tmp_path_factory.mktemp("landmarks")
    run(FOLDER / "make_lists.py", data_dir / "faces", folder)
    printed = run(
        *("-m", "penstock", "convert", folder / "photos", f"landmarks:{folder}/points.txt"),
        *(folder / "faces", "--to", "voc", "--landmarks", 68, "--layout", "xyxy", "--box"),
        *("--classes", "class,pose"),
    )
    return folder / "faces", printed


def test_convert_joins_three_faces_in_four_and_says_which_one_it_could_not(converted, data_dir):
    faces, printed = converted
    assert printed.splitlines() == [
        "not joined: 1 object of 1 image that two sources have; their boxes, classes or other "
        "values differ",
        f"{faces}: 9 images, 44 objects, 32 of them of two sources",
    ]
    objects = [found for image in read_voc_folder(faces) for found in image.objects]
    assert sum(bool(found.landmarks_xy_px) for found in objects) == 33
    assert {found.class_name for found in objects} == {"face"}
    first = read_imglab(data_dir / "faces" / "training_with_face_landmarks.xml")[0].objects[0]
    same = [found for found in objects if found.box_xyxy_px == first.box_xyxy_px]
    assert [found.landmarks_xy_px for found in same] == [first.landmarks_xy_px]


def test_the_readme_shows_what_convert_says(converted):
    _, printed = converted
    for line in printed.splitlines():
        assert line.replace(str(converted[0]), "faces") in (FOLDER / "README.md").read_text()


def test_training_lowers_the_loss_and_is_the_same_for_any_number_of_workers(converted):
    options = ("--epochs", 4, "--samples", 64, "--batch-size", 16)
    outputs = [
        run(FOLDER / "train.py", converted[0], *options, "--workers", n).splitlines()
        for n in (0, 2)
    ]
    losses = [float(loss) for loss in re.findall(r"loss (\S+)  ", "\n".join(outputs[0]))]
    assert len(losses) == 4
    assert losses[-1] < 0.9 * losses[0]
    assert outputs[0] == outputs[1]
    errors = [float(line.split("error ")[1].split()[0]) for line in outputs[0] if "error" in line]
    assert errors[1] < errors[0]
    assert "\n".join(outputs[0][:4]) in (FOLDER / "README.md").read_text()


def test_a_mirrored_face_has_its_landmarks_where_those_of_a_face_are(example, data_dir):
    order = np.array(example["data"].mirrored_order())
    assert np.array_equal(order[order], np.arange(68))
    images = read_imglab(data_dir / "faces" / "training_with_face_landmarks.xml")
    faces = [np.array(found.landmarks_xy_px) for image in images for found in image.objects]
    mean = np.mean([(face - face.mean(0)) / face.std() for face in faces], axis=0)
    # Which landmark of the face each one of its mirror image lies at, by places alone.
    distances = np.linalg.norm((mean * [-1, 1])[None] - mean[:, None], axis=2)
    assert np.array_equal(order, linear_sum_assignment(distances)[1])


def test_samples_have_masks_where_nobody_marked_anything(example, converted):
    faces = example["data"].Faces(converted[0], "train", augment=False)
    assert np.bincount(faces.labels + 1).tolist() == [5, 6, 6, 2]
    for index, label in enumerate(faces.labels):
        sample = faces[index]
        assert sample["pose"] == label
        assert sample["landmarks"].isnan().all() == (label == -1)
        assert sample["box"].isfinite().all()
        assert sample["image"].shape == (3, 64, 64)
        # Twice the box's longer side: it reaches from -1/2 to 1/2, up to a pixel of rounding.
        assert sample["box"].abs().max().item() == pytest.approx(0.5, abs=0.03)


def test_a_folder_without_landmarks_is_refused_with_the_call_that_adds_them(example, converted):
    photos = converted[0].parent / "photos"
    refusal = r"have 0 landmarks, and 68 are .*convert .*--box"
    with pytest.warns(UserWarning, match="'pose'"), pytest.raises(ValueError, match=refusal):
        example["data"].Faces(photos, "train", augment=False)
