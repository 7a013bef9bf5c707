# SPDX-License-Identifier: Apache-2.0
"""`pack`: what goes in, what is refused, and a kill at any moment."""

from __future__ import annotations

import io
import os
import random
import signal
import subprocess
import sys
import textwrap

import cv2
import numpy as np
import pytest
from PIL import Image
from tests.images.making import saved

from penstock.data import ArrayDataset, ConcatDataset, IterableDataset, Subset
from penstock.errors import ConfigError, StoreError
from penstock.stores import EncodedImage, LMDBDataset, open_store, pack
from penstock.stores.packing import PackProgress


def photo(height, width, seed=0, quality=95):
    """A JPEG file with something in it."""
    generator = np.random.default_rng(seed)
    small = generator.integers(0, 256, (6, 8, 3), np.uint8)
    pixels = cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)
    return saved(pixels, "JPEG", quality=quality)


def samples_of(address):
    with open_store(address) as store:
        return [record.sample for record in store.scan()]


class Photos:
    """Files and labels; sample 3 may be broken."""

    class_names = ("cat", "dog")

    def __init__(self, count=6, broken=()):
        self.files = [photo(60, 80, seed) for seed in range(count)]
        self.broken = broken

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        if index in self.broken:
            raise OSError(f"cannot read {index}.jpg")
        return EncodedImage(self.files[index]), index % 2

    def describe(self, index):
        return f"{index}.jpg"


class Interrupted(Photos):
    """Ctrl-C comes at sample 30, until `fail_at` says otherwise."""

    fail_at = 30

    def __getitem__(self, index):
        if index == self.fail_at:
            raise KeyboardInterrupt
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_any_map_style_dataset_can_be_packed(tmp_path, num_workers):
    dataset = ArrayDataset(np.arange(200).reshape(100, 2), np.arange(100) / 2)
    report = pack(dataset, f"lmdb:{tmp_path}/a.lmdb", num_workers=num_workers)
    assert report.num_records == 100
    for number, (first, second) in enumerate(samples_of(report.address)):
        assert first.tolist() == [2 * number, 2 * number + 1]
        assert second == number / 2


def test_torch_tensors_and_pillow_images_are_packed_as_arrays(tmp_path):
    torch = pytest.importorskip("torch")
    from torch.utils.data import TensorDataset

    tensors = TensorDataset(torch.arange(6.0).reshape(3, 2), torch.tensor([2, 0, 1]))
    address = f"lmdb:{tmp_path}/a.lmdb"
    pack(tensors, address)
    with open_store(address) as store:
        assert store.labels.tolist() == [2, 0, 1]
        assert store.get_many([1])[0].sample[0].tolist() == [2.0, 3.0]
    image = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
    pack([(image, 1)], address, overwrite=True)
    ((pixels, label),) = samples_of(address)
    assert (pixels == np.arange(12).reshape(3, 4)).all()
    assert label == 1
    pack([(image, 1)], address, quality=100, overwrite=True)
    (((file, _),),) = (samples_of(address),)
    assert bytes(file.data[:3]) == b"\xff\xd8\xff"


def test_labels_and_class_names_of_the_dataset_are_kept(tmp_path):
    whole = ConcatDataset([Photos(), Subset(Photos(), [5, 0])])
    address = f"lmdb:{tmp_path}/a.lmdb"
    pack(whole, address)
    assert LMDBDataset(address).labels.tolist() == [0, 1, 0, 1, 0, 1, 1, 0]
    pack(Photos(), address, overwrite=True)
    dataset = LMDBDataset(address)
    assert dataset.class_names == ("cat", "dog")
    assert dataset.class_to_idx == {"cat": 0, "dog": 1}
    assert list(dataset.store.keys) == list("012345")
    texts = Photos()
    texts.labels = ["dog", "cat"] * 3  # its samples have numbers
    texts.class_names = ("dog", "cat")
    pack(texts, address, overwrite=True)
    assert LMDBDataset(address).class_names == ("dog", "cat")


