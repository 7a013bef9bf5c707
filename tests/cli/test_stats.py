# SPDX-License-Identifier: Apache-2.0
"""`penstock stats` counts classes from the index, and measures what a sample of records holds."""

from __future__ import annotations

import io
import json
import math
import re
import textwrap

import numpy as np
import pytest

from penstock.cli import main

pytest.importorskip("lmdb")
pytest.importorskip("msgspec")
pytest.importorskip("rich")
Image = pytest.importorskip("PIL.Image")

from penstock.stores import EncodedImage, create_store, pack  # noqa: E402 - it needs the above
from penstock.stores.records import encode_record  # noqa: E402

pytest.importorskip("cv2")
from tests.vision.annotation_files import painted, voc_object, write_voc_image  # noqa: E402


def png(height, width):
    file = io.BytesIO()
    Image.new("L", (width, height)).save(file, "PNG")
    return file.getvalue()


class Photos(list):
    """8 cats, 3 dogs, 1 class without a name, and a class that has nothing."""

    class_names = ("dog", "cat", "cow")

    def __init__(self):
        labels = [1] * 8 + [0] * 3 + [7]
        super().__init__(
            (EncodedImage(png(10 + position, 20 + 2 * position)), label)
            for position, label in enumerate(labels)
        )


@pytest.fixture
def photos(tmp_path):
    pack(Photos(), tmp_path / "photos.lmdb")
    return tmp_path / "photos.lmdb"


def write_store(path, records, class_names=()):
    writer = create_store(path, class_names=class_names)
    writer.put_many([encode_record(key, sample, label) for key, sample, label in records])
    writer.finish()


