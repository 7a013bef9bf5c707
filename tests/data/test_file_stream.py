# SPDX-License-Identifier: Apache-2.0
"""Records of files that are read from front to back: in any order the same, and each read once."""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import os
import pickle
import random
import signal
import tarfile
import threading
import warnings
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import FaultPolicy, Loader
from penstock.data import ConcatDataset, FileStream, file_formats, file_stream
from penstock.data.dataset import is_drawless
from penstock.errors import ConfigError, MissingExtraError, StoreError
from penstock.sampling import LaneBatchSampler, MixtureSampler

COUNTS = [300, 0, 41, 1, 512, 77, 150]  # 7 files
RECORDS = [
    [{"x": 1000 * file + number, "text": "añ" * (number % 30)} for number in range(count)]
    for file, count in enumerate(COUNTS)
]
ALL = [record for records in RECORDS for record in records]
CONTEXT = multiprocessing.get_context("fork")


def zstandard(data):
    module = pytest.importorskip("zstandard")
    half = len(data) // 2
    return b"".join(map(module.ZstdCompressor().compress, (data[:half], data[half:])))


def gzipped(data):
    half = len(data) // 2
    return gzip.compress(data[:half]) + gzip.compress(data[half:])


COMPRESSED = {"": bytes, ".gz": gzipped, ".zst": zstandard}