def test_a_store_copied_to_another_has_the_same_fingerprint_and_metadata(tmp_path):
    pack(Photos(20), f"lmdb:{tmp_path}/a.lmdb", metadata={"from": "here"})
    pack(f"lmdb:{tmp_path}/a.lmdb", f"lmdb:{tmp_path}/b", num_shards=3)
    pack(f"lmdb:{tmp_path}/b", f"lmdb:{tmp_path}/c.lmdb")
    with open_store(f"lmdb:{tmp_path}/a.lmdb") as one, open_store(f"lmdb:{tmp_path}/c.lmdb") as two:
        assert one.fingerprint == two.fingerprint
        assert dict(two.metadata) == {"from": "here"}
        assert two.class_names == ("cat", "dog")
    assert samples_of(f"lmdb:{tmp_path}/b") == samples_of(f"lmdb:{tmp_path}/a.lmdb")


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(("place", "options"), [("lmdb:a.lmdb", {}), ("lmdb:a", {"num_shards": 2})])
def test_a_store_is_replaced_only_on_request(tmp_path, monkeypatch, place, options, resume):
    monkeypatch.chdir(tmp_path)
    report = pack(Photos(4), place, **options)
    before = sorted(tmp_path.rglob("*"))
    others = " of another source or with other options" if resume else ""
    which = f", {others.strip()}" if others else ""
    with pytest.raises(StoreError, match=f"{place} is there already{which}\\. .*--overwrite"):
        pack(Photos(2), place, resume=resume, **options)
    assert sorted(tmp_path.rglob("*")) == before
    assert len(samples_of(place)) == report.num_records == 4
    pack(Photos(2), place, resume=resume, overwrite=True, **options)
    assert len(samples_of(place)) == 2


def test_an_interrupted_run_is_kept_where_its_store_is_refused(tmp_path):
    address = f"lmdb:{tmp_path}/a.lmdb"
    pack(Photos(2), address)
    with pytest.raises(OSError, match=r"cannot read 39\.jpg"):
        pack(Photos(40, {39}), address, overwrite=True, num_workers=0)
    with pytest.raises(StoreError, match="is there already"):
        pack(Photos(40), address, num_workers=0)
    report = pack(Photos(40), address, resume=True, overwrite=True, num_workers=0)
    assert report.num_resumed > 0
    assert report.num_records == 40


@pytest.mark.parametrize("resize", [None, 40, 500])
def test_images_are_checked_on_request(tmp_path, resize):
    files = [photo(60, 80), photo(60, 80)[:900], b"", photo(20, 20)]
    data = [({"views": [EncodedImage(file)]}, n) for n, file in enumerate(files)]
    if resize is not None:
        data = [(EncodedImage(file), n) for n, file in enumerate(files)]
    options = {"resize": resize, "on_error": "skip", "check_images": True}
    report = pack(data, f"lmdb:{tmp_path}/a.lmdb", **options)
    assert [failure.index for failure in report.left_out] == [1, 2]
    assert [label for _, label in samples_of(report.address)] == [0, 3]
    with pytest.raises(ValueError, match="Premature end"):
        pack(data[1:], f"lmdb:{tmp_path}/b.lmdb", resize=resize, check_images=True)


def test_decoders_that_are_not_installed_are_missed_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "penstock.images", None)
    for options in ({"check_images": True}, {"resize": 20}):
        with pytest.raises(ModuleNotFoundError):
            pack([1], f"lmdb:{tmp_path}/a.lmdb", on_error="skip", **options)
    assert list(tmp_path.iterdir()) == []


