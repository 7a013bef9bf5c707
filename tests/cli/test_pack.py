# SPDX-License-Identifier: Apache-2.0
"""`penstock pack` packs what it is given, resumes, and says what went wrong without secrets."""

from __future__ import annotations

import io
import os
import pickle
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from penstock.cli import main

lmdb = pytest.importorskip("lmdb")
pytest.importorskip("msgspec")
pytest.importorskip("rich")
Image = pytest.importorskip("PIL.Image")

from penstock.stores import EncodedImage, open_store, pack  # noqa: E402 - it needs the above

SUMMARY = re.compile(
    r"(?P<address>\S+): (?P<records>[\d,]+) records?,(?: (?P<resumed>[\d,]+) of them from the "
    r"interrupted run,)? (?P<size>[\d,.]+ (?:[kMG]B|bytes)) in [\d.]+ s "
    r"\([\d,.]+ MB/s, [\d,]+ records?/s\)"
    r"(?:, (?P<left_out>[\d,]+) left out)?\n"
)
MODULE = """
import os, signal
import numpy as np

class Blocks:  # of 1 MiB; LMDB's writer brings them to disk 64 MiB at a time
    def __len__(self):
        return 160
    def __getitem__(self, index):
        # Two workers are at most 4 tasks of 16 ahead of the writer, so 5 are written by now.
        if index == 156 and "STOP_AT" in os.environ:
            os.write(int(os.environ["STOP_AT"]), b"!")
            signal.pause()
        return np.full(1 << 20, index, np.uint8)

class Numbers:
    class_names = ("even", "odd")
    def __len__(self):
        return 10
    def __getitem__(self, index):
        if index in (3, 8):
            raise ValueError(f"no number\\n{index}")
        return index, index % 2
    def describe(self, index):
        return f"number\\t{index}"

class Inverses(Numbers):
    describe = None
    def __getitem__(self, index):
        return 1 / (index - 2)

strange = [1, object()]

class nested:
    numbers = Numbers

def stream():
    return iter(())

def broken():
    import no_such_module_of_theirs

number = 3
"""


def jpeg(seed, size=(64, 48)):
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


@pytest.fixture
def images(tmp_path):
    """A folder of 12 images in 3 classes."""
    for position in range(12):
        path = tmp_path / "images" / f"class_{position % 3}" / f"{position:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(position))
    return tmp_path / "images"


@pytest.fixture
def module(write_module):
    return write_module("my_data", MODULE)


