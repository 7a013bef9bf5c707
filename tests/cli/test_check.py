# SPDX-License-Identifier: Apache-2.0
"""`penstock check` finds every file that cannot be decoded, and only those."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys

import numpy as np
import pytest

from penstock.cli import main
from penstock.optional import install_command

cv2 = pytest.importorskip("cv2")
pytest.importorskip("rich")
Image = pytest.importorskip("PIL.Image")

from penstock.cli.check import (  # noqa: E402 - it needs the above
    Broken,
    Files,
    Findings,
    Records,
    check_file,
    check_in_parallel,
)
from penstock.cli.files import check_annotations  # noqa: E402
from penstock.images.decode import check_image  # noqa: E402

ONE_WORKER = ["--workers", "1"]
HEIGHT, WIDTH = 24, 32


def write_image(path, **how):
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0).integers(0, 255, (HEIGHT, WIDTH, 3), np.uint8)
    Image.fromarray(noise).convert(how.pop("mode", "RGB")).save(path, **how)


def cut(path, keep):
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole))])


@pytest.fixture
def folder(tmp_path):
    for position in range(12):
        write_image(tmp_path / "images" / f"class_{position % 3}" / f"{position:02}.jpg")
    return tmp_path / "images"


def run(capsys, *arguments):
    """Give exit code, [(path, reason), …] and stderr."""
    capsys.readouterr()
    code = main(["check", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, [tuple(line.split("\t")) for line in out.splitlines()], err


def command_for(folder, before=""):
    """Give the command line of a check in a process of its own."""
    script = (
        f"import sys; {before}\n"
        "from penstock.cli import main\n"
        f"sys.exit(main(['check', {str(folder)!r}, '--workers', '1']))"
    )
    return [sys.executable, "-c", script]


def test_a_sound_folder_gives_a_summary_and_status_0(folder, capsys):
    code, lines, err = run(capsys, folder, "--workers", 2)
    assert (code, lines) == (0, [])
    assert re.fullmatch(r"12 files, 0 broken, \d+\.\d s\n", err)


def test_broken_files_have_a_line_each_in_order_of_their_paths(folder, capsys):
    cut(folder / "class_1" / "01.jpg", 0.9)
    (folder / "class_0" / "empty.png").write_bytes(b"")
    (folder / "class_2" / "page.JPG").write_text("<html>404</html>")
    (folder / "notes.txt").write_text("no image, by its name")
    code, lines, err = run(capsys, folder, "--workers", 2)
    assert code == 1
    assert lines == [
        (str(folder / "class_0" / "empty.png"), "the file is empty"),
        (str(folder / "class_1" / "01.jpg"), "Premature end of JPEG file"),
        (
            str(folder / "class_2" / "page.JPG"),
            "text, not an image: it begins with '<html>404</html>'",
        ),
    ]
    assert err.startswith("14 files, 3 broken, ")


@pytest.mark.parametrize("keep", [0.4, 0.9, 0.99])
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("a.jpg", {}),
        ("progressive.jpg", {"progressive": True}),
        ("grey.jpg", {"mode": "L"}),
        ("cmyk.jpg", {"mode": "CMYK"}),
        ("a.png", {}),
        ("a.webp", {}),
        ("a.bmp", {}),
        ("a.ppm", {}),
        ("a.tif", {}),
        ("lzw.tiff", {"compression": "tiff_lzw"}),
    ],
)
def test_a_truncated_image_of_any_form_is_broken_and_a_whole_one_is_not(name, how, keep, tmp_path):
    write_image(tmp_path / name, **how)
    assert check_image((tmp_path / name).read_bytes()) == HEIGHT * WIDTH
    cut(tmp_path / name, keep)
    with pytest.raises((ValueError, OSError)):
        check_image((tmp_path / name).read_bytes())


def test_damage_that_opencv_passes_over_is_found(tmp_path):
    path = tmp_path / "a.tif"
    write_image(path, compression="tiff_adobe_deflate")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x41
    with pytest.raises(ValueError, match="decoder error"):
        check_image(bytes(data))


def is_sound(path):
    try:
        return check_image(path.read_bytes()) > 0
    except Exception:  # over damaged data Pillow raises nearly anything
        return False


def test_every_real_broken_file_has_a_line_and_the_good_ones_have_none(data_dir, capsys):
    files = [p for p in (data_dir / "broken").iterdir() if p.suffix not in (".tsv", ".gif")]
    code, lines, err = run(capsys, data_dir / "broken", "--workers", 2)
    broken = sorted(str(path) for path in files if not is_sound(path))
    assert (code, [path for path, _ in lines]) == (1, broken)
    assert all(reason for _, reason in lines)
    assert err.startswith(f"{len(files)} files, 16 broken, ")


def test_json_has_the_counts_and_every_broken_file(folder, capsys):
    (folder / "class_0" / "empty.png").write_bytes(b"")
    assert main(["check", str(folder), "--json", *ONE_WORKER]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record.pop("seconds") > 0
    assert record == {
        "num_files": 13,
        "num_annotations": 0,
        "num_checked": 13,
        "num_broken": 1,
        "broken": [
            {"path": str(folder / "class_0" / "empty.png"), "reason": "the file is empty"},
        ],
        "not_looked_at": [],
    }
    (folder / "class_0" / "empty.png").unlink()
    assert main(["check", str(folder), "--json", *ONE_WORKER]) == 0
    assert json.loads(capsys.readouterr().out)["broken"] == []


def test_a_name_that_is_no_text_stays_in_its_line_and_comes_whole_in_json(tmp_path, capsys):
    path = os.fsencode(tmp_path) + b"/a\n\tb\xe9.jpg"
    with open(path, "wb"):
        pass
    code, lines, _ = run(capsys, tmp_path, *ONE_WORKER)
    assert code == 1
    assert lines == [(f"{tmp_path}/a\\n\\tb\\udce9.jpg", "the file is empty")]
    assert main(["check", str(tmp_path), "--json", *ONE_WORKER]) == 1
    named = json.loads(capsys.readouterr().out)["broken"][0]["path"]
    assert os.fsencode(named) == path


def test_links_are_followed_and_what_is_no_file_is_broken(folder, tmp_path, capsys):
    (folder / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    os.mkfifo(folder / "pipe.jpg")
    write_image(tmp_path / "elsewhere" / "a.jpg")
    (tmp_path / "elsewhere" / "b.jpg").write_bytes(b"")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "class_0" / "round").symlink_to(folder)  # a ring
    code, lines, err = run(capsys, folder, *ONE_WORKER)
    assert code == 1
    assert lines == [
        (str(folder / "gone.jpg"), "No such file or directory"),
        (str(folder / "linked" / "b.jpg"), "the file is empty"),
        (str(folder / "pipe.jpg"), "not a regular file, but a FIFO"),
    ]
    assert err.startswith("16 files, 3 broken, ")


def end_process_on_bad_names(path):
    """A decoder with a bug: some files kill their process, others make it leave."""
    if "segfault" in path:
        os.kill(os.getpid(), signal.SIGSEGV)
    if "exit" in path:
        os._exit(0)
    check_file(path)


@pytest.mark.usefixtures("workers_by_fork")
def test_a_file_that_ends_its_worker_is_broken_and_the_rest_is_checked(folder, monkeypatch):
    for name in ("class_0/segfault.jpg", "class_1/segfault.jpg", "class_2/exit.jpg"):
        write_image(folder / name)
    (folder / "empty.jpg").write_bytes(b"")
    paths = sorted(str(path) for path in folder.rglob("*.jpg"))
    findings = Findings(len(paths))
    monkeypatch.setattr(sys.modules["penstock.cli.check"], "check_file", end_process_on_bad_names)
    check_in_parallel(Files(paths), 2, findings, lambda: None)
    reasons = {os.path.relpath(file.name, folder): file.reason for file in findings.broken}
    assert sorted(reasons) == [
        "class_0/segfault.jpg", "class_1/segfault.jpg", "class_2/exit.jpg", "empty.jpg",
    ]  # fmt: skip
    assert re.search(r"worker \d was killed by SIGSEGV while", reasons["class_0/segfault.jpg"])
    assert re.search(r"worker \d exited with code 0", reasons["class_2/exit.jpg"])
    assert reasons["empty.jpg"] == "the file is empty"
    assert findings.num_checked == len(paths) == 16


def test_a_check_that_is_interrupted_reports_what_it_has_found(folder, capsys, monkeypatch):
    def interrupted(files, num_workers, findings, show):
        findings.num_checked = 5
        for number in (4, 2):  # what ends its worker is known late
            broken = Broken(files.describe(number), "the file is empty", number)
            findings.broken.append(broken)
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["penstock.cli.check"], "check_in_parallel", interrupted)
    code, lines, err = run(capsys, folder)
    assert code == 130
    names = [str(folder / "class_0" / "06.jpg"), str(folder / "class_1" / "01.jpg")]
    assert lines == [(name, "the file is empty") for name in names]
    assert "stopped after 5 of 12 files, 2 broken" in err


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "{tmp}/nowhere",
            r"nowhere does not exist\. Name a folder, a file or a store; pack a dataset first",
        ),
        ("{tmp}/empty", r"no image in .*empty or below it\. Looked for files ending in \.bmp"),
        ("{tmp}/gifs", r"\.webp\. 1 file not looked at: a\.gif"),
    ],
)
def test_a_folder_without_images_is_refused_with_what_to_do(argument, message, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "gifs").mkdir()
    (tmp_path / "gifs" / "a.gif").write_bytes(b"GIF89a")
    code, lines, err = run(capsys, argument.format(tmp=tmp_path))
    assert (code, lines) == (1, [])
    assert "Traceback" not in err
    assert re.search(message, err.replace("\n", " "))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list every folder")
def test_a_folder_that_cannot_be_listed_is_refused(folder, capsys):
    (folder / "class_1").chmod(0)
    try:
        code, _, err = run(capsys, folder)
    finally:
        (folder / "class_1").chmod(0o700)
    assert code == 1
    assert re.search(r"cannot list .*class_1: Permission denied\. Its images would be", err)


@pytest.mark.parametrize("option", [["--workers", "0"], ["--nonsense"]])
def test_a_wrong_option_gives_status_2(option, folder):
    assert main(["check", str(folder), *option]) == 2


@pytest.mark.parametrize(("module", "extra"), [("typer", "cli"), ("PIL", "vision")])
def test_a_missing_extra_is_named(module, extra, folder):
    command = command_for(folder, before=f"sys.modules[{module!r}] = None")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert install_command(*extra.split(",")) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("modules", [["torch"], ["lmdb", "pymongo"]])
def test_torch_and_what_stores_need_are_not_needed_for_a_plain_folder(folder, modules):
    command = command_for(folder, before=f"sys.modules.update(dict.fromkeys({modules}))")
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.returncode == 0


def test_a_bar_is_drawn_on_a_terminal(folder, drawn_on_a_terminal):
    out, drawn = drawn_on_a_terminal("check", str(folder), *ONE_WORKER, cwd=folder)
    assert out == ""
    assert b"0 broken" in drawn
    assert b"/12" in drawn


# ---- stores ------------------------------------------------------------------------------------


def jpeg(seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
    return cv2.imencode(".jpg", pixels)[1].tobytes()


def image_records(number=12):
    from penstock.stores.records import EncodedImage, encode_record

    return [
        encode_record(f"class_{n % 3}/{n:02}.jpg", (EncodedImage(jpeg(n)), n % 3), n % 3)
        for n in range(number)
    ]


def write_store(address, records):
    from penstock.stores import create_store

    writer = create_store(address, class_names=("a", "b", "c"))
    writer.put_many(records)
    writer.finish()


@pytest.fixture
def store(tmp_path):
    """An LMDB store of 12 images."""
    pytest.importorskip("lmdb")
    pytest.importorskip("msgspec")
    write_store(tmp_path / "a.lmdb", image_records())
    return tmp_path / "a.lmdb"


def change(path, edit):
    """Let `edit` write to an LMDB file behind the store's back, with a write transaction."""
    import lmdb

    with (
        lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 24) as environment,
        environment.begin(write=True) as transaction,
    ):
        edit(transaction)


