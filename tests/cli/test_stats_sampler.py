# SPDX-License-Identifier: Apache-2.0
"""`penstock stats --sampler` shows classes as they are and as a sampler has them."""

from __future__ import annotations

import json
import shutil

import pytest

from penstock.cli import main

pytest.importorskip("rich")
pytest.importorskip("lmdb")
pytest.importorskip("msgspec")
Image = pytest.importorskip("PIL.Image")

from penstock.stores import create_store  # noqa: E402 - it needs the above
from penstock.stores.records import encode_record  # noqa: E402

COUNTS = {"coat": 12, "hat": 4, "skirt": 2}
NAMES = ("coat", "hat", "skirt")


pytestmark = pytest.mark.usefixtures("fonts")


@pytest.fixture
def clothes(tmp_path):
    """Folders of classes, whose files are no images: none may be opened."""
    for name, count in COUNTS.items():
        (tmp_path / "clothes" / name).mkdir(parents=True)
        for number in range(count):
            (tmp_path / "clothes" / name / f"{number}.png").write_bytes(b"no image")
    return tmp_path / "clothes"


def balance_of(capsys, *arguments):
    """Give the JSON object."""
    capsys.readouterr()
    assert main(["stats", *map(str, arguments), "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def refusal_of(capsys, *arguments):
    """Give what stderr says."""
    capsys.readouterr()
    assert main(["stats", *map(str, arguments)]) == 1
    return capsys.readouterr().err


def after(record, level="images"):
    return {row["name"]: row[f"{level}_after"] for row in record["balance"]["classes"]}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("natural", {"coat": 12, "hat": 4, "skirt": 2}),
        ("balanced --exact", {"coat": 6, "hat": 6, "skirt": 6}),
        ("balanced --alpha 0 --exact", {"coat": 12, "hat": 4, "skirt": 2}),
        ("balanced --num-samples undersample --exact", {"coat": 2, "hat": 2, "skirt": 2}),
        ("balanced --num-samples oversample --exact", {"coat": 12, "hat": 12, "skirt": 12}),
        ("effective --beta 0 --num-samples 36 --exact", {"coat": 24, "hat": 8, "skirt": 4}),
        ("repeat-factor --threshold 0.44444445", {"coat": 12, "hat": 6, "skirt": 4}),
        ("class-aware --num-samples 9", {"coat": 3, "hat": 3, "skirt": 3}),
    ],
)
def test_each_sampler_is_the_one_of_its_name(clothes, capsys, options, expected):
    name, *others = options.split()
    found = balance_of(capsys, clothes, "--sampler", name, *others)
    assert after(found) == pytest.approx(expected, abs=1e-9)
    assert found["sampler"]["name"] == name
    assert found["address"] == f"folder:{clothes}"
    assert found["balance"]["objects"] is None


def test_the_seed_decides_the_draws(clothes, capsys):
    options = [clothes, "--sampler", "balanced", "--alpha", "0.5"]
    first, again, other = (balance_of(capsys, *options, "--seed", seed) for seed in (1, 1, 2))
    assert first == again
    assert after(first) != after(other)
    assert first["sampler"] == {"name": "balanced", "alpha": 0.5, "exact": False, "seed": 1}


@pytest.mark.parametrize(
    ("options", "settings", "words"),
    [
        ("natural", {}, "natural"),
        ("balanced", {"alpha": 1.0, "exact": False, "seed": 0}, "balanced, alpha 1, seed 0"),
        (
            "balanced --num-samples undersample",
            {"alpha": 1.0, "num_samples": "undersample", "exact": True, "seed": 0},
            "balanced, alpha 1, num samples undersample, exact, seed 0",
        ),
        (
            "effective --exact",
            {"beta": 0.999, "exact": True, "seed": 0},
            "effective, beta 0.999, exact, seed 0",
        ),
        (
            "repeat-factor --threshold 0.2 --num-samples 9",
            {"threshold": 0.2, "num_samples": 9, "seed": 0},
            "repeat-factor, threshold 0.2, num samples 9, seed 0",
        ),
        ("class-aware", {"seed": 0}, "class-aware, seed 0"),
    ],
)
def test_all_settings_are_told_also_those_that_were_not_given(
    clothes, capsys, options, settings, words
):
    name, *others = options.split()
    record = balance_of(capsys, clothes, "--sampler", name, *others)
    assert record["sampler"] == {"name": name, **settings}
    assert main(["stats", str(clothes), "--sampler", name, *others]) == 0
    assert capsys.readouterr().out.startswith(f"folder:{clothes}, sampler: {words}\n")