def jsonl(records):
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def tar(records, members=None):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for number, record in enumerate(records):
            for extension, data in (("JSON", json.dumps(record).encode()), ("seg.txt", b"t")):
                info = tarfile.TarInfo(f"part/{number:05}.{extension}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        for info in members or ():
            archive.addfile(info)
    return buffer.getvalue()


def write(folder, suffix=".jsonl", make=jsonl, compress=bytes):
    paths = []
    for number, records in enumerate(RECORDS):
        paths.append(folder / f"{number}{suffix}")
        paths[-1].write_bytes(compress(make(records)))
    return paths


def parquet(folder):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    schema = pa.schema([("x", pa.int64()), ("text", pa.string())])
    paths = []
    for number, records in enumerate(RECORDS):
        paths.append(folder / f"{number}.parquet")
        table = pa.Table.from_pylist(records, schema=schema)
        pq.write_table(table, paths[-1], row_group_size=64)
    return paths


def parsed(path):
    """A user's own function."""
    with open(path, "rb") as file:
        yield from map(json.loads, file)


def of_tar(sample):
    assert sample["seg.txt"] == b"t"
    assert sample["__key__"].startswith("part/0")
    return json.loads(sample["json"])


SOURCES = {
    **{
        f"jsonl{suffix}": (
            partial(write, suffix=f".jsonl{suffix}", compress=compress),
            "jsonl",
            dict,
        )
        for suffix, compress in COMPRESSED.items()
    },
    "lines": (write, "lines", json.loads),
    **{
        f"tar{suffix}": (
            partial(write, suffix=f".tar{suffix}", make=tar, compress=compress),
            "tar",
            of_tar,
        )
        for suffix, compress in COMPRESSED.items()
    },
    "parquet": (parquet, "parquet", dict),
    "function": (write, parsed, dict),
}


@pytest.fixture
def paths(tmp_path):
    return write(tmp_path, ".jsonl.gz", compress=gzipped)


def opened_by(monkeypatch):
    """Return a list to which each opening of a file to read samples adds its path."""
    paths = []
    opened = file_stream._opened

    def noted(path, file_format):
        paths.append(path)
        return opened(path, file_format)

    monkeypatch.setattr(file_stream, "_opened", noted)
    return paths


# Samples.


@pytest.mark.filterwarnings("ignore:files were opened")
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("window", [7, 1024])
def test_records_are_the_same_in_any_order(tmp_path, monkeypatch, kind, window):
    monkeypatch.setattr(file_formats, "_BLOCK_BYTES", 1500)  # pieces end in mid-window
    make, parse, record_of = SOURCES[kind]
    stream = FileStream(make(tmp_path), parse, window=window, max_open=4)
    assert stream.counts.tolist() == COUNTS
    assert len(stream) == len(ALL)
    assert [record_of(stream[index]) for index in range(len(ALL))] == ALL
    rng = np.random.default_rng(0)
    for index in [*rng.permutation(len(ALL))[:150].tolist(), -1, -len(ALL)]:
        assert record_of(stream[index]) == ALL[index]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is opened far too often
        stream = pickle.loads(pickle.dumps(stream))
        batches = LaneBatchSampler(stream, 8, lanes=4, seed=1)
        assert sorted(record_of(stream[i])["x"] for b in batches for i in b) == [
            record["x"] for record in ALL
        ]
    for wrong in (len(ALL), -len(ALL) - 1):
        with pytest.raises(IndexError, match=f"index {wrong} is out of range for 1081 records"):
            stream[wrong]


@given(st.lists(st.sampled_from([b"", b" \t", b"\r", b'"a"', b"17\r", b"[1, 2]"])), st.booleans())
def test_blank_lines_are_not_records_and_lines_keep_their_numbers(tmp_path_factory, lines, has_end):
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n" * (has_end and bool(lines)))
    stream = FileStream(path, "jsonl", window=3)
    expected = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    assert [stream[k] for k in range(len(stream))] == [json.loads(line) for _, line in expected]
    texts = FileStream([path], "lines", window=3)
    assert list(map(texts.__getitem__, range(len(texts)))) == [
        line.decode().rstrip("\r") for _, line in expected
    ]
    for skip in range(len(expected) + 1):
        reader = file_formats.format_of("lines").open(os.fspath(path))
        assert reader.skip(skip) == skip
        assert reader.take(100) == expected[skip:]
        reader.close()


def test_in_the_order_of_lanes_each_file_is_opened_once_by_each_lane(paths, monkeypatch):
    stream = FileStream(paths, "jsonl", window=16)
    opened = opened_by(monkeypatch)
    lanes = 4
    batches = LaneBatchSampler(stream, 8, lanes=lanes, seed=3)
    assert sorted(stream[i]["x"] for batch in batches for i in batch) == [r["x"] for r in ALL]
    # Lanes may begin in the file that another one is reading, and take over its reader.
    assert len(opened) <= len(paths) + 2 * lanes
    # Nothing is kept of a file whose records were all given.
    kept = stream._local.files._opened
    assert len(kept) <= lanes


def test_another_order_is_slow_and_says_so_once(paths):
    stream = FileStream(paths, "jsonl", window=16, max_open=2)
    order = np.random.default_rng(0).permutation(len(ALL)).tolist()
    with pytest.warns(UserWarning, match=r"opened \d+ times, and .*LaneBatchSampler") as caught:
        assert [stream[index] for index in order] == [ALL[index] for index in order]
    assert len(caught) == 1


def test_each_thread_has_files_of_its_own(paths):
    stream = FileStream(paths, "jsonl", window=16)
    found = {}
    barrier = threading.Barrier(4)

    def read(number):
        barrier.wait()
        batches = LaneBatchSampler(stream, 8, lanes=4, seed=number)
        found[number] = sorted(stream[i]["x"] for batch in batches for i in batch)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(found.values()) == [[record["x"] for record in ALL]] * 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_files_of_its_own(paths):
    stream = FileStream(paths, "jsonl", window=16)
    assert stream[3] == ALL[3]
    child = CONTEXT.Process(target=_reads_on, args=(stream,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert [stream[k] for k in range(40)] == ALL[:40]


def _reads_on(stream):
    assert [stream[k] for k in range(200)] == ALL[:200]


# Counts.


def test_counts_are_kept_in_a_file_and_only_what_is_new_is_counted(tmp_path, monkeypatch):
    paths = write(tmp_path)
    opened = opened_by(monkeypatch)
    kept = tmp_path / "counts.json"
    for expected in (len(paths), 0):
        opened.clear()
        assert FileStream(paths, "jsonl", counts=kept).counts.tolist() == COUNTS
        assert len(opened) == expected
    with open(paths[3], "ab") as file:
        file.write(b'{"x": 1}\n')
    opened.clear()
    changed = [*COUNTS[:3], COUNTS[3] + 1, *COUNTS[4:]]
    assert FileStream(paths, "jsonl", counts=kept).counts.tolist() == changed
    assert opened == [str(paths[3])]
    opened.clear()  # another format has other records
    FileStream(paths, parsed, counts=kept)
    assert len(opened) == len(paths)
    kept.write_text("[]")
    with pytest.raises(StoreError, match=r"counts\.json is not a file of counts .* Delete it"):
        FileStream(paths, "jsonl", counts=kept)
    kept.write_text('{"version": 2}')
    with pytest.raises(StoreError, match="version 2 where 1 is read"):
        FileStream(paths, "jsonl", counts=kept)


def test_given_counts_are_believed_and_wrong_ones_are_named(paths):
    stream = FileStream(paths, "jsonl", counts=np.array(COUNTS, np.uint16))
    assert [stream[k] for k in range(len(ALL))] == ALL
    fewer = FileStream(paths[:1], "jsonl", counts=[299])
    with pytest.raises(StoreError, match=r"0\.jsonl\.gz has more than 299 records, and 299 were"):
        fewer[298]
    more = FileStream(paths[:1], "jsonl", counts=[301])
    with pytest.raises(StoreError, match=r"0\.jsonl\.gz has 300 records, and 301 were counted"):
        more[300]
    for wrong in ([1], [1.5] * 7, [-1] * 7):
        with pytest.raises(
            ConfigError, match="counts should be the number of records of each of 7"
        ):
            FileStream(paths, "jsonl", counts=wrong)


def test_a_file_that_is_changed_or_gone_is_named(paths):
    stream = FileStream(paths, "jsonl", window=16)
    fingerprint = stream.fingerprint
    assert fingerprint == FileStream(paths, "jsonl").fingerprint
    assert fingerprint != FileStream(paths, "lines").fingerprint
    os.utime(paths[0], ns=(0, 0))
    assert fingerprint != FileStream(paths, "jsonl").fingerprint
    with pytest.raises(StoreError, match=r"0\.jsonl\.gz was changed since its records were counte"):
        stream[0]
    paths[2].unlink()
    with pytest.raises(StoreError, match=r"cannot read .*2\.jsonl\.gz: No such file"):
        stream[310]
    with pytest.raises(StoreError, match=r"No such file .* Give the paths of files, such as sort"):
        FileStream("data/*.jsonl", "jsonl")


# Bad input.


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"x": ', r"b\.jsonl, line 3: it is not JSON: Expecting value"),
        (b'{"x": "\xff"}', r"b\.jsonl, line 3: 'utf-8' codec can't decode byte 0xff"),
        (b"[" * 100_000, r"b\.jsonl, line 3: it is not JSON: maximum recursion"),
    ],
)
def test_a_bad_line_is_named_and_may_be_left_out(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(b"1\n2\n")
    (tmp_path / "b.jsonl").write_bytes(b"3\n\n" + line + b"\n4\n")
    stream = FileStream([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], "jsonl")
    with pytest.raises(StoreError, match=message):
        stream[3]
    assert stream[4] == 4
    assert stream.describe(3) == f"{tmp_path}/b.jsonl, record 2"
    batches = LaneBatchSampler(stream, 5, seed=1)
    with pytest.raises(StoreError, match=message) as caught:
        list(Loader(stream, batch_sampler=batches))
    assert "b.jsonl, record 2" in "".join(caught.value.__notes__)
    with pytest.warns(UserWarning, match=r"(?s)1 bad sample left out.*b\.jsonl, record 2"):
        (batch,) = Loader(stream, batch_sampler=batches, on_error="skip")
    assert sorted(batch.tolist()) == [1, 2, 3, 4]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "tar"])