def test_larger_images_are_shrunk_and_smaller_ones_stay_byte_for_byte(tmp_path):
    large, small = photo(300, 400), photo(50, 64)
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.open(io.BytesIO(large))
    files = [large, small, saved(image, "JPEG", exif=exif), saved(image.convert("RGBA"), "PNG")]
    address = f"lmdb:{tmp_path}/a.lmdb"
    pack([(EncodedImage(data), 0) for data in files], address, resize=100)
    shrunk, kept, turned, from_png = [bytes(image.data) for image, _ in samples_of(address)]
    assert kept == small
    for data in (shrunk, turned, from_png):
        with Image.open(io.BytesIO(data)) as image:
            assert (image.format, image.size, image.mode) == ("JPEG", (133, 100), "RGB")
            near = np.asarray(Image.open(io.BytesIO(large)).resize((133, 100)), np.float32)
            assert np.abs(np.asarray(image, np.float32) - near).mean() < 6
    assert Image.open(io.BytesIO(turned)).getexif()[0x0112] == 6
    pack([(EncodedImage(data), 0) for data in files], address, quality=30, overwrite=True)
    assert [Image.open(io.BytesIO(i.data)).size for i, _ in samples_of(address)] == [
        (400, 300),
        (64, 50),
        (400, 300),
        (400, 300),
    ]
    assert len(samples_of(address)[0][0].data) < len(large)


def test_images_with_boxes_are_not_shrunk(tmp_path):
    from penstock.stores.lmdb.writer import LMDBWriter
    from penstock.stores.records import encode_record

    writer = LMDBWriter(tmp_path / "a.lmdb", class_names=("cell",))
    writer.put_many([encode_record("a", (EncodedImage(photo(60, 80)), "<xml/>"), (0, 0))])
    writer.finish()
    with pytest.raises(ConfigError, match="a tuple; resize and quality are for image files"):
        pack(f"lmdb:{tmp_path}/a.lmdb", f"lmdb:{tmp_path}/b.lmdb", resize=30)
    assert os.listdir(tmp_path) == ["a.lmdb"]


def test_a_sample_that_raises_ends_it_with_its_name_and_the_old_store_stays(tmp_path):
    address = f"lmdb:{tmp_path}/a.lmdb"
    pack(Photos(2), address)
    with pytest.raises(OSError, match=r"cannot read 3\.jpg") as raised:
        pack(Photos(broken={3}), address, overwrite=True)
    assert any("sample 3 (3.jpg)" in note for note in raised.value.__notes__)
    assert len(samples_of(address)) == 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_samples_are_left_out_on_request_and_listed(tmp_path, num_workers):
    address = f"lmdb:{tmp_path}/a.lmdb"
    broken = {0, 17, 18, 39}
    report = pack(Photos(40, broken), address, on_error="skip", num_workers=num_workers)
    assert [failure.name for failure in report.left_out] == ["0.jpg", "17.jpg", "18.jpg", "39.jpg"]
    assert report.num_records == 36
    with open_store(address) as store:
        assert [int(key) for key in store.keys] == [i for i in range(40) if i not in broken]


def test_a_file_that_cannot_be_shrunk_is_named(tmp_path):
    data = [(EncodedImage(photo(60, 80)), 0), (EncodedImage(b"<html>"), 1)]
    with pytest.raises(ValueError, match="text, not an image: it begins with '<html>'") as raised:
        pack(data, f"lmdb:{tmp_path}/a.lmdb", resize=20)
    assert any("sample 1" in note for note in raised.value.__notes__)


def test_progress_rises_to_the_end(tmp_path):
    seen = []
    pack(Photos(50), f"lmdb:{tmp_path}/a.lmdb", progress=seen.append, num_workers=0)
    assert seen[-1].num_done == seen[-1].num_records == 50
    assert seen == sorted(seen, key=lambda at: (at.num_done, at.num_bytes))
    assert isinstance(seen[0], PackProgress)
    with open_store(f"lmdb:{tmp_path}/a.lmdb") as store, store.borrow(range(50)):
        assert seen[-1].num_bytes > 50 * 1000


