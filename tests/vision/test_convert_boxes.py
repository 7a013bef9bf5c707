# SPDX-License-Identifier: Apache-2.0
"""Boxes that cannot be right are counted by `convert`, as data sets count them, or mended."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.vision.test_convert import one, picture, voc

from penstock.errors import ConfigError, StoreError
from penstock.vision import AnnotationRules, VOCDetection
from penstock.vision.annotations.voc_folder import read_voc_folder
from penstock.vision.convert import Source, convert

# In images of 40 x 30: sound, without area, inverted, reaching beyond, beyond altogether.
BOXES = [(2, 3, 20, 15), (7, 7, 7, 7), (20, 15, 2, 3), (30, 1, 50, 30), (60, 1, 70, 30)]


@pytest.fixture
def source(tmp_path):
    return voc(tmp_path / "voc", a="".join(one(box=box) for box in BOXES))


@pytest.mark.parametrize("policy", ["keep", "drop", "fix"])
def test_boxes_are_counted_as_the_data_set_counts_them(source, tmp_path, policy):
    report = convert(source, tmp_path / "to", target_format="voc", bad_boxes=policy)
    assert (
        report.box_counts
        == VOCDetection(source, rules=AnnotationRules(bad_boxes=policy)).box_counts
    )
    assert (report.box_counts.zero_area, report.box_counts.inverted) == (1, 1)
    assert report.box_counts.outside == 2
    assert report.num_objects == report.box_counts.kept


def test_boxes_are_mended_as_the_data_set_mends_them(source, tmp_path):
    convert(source, tmp_path / "to", target_format="voc", bad_boxes="fix")
    (image,) = read_voc_folder(tmp_path / "to")
    expected = VOCDetection(source, rules=AnnotationRules(bad_boxes="fix")).annotation(0)
    assert [o.box_xyxy_px for o in image.objects] == [o.box_xyxy_px for o in expected.objects]
    assert image.objects[2].box_xyxy_px == (29, 0, 40, 30)


def test_a_sound_box_keeps_all_its_digits_beside_one_that_is_mended(tmp_path):
    box = (1.123456789012, 2, 20, 15)
    source = voc(tmp_path / "voc", a=one(box=box) + one(box=(30, 1, 50, 30)))
    convert(source, tmp_path / "to", target_format="voc", bad_boxes="fix")
    (image,) = read_voc_folder(tmp_path / "to")
    assert image.objects[0].box_xyxy_px == pytest.approx((0.123456789012, 1, 20, 15), abs=1e-12)


def test_a_bad_box_is_an_error_if_that_is_said_and_nothing_is_written(source, tmp_path):
    with pytest.raises(StoreError, match=r"4 bad box\(es\).*'cat' in .*a.xml, is zero_area\."):
        convert(source, tmp_path / "to", target_format="yolo", bad_boxes="raise")
    assert not (tmp_path / "to").exists()
    with pytest.raises(ConfigError, match=r"bad_boxes is 'fix' or .*, not 'mend'"):
        convert(source, tmp_path / "to", target_format="yolo", bad_boxes="mend")


def test_both_ends_count_where_the_source_includes_both(tmp_path):
    picture(tmp_path / "x.jpg")
    Path(tmp_path / "l.txt").write_text("x.jpg 5 5 5 9 5 5\n")
    counts = []
    for options in ({"origin": 1}, {"origin": 0}, {"origin": 1, "box_format": "xywh"}):
        columns = {"has_box": True, "box_at": "before", "num_landmarks": 1, **options}
        form = Source(tmp_path / "l.txt", "landmarks", columns)
        place = tmp_path / f"to{len(counts)}"
        report = convert(form, place, target_format="voc", images="reference")
        counts.append((report.box_counts.zero_area, report.box_counts.unchecked))
    # From 5 to 5: nothing, or one column, which both count as no area; a width of 5 is one.
    assert counts == [(1, 0), (1, 0), (0, 0)]