def test_a_file_that_is_cut_off_is_named_with_the_place(tmp_path, monkeypatch, kind, suffix):
    monkeypatch.setattr(file_formats, "_BLOCK_BYTES", 1500)
    make = {"jsonl": jsonl, "tar": tar}[kind]
    path = tmp_path / f"a.{kind}{suffix}"
    path.write_bytes(COMPRESSED[suffix](make(RECORDS[0]))[:-10])
    unit = "line" if kind == "jsonl" else "sample"
    message = rf"a\.{kind}\{suffix} is cut off or damaged, after {unit} [1-9]\d*: "
    with pytest.raises(StoreError, match=message):
        FileStream(path, kind)
    stream = FileStream(path, kind, counts=[300], window=10)
    stream[0]
    with pytest.raises(StoreError, match=message):
        stream[299]


@pytest.mark.parametrize("cut", [0, 700, 512 * 4, 512 * 4 + 100, 512 * 5])
def test_a_tar_file_that_is_cut_off_anywhere_is_an_error(tmp_path, cut):
    path = tmp_path / "a.tar"
    path.write_bytes(tar(RECORDS[0][:3])[:cut])  # each sample takes 4 blocks of 512 bytes
    with pytest.raises(StoreError, match=r"a\.tar is cut off or damaged, after sample [01]: "):
        FileStream(path, "tar")