def place(position):
    return position.to_bytes(8, "big")


def test_records_that_were_damaged_have_a_line_each_in_their_order(store, capsys):
    from penstock.stores.records import EncodedImage, encode_record

    def damage(transaction):
        flipped = bytearray(transaction.get(place(2)))
        flipped[-7] ^= 0x10
        transaction.put(place(2), bytes(flipped))
        transaction.put(place(4), transaction.get(place(4))[:-9])
        other = encode_record("elsewhere.jpg", (EncodedImage(jpeg(6)), 0), 0)
        transaction.put(place(6), other.data)
        key = "class_1/07.jpg"
        transaction.put(place(7), encode_record(key, (EncodedImage(jpeg(7)), 2), 2).data)
        transaction.put(place(10), b"gone")

    change(store, damage)
    code, lines, err = run(capsys, store, "--workers", 2)
    assert code == 1
    assert [key for key, _ in lines] == [
        "class_2/02.jpg",
        "class_1/04.jpg",
        "class_0/06.jpg",
        "class_1/07.jpg",
        "class_1/10.jpg",
    ]
    patterns = [
        r"is damaged: its checksum is [0-9a-f]{16}, that of its bytes [0-9a-f]{16}",
        r"is truncated: its header says [\d,]+ bytes, it has [\d,]+",
        r"the record at its place is called 'elsewhere\.jpg'",
        r"its label is 2, by the index it is 1",
        r"is truncated: it has 4 bytes, its header 32",
    ]
    for (_, reason), pattern in zip(lines, patterns, strict=True):
        assert re.search(pattern, reason)
    assert err.startswith("12 records, 7 images decoded, 5 broken, ")