def test_the_threshold_is_set_beside_the_shares_of_images(clothes, capsys):
    options = [clothes, "--sampler", "repeat-factor", "--threshold"]
    shares = "Classes are in 11.1% (skirt) to 66.7% (coat) of the images; "
    below = balance_of(capsys, *options, "0.3")["threshold"]
    assert below == shares + "2 of 3 in less than the threshold, 30%."
    found = balance_of(capsys, *options, "0.11")
    assert found["threshold"] == shares + "0 of 3 in less than the threshold, 11%: nothing changes."
    assert after(found) == COUNTS
    assert main(["stats", *map(str, options), "0.11"]) == 0
    assert found["threshold"] in capsys.readouterr().out


def test_the_table_says_what_was_asked_and_what_came_of_it(clothes, capsys):
    assert main(["stats", str(clothes), "--sampler", "balanced", "--exact"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"folder:{clothes}, sampler: balanced, alpha 1, exact, seed 0"
    assert "coat        12      6   0.50  66.7%     33.3%" in out
    assert "largest to smallest class  6.0 : 1  1.0 : 1" in out
    assert "Balance over samples is even now" in out


def test_a_chart_has_bars_before_and_after(clothes, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    png = tmp_path / "a.png"
    assert main(["stats", str(clothes), "--sampler", "balanced", "--png", str(png)]) == 0
    assert f"{png}: chart\n" in capsys.readouterr().out
    with Image.open(png) as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
        width = image.width
    assert {(0, 0x72, 0xB2), (0xE6, 0x9F, 0)} <= colours
    write_boxes(tmp_path / "boxes.lmdb")
    two = tmp_path / "b.png"
    natural = ["--sampler", "natural", "--png", str(two), "--json"]
    assert main(["stats", str(tmp_path / "boxes.lmdb"), *natural]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)
    assert err.endswith(f"{two}: chart\n")
    with Image.open(two) as image:
        assert image.width == 2 * width  # a panel for images, one for objects


def write_boxes(path):
    """Ten images, all with cells, one with a parasite."""
    writer = create_store(path, class_names=("cell", "parasite"))
    rows = [(0, 0, 0, 1) if n == 3 else (0, 0, 0) for n in range(10)]
    writer.put_many([encode_record(str(n), {"n": n}, row) for n, row in enumerate(rows)])
    writer.finish()


def test_a_store_of_boxes_has_images_and_objects(tmp_path, capsys):
    write_boxes(tmp_path / "boxes.lmdb")
    options = ["--sampler", "repeat-factor", "--threshold", "0.4"]
    found = balance_of(capsys, tmp_path / "boxes.lmdb", *options)
    assert after(found) == {"cell": 11, "parasite": 2}
    assert after(found, "objects") == {"cell": 33, "parasite": 2}
    assert "Class cell is in 100.0% of the images" in found["balance"]["verdict"]


DATASETS = """
class Unreadable:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        raise RuntimeError("a sample was read")

class Words(Unreadable):
    labels = ["hat", "hat", "hat", "coat"]

class Tags(Unreadable):
    labels = [[0, 1], [0], [0], []]
    class_names = ("day", "rain")

class Many(Unreadable):
    labels = [["cat", "dog"], ["dog", "cat"], ["cat"], ["cat", "dog", "fox"]]

class Read(list):
    def __init__(self):
        super().__init__([("a", 0), ("b", 0), ("c", 0), ("d", 1)])

class Needs(list):
    def __init__(self, folder):
        super().__init__()

class Fails(list):
    def __init__(self):
        raise OSError("no such disk")

class Silent(list):
    def __init__(self):
        super().__init__([{"text": "a"}, {"text": "b"}])
"""


@pytest.fixture
def faces(tmp_path):
    """A VOC folder, XML beside photos, a list, an imglab file and a store of three poses."""
    pytest.importorskip("cv2")
    from tests.vision.annotation_files import painted, voc_object, write_voc_image

    from penstock.stores import pack
    from penstock.vision import VOCDetection

    poses = ["frontal"] * 4 + ["left", "right"]
    lines, images = "", ""
    for number, pose in enumerate(poses):
        item = voc_object("face", (1, 1, 4, 4), f"<pose>{pose}</pose>")
        write_voc_image(tmp_path / "voc", number, item, size=(8, 8), pixels=painted(8, 8))
        lines += f"voc/JPEGImages/{number}.jpg 1 2 3 4 man {pose}\n"
        images += f"<image file='voc/JPEGImages/{number}.jpg' width='8' height='8'>"
        images += f"<box top='1' left='1' width='3' height='3' pose='{pose}'/></image>"
    for folder in ("Annotations", "JPEGImages"):
        shutil.copytree(tmp_path / "voc" / folder, tmp_path / "beside", dirs_exist_ok=True)
    (tmp_path / "faces.txt").write_text(lines)
    (tmp_path / "faces.xml").write_text(f"<dataset><images>{images}</images></dataset>")
    pack(VOCDetection(tmp_path / "voc", attributes=["pose"]), f"lmdb:{tmp_path}/faces.lmdb")
    return tmp_path


@pytest.mark.parametrize(
    "options",
    ["voc", "beside", "faces.txt --classes gender,pose", "faces.xml", "faces.lmdb"],
)
def test_a_field_of_the_annotations_is_what_is_balanced(faces, monkeypatch, capsys, options):
    monkeypatch.chdir(faces)
    source, *others = options.split()
    asked = [source, *others, "--column", "pose"]
    found = balance_of(capsys, *asked, "--sampler", "balanced", "--exact")
    assert found["column"] == "pose"
    assert after(found) == {"frontal": 2, "left": 2, "right": 2}
    assert found["balance"]["images"]["largest_to_smallest_before"] == 4
    natural = balance_of(capsys, *asked)
    assert natural["column"] == "pose"
    assert {row["name"]: row["count"] for row in natural["classes"]} == {
        "frontal": 4,
        "left": 1,
        "right": 1,
    }
    assert main(["stats", *asked, "--sampler", "natural"]) == 0
    assert ", by pose, sampler: natural\n" in capsys.readouterr().out


@pytest.mark.parametrize(("source", "options"), [("voc", ["--objects"]), ("faces.xml", [])])
def test_what_pack_was_told_to_keep_is_a_field_of_the_store(
    faces, monkeypatch, capsys, source, options
):
    monkeypatch.chdir(faces)
    assert main(["pack", source, "kept.lmdb", *options, "--attributes", "pose"]) == 0
    found = balance_of(capsys, "kept.lmdb", "--column", "pose", "--sampler", "balanced", "--exact")
    assert after(found) == {"frontal": 2, "left": 2, "right": 2}
    assert main(["pack", "faces.txt", "other.lmdb", "--classes", "a,b", "--attributes", "hat"]) == 1
    said = "penstock: --attributes is for VOC and imglab; faces.txt has no 'hat'.\n"
    assert capsys.readouterr().err.endswith(said)


def test_one_object_of_each_image_says_its_class(module, capsys):
    asked = [f"{module}:Many", "--sampler", "natural"]
    assert after(balance_of(capsys, *asked, "--class-of", "first")) == {"cat": 3, "dog": 1}
    rarest = after(balance_of(capsys, *asked, "--class-of", "rarest"))
    assert rarest == {"cat": 1, "dog": 2, "fox": 1}


def test_a_field_that_is_not_there_is_refused_with_those_that_are(faces, capsys):
    asked = ["--column", "poze", "--sampler", "natural"]
    said = refusal_of(capsys, faces / "voc", *asked)
    assert said == (
        "penstock: no object has the attribute 'poze' (is 'pose' meant?); there are: 'pose'.\n"
    )
    said = refusal_of(capsys, faces / "faces.txt", "--classes", "gender,pose", *asked)
    assert "penstock: there is no column 'poze'; there are 'name', 'gender', 'pose'. Make" in said
    assert main(["pack", str(faces / "voc"), f"{faces}/plain.lmdb", "--objects"]) == 0
    capsys.readouterr()
    said = refusal_of(capsys, faces / "plain.lmdb", *asked)
    assert "`penstock pack SRC DST --objects --attributes poze`" in said


@pytest.fixture
def module(write_module):
    return write_module("balance_sets", DATASETS)


def test_datasets_of_ones_own_are_counted_by_the_labels_that_they_know(module, capsys):
    found = balance_of(capsys, f"{module}:Words", "--sampler", "balanced", "--exact")
    assert after(found) == {"coat": 2, "hat": 2}
    found = balance_of(capsys, f"{module}:Tags", "--sampler", "natural")
    assert after(found) == after(found, "objects") == {"day": 3, "rain": 1}
    assert found["balance"]["num_unlabelled"] == 1


def test_a_dataset_that_knows_none_is_read(module, capsys):
    found = balance_of(capsys, f"{module}:Read", "--sampler", "balanced", "--exact")
    assert after(found) == {"0": 2, "1": 2}


@pytest.mark.parametrize("options", [[], ["--sampler", "natural"]])
def test_what_ones_own_code_raises_is_told_in_a_line(module, capsys, options):
    said = refusal_of(capsys, f"{module}:Needs", *options)
    assert said.startswith(f"penstock: {module}:Needs: TypeError: Needs.__init__() missing 1 req")
    assert said.count("\n") == 1
    said = refusal_of(capsys, f"{module}:Fails", *options)
    assert "balance_sets.py, line " in said
    assert said.endswith(": OSError: no such disk\n")


@pytest.mark.parametrize("options", [[], ["--sampler", "natural"]])
def test_parts_of_a_data_set_taken_for_classes_are_pointed_out(tmp_path, capsys, options):
    for name in ("train/hat", "validation/hat"):
        (tmp_path / "all" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "all" / name / "1.png")
    hint = "The classes are called train, validation, as parts of a data set are. If they are pa"
    capsys.readouterr()
    assert main(["stats", str(tmp_path / "all"), *options]) == 0
    err = capsys.readouterr().err
    assert hint in err
    assert f"name one of them: {tmp_path / 'all' / 'train'}\n" in err
    assert main(["stats", str(tmp_path / "all" / "train"), *options]) == 0
    assert hint not in capsys.readouterr().err


def test_samples_without_labels_are_refused(module, tmp_path, capsys):
    said = "balance_sets:Silent: its samples have no labels, so --sampler balanced has no classes"
    assert said in refusal_of(capsys, f"{module}:Silent", "--sampler", "balanced")
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "a.png").write_bytes(b"")
    assert "no labels" in refusal_of(capsys, tmp_path / "flat", "--sampler", "natural")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--alpha 0.5", "--alpha is for a sampler: say which, with --sampler."),
        ("--exact", "--exact is for a sampler"),
        ("--sampler natural --seed 1", "--seed is for --sampler balanced or effective or repeat"),
        ("--sampler effective --alpha 1", "--alpha is for --sampler balanced; effective takes"),
        ("--sampler balanced --beta 0.9", "--beta is for --sampler effective; balanced takes"),
        ("--sampler class-aware --exact", "--exact is for --sampler balanced or effective; class"),
        (
            "--sampler balanced --threshold 0.1",
            "--threshold is for --sampler repeat-factor; balanced takes --alpha, --num-samples",
        ),
        ("--sampler repeat-factor", "--sampler repeat-factor needs --threshold: the share"),
        (
            "--sampler repeat-factor --threshold 1 --num-samples oversample",
            "--num-samples of --sampler repeat-factor is a number from 1 to 999,999,999, but got",
        ),
        ("--sampler balanced --sample 3", "--sample is for the sizes, and --sampler shows none"),
        (f"--sampler class-aware --num-samples {'9' * 5000}", "to 999,999,999, but got '9999"),
        ("--sampler balanced --num-samples=", "or \"undersample\", but got ''"),
        ("--sampler balanced --num-samples 0", '9, or "oversample", or "undersample", but got'),
        ("--sampler effective --beta 1", "beta should be 0 or more and below 1, but got beta=1"),
    ],
)
def test_an_option_of_another_sampler_is_refused(clothes, capsys, options, said):
    assert said in refusal_of(capsys, clothes, *options.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--sampler fair", "repeat-factor"),
        ("--sampler repeat-factor --threshold 50", "Invalid value for '--threshold'"),
    ],
)
def test_values_that_no_option_has_are_refused(clothes, capsys, options, said):
    assert main(["stats", str(clothes), *options.split()]) == 2
    assert said in capsys.readouterr().err
