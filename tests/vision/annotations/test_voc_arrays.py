# SPDX-License-Identifier: Apache-2.0
"""`parse_voc`: boxes in the form used here, and XML that must not be trusted."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from penstock.vision import parse_voc
from penstock.vision.annotations.reading import xml_text

BOMB = (
    "<!DOCTYPE x [<!ENTITY a0 'ha'>"
    + "".join(f"<!ENTITY a{i} '{f'&a{i - 1};' * 10}'>" for i in range(1, 12))
    + "]><annotation><filename>&a11;</filename></annotation>"
)


def annotation(objects="", size="<size><width>40</width><height>30</height></size>"):
    return f"<annotation><filename>1.jpg</filename>{size}{objects}</annotation>"


def one(name="cat", box=(1, 1, 40, 30), extra=""):
    sides = zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
    inner = "".join(f"<{side}>{value}</{side}>" for side, value in sides if value is not None)
    return f"<object><name>{name}</name>{extra}<bndbox>{inner}</bndbox></object>"


def test_boxes_become_0_based_and_half_open():
    found = parse_voc(annotation(one() + one("dog", (5, 6, 7, 8.5))))
    assert found.boxes_xyxy_px.tolist() == [[0, 0, 40, 30], [4, 5, 7, 8.5]]
    assert found.boxes_xyxy_px.dtype == np.float32
    assert found.class_names == ("cat", "dog")
    assert (found.filename, found.width_px, found.height_px) == ("1.jpg", 40, 30)


def test_an_image_without_objects_has_empty_arrays_of_the_usual_shape():
    found = parse_voc(annotation(size=""))
    assert found.boxes_xyxy_px.shape == (0, 4)
    assert found.difficult.shape == found.truncated.shape == (0,)
    assert (found.width_px, found.height_px, found.class_names) == (None, None, ())


def test_a_size_of_0_is_not_known_and_one_that_is_no_number_is_wrong():
    assert parse_voc(annotation(size="<size><width>0</width></size>")).width_px is None
    for text in ("wide", "-3", "1.5"):
        with pytest.raises(ValueError, match=f"size: width is '{text}', not a number"):
            parse_voc(annotation(size=f"<size><width>{text}</width></size>"))


@pytest.mark.parametrize("as_bytes", [False, True])
def test_entities_are_not_expanded(as_bytes):
    start = time.monotonic()
    with pytest.raises(ValueError, match="it has a DOCTYPE"):
        parse_voc(BOMB.encode() if as_bytes else BOMB)
    assert time.monotonic() - start < 5  # expanded it has 200 GB


@pytest.mark.parametrize(
    "doctype",
    [
        "<!DOCTYPE annotation SYSTEM 'file://{}'>",
        "<!DOCTYPE annotation [<!ENTITY secret SYSTEM 'file://{}'>]>",
        "<!DOCTYPE annotation [<!ENTITY % p SYSTEM 'file://{}'> %p;]>",
        "<!DOCTYPE annotation>",
    ],
)
def test_no_file_is_opened_for_a_document_type(doctype, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # who opened it would wait for a writer, without end
    xml = doctype.format(pipe) + annotation("<object><name>&secret;</name></object>")
    with pytest.raises(ValueError, match="it has a DOCTYPE"):
        parse_voc(xml)


def test_an_entity_that_nobody_declared_is_an_error():
    with pytest.raises(ValueError, match="not well-formed XML: undefined entity"):
        parse_voc("<annotation><filename>&secret;</filename></annotation>")


def test_elements_in_one_another_have_an_end():
    with pytest.raises(ValueError, match="more than 64 elements in one another"):
        parse_voc("<a>" * 100_000)


@pytest.mark.parametrize(
    ("encoding", "name"),
    [("utf-8", "räuber"), ("iso-8859-1", "räuber"), ("gbk", "白细胞"), ("utf-8-sig", "räuber")],
)
def test_an_encoding_that_is_declared_is_heeded_and_the_file_comes_back(encoding, name):
    text = f'<?xml version="1.0" encoding="{encoding.removesuffix("-sig")}"?>\r\n'
    data = (text + annotation(one(name))).encode(encoding)
    assert parse_voc(data).class_names == (name,)
    assert parse_voc(xml_text(data)).class_names == (name,)
    assert name in xml_text(data)


@pytest.mark.parametrize("encoding", ["utf-7", "unicode_escape", "punycode", "rot13", "nonsense"])
def test_encodings_that_nobody_annotates_in_are_refused(encoding):
    data = f'<?xml version="1.0" encoding="{encoding}"?><annotation/>'.encode()
    with pytest.raises(ValueError, match=f"encoding .{encoding}. is not supported"):
        parse_voc(data)
    with pytest.raises(ValueError, match="can't decode byte"):
        parse_voc("<annotation/>".encode("utf-16"))


def test_real_annotations_have_the_boxes_they_are_known_to_have(data_dir):
    found = [parse_voc(path.read_bytes()) for path in (data_dir / "bccd/Annotations").iterdir()]
    names = [name for annotation in found for name in annotation.class_names]
    assert {name: names.count(name) for name in set(names)} == {
        "RBC": 4155,
        "WBC": 372,
        "Platelets": 361,
    }
    boxes = np.concatenate([annotation.boxes_xyxy_px for annotation in found])
    assert boxes.min() == 0
    assert (boxes[:, 2].max(), boxes[:, 3].max()) == (640, 480)