def stats_of(capsys, *arguments):
    """Give the JSON object."""
    capsys.readouterr()
    assert main(["stats", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_classes_are_counted_and_sorted_and_imbalance_measured(photos, capsys):
    found = stats_of(capsys, photos)
    assert found["address"] == f"lmdb:{photos}"
    assert (found["num_records"], found["num_classes"], found["num_empty_classes"]) == (12, 4, 1)
    assert [(c["class"], c["name"], c["count"]) for c in found["classes"]] == [
        (1, "cat", 8),
        (0, "dog", 3),
        (7, "7", 1),
        (2, "cow", 0),
    ]
    shares = [8 / 12, 3 / 12, 1 / 12]
    assert [c["share"] for c in found["classes"]] == pytest.approx([*shares, 0])
    assert found["largest_to_smallest"] == 8
    assert not {"objects", "objects_error"} & found.keys()
    entropy = -sum(share * math.log(share) for share in shares)
    assert found["effective_classes"] == pytest.approx(math.exp(entropy))


def test_sizes_are_those_of_the_files(photos, capsys):
    sizes = stats_of(capsys, photos)["sizes"]
    num_bytes = [len(image.data) for image, _ in Photos()]
    assert sizes["total_bytes"] == sum(num_bytes)
    assert sizes["is_total_estimated"] is False
    assert sizes["record_bytes"] == {
        "min": min(num_bytes),
        "median": float(np.median(num_bytes)),
        "mean": sum(num_bytes) / 12,
        "max": max(num_bytes),
    }
    assert sizes["height_px"] == {"min": 10, "median": 15.5, "mean": 15.5, "max": 21}
    assert sizes["width_px"] == {"min": 20, "median": 31, "mean": 31, "max": 42}


def test_a_sample_is_spread_evenly_over_the_store(photos, capsys):
    sizes = stats_of(capsys, photos, "--sample", 3)["sizes"]
    assert sizes["num_sampled"] == 3  # records 0, 4 and 8
    assert sizes["height_px"] == {"min": 10, "median": 14, "mean": 14, "max": 18}
    assert sizes["is_total_estimated"] is True
    read = [len(Photos()[position][0].data) for position in (0, 4, 8)]
    assert sizes["total_bytes"] == 4 * sum(read)
    assert stats_of(capsys, photos, "--sample", 0)["sizes"]["num_sampled"] == 12


def test_records_with_several_labels_have_objects_and_images_counted_apart(tmp_path, capsys):
    labels = [(0, 0, 1), (), (0,), (1, 1, 1, 1)]
    write_store(
        tmp_path / "a.lmdb",
        [(str(n), {"image": EncodedImage(png(8, 8))}, label) for n, label in enumerate(labels)],
        ("red", "white"),
    )
    found = stats_of(capsys, tmp_path / "a.lmdb")
    counts = [(c["name"], c["count"], c["images"]) for c in found["classes"]]
    assert counts == [("white", 5, 2), ("red", 3, 2)]
    assert found["objects_per_image"] == {"min": 0, "median": 2, "mean": 2, "max": 4}
    assert found["num_images_without_objects"] == 1
    assert main(["stats", str(tmp_path / "a.lmdb")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Objects per image: 0 / 2.0 / 4 (min / mean / max). Images without any: 1." in out


def test_records_without_images_or_labels_have_sizes_alone(tmp_path, capsys):
    write_store(tmp_path / "a.lmdb", [("a", np.zeros(5, np.int16), None), ("b", ["é", b"1"], None)])
    found = stats_of(capsys, tmp_path / "a.lmdb")
    assert found["num_classes"] is None
    assert found["sizes"]["record_bytes"] == {"min": 3, "median": 6.5, "mean": 6.5, "max": 10}
    assert found["sizes"]["height_px"] is None
    assert main(["stats", str(tmp_path / "a.lmdb")]) == 0
    assert "Its records have no labels." in capsys.readouterr().out


def test_a_store_of_nothing_is_told(tmp_path, capsys):
    write_store(tmp_path / "a.lmdb", [], ("cat",))
    found = stats_of(capsys, tmp_path / "a.lmdb")
    assert (found["num_records"], found["sizes"]["total_bytes"]) == (0, 0)
    assert main(["stats", str(tmp_path / "a.lmdb")]) == 0


def test_the_table_has_a_row_for_each_class_and_leaves_the_middle_of_many_out(
    photos, tmp_path, capsys
):
    assert main(["stats", str(photos)]) == 0
    out = capsys.readouterr().out
    assert "12 records, 4 classes" in out
    rows = re.findall(r"^(\S+) +([\d,]+) +([\d.]+)%$", out, re.MULTILINE)
    assert rows == [
        ("cat", "8", "66.67"),
        ("dog", "3", "25.00"),
        ("7", "1", "8.33"),
        ("cow", "0", "0.00"),
    ]
    assert "Largest to smallest class: 8.0 : 1. Empty classes: 1." in " ".join(out.split())
    write_store(tmp_path / "many.lmdb", [(str(n), n, n % 100) for n in range(250)])
    assert main(["stats", str(tmp_path / "many.lmdb")]) == 0
    assert re.search(r"^\.\.\. 60 more +140 +56\.00%$", capsys.readouterr().out, re.MULTILINE)


def test_names_are_shown_as_they_are_and_whole(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    long = "a name of a class " * 8 + "that ends here"
    names = ("[red]$x_1$[/red]", "a\nb", long)
    write_store(tmp_path / "a.lmdb", [("a", 1, 0), ("b", 2, 1), ("c", 3, 2)], names)
    assert main(["stats", str(tmp_path / "a.lmdb")]) == 0
    out = capsys.readouterr().out
    assert "[red]$x_1$[/red] " in out
    assert re.search(r"^a(\\n|\?)b ", out, re.MULTILINE)
    assert f"{long} " in out


def test_an_image_whose_header_is_damaged_is_counted(tmp_path, capsys):
    images = [EncodedImage(png(8, 9)), EncodedImage(b"<html>")]
    write_store(tmp_path / "a.lmdb", [(str(n), (i, 0), 0) for n, i in enumerate(images)])
    sizes = stats_of(capsys, tmp_path / "a.lmdb")["sizes"]
    assert (sizes["num_images"], sizes["num_unreadable"]) == (1, 1)
    assert main(["stats", str(tmp_path / "a.lmdb")]) == 0
    assert re.search(r"header cannot be read +1$", capsys.readouterr().out, re.MULTILINE)


def test_damaged_records_have_a_row_and_classes_are_counted_all_the_same(photos, capsys):
    import lmdb

    with (
        lmdb.open(str(photos), subdir=False, lock=False, map_size=1 << 24) as environment,
        environment.begin(write=True) as transaction,
    ):
        transaction.put((3).to_bytes(8, "big"), b"gone")
    found = stats_of(capsys, photos)
    assert [c["count"] for c in found["classes"]] == [8, 3, 1, 0]
    sizes = found["sizes"]
    assert (sizes["num_sampled"], sizes["num_damaged"]) == (11, 1)
    assert sizes["is_total_estimated"] is True
    assert main(["stats", str(photos)]) == 0
    assert re.search(r"records that cannot be read +1$", capsys.readouterr().out, re.MULTILINE)


MODULE = """
import numpy as np

class Known(list):
    labels = np.array([1, 0, 1])
    class_names = ("dog", "cat")
    def __init__(self):
        super().__init__("abc")

unknown = [(np.zeros(4, np.uint8), 1), ("é", 0), (b"1", 1)]
"""


@pytest.mark.parametrize("name", ["Known", "unknown"])
def test_a_dataset_of_ones_own_is_counted(name, write_module, capsys):
    write_module("my_photos", MODULE)
    found = stats_of(capsys, f"my_photos:{name}")
    assert found["address"] == f"my_photos:{name}"
    assert [(c["class"], c["count"]) for c in found["classes"]] == [(1, 2), (0, 1)]
    assert found["classes"][0]["name"] == ("cat" if name == "Known" else "1")
    assert found["sizes"]["total_bytes"] == (3 if name == "Known" else 7)


def test_an_error_of_ones_own_code_is_no_damage_of_the_data(write_module, capsys):
    text = """
    class Photos:
        targets = [0, 1]
        def __len__(self):
            return 2
        def __getitem__(self, index):
            raise ValueError("forgotten")
    """
    write_module("my_broken", f"{textwrap.dedent(text)}photos = Photos()")
    assert main(["stats", "my_broken:photos"]) == 1
    assert "my_broken.py, line 7: ValueError: forgotten" in capsys.readouterr().err


def test_what_is_not_there_is_refused(tmp_path, capsys):
    assert main(["stats", str(tmp_path / "nowhere.lmdb")]) == 1
    assert "cannot open" in capsys.readouterr().err
    assert main(["stats", str(tmp_path), "--sample", "-1"]) == 2


def voc_folder(root, boxes_of_images, size=(60, 80)):
    """Write a VOC folder whose images have the boxes given, as VOC has them: 1-based, inclusive."""
    for number, boxes in enumerate(boxes_of_images):
        objects = [voc_object("cell", box) for box in boxes]
        write_voc_image(root, number, *objects, size=size, pixels=painted(*size))
    return root


def test_boxes_are_counted_by_image_and_area(tmp_path, capsys):
    boxes = [[(1, 1, 10, 10), (1, 1, 40, 40)], [], [(1, 1, 80, 60), (5, 5, 4, 4)]]
    source = voc_folder(tmp_path / "voc", boxes)
    objects = stats_of(capsys, source)["objects"]
    assert objects["num_boxes"] == 4
    assert objects["num_boxes_without_area"] == 1
    assert objects["bad_boxes"] == {"zero_area": 0, "inverted": 1, "outside": 0}
    assert objects["boxes_by_size"] == {"small": 1, "medium": 2, "large": 0}
    assert main(["stats", str(source)]) == 0
    out = capsys.readouterr().out
    assert "Boxes: 1 small, 2 medium, 0 large" in out
    assert "Bad boxes: 1 inverted; `rules=AnnotationRules(bad_boxes=...)`" in " ".join(out.split())


def test_objects_are_small_below_32_pixels_squared_and_large_from_96_on(tmp_path, capsys):
    # Of 31 x 33 = 32 * 32 - 1 pixels, 32 x 32, 95 x 97 = 96 * 96 - 1, 96 x 96.
    ends = [(31, 33), (32, 32), (95, 97), (96, 96)]
    boxes = [[(1, 1, right, bottom) for right, bottom in ends]]
    objects = stats_of(capsys, voc_folder(tmp_path / "voc", boxes, (100, 100)))["objects"]
    assert objects["boxes_by_size"] == {"small": 1, "medium": 2, "large": 1}