class Stream(IterableDataset):
    def __iter__(self):
        return iter([1, 2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resize": 0}, "resize=0"),
        ({"quality": 101}, "quality=101"),
        ({"limit": -1}, "limit=-1"),
        ({"on_error": "replace"}, "on_error is"),
        ({"num_shards": 0}, "num_shards=0"),
        ({"src": Stream()}, "cannot pack a Stream"),
        ({"src": 7}, "cannot pack a int"),
        ({"dst": "tar:a.tar"}, "can be read, not written"),
        ({"dst": "ftp://bucket/a"}, "ftp:// are not known"),
        ({"dst": ""}, "names no place"),
        ({"dst": "lmdb:"}, "names no place"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(tmp_path, options, message):
    options = {"src": [(1, 2)], "dst": f"lmdb:{tmp_path}/a.lmdb"} | options
    with pytest.raises(ConfigError, match=message):
        pack(**options)
    assert os.listdir(tmp_path) == []


PACK = """
    import sys
    import numpy as np
    from penstock.stores import EncodedImage, pack
    from penstock.stores.lmdb import writer

    class Files:
        def __len__(self):
            return 400
        def __getitem__(self, index):
            data = np.random.default_rng(index).integers(0, 256, 20_000, np.uint8)
            return EncodedImage(data.tobytes()), index % 7

    writer.LMDBWriter._transaction_bytes = 300_000
    def tell(at):
        print(at.num_done, flush=True)
        if at.num_done >= int(sys.argv[5]):
            sys.stdin.read()
    print("begin", flush=True)
    report = pack(
        Files(), sys.argv[1], num_workers=int(sys.argv[2]), num_shards=int(sys.argv[3]),
        resume=sys.argv[4] == "resume", progress=tell, overwrite=True,
    )
    print("end", report.num_resumed, flush=True)
"""


def packing(address, num_workers=1, num_shards=1, resume="", waits_at=1000):
    """Return the packer's process, which waits for the end of its input at a number of records."""
    arguments = map(str, (address, num_workers, num_shards, resume, waits_at))
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PACK), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def is_complete(address, count=400):
    with open_store(address) as store:
        records = store.get_many(range(count))
        return len(store) == count and all(
            bytes(record.sample[0].data)
            == np.random.default_rng(i).integers(0, 256, 20_000, np.uint8).tobytes()
            and record.label == i % 7
            for i, record in enumerate(records)
        )


def kill_at(process, line, more_syscalls):
    """Read the output up to a line, spin a little, and kill the packer with its workers."""
    for _ in range(line):
        if not process.stdout.readline():
            break
    for _ in range(more_syscalls):
        os.getppid()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize(
    ("num_kills", "num_shards"),
    [(3, 1), (3, 4), pytest.param(20, 1, marks=pytest.mark.slow)],
)
def test_killed_at_any_moment_the_old_store_stays_and_resuming_finishes(
    tmp_path, num_kills, num_shards
):
    generator = random.Random(num_kills)
    num_resumed = 0
    for number in range(num_kills):
        path = tmp_path / f"{number}.lmdb"
        has_old = bool(number % 2)
        if has_old:
            pack([(np.arange(3), 1)], f"lmdb:{path}", num_shards=num_shards)
        address = f"lmdb:{path}"
        kill_at(
            packing(address, 1, num_shards), generator.randrange(1, 27), generator.randrange(9**6)
        )
        if has_old and not path_is_new(address):
            ((array, _),) = samples_of(address)
            assert array.tolist() == [0, 1, 2]
        elif path.exists():
            assert is_complete(address)
        process = packing(address, 2, num_shards, "resume")
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        num_resumed += int(output.split()[-1]) > 0
        assert is_complete(address)
        assert not [name for name in os.listdir(tmp_path) if "partial" in name or "lock" in name]
    assert num_resumed > 0


def path_is_new(address):
    with open_store(address) as store:
        return len(store) == 400


def test_resuming_with_other_arguments_is_refused(tmp_path):
    address = f"lmdb:{tmp_path}/a.lmdb"
    kill_at(packing(address, waits_at=19 * 16), 20, 0)
    assert (tmp_path / "a.lmdb.partial").exists()
    (tmp_path / "b.lmdb.partial").mkdir()  # of shards
    for place, num_shards in ((address, 1), (address, 2), (f"lmdb:{tmp_path}/b.lmdb", 1)):
        with pytest.raises(StoreError, match="from another source or with other options"):
            pack([(1, 2)], place, num_shards=num_shards, resume=True)
    assert (tmp_path / "a.lmdb.partial").exists()
    pack([(1, 2)], address)
    assert samples_of(address) == [(1, 2)]


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("num_shards", "name"),
    [(1, ""), (1, "/letter.txt"), (2, "/letter.txt"), (2, "/00000-of-00002.lmdb.partial.txt")],
)
def test_what_somebody_else_has_where_a_store_grows_is_never_removed(
    tmp_path, num_shards, name, resume
):
    path = tmp_path / f"a.lmdb.partial{name}"
    path.parent.mkdir(exist_ok=True)
    path.write_text("a letter")
    (tmp_path / "a.lmdb.partial.lock").touch()
    with pytest.raises(StoreError, match=r"a\.lmdb\.partial should hold what an interrupted"):
        pack([1, 2], f"lmdb:{tmp_path}/a.lmdb", num_shards=num_shards, resume=resume)
    assert path.read_text() == "a letter"
    assert os.listdir(tmp_path) == ["a.lmdb.partial"]


def test_a_record_damaged_in_what_is_left_is_named_when_resuming(tmp_path):
    address = f"lmdb:{tmp_path}/a.lmdb"
    kill_at(packing(address, waits_at=21 * 16), 22, 0)
    partial = tmp_path / "a.lmdb.partial"
    content = bytearray(partial.read_bytes())
    image = np.random.default_rng(2).integers(0, 256, 20_000, np.uint8).tobytes()
    content[content.index(image[:64]) + 3000] ^= 1
    partial.write_bytes(content)
    process = packing(address, resume="resume")
    output, errors = process.communicate()
    assert "end" not in output
    assert process.returncode == 1
    assert errors.splitlines()[-2].startswith("penstock.errors.StoreError: record 2 of ")
    assert "is damaged" in errors
    with pytest.raises(StoreError, match="No such file"):
        LMDBDataset(address)


def test_a_dataset_over_a_store_is_packed_as_its_store_is(tmp_path):
    address = f"lmdb:{tmp_path}/a.lmdb"
    pack(Photos(8), address)
    for source in (LMDBDataset(tmp_path / "a.lmdb"), LMDBDataset(tmp_path / "a.lmdb", decode=None)):
        pack(source, f"lmdb:{tmp_path}/b.lmdb", overwrite=True)
        assert samples_of(f"lmdb:{tmp_path}/b.lmdb") == samples_of(address)
    with pytest.raises(ConfigError, match=r"has transforms\. To pack what it is made from, give"):
        pack(LMDBDataset(tmp_path / "a.lmdb", transform=np.mean), f"lmdb:{tmp_path}/c.lmdb")


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_destination_that_is_no_store_is_not_replaced(tmp_path, num_shards):
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("years of work")
    with pytest.raises(StoreError, match=r"did not pack|is a file, and the new"):
        pack(Photos(2), f"lmdb:{thesis}", num_shards=num_shards)
    import lmdb

    foreign = tmp_path / "foreign.lmdb"
    with lmdb.open(str(foreign), subdir=False, lock=False) as env, env.begin(write=True) as txn:
        txn.put(b"my", b"only copy")
    with pytest.raises(StoreError, match=r"did not pack|is a file, and the new"):
        pack(Photos(2), f"lmdb:{foreign}", num_shards=num_shards)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "data.csv").write_text("1,2,3")
    with pytest.raises(StoreError, match=r"is a folder, and the new|holds something else"):
        pack(Photos(2), f"lmdb:{folder}", num_shards=num_shards)
    assert sorted(os.listdir(tmp_path)) == ["folder", "foreign.lmdb", "thesis.txt"]
    assert thesis.read_text() == "years of work"