def run(capsys, *arguments):
    """Give exit code, stdout and stderr."""
    capsys.readouterr()
    code = main(["pack", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_a_folder_is_packed_byte_for_byte_and_the_last_line_says_what_was_done(
    images, tmp_path, capsys
):
    code, out, err = run(capsys, images, tmp_path / "a.lmdb", "--workers", 2)
    assert (code, err) == (0, "")
    summary = SUMMARY.fullmatch(out)
    assert summary["address"] == f"lmdb:{tmp_path / 'a.lmdb'}"
    assert (summary["records"], summary["resumed"], summary["left_out"]) == ("12", None, None)
    with open_store(tmp_path / "a.lmdb") as store:
        assert store.class_names == ("class_0", "class_1", "class_2")
        files = {record.key: record.sample[0].data for record in store.scan()}
    paths = images.rglob("*.jpg")
    assert files == {path.relative_to(images).as_posix(): path.read_bytes() for path in paths}


def test_limit_shards_resize_and_quality_do_what_they_say(images, tmp_path, capsys):
    options = ["--limit", 7, "--shards", 3, "--resize", 16, "--quality", 50, "--workers", 0]
    code, out, _ = run(capsys, images, f"lmdb:{tmp_path / 'a'}", *options)
    assert code == 0
    assert SUMMARY.fullmatch(out)["records"] == "7"
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "00000-of-00003.lmdb",
        "00001-of-00003.lmdb",
        "00002-of-00003.lmdb",
    ]
    with open_store(f"lmdb:{tmp_path / 'a'}") as store:
        assert len(store) == 7
        for record in store.scan():
            assert Image.open(io.BytesIO(record.sample[0].data)).size == (21, 16)
    # A second run takes the place of the first.
    again = [images, f"lmdb:{tmp_path / 'a'}", "--limit", 2, "--shards", 2]
    assert "--overwrite" in run(capsys, *again)[2]
    assert run(capsys, *again, "--overwrite")[0] == 0
    assert len(list((tmp_path / "a").iterdir())) == 2


@pytest.mark.parametrize(
    ("number", "goes_to_all", "status", "workers"),
    [
        (signal.SIGINT, True, 130, 2),  # as a terminal sends it: to the workers, too
        (signal.SIGTERM, False, 143, 0),  # Kubernetes
        (signal.SIGTERM, True, 143, 2),  # Slurm; `timeout` to the packer once more
    ],
)
def test_a_run_that_is_stopped_says_how_to_go_on_and_resume_does(
    number, goes_to_all, status, workers, module, tmp_path, capsys
):
    ours, theirs = os.pipe()
    arguments = ["pack", f"{module}:Blocks", "a.lmdb", "--workers", str(workers)]
    script = f"import sys; from penstock.cli import main; sys.exit(main({arguments!r}))"
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "STOP_AT": str(theirs)},
        pass_fds=[theirs],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    os.close(theirs)
    with child, open(ours, "rb", buffering=0) as pipe:
        assert pipe.read(1) == b"!"
        (os.killpg if goes_to_all else os.kill)(child.pid, number)
        if number == signal.SIGTERM:
            os.kill(child.pid, number)
        out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (status, "")
    assert err == (
        "penstock: stopped. What was packed so far is kept in a.lmdb.partial: the same command "
        "with --resume goes on.\n"
    )
    assert not (tmp_path / "a.lmdb").exists()
    code, out, err = run(capsys, *arguments[1:], "--resume")
    assert code == 0, err
    summary = SUMMARY.fullmatch(out)
    assert summary["records"] == "160"
    assert 0 < int(summary["resumed"]) <= 156
    with open_store("a.lmdb") as store:
        assert [record.sample[0] for record in store.scan()] == list(range(160))
    assert not (tmp_path / "a.lmdb.partial").exists()


def test_bad_samples_are_left_out_and_listed(module, capsys):
    code, out, err = run(capsys, f"{module}:nested.numbers", "a.lmdb", "--skip-bad")
    assert (code, err) == (0, "")
    *lines, last = out.splitlines(keepends=True)
    assert lines == ["number\\t3\tno number 3\n", "number\\t8\tno number 8\n"]
    summary = SUMMARY.fullmatch(last)
    assert (summary["records"], summary["left_out"]) == ("8", "2")
    with open_store("a.lmdb") as store:
        assert store.class_names == ("even", "odd")
        assert list(store.keys) == ["0", "1", "2", "4", "5", "6", "7", "9"]


def test_an_error_of_the_users_own_code_keeps_its_type_and_traceback(module, tmp_path, capsys):
    code, _, err = run(capsys, f"{module}:Numbers", "a.lmdb")
    assert code == 1
    assert err.startswith("Traceback (most recent call last):\n")
    assert "\nValueError: no number\n3\n" in err
    assert "number\\t3" in err
    code, _, err = run(capsys, f"{module}:Inverses", "a.lmdb")
    assert code == 1
    error, *notes = err[err.index("ZeroDivisionError") :].splitlines()
    assert error == "ZeroDivisionError: division by zero"
    assert notes.count("while reading sample 2 of the dataset") == 1
    assert "on_error" not in err
    assert notes[-1].startswith("--skip-bad leaves such samples out and lists them")
    code, _, err = run(capsys, f"{module}:broken", "a.lmdb")
    assert code == 1
    assert "\nModuleNotFoundError: No module named 'no_such_module_of_theirs'\n" in err
    assert not (tmp_path / "a.lmdb").exists()
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nothing_here:dataset", r"there is no module nothing_here in .*module:name of a d.*\n"),
        ("jsonl:a", r"there is no module jsonl .* kind of your own is named as module:dataset.*\n"),
        ("my_data:nothing", r"my_data:nothing: my_data has no nothing\.\n"),
        ("my_data:number", r"my_data:number is of type int and cannot be called\. Name a data.*\n"),
        ("my_data:stream", r"cannot pack a tuple_iterator: give a store's address, .*\n"),
        ("nowhere", r".*nowhere.*\n"),
        ("nowhere.lmdb", r"cannot open nowhere\.lmdb: No such file or directory\. .*\n"),
        ("ftp://host/photos", r"addresses that begin with ftp:// are not known\. .*\n"),
    ],
)
def test_a_source_that_is_not_there_is_refused(source, message, module, tmp_path, capsys):
    code, out, err = run(capsys, source, "a.lmdb")
    assert (code, out) == (1, "")
    assert re.fullmatch(f"penstock: {message}", err)
    assert not (tmp_path / "a.lmdb").exists()