def test_tar_files_that_are_not_samples_are_left_out_and_links_are_an_error(tmp_path):
    path = tmp_path / "a.tar"
    hidden, folder, link = (tarfile.TarInfo(name) for name in ("part/.x", "part", "part/9.txt"))
    folder.type, link.type, link.linkname = tarfile.DIRTYPE, tarfile.SYMTYPE, "part/1.txt"
    path.write_bytes(tar(RECORDS[0][:3], [hidden, folder]))
    assert len(FileStream(path, "tar")) == 3
    path.write_bytes(tar(RECORDS[0][:3], [link]))
    with pytest.raises(StoreError, match=r"a\.tar has a link or a sparse file, 'part/9\.txt'"):
        FileStream(path, "tar")
    twice = [tarfile.TarInfo("part/9.txt"), tarfile.TarInfo("part/9.TXT")]
    path.write_bytes(tar(RECORDS[0][:3], twice))
    with pytest.raises(StoreError, match=r"a\.tar has two files part/9\.txt in a row"):
        FileStream(path, "tar")


def test_damaged_parquet_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    path = parquet(tmp_path)[0]
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    with pytest.raises(StoreError, match=r"0\.parquet is cut off or damaged, after row 0: "):
        FileStream(path, "parquet")
    path.write_bytes(data[:40] + bytes(200) + data[240:])
    stream = FileStream(path, "parquet")
    with pytest.raises(StoreError, match=r"0\.parquet is cut off or damaged, after row 0: "):
        stream[0]


def test_an_error_of_a_function_keeps_its_type_and_names_the_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("1\n2\nx\n")
    with pytest.raises(json.JSONDecodeError) as caught:
        FileStream(path, parsed)
    assert f"{path} was read up to record 2." in caught.value.__notes__


def test_what_is_no_argument_is_named(paths, monkeypatch):
    with pytest.raises(
        ConfigError, match="parse should be one of jsonl, lines, tar, parquet, or a"
    ):
        FileStream(paths, "csv")
    for name in ("window", "max_open"):
        with pytest.raises(ConfigError, match=f"{name} should be 1 or more, but got {name}=0"):
            FileStream(paths, "jsonl", **{name: 0})
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"0\.jsonl\.gz needs pyarrow"):
        FileStream(paths, "parquet")


# In a loader.


class Killing(FileStream):
    """Gives one number of each record; ends a worker once, at record `kills`."""

    def __init__(self, *arguments, kills=None, **options):
        super().__init__(*arguments, **options)
        flag = CONTEXT.Event()
        self.flag = lambda: flag
        self.kills = kills

    def __getitem__(self, index):
        if index == self.kills and not self.flag().is_set():
            self.flag().set()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)["x"]