def test_through_a_link_its_target_is_replaced(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.lmdb").symlink_to(tmp_path / "real" / "a.lmdb")
    pack(Photos(2), f"lmdb:{tmp_path}/link.lmdb")
    assert (tmp_path / "link.lmdb").is_symlink()
    assert os.listdir(tmp_path / "real") == ["a.lmdb"]


class Numbers:
    """Samples that a later version of the code makes otherwise."""

    def __init__(self, offset=0, class_names=("cat", "dog"), fail_at=None):
        self.offset, self.class_names, self.fail_at = offset, class_names, fail_at

    def __len__(self):
        return 60

    def __getitem__(self, index):
        if index == self.fail_at:
            raise OSError("the disk is away")
        return np.full(10, index + self.offset), index % 2


@pytest.mark.parametrize("num_shards", [1, 4])
def test_a_source_that_has_changed_is_not_mixed_with_what_is_there(tmp_path, num_shards):
    address = f"lmdb:{tmp_path}/a.lmdb"
    options = {"num_shards": num_shards, "num_workers": 0}
    with pytest.raises(OSError, match="the disk is away"):
        pack(Numbers(fail_at=50), address, **options)
    with pytest.raises(StoreError, match=r"sample '47' of the source is not what the interrupted"):
        pack(Numbers(offset=1000), address, resume=True, **options)
    with pytest.raises(StoreError, match="from another source or with other options"):
        pack(Numbers(class_names=("dog", "cat")), address, resume=True, **options)
    report = pack(Numbers(), address, resume=True, **options)
    assert report.num_resumed == 48
    assert [int(array[0]) for array, _ in samples_of(address)] == list(range(60))


@pytest.mark.parametrize("num_shards", [1, 2])
def test_where_nothing_could_be_packed_no_store_is_made(tmp_path, num_shards):
    address, path = f"lmdb:{tmp_path}/a", tmp_path / "a"
    with pytest.raises(StoreError, match=r"none of 6 samples could be packed.*cannot read 0\.jpg"):
        pack(Photos(broken=range(6)), address, on_error="skip", num_shards=num_shards)
    assert not path.exists()
    report = pack(Photos(), address, on_error="skip", resume=True, num_shards=num_shards)
    assert (report.num_records, report.num_resumed, len(samples_of(address))) == (6, 0, 6)


def test_a_run_that_leaves_broken_images_out_goes_on_behind_one_that_did_not(tmp_path):
    address = f"lmdb:{tmp_path}/a.lmdb"
    data = Interrupted(40)
    for index in (0, 15, 35):  # the first, and the last that is packed: both are compared
        data.files[index] = data.files[index][:900]
    with pytest.raises(KeyboardInterrupt):
        pack(data, address, num_workers=0)
    data.fail_at = None
    options = {"on_error": "skip", "check_images": True, "num_workers": 0}
    report = pack(data, address, resume=True, **options)
    assert report.num_resumed == 16
    assert [failure.index for failure in report.left_out] == [35]
    assert report.num_records == 39


@pytest.mark.parametrize("num_shards", [1, 3])
def test_resuming_what_is_complete_does_nothing(tmp_path, num_shards):
    address = f"lmdb:{tmp_path}/a.lmdb"
    pack(Numbers(), address, num_shards=num_shards)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.lmdb")}
    report = pack(Numbers(fail_at=3), address, num_shards=num_shards, resume=True)
    assert (report.num_records, report.num_resumed) == (60, 60)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.lmdb")} == before


def test_shards_are_even_and_empty_ones_do_not_show(tmp_path):
    address = f"lmdb:{tmp_path}/a.lmdb"
    pack(Photos(9), address, num_shards=4)
    dataset = LMDBDataset(tmp_path / "a.lmdb", decode=None)
    assert dataset.labels.tolist() == [0, 1] * 4 + [0]
    assert dataset.can_get_batch
    sizes = []
    for path in sorted((tmp_path / "a.lmdb").iterdir()):
        with open_store(path) as shard:
            sizes.append(len(shard))
    assert sizes == [2, 2, 2, 3]
    pack(Photos(3), address, num_shards=5, overwrite=True)
    few = LMDBDataset(tmp_path / "a.lmdb", decode=None)
    assert few.labels.tolist() == [0, 1, 0]
    assert few.can_get_batch
    options = {"num_shards": 4, "on_error": "skip", "overwrite": True}
    report = pack(Photos(20, set(range(12, 20))), address, **options)
    assert report.num_left_out == 8
    assert LMDBDataset(tmp_path / "a.lmdb").labels.tolist() == [0, 1] * 6