def test_an_image_that_cannot_be_shrunk_ends_it_with_its_name_and_what_to_do(
    images, tmp_path, capsys
):
    (images / "class_1" / "04.jpg").write_bytes(b"<html>")
    said = "text, not an image: it begins with '<html>'"
    arguments = [images, tmp_path / "a.lmdb", "--resize", 16, "--workers", 2]
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (1, "")
    assert re.search(f"{said}.*--skip-bad leaves", err, re.DOTALL)
    code, out, _ = run(capsys, *arguments, "--skip-bad", "--resume")
    assert code == 0
    assert out.startswith(f"class_1/04.jpg\t{said}\n")
    assert SUMMARY.search(out)["left_out"] == "1"


def test_broken_images_are_packed_as_they_are_or_left_out(images, tmp_path, capsys):
    cut = images / "class_1" / "04.jpg"
    cut.write_bytes(cut.read_bytes()[:-400])
    code, out, _ = run(capsys, images, tmp_path / "a.lmdb", "--workers", 2)
    assert (code, SUMMARY.fullmatch(out)["records"]) == (0, "12")
    code, out, _ = run(capsys, images, tmp_path / "b.lmdb", "--workers", 2, "--skip-bad")
    line, last = out.splitlines(keepends=True)
    assert (code, line) == (0, "class_1/04.jpg\tPremature end of JPEG file\n")
    assert SUMMARY.fullmatch(last)["left_out"] == "1"
    assert main(["check", str(tmp_path / "b.lmdb")]) == 0


def write_pickles(path):
    """Write an LMDB file as many scripts do."""
    environment = lmdb.open(str(path), subdir=False, map_size=1 << 24)
    with environment.begin(write=True) as transaction:
        for position in range(3):
            transaction.put(str(position).encode(), pickle.dumps((jpeg(position), position)))
        transaction.put(b"__len__", pickle.dumps(3))
    environment.close()


def test_pickles_are_converted_only_if_trusted(tmp_path, capsys):
    pytest.importorskip("penstock.stores.lmdb.store")
    write_pickles(tmp_path / "old.lmdb")
    code, _, err = run(capsys, tmp_path / "old.lmdb", tmp_path / "new.lmdb")
    assert code == 1
    assert "Pickles can run any program" in err
    assert run(capsys, "--trust-pickle", tmp_path / "old.lmdb", tmp_path / "new.lmdb")[0] == 0
    with open_store(tmp_path / "new.lmdb") as store:
        assert [record.sample[0] for record in store.scan()] == [
            EncodedImage(jpeg(position)) for position in range(3)
        ]
        assert store.labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{t}/a.lmdb", "{t}/a.lmdb"], r"--overwrite"),
        (["{t}/images", "lmdb:{t}/images", "--shards", "2"], r"holds something else than the sha"),
        (["{t}/images/class_0", "{t}/images"], r"folder stores can be read, not written"),
        (["{t}/a.lmdb", "{t}/b.lmdb", "--image-field", "x"], r"no option 'image_field'"),
        (["{t}/images", "{t}/b.lmdb", "--key-column", "x"], r"no option 'key_field'"),
        (["m:f", "{t}/b.lmdb", "--label-column", "x"], r"--label-field is for stores, and m:f"),
        (["{t}/images", "lmdb:{t}/other"], r"other is a folder, and the new store a"),
        (["{t}/images", "lmdb:{t}/other", "--shards", "2"], r"a store \('notes.txt'\), and would"),
        (["{t}/images", "{t}/a.lmdb", "--shards", "2"], r"a\.lmdb is a file, and the new store"),
        (["{t}/a.lmdb", "{t}/b.lmdb", "--split", "train"], r"lmdb stores have no option 'split'"),
        (["{t}/images", "{t}/b.lmdb", "--trust-pickle"], r"layout is"),
        (["m:f", "{t}/b.lmdb", "--split", "train"], r"--split is for stores, and m:f"),
        (["{t}/images", "{t}/b.tar"], r"tar stores can be read, not written"),
    ],
)
def test_places_and_options_that_do_not_fit_are_refused_before_anything_is_done(
    arguments, message, images, tmp_path, capsys
):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("precious")
    pack([("one", 1)], tmp_path / "a.lmdb")
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run(capsys, *(argument.format(t=tmp_path) for argument in arguments))
    assert (code, out) == (1, "")
    assert re.search(message, err)
    assert sorted(tmp_path.rglob("*")) == before