def loader_of(stream, ranks=1, rank=0, size=8, lanes=4, **options):
    batches = LaneBatchSampler(stream, size // ranks, lanes=lanes, num_replicas=ranks, rank=rank)
    if options.get("backend") == "process":
        options["multiprocessing_context"] = CONTEXT
    return Loader(stream, batch_sampler=batches, seed=7, **options)


def xs(loader):
    return [np.asarray(batch).tolist() for batch in loader]


def stream_of(paths, **options):  # no fixture, which would keep its files open
    return Killing(paths, "jsonl", window=16, **options)


@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_batches_are_the_same_with_any_workers(paths, backend, num_workers):
    stream = stream_of(paths)
    alone = loader_of(stream)
    first, second = xs(alone), xs(alone)
    assert first != second
    assert sorted(x for batch in first for x in batch) == [record["x"] for record in ALL]
    with_workers = loader_of(stream, num_workers=num_workers, backend=backend)
    assert [xs(with_workers), xs(with_workers)] == [first, second]


def test_a_killed_worker_changes_nothing(paths):
    killing = stream_of(paths, kills=500)
    loader = loader_of(
        killing, num_workers=2, backend="process", on_error=FaultPolicy(max_respawns=1)
    )
    assert xs(loader) == xs(loader_of(stream_of(paths)))
    assert killing.flag().is_set()


def test_it_goes_on_with_other_workers_and_ranks(paths):
    stream = stream_of(paths)
    whole = xs(loader_of(stream))
    running = loader_of(stream, num_workers=2)
    batches = iter(running)
    assert [next(batches).tolist() for _ in range(50)] == whole[:50]
    state = json.loads(json.dumps(running.state_dict()))
    assert len(json.dumps(state)) < 1024
    del batches
    for ranks in (1, 2, 4):
        steps = []
        for rank in range(ranks):
            loader = loader_of(stream, ranks, rank, num_workers=3 if ranks == 1 else 0)
            loader.load_state_dict(state)
            steps.append(xs(loader))
        united = [[x for batch in step for x in batch] for step in zip(*steps, strict=True)]
        assert united[:-1] == whole[50:-1]
        assert set(united[-1]) >= set(whole[-1])


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_each_worker_reads_lanes_of_its_own(paths, tmp_path, monkeypatch, backend):
    stream = stream_of(paths)
    log = tmp_path / "opened"
    opened = file_stream._opened

    def noted(path, file_format):
        with open(log, "a") as file:
            file.write(f"{path}\n")
        return opened(path, file_format)

    monkeypatch.setattr(file_stream, "_opened", noted)
    num_opens = {}
    # 4 steps go round the lanes: of 3 workers each reads all of them.
    for num_workers in (0, 2, 4, 3):
        log.write_text("")
        options = {"num_workers": num_workers, "backend": backend} if num_workers else {}
        xs(loader_of(stream, lanes=4, **options))
        num_opens[num_workers] = len(log.read_text().splitlines())
    files, lanes = len(COUNTS) - 1, 4
    assert max(num_opens[2], num_opens[4]) <= files + 2 * lanes
    assert num_opens[3] > num_opens[4]


class Drawing(FileStream):
    """Draws from a global generator, which `FileStream` itself never does."""

    def __getitem__(self, index):
        return random.random()


def test_only_what_may_draw_has_seeded_generators(paths):
    plain, drawing = FileStream(paths, "jsonl"), Drawing(paths, "jsonl")
    assert is_drawless(plain)
    assert not is_drawless(drawing)
    assert not is_drawless(FileStream(paths, parsed, counts=COUNTS))
    assert xs(loader_of(drawing)) == xs(loader_of(drawing, num_workers=2, backend="process"))


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "backend": "thread"}])
def test_a_stream_is_a_source_of_a_mixture_in_the_order_of_its_lanes(paths, monkeypatch, options):
    opened = opened_by(monkeypatch)
    stream = FileStream(paths, "jsonl", window=64)
    opened.clear()
    other = [{"x": -1, "text": ""}] * 500
    lanes = LaneBatchSampler(stream, 32, lanes=4, num_replicas=1, rank=0)
    mixture = MixtureSampler([lanes, 500], [(0, [3, 1])], 2048, seed=5)
    loader = Loader(ConcatDataset([stream, other]), 32, sampler=mixture, seed=5, **options)
    drawn = [x for batch in loader for x in batch["x"].tolist() if x >= 0]
    assert len(drawn) == 3 * 2048 // 4
    # A pass has each record once, and each thread opens each file once, or a lane in its middle.
    assert sorted(drawn[: len(ALL)]) == sorted(record["x"] for record in ALL)
    assert len(opened) <= 2 * (len(paths) + 4) * options.get("num_workers", 1)


def test_files_of_one_name_in_two_folders_keep_counts_of_their_own(tmp_path):
    streams = []
    for folder, texts in (("a", "1\n22\n"), ("b", "333\n4")):
        path = tmp_path / folder / "0.txt"
        path.parent.mkdir()
        path.write_text(texts + "5" * (8 - len(texts)))
        os.utime(path, (1, 1))
        streams.append(path)
    for paths in ([streams[0]], [streams[1]], streams):
        stream = FileStream(paths, "lines", counts=tmp_path / "counts.json")
        assert stream.counts.sum() == sum(len(path.read_text().split()) for path in paths)
    kept = json.loads((tmp_path / "counts.json").read_text())
    assert [name for name, *_ in kept["files"]] == ["a/0.txt", "b/0.txt"]


@pytest.mark.parametrize("counts", ["absent/counts.json", ""])
def test_counts_that_cannot_be_kept_are_an_error_before_anything_is_counted(
    paths, tmp_path, counts
):
    with pytest.raises(ConfigError, match="counts should be the path of a file in a folder"):
        FileStream(paths, "jsonl", counts=tmp_path / counts)


def test_no_file_is_an_error():
    with pytest.raises(ConfigError, match="files should be one path or more"):
        FileStream([], "jsonl")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_an_empty_file_is_no_compressed_one(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(b"")
    with pytest.raises(StoreError, match="it is empty"):
        FileStream(path, "jsonl")


def test_a_byte_order_mark_is_passed_over(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": 1}\n{"x": 2}\n', encoding="utf-8-sig")
    assert list(FileStream(path, "jsonl")) == [{"x": 1}, {"x": 2}]
