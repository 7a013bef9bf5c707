# SPDX-License-Identifier: Apache-2.0
"""`COCODetection`: what pycocotools reads of the same file, with masks that fit the pixels."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("pycocotools")
pytest.importorskip("lmdb")

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from tests.vision.annotation_files import assert_equal_samples
from tests.vision.coco_files import HEIGHT, IDS, WIDTH, compressed, write_shapes
from tests.vision.rectangles import ious

from penstock import Loader, labels_of
from penstock.errors import MissingExtraError, StoreError
from penstock.sampling import ClassBalancedSampler
from penstock.stores import pack
from penstock.vision import (
    AnnotationRules,
    COCODetection,
    PackedAnnotations,
    contact_sheet,
    detection_collate,
)


@pytest.fixture
def path(tmp_path):
    return write_shapes(tmp_path)


def read(path, **options):
    return COCODetection(path, path.parent / "images", **{"masks": True, **options})


def test_sums_are_those_of_pycocotools_and_masks_fit_the_pixels(path):
    dataset, reference = read(path, area=True), COCO(path)
    assert tuple(dataset.category_ids.values()) == IDS
    assert len(dataset) == len(reference.imgs)
    for sample in (dataset[n] for n in range(len(dataset))):
        said = reference.imgToAnns[int(sample["image_id"])]
        corners = sample["boxes"].reshape(-1, 2, 2)
        boxes = np.concatenate([corners[:, 0], np.diff(corners, axis=1)[:, 0]], axis=1)
        assert boxes.tolist() == [one["bbox"] for one in said]
        assert sample["area"].tolist() == [one["area"] for one in said]
        assert sample["iscrowd"].tolist() == [bool(one["iscrowd"]) for one in said]
        ids = [dataset.category_ids[dataset.class_names[label]] for label in sample["labels"]]
        assert ids == [one["category_id"] for one in said]
        np.testing.assert_array_equal(sample["masks"], [reference.annToMask(one) for one in said])
        assert sample["masks"].dtype == np.uint8
        found = ious(sample)
        assert found.min() > 0.85
        assert (found[[1, 2, 4, 5]] == 1).all()  # run lengths are exact, an outline is not


def test_results_in_cocos_ids_are_found_perfect(path):
    dataset = read(path)
    loader = Loader(dataset, batch_size=2, num_workers=1, collate_fn=detection_collate)
    results = []
    for target in (target for _, targets in loader for target in targets):
        rows = zip(target["boxes"].tolist(), target["labels"], target["masks"], strict=True)
        for (x1, y1, x2, y2), label, mask in rows:
            results.append(
                {
                    "image_id": int(target["image_id"]),
                    "category_id": dataset.category_ids[dataset.class_names[label]],
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "segmentation": compressed(mask),
                    "score": 1.0,
                }
            )
    reference = COCO(path)
    for kind in ("bbox", "segm"):
        evaluation = COCOeval(reference, reference.loadRes(results), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        assert evaluation.stats[0] == 1


def test_packed_masks_are_short_and_the_same(path, tmp_path):
    dataset = read(path)
    pack(dataset, f"lmdb:{tmp_path}/shapes.lmdb", num_workers=0)
    packed = PackedAnnotations(f"lmdb:{tmp_path}/shapes.lmdb")
    for index in range(len(dataset)):
        assert_equal_samples(packed[index], dataset[index])
    with packed.store.borrow([0]) as (record,):
        assert sum(map(len, record.sample["segmentation"])) < 6 * HEIGHT * WIDTH / 20
    packed.close()


def test_crowds_are_left_out_if_asked_for_with_their_masks(path):
    every, some = read(path), read(path, rules=AnnotationRules(skip_difficult=True))
    assert (some.box_counts.kept, some.box_counts.difficult) == (20, 4)
    np.testing.assert_array_equal(some[1]["masks"], every[1]["masks"][:5])
    assert some.annotation(1).objects == every.annotation(1).objects[:5]
    assert len({one.fingerprint for one in (every, some, read(path, masks=False))}) == 3


def test_samplers_and_sheets_take_it(path):
    dataset = read(path)
    assert labels_of(dataset, objects="rarest").shape == (4,)
    assert len(list(ClassBalancedSampler(dataset, seed=1))) == 4
    assert dataset.column("iscrowd")[0].tolist() == [0, 0, 0, 0, 0, 1]
    plain = contact_sheet([{**dataset[0], "masks": ()}], tile_px=WIDTH)
    is_shaded = (contact_sheet([dataset[0]], tile_px=WIDTH) != plain).any(axis=2)
    is_shaded = is_shaded[8 : 8 + HEIGHT, 8 : 8 + WIDTH]
    inside = dataset[0]["masks"].any(axis=0)
    assert is_shaded[inside].mean() > 0.5  # the rest are lines of boxes
    assert not is_shaded[~inside].any()


def test_pycocotools_is_needed_for_masks_alone(path, monkeypatch):
    code = (
        "import sys; from penstock.vision import COCODetection\n"
        f"print(*COCODetection({str(path)!r}, {str(path.parent / 'images')!r})[0])\n"
        "assert not [name for name in sys.modules if name.startswith('pycocotools')]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "image boxes labels iscrowd image_id\n", done.stderr
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    monkeypatch.delitem(sys.modules, "pycocotools.mask")
    with pytest.raises(MissingExtraError, match=re.escape('pip install "penstock-loader[coco]"')):
        read(path)


OF_CAR = {"image_id": 139, "category_id": 3, "bbox": [1, 1, 5, 5]}


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"images": 1}, r"no JSON of COCO's: Expected `array`, got `int` - at `\$.images`"),
        ({"annotations": [{**OF_CAR, "image_id": 5}]}, "annotation 0 is of image 5, not a listed"),
        ({"annotations": [{**OF_CAR, "category_id": 4}]}, "is of category 4, not a listed"),
        ({"categories": [{"id": n, "name": "a"} for n in IDS]}, "two categories are called 'a'"),
        ({"images": [{"id": 139, "file_name": n} for n in "ab"]}, "two images have the id 139"),
        ({"annotations": [{**OF_CAR, "keypoints": [1, 2, 3]}]}, "139: keypoints of a kind 3 are"),
        ({"annotations": [{**OF_CAR, "segmentation": []}]}, "segmentation: leave out masks"),
    ],
)
def test_a_file_that_is_wrong_is_an_error(tmp_path, edits, message):
    with pytest.raises(StoreError, match=message):
        read(write_shapes(tmp_path, 1, **edits))


def test_a_folder_without_any_of_the_images_is_an_error(path):
    with pytest.raises(StoreError, match=r"none of the 4 images of .*: give images="):
        COCODetection(path, path.parent / "nowhere")


def runs(counts, size=(HEIGHT, WIDTH)):
    return {"size": size, "counts": counts}


@pytest.mark.parametrize(
    ("segmentation", "message"),
    [
        ([[1, 2, 3, 4]], "a polygon has 4 numbers"),
        ([1, 2, 3, 4, 5, 6], r"list of polygons \[\[x1, y1, \.\.\.\]"),
        ([[0, 0, 1e7, 0, 0, 9]], "a polygon is longer than 10,000,000 pixels"),
        (runs([10_800], (WIDTH, HEIGHT)), "120 x 90 px .*, and the image has 90 x 120"),
        (runs([10_801]), "its counts are not those of 10,800 pixels"),
        (runs([10_805, -5]), "its counts are not those of 10,800 pixels"),
        (runs("0" * 5), "its counts are not those of 10,800 pixels"),
        (runs(""), "its counts are no text of COCO's"),
        (runs("P" * 9 + "0"), "its counts are no text of COCO's"),
        (runs("0é"), "its counts are no text of COCO's"),
    ],
)
def test_a_mask_that_is_wrong_is_an_error_of_its_sample(tmp_path, segmentation, message):
    wrong = {**OF_CAR, "segmentation": segmentation}
    dataset = read(write_shapes(tmp_path, 1, annotations=[wrong]))
    with pytest.raises(ValueError, match=message) as caught:
        dataset[0]
    assert "139.png" in "".join(caught.value.__notes__)