def test_images_that_were_broken_when_they_were_packed_are_found(tmp_path, capsys):
    pytest.importorskip("lmdb")
    from penstock.stores.records import EncodedImage, encode_record

    half = jpeg(1)[: len(jpeg(1)) // 2]
    page = EncodedImage(b"<html>404</html>")
    records = [
        encode_record("whole", {"views": [EncodedImage(jpeg(0))]}, (0, 1)),
        encode_record("half", (EncodedImage(half), 1), 1),
        encode_record("page", {"views": [EncodedImage(jpeg(0)), page]}, ()),
        encode_record("numbers", np.arange(3)),
    ]
    write_store(tmp_path / "a.lmdb", records)
    code, lines, _ = run(capsys, tmp_path / "a.lmdb", *ONE_WORKER)
    assert code == 1
    assert lines == [
        ("half", "Premature end of JPEG file"),
        ("page", "text, not an image: it begins with '<html>404</html>'"),
    ]


def test_shards_are_checked_as_one_store_and_a_missing_one_ends_the_check(tmp_path, capsys):
    pytest.importorskip("lmdb")
    from penstock.stores import pack
    from penstock.stores.records import EncodedImage

    folder = tmp_path / "a.lmdb"
    pack([(EncodedImage(jpeg(n)), n % 3) for n in range(12)], folder, num_shards=3)

    def damage(transaction):
        transaction.put(place(1), transaction.get(place(0)))

    change(folder / "00001-of-00003.lmdb", damage)
    code, lines, _ = run(capsys, folder, *ONE_WORKER)
    assert (code, lines) == (1, [("05", "the record at its place is called '04'")])
    (folder / "00001-of-00003.lmdb").unlink()
    code, lines, err = run(capsys, folder, *ONE_WORKER)
    assert (code, lines) == (1, [])
    assert "00001-of-00003.lmdb is missing" in err


@pytest.mark.parametrize("num_shards", [1, 2])
def test_an_unfinished_pack_is_called_so(num_shards, tmp_path, capsys, monkeypatch):
    pytest.importorskip("lmdb")
    from penstock.stores import create_store

    monkeypatch.chdir(tmp_path)
    writer = create_store("a.lmdb", num_shards=num_shards, num_records=12)
    writer.put_many(image_records())
    writer.close()
    code, lines, err = run(capsys, "lmdb:a.lmdb.partial")
    assert (code, lines) == (1, [])
    assert re.match(r"penstock: a\.lmdb\.partial\S* is unfinished: ", err)
    assert "--resume" in err


def test_json_of_a_store_has_the_counts_and_every_bad_record(store, capsys):
    change(store, lambda transaction: transaction.put(place(3), b"gone"))
    assert main(["check", str(store), "--json", *ONE_WORKER]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record.pop("seconds") > 0
    (broken,) = record.pop("broken")
    assert (broken["key"], broken["position"]) == ("class_0/03.jpg", 3)
    assert "is truncated: it has 4 bytes" in broken["reason"]
    assert record == {
        "address": f"lmdb:{store}",
        "num_records": 12,
        "num_checked": 12,
        "num_images": 11,
        "num_broken": 1,
    }


@pytest.mark.parametrize(("number", "counted"), [(0, "0 records"), (1, "1 record")])
def test_a_store_without_records_or_images_is_sound(tmp_path, capsys, number, counted):
    pytest.importorskip("lmdb")
    from penstock.stores.records import encode_record

    write_store(tmp_path / "a.lmdb", [encode_record("a", (jpeg(0)[:99], 0), 0)][:number])
    code, lines, err = run(capsys, tmp_path / "a.lmdb")
    assert (code, lines) == (0, [])
    assert err.startswith(f"{counted}, 0 images decoded, 0 broken, ")


def test_a_server_that_goes_away_ends_the_check_and_breaks_no_record(store):
    from penstock.errors import StoreUnreachable
    from penstock.stores.lmdb.store import LMDBStore

    class Lost(LMDBStore):
        def _read(self, positions, *, copy):
            if int(np.max(positions)) >= 6:
                raise StoreUnreachable(f"no answer from {self.address}.")
            return super()._read(positions, copy=copy)

    findings = Findings(12)
    with Lost(store) as lost, pytest.raises(StoreUnreachable, match="no answer from"):
        check_in_parallel(Records(lost), 1, findings, lambda: None)
    assert findings.broken == []
    assert 0 < findings.num_checked <= 6


def nodes_of_leaves(path):
    """Yield each key in a leaf, also of older trees, and the place behind it."""
    data = path.read_bytes()
    for page in range(2 * 4096, len(data) - 4095, 4096):
        number, _, flags, lower, _ = struct.unpack_from("<QHHHH", data, page)
        if flags == 2 and number == page // 4096:
            for (at,) in struct.iter_unpack("<H", data[page + 16 : page + lower]):
                stop = page + at + 8 + data[page + at + 6]
                yield data[page + at + 8 : stop], stop


def send_to_page(path, key, number):
    """Let a node name another page for its value: LMDB follows it, beyond the end of the file."""
    with path.open("r+b") as file:
        for found, value in list(nodes_of_leaves(path)):
            if found == key:
                file.seek(value)
                file.write(struct.pack("<Q", number))


def test_a_store_whose_index_kills_the_process_that_reads_it_ends_the_check(
    tmp_path, capsys, monkeypatch
):
    from penstock.stores.records import encode_record

    path = tmp_path / "a.lmdb"
    write_store(path, [encode_record(f"a rather long name {n}", b"", n) for n in range(500)])
    last_page = path.stat().st_size // 4096 - 1
    send_to_page(path, b"penstock.index", last_page)  # there, and too short for all of it
    assert run(capsys, path)[2].startswith("penstock: ")  # the page has another checksum
    # A disk that fails after the pages were compared.
    monkeypatch.setattr("penstock.stores.lmdb.environments.check_pages", lambda file: None)
    code, lines, err = run(capsys, path)
    assert (code, lines) == (1, [])
    assert re.search(r"its index was killed by SIG(BUS|SEGV)\.", err)


def test_a_record_that_ends_the_process_that_reads_it_has_a_line(tmp_path):
    from penstock.stores.lmdb.store import LMDBStore
    from penstock.stores.records import encode_record

    path = tmp_path / "a.lmdb"
    write_store(path, [encode_record(f"{n}", bytes(9000), n) for n in range(12)])
    send_to_page(path, place(7), path.stat().st_size // 4096 - 1)
    findings = Findings(12)
    with LMDBStore(path, verify="never") as store:
        check_in_parallel(Records(store), 1, findings, lambda: None)
    ((position, reason),) = [(record.position, record.reason) for record in findings.broken]
    assert position == 7
    assert re.search("was killed by SIG(BUS|SEGV)", reason)
    assert findings.num_checked == 12


def voc_folder(root, names):
    for folder in ("Annotations", "JPEGImages"):
        (root / folder).mkdir(parents=True)
    for name in names:
        write_image(root / "JPEGImages" / f"{name}.png")
        (root / "Annotations" / f"{name}.xml").write_text(
            f"<annotation><filename>{name}.png</filename><object><name>cat</name></object>"
            "</annotation>"
        )
    return root


@pytest.mark.parametrize("is_below", [False, True], ids=["itself", "below"])
def test_annotations_are_compared_with_the_images_beside_them(tmp_path, capsys, is_below):
    root = voc_folder(tmp_path / "all" / "voc", "abcd")
    (root / "JPEGImages" / "b.png").unlink()
    (root / "Annotations" / "c.xml").write_text("<annotation><object>")
    (root / "Annotations" / "d.xml").unlink()  # an image alone is no fault
    where = tmp_path / "all" if is_below else root
    assert main(["check", str(where), *ONE_WORKER]) == 1
    out, err = capsys.readouterr()
    first, second = out.splitlines()
    assert first.startswith(f"{root / 'Annotations' / 'c.xml'}\tnot well-formed XML: ")
    assert second == (
        f"{root / 'JPEGImages' / 'b.png'}\tis not there, and is named in "
        f"{root / 'Annotations' / 'b.xml'}"
    )
    assert err.startswith("3 files and 3 annotations, 2 broken, ")


def test_a_sound_voc_folder_is_sound_and_its_annotations_are_counted(tmp_path, capsys):
    root = voc_folder(tmp_path, "ab")
    (root / "Annotations" / "b.xml").rename(root / "Annotations" / "other.xml")  # by <filename>
    (root / "Annotations" / "._a.xml").write_bytes(b"\0")  # what macOS leaves behind
    assert main(["check", str(root), "--json", *ONE_WORKER]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["num_files"], record["num_annotations"], record["broken"]) == (2, 2, [])


@pytest.mark.parametrize("names", [("annotations", "images"), ("annots", "photos"), (".", ".")])
def test_annotations_of_any_names_are_compared_with_their_images(tmp_path, capsys, data_dir, names):
    """Real files of Kaggle's, in lower case; and XML files beside the images."""
    xml, images = (tmp_path / "masks" / name for name in names)
    for number in (0, 10, 100, 102):
        for folder, source in ((xml, "annotations"), (images, "images")):
            folder.mkdir(parents=True, exist_ok=True)
            (file,) = (data_dir / "masks" / source).glob(f"maksssksksss{number}.*")
            shutil.copy(file, folder)
    assert run(capsys, tmp_path / "masks", *ONE_WORKER)[:2] == (0, [])
    cut(xml / "maksssksksss10.xml", 0.7)
    (images / "maksssksksss100.jpg").unlink()
    for where in (tmp_path / "masks", tmp_path):
        code, (broken, missing), err = run(capsys, where, *ONE_WORKER)
        assert code == 1
        assert broken[0] == str(xml / "maksssksksss10.xml")
        assert broken[1].startswith("not well-formed XML: ")
        assert missing == (
            str(images / "maksssksksss100.jpg"),
            f"is not there, and is named in {xml / 'maksssksksss100.xml'}",
        )
        assert err.startswith("3 files and 4 annotations, 2 broken, ")


def test_a_folder_of_which_no_image_is_clearly_meant_is_broken(tmp_path, capsys):
    root = voc_folder(tmp_path, "ab")
    write_image(root / "JPEGImages" / "a.jpg")
    code, lines, _ = run(capsys, root, *ONE_WORKER)
    reason = "has 'a.jpg' and 'a.png': which of them is meant by 'a'? Move one away."
    assert (code, lines) == (1, [(str(root / "JPEGImages"), reason)])
    (root / "JPEGImages").rename(root / "photos")
    shutil.copytree(root / "photos", root / "thumbs")  # which of the two is meant?
    code, ((path, reason),), _ = run(capsys, root, *ONE_WORKER)
    assert (code, path) == (1, str(root / "JPEGImages"))
    assert reason.startswith("none of 2 annotated images is there: ")


def test_a_split_that_names_what_has_no_annotation_is_broken(tmp_path, capsys):
    root = voc_folder(tmp_path, "ab")
    (root / "ImageSets" / "Main").mkdir(parents=True)
    (root / "ImageSets/Main/train.txt").write_text("a\nc\nd\n")
    (root / "ImageSets/Main/cat_train.txt").write_text("a 1\nb -1\n")
    code, lines, _ = run(capsys, root, *ONE_WORKER)
    reason = "2 of its images have no annotation: 'c'"
    assert (code, lines) == (1, [(str(root / "ImageSets/Main/train.txt"), reason)])


GOOD_LINE = "1 .5 .5 .2 .2\n"


def yolo_folder(root, yaml="names: [cat, dog]\ntrain: images/train\nval: images/val\n"):
    for name in ("train/a", "train/b", "train/empty", "val/a"):
        write_image(root / "images" / f"{name}.png")
        (root / "labels" / name).parent.mkdir(parents=True, exist_ok=True)
    for name in ("train/a", "train/b", "val/a"):
        (root / "labels" / f"{name}.txt").write_text(GOOD_LINE)
    (root / "data.yaml").write_text(yaml)
    return root


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("1 .5 .5 .2", "line 2: it has 4 columns, not 5"),
        ("1 .5 .5 .2 .2 .9", "line 2: it has 6 columns, not 5"),
        ("2 .5 .5 .2 .2", "line 2: its class is 2, and the data set has 2, from 0 to 1"),
        ("-1 .5 .5 .2 .2", "line 2: column 1 is '-1', not the number of a class"),
        ("1 300 .5 .2 .2", "these may be pixels"),
        ("1 .5 .5 .2 many", "line 2: column 5"),
        ("\xff", "convert it to UTF-8"),
        ("1 .1 .1 .2 .1 .2 .2", None),  # a polygon, of a data set for segmentation
    ],
)
def test_a_line_of_yolos_labels_is_read(tmp_path, line, reason):
    root = yolo_folder(tmp_path / "set")
    file = root / "labels" / "val" / "a.txt"
    file.write_bytes((GOOD_LINE + line).encode("latin-1"))
    findings = check_annotations(tmp_path, [*map(str, root.rglob("*.png"))], [])
    assert findings.num_files == 3
    assert [broken.name for broken in findings.broken] == ([] if reason is None else [str(file)])
    assert (reason or "") in "".join(broken.reason for broken in findings.broken)


def test_yolos_labels_are_checked_by_their_folder_or_their_yaml(tmp_path, capsys):
    root = yolo_folder(tmp_path / "set")
    file = root / "labels" / "val" / "a.txt"
    assert run(capsys, root, *ONE_WORKER)[:2] == (0, [])
    file.write_text(GOOD_LINE + "9 .5 .5 .2 .2\n1 .5\n")
    for where in (root, tmp_path, root / "data.yaml"):
        code, lines, err = run(capsys, where, *ONE_WORKER)
        reason = "line 2: its class is 9, and the data set has 2, from 0 to 1"
        assert (code, lines) == (1, [(str(file), reason)])
        assert err.startswith("4 files and 3 annotations, 1 broken, ")


def test_labels_without_image_and_images_that_a_list_names_in_vain_are_broken(tmp_path, capsys):
    root = yolo_folder(tmp_path, "names: [cat, dog]\ntrain: train.txt\nval: images/gone\n")
    (root / "train.txt").write_text("images/train/a.png\nimages/train/c.png\nimages/val/a.png\n")
    (root / "images" / "train" / "b.png").unlink()
    code, lines, err = run(capsys, root, *ONE_WORKER)
    assert code == 1
    alone = "is of no image: none is called like it in the folder of images"
    assert lines == [
        (str(root / "data.yaml"), f"val is 'images/gone', and {root}/images/gone is not there."),
        (
            str(root / "images" / "train" / "c.png"),
            f"is not there, and is named in {root / 'data.yaml'}",
        ),
        (str(root / "labels" / "train" / "b.txt"), alone),
    ]
    assert err.startswith("3 files and 3 annotations, 3 broken, ")


def test_imglabs_file_is_checked_with_its_images(tmp_path, capsys, data_dir):
    shutil.copytree(data_dir / "faces", tmp_path / "faces")
    file, image = tmp_path / "faces" / "training.xml", tmp_path / "faces" / "2007_007763.jpg"
    image.unlink()
    for where in (file, file.parent):
        code, lines, _ = run(capsys, where, *ONE_WORKER)
        assert (code, (str(image), f"is not there, and is named in {file}") in lines) == (1, True)
    cut(file, 0.5)
    ((path, reason),) = run(capsys, file, *ONE_WORKER)[1]
    assert (path, reason[:21]) == (str(file), "not well-formed XML: ")


def test_lists_are_checked_with_the_columns_that_options_name(tmp_path, capsys):
    write_image(tmp_path / "a.png")
    (tmp_path / "classes.txt").write_text("a.png 1\nb.png 0\n")
    code, lines, err = run(capsys, tmp_path / "classes.txt", *ONE_WORKER)
    missing = f"is not there, and is named in {tmp_path / 'classes.txt'}"
    assert (code, lines) == (1, [(str(tmp_path / "b.png"), missing)])
    assert err.startswith("1 file and 1 annotation, 1 broken, ")
    points = tmp_path / "points.txt"
    points.write_text("a.png 1 2 3 4 9 9 20 20 f\n")
    options = ["--box", "--classes", "sex", *ONE_WORKER]
    assert run(capsys, points, *options)[:2] == (0, [])
    points.write_text("a.png 1 2 3 4 9 9 20 20 f\na.png 1 2 3 4 9 9 x 20 f\n")
    code, lines, _ = run(capsys, points, *options)
    assert (code, len(lines)) == (1, 1)
    assert lines[0][1].startswith("line 2: ")
    code, _, err = run(capsys, tmp_path, "--box")
    assert (code, err) == (1, "penstock: --box is for text lists.\n")


def test_a_single_image_is_checked(tmp_path, capsys):
    image = voc_folder(tmp_path / "set", "ab") / "JPEGImages" / "a.png"
    code, lines, err = run(capsys, image, *ONE_WORKER)
    assert (code, lines) == (0, [])
    assert err.startswith("1 file, 0 broken, ")
    cut(image, 0.5)
    code, lines, _ = run(capsys, image, *ONE_WORKER)
    assert (code, [path for path, _ in lines]) == (1, [str(image)])
    _, ((_, reason),), _ = run(capsys, tmp_path / "set" / "Annotations" / "a.xml", *ONE_WORKER)
    assert reason == "the root element is <annotation>, not <dataset>; VOC takes its folder."


@pytest.fixture
def with_others(folder):
    """Class folders with images of forms and names that are not read, and with other files."""
    for name in ("class_0/b.avif", "class_0/a.AVIF", "class_1/c.gif", "class_2/x.avif"):
        (folder / name).write_bytes(b"...")
    write_image(folder / "class_1" / "good.webp")
    (folder / "class_1" / "good.webp").rename(folder / "class_1" / "good.webp_large")
    shutil.copy(folder / "class_0" / "00.jpg", folder / "class_2" / "no suffix")
    for name in ("README.md", "labels.txt", "LICENSE", "Thumbs.db"):
        (folder / name).write_bytes(b"no image")
    (folder / "__MACOSX").mkdir()
    (folder / "__MACOSX" / "._00.jpg").write_bytes(b"no image either")
    return folder


NOT_LOOKED_AT = "4 files not looked at: class_0/a.AVIF, class_0/b.avif, class_1/c.gif, …"


def test_files_that_are_passed_over_are_counted_and_named(with_others, capsys):
    code, lines, err = run(capsys, with_others, *ONE_WORKER)
    assert (code, lines) == (0, [])
    summary, shown = err.splitlines()
    assert summary.startswith("12 files, 0 broken, ")
    assert shown == NOT_LOOKED_AT
    assert main(["check", str(with_others), "--json", *ONE_WORKER]) == 0
    named = json.loads(capsys.readouterr().out)["not_looked_at"]
    assert [os.path.relpath(path, with_others) for path in named] == [
        "class_0/a.AVIF",
        "class_0/b.avif",
        "class_1/c.gif",
        "class_2/x.avif",
    ]


def test_pack_says_what_it_passes_over(with_others, tmp_path, capsys):
    pytest.importorskip("msgspec")
    packed = str(tmp_path / "packed.lmdb")
    assert main(["pack", str(with_others), packed, "--workers", "0"]) == 0
    assert NOT_LOOKED_AT in capsys.readouterr().err.splitlines()