def test_resuming_what_is_complete_says_so_and_packs_nothing(images, tmp_path, capsys):
    arguments = [images, tmp_path / "a.lmdb"]
    assert run(capsys, *arguments)[0] == 0
    before = (tmp_path / "a.lmdb").stat()
    code, out, _ = run(capsys, *arguments, "--resume")
    assert (code, out) == (0, f"lmdb:{tmp_path / 'a.lmdb'}: 12 records, already complete\n")
    assert os.path.samestat((tmp_path / "a.lmdb").stat(), before)
    # Other options are another store.
    code, _, err = run(capsys, *arguments, "--resume", "--limit", 5)
    assert (code, err.count("with other options. Name another place")) == (1, 1)
    code, out, _ = run(capsys, *arguments, "--resume", "--limit", 5, "--overwrite")
    assert code == 0
    assert SUMMARY.fullmatch(out)["records"] == "5"


def change(path, position):
    """Flip a bit of one record behind the store's back."""
    place = position.to_bytes(8, "big")
    with (
        lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 24) as environment,
        environment.begin(write=True) as transaction,
    ):
        data = bytearray(transaction.get(place))
        data[-7] ^= 0x10
        transaction.put(place, bytes(data))


def test_a_damaged_record_gets_a_short_line_and_a_hint(images, tmp_path, capsys):
    pack(str(images), tmp_path / "a.lmdb")
    change(tmp_path / "a.lmdb", 5)
    arguments = [tmp_path / "a.lmdb", tmp_path / "b.lmdb"]
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (1, "")
    assert re.search(r"record 5 \(.*is damaged: .* --skip-bad leaves such samples out", err)
    code, out, _ = run(capsys, *arguments, "--skip-bad")
    assert code == 0
    key = sorted(p.relative_to(images).as_posix() for p in images.rglob("*.jpg"))[5]
    line, last = out.splitlines(keepends=True)
    checksums = r"is damaged: its checksum is [0-9a-f]{16}, that of its bytes [0-9a-f]{16}"
    assert re.match(f"{key}\t.*{checksums}", line)
    assert SUMMARY.fullmatch(last)["left_out"] == "1"


def test_a_sample_that_cannot_be_stored_has_the_hint(module, capsys):
    code, _, err = run(capsys, f"{module}:strange", "a.lmdb")
    assert code == 1
    assert re.match(r"penstock: sample '1' cannot be stored: .*\. --skip-bad leaves such", err)
    code, out, _ = run(capsys, f"{module}:strange", "a.lmdb", "--skip-bad")
    assert code == 0
    assert out.startswith("sample 1\tsample '1' cannot be stored: at $ is a object")


def test_fields_and_columns_may_be_named(tmp_path, capsys):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.table({"one": [jpeg(0)], "two": [jpeg(1)], "kind": [3], "name": ["x"]})
    pq.write_table(table, tmp_path / "a.parquet")
    names = ["--image-column", "two", "--label-field", "kind", "--key-column", "name"]
    assert run(capsys, tmp_path / "a.parquet", tmp_path / "a.lmdb", *names)[0] == 0
    with open_store(tmp_path / "a.lmdb") as store:
        (record,) = store.scan()
    assert (record.key, record.label) == ("x", 3)
    assert main(["check", str(tmp_path / "a.parquet"), *names]) == 0
    assert main(["stats", str(tmp_path / "a.parquet"), *names]) == 0


def test_a_bar_is_drawn_on_a_terminal(module, tmp_path, drawn_on_a_terminal):
    arguments = ["pack", f"{module}:Blocks", "a.lmdb", "--workers", "0"]
    out, drawn = drawn_on_a_terminal(*arguments, cwd=tmp_path)
    assert SUMMARY.fullmatch(out)["records"] == "160"
    assert b"/160" in drawn
    assert b" MB" in drawn
