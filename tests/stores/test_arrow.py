# SPDX-License-Identifier: Apache-2.0
"""Parquet and Arrow files as stores, and what Hugging Face's datasets write."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import pickle
import re
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.support.processes import python
from tests.support.stores import refused

from penstock.errors import ConfigError, StoreError
from penstock.sampling import ShardSampler
from penstock.stores import EncodedImage, StoreDataset, open_store

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")

from penstock.stores.arrow import Tables, _tables  # noqa: E402 - it needs pyarrow
from penstock.stores.records import decode_record  # noqa: E402
from penstock.testing.stores import StoreReaderContract  # noqa: E402

COUNT = 30
IMAGES = [b"image %d" % number * (number + 1) for number in range(COUNT)]
LABELS = [number % 3 for number in range(COUNT)]
STRUCTS = [{"bytes": image, "path": None} for image in IMAGES]
STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
FEATURES = {
    "image": {"_type": "Image"},
    "label": {"names": ["cat", "dog", "hen"], "_type": "ClassLabel"},
}


def pair_table(kind=None):
    images = pa.array(STRUCTS, STRUCT) if kind is None else pa.array(IMAGES, kind)
    return pa.table({"image": images, "label": LABELS})


def write(path, table, rows=7):
    """Write a table in pieces, in the form that the file's name says."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows)
        return path
    make = pa.ipc.new_stream if path.name.startswith("data-") else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, make(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


FORMS = ["a.parquet", "a.arrow", "data-00000-of-00001.arrow"]


class TestParquet(StoreReaderContract):
    name = FORMS[0]

    def place(self, tmp_path):
        return f"arrow:{tmp_path}/{self.name}"

    def table_of(self, records, class_names):
        samples = [decode_record(record.data).sample for record in records]
        columns = {
            "image": [image.data for image, _ in samples],
            "label": [label for _, label in samples],
            "key": [record.key for record in records],
        }
        features = {**FEATURES, "label": {"names": class_names, "_type": "ClassLabel"}}
        text = json.dumps({"info": {"features": features}})
        return pa.table(columns).replace_schema_metadata({"huggingface": text})

    def fill(self, address, records, class_names=(), metadata=None):
        write(Path(address.removeprefix("arrow:")), self.table_of(records, class_names))

    def open(self, address):
        return open_store(address, key_column="key")


class TestArrowFile(TestParquet):
    name = FORMS[1]


class TestArrowStream(TestParquet):
    name = FORMS[2]


def test_one_thread_at_a_time_reads_a_parquet_file(tmp_path):
    opened = Tables([write(tmp_path / "a.parquet", pair_table())], 1 << 30)
    busy = threading.Lock()

    def alone(load, columns):
        assert busy.acquire(blocking=False)
        time.sleep(0.01)
        busy.release()
        return load(columns)

    opened._loaders[:] = [functools.partial(alone, load) for load in opened._loaders]
    with ThreadPoolExecutor(3) as pool:
        columns = pool.map(opened.column, ["image", "label", "image"])
        assert [len(column) for column in columns] == [COUNT] * 3
    opened.close()


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kind", [None, pa.binary(), pa.large_binary()], ids=str)
def test_images_with_classes_are_pairs_in_any_order(tmp_path, name, kind):
    path = write(tmp_path / name, pair_table(kind))
    with open_store(f"arrow:{path}") as store:
        assert len(store) == COUNT
        assert list(store.keys)[:2] == ["00", "01"]
        assert store.labels.tolist() == LABELS
        assert store.labels.dtype == np.int64
        assert store.index.are_pairs
        order = [29, 0, 13, 6, 7, 13, -1]
        expected = [(EncodedImage(IMAGES[i]), LABELS[i]) for i in order]
        assert [r.sample for r in store.get_many(order)] == expected
        with store.borrow(order) as records:
            assert [r.sample for r in records] == expected
        assert type(store.get_many([3])[0].sample[0].data) is bytes


def save_to_disk(folder, **more):
    """A folder as `datasets.Dataset.save_to_disk` lays it out."""
    folder.mkdir()
    table = pair_table()
    for number in range(2):
        name = f"data-{number:05}-of-00002.arrow"
        write(folder / name, table.slice(15 * number, 15))
    files = [{"filename": f"data-{number:05}-of-00002.arrow"} for number in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, **more}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": FEATURES}))
    return folder


def test_a_dataset_saved_by_hugging_face_has_its_class_names(tmp_path):
    with open_store(f"arrow:{save_to_disk(tmp_path / 'train')}") as store:
        assert store.class_names == ("cat", "dog", "hen")
        assert [r.sample[0].data for r in store.scan()] == IMAGES
        assert store.labels.tolist() == LABELS
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    refused(open_store(f"arrow:{tmp_path}"), r"holds several splits: name one, .* of \['train'\]")


@pytest.mark.parametrize("name", FORMS)
def test_class_names_in_a_files_own_metadata_are_found(tmp_path, name):
    text = json.dumps({"info": {"features": {**FEATURES, "klasse": FEATURES["label"]}}})
    table = pair_table().rename_columns(["image", "klasse"])
    path = write(tmp_path / name, table.replace_schema_metadata({"huggingface": text}))
    with open_store(f"arrow:{path}") as store:
        assert store.class_names == ("cat", "dog", "hen")
        assert store.labels.tolist() == LABELS


def test_a_folder_of_files_is_read_in_the_order_of_their_names(tmp_path):
    for number in (1, 0):
        write(tmp_path / f"{number}.parquet", pair_table().slice(15 * number, 15))
    with open_store(f"arrow:{tmp_path}") as store:
        assert [r.sample[0].data for r in store.scan()] == IMAGES
    write(tmp_path / "2.parquet", pair_table().drop_columns(["label"]))
    refused(open_store(f"arrow:{tmp_path}"), r"2\.parquet has other columns")


@pytest.mark.parametrize("as_dictionary", [False, True])
def test_classes_may_be_texts(tmp_path, as_dictionary):
    texts = pa.array(["dog", "cat", None, "dog"])
    table = pa.table({"label": texts.dictionary_encode() if as_dictionary else texts})
    with open_store(f"arrow:{write(tmp_path / 'a.arrow', table)}") as store:
        assert store.class_names == ("cat", "dog")
        assert [row.tolist() for row in store.labels] == [[1], [0], [], [1]]
        assert [r.label for r in store.scan()] == [1, 0, None, 1]


@pytest.mark.parametrize("name", FORMS)
def test_other_columns_make_a_sample_a_dict(tmp_path, name):
    table = pair_table().append_column("boxes", pa.array([[[1, 2.5]]] * COUNT))
    table = table.append_column("name", pa.array([f"n{i}" for i in range(COUNT)]))
    with open_store(f"arrow:{write(tmp_path / name, table)}", key_column="name") as store:
        assert store.keys[2] == "n2"
        assert not store.index.are_pairs
        sample = {"image": EncodedImage(IMAGES[2]), "label": 2, "boxes": [[1, 2.5]], "name": "n2"}
        assert store.get(["n2"])[0].sample == sample
        assert list(store.get(["n2"])[0].sample) == list(sample)


def test_images_without_classes_stand_alone(tmp_path):
    table = pair_table().select(["image"])
    with open_store(f"arrow:{write(tmp_path / 'a.parquet', table)}") as store:
        assert store.labels is None
        assert store.get_many([1])[0].sample == EncodedImage(IMAGES[1])


def test_columns_that_may_be_meant_are_listed(tmp_path):
    table = pair_table().append_column("mask", pa.array(IMAGES))
    table = table.append_column("target", pa.array(LABELS))
    path = write(tmp_path / "a.parquet", table)
    with pytest.raises(ConfigError, match="2 columns that may hold the images: image, mask") as e:
        len(open_store(path))
    assert "mask (binary)" in str(e.value)
    with pytest.raises(ConfigError, match="2 columns that may hold the labels: label, target"):
        len(open_store(path, image_column="mask"))
    with pytest.raises(ConfigError, match=r"no column 'photo', or two. It has: image"):
        len(open_store(path, image_column="photo"))
    with open_store(path, image_column="mask", label_column="target") as store:
        assert store.get_many([3])[0].sample["mask"] == EncodedImage(IMAGES[3])
    with pytest.raises(ConfigError, match=r"column 'image' of .* is struct.*classes are integers"):
        len(open_store(path, image_column="mask", label_column="image"))


def test_integers_that_are_not_called_classes_are_none(tmp_path):
    images = pa.array(IMAGES)
    boxes = pa.array([[[1, 2]]] * COUNT)
    for name, columns in (
        ("a.parquet", {"image": images, "width": LABELS, "height": LABELS, "boxes": boxes}),
        ("b.parquet", {"image": images, "fine": LABELS, "coarse": LABELS}),
    ):
        with open_store(write(tmp_path / name, pa.table(columns))) as store:
            assert store.labels is None
            assert list(store.get_many([0])[0].sample) == list(columns)
    with open_store(tmp_path / "b.parquet", label_column="coarse") as store:
        assert store.labels.tolist() == LABELS


@pytest.mark.parametrize("values", [[2**64 - 1, 1], [2**63, None]])
def test_classes_beyond_64_bits_with_a_sign_are_an_error(tmp_path, values):
    table = pa.table({"label": pa.array(values, pa.uint64())})
    with pytest.raises(StoreError, match=rf"column 'label' of .*a\.parquet has a .*{values[0]}"):
        len(open_store(write(tmp_path / "a.parquet", table)))
    table = pa.table({"label": pa.array([5, 1], pa.uint64())})
    assert open_store(write(tmp_path / "b.parquet", table)).labels.tolist() == [5, 1]


def replace(path, image):
    """Put another file of the same name and size in its place, as an exporter does."""
    status = path.stat()
    table = pa.table({"image": [image] * 4, "label": ["dog", "eel", "dog", "eel"]})
    new = write(path.with_name(f"data-{path.name}"), table) if "data-" in path.name else None
    new = new or write(path.with_name(f"new-{path.name}"), table)
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    new.replace(path)


@pytest.mark.parametrize("name", FORMS)
def test_a_file_that_was_replaced_never_gives_its_images_with_the_old_labels(tmp_path, name):
    path = tmp_path / name
    write(path, pa.table({"image": [b"OLD"] * 4, "label": ["cat", "dog", "cat", "dog"]}))
    dataset = StoreDataset(f"arrow:{path}", decode=None)
    copy = pickle.dumps(dataset)
    assert dataset[1] == (b"OLD", 1)
    replace(path, b"NEW")
    assert dataset[1] == (b"OLD", 1)  # what is open stays what it is
    dataset.close()
    for reader in (dataset, pickle.loads(copy)):
        with pytest.raises(StoreError, match=f"{name} was changed since its index was read"):
            reader[1]
    anew = StoreDataset(f"arrow:{path}", decode=None)
    assert (anew[1], anew.class_names) == ((b"NEW", 1), ("dog", "eel"))
    anew.close()
    path.unlink()
    with pytest.raises(StoreError, match=f"cannot read .*{name}: .*No such file"):
        anew[1]


def test_a_stream_that_was_cut_between_two_messages_is_an_error(tmp_path):
    file = io.BytesIO()
    table, ends = pair_table(), []
    with pa.ipc.new_stream(file, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=10):
            writer.write_batch(batch)
            ends.append(file.tell())
    data, path = file.getvalue(), tmp_path / "data-0.arrow"
    path.write_bytes(data)
    assert len(open_store(f"arrow:{path}")) == COUNT
    for end, rows in zip(ends, (10, 20, 30), strict=True):
        path.write_bytes(data[:end])
        refused(open_store(f"arrow:{path}"), f"data-0.arrow has no mark .* after {rows} rows")
    path.write_bytes(data + data)
    refused(open_store(f"arrow:{path}"), r"goes on behind the mark of its end.* after 30 rows")


def test_keys_are_all_there_and_different(tmp_path):
    for keys, message in ((["a", "b", "a"], "has 'a' twice"), (["a", None, "b"], "lacks some")):
        path = write(tmp_path / "a.parquet", pa.table({"key": keys}))
        refused(open_store(path, key_column="key"), message)


def test_a_row_without_an_image_is_an_error(tmp_path):
    structs = [{"bytes": None, "path": "cat.jpg"}, None]
    path = write(tmp_path / "a.arrow", pa.table({"image": pa.array(structs, STRUCT)}))
    with open_store(path) as store:
        with pytest.raises(StoreError, match=r"no image, but .*'cat\.jpg'"):
            store.get_many([0])
        with pytest.raises(StoreError, match=r"has no image, but None"):
            store.get_many([1])


@pytest.mark.parametrize("name", FORMS)
def test_damaged_files_are_named(tmp_path, name):
    path = write(tmp_path / name, pair_table())
    data = path.read_bytes()
    for damaged in (data[: len(data) // 2], b"", b"text" * 100, data[:4]):
        path.write_bytes(damaged)
        with pytest.raises(StoreError, match=f"cannot read .*{name}"):
            open_store(f"arrow:{path}").get_many([0])
    refused(open_store(f"arrow:{tmp_path}/nowhere"), "nowhere does not exist")
    (tmp_path / "empty").mkdir()
    refused(open_store(f"arrow:{tmp_path}/empty"), r"without a file ending in \.parquet")


@pytest.mark.parametrize(
    "files", [1, "x", [1], [None], [{}], [{"filename": 1}], [{"filename": "a\0b"}], {"a": "b"}]
)
def test_a_damaged_list_of_a_saved_dataset_is_named(tmp_path, files):
    folder = save_to_disk(tmp_path / "train", _data_files=files)
    refused(open_store(f"arrow:{folder}"), "/train/")


DAMAGE_OFFSETS = """
    import sys
    from pathlib import Path
    import pyarrow as pa
    from penstock.errors import StoreError
    from penstock.stores import open_store

    path, column = Path(sys.argv[1]), sys.argv[2]
    mapped = pa.py_buffer(path.read_bytes())
    array = pa.ipc.open_file(mapped).get_batch(1).column(column)
    array = array.field("bytes") if pa.types.is_struct(array.type) else array
    data = bytearray(mapped)
    data[array.buffers()[1].address - mapped.address + 4 * 3 + 3] ^= 0x40
    path.write_bytes(data)
    store = open_store(path)
    assert len(store.get_many([0, 6])) == 2
    for _ in range(2):
        try:
            store.get_many([8])
        except StoreError as error:
            print(error)
"""


@pytest.mark.parametrize("column", ["image", "text", "numbers"])
def test_a_flipped_bit_in_arrows_offsets_is_an_error_and_not_the_end(tmp_path, column):
    table = pair_table().append_column("text", pa.array([str(n) for n in range(COUNT)]))
    table = table.append_column("numbers", pa.array([[n] * 3 for n in range(COUNT)]))
    path = write(tmp_path / "a.arrow", table)
    done = python("-c", DAMAGE_OFFSETS, path, column)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"{path} is damaged: ") for line in lines)


def test_text_that_is_no_utf_8_names_its_record(tmp_path):
    table = pair_table().append_column("text", pa.array(["text"] * COUNT))
    path = write(tmp_path / "a.arrow", table)
    path.write_bytes(path.read_bytes().replace(b"texttext", b"tex\xfftext", 1))
    with open_store(path) as store, pytest.raises(StoreError, match=r"record \d .*a\.arrow: .*utf"):
        store.get_many(range(COUNT))


def test_parquet_that_would_fill_the_memory_is_not_decoded(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"label": np.zeros(1_000_000, np.int64)}), path)  # 4 kB
    with pytest.raises(
        StoreError, match=r"a\.parquet: its rows would take 8,000,000 .*raise max_row"
    ):
        len(open_store(path, max_row_group_size=7_999_999))
    assert len(open_store(path, max_row_group_size=8_000_000)) == 1_000_000
    zeros = [bytes(1_000_000)] * 20
    pq.write_table(pa.table({"x": zeros}), path, compression="zstd", use_dictionary=False)
    store = open_store(path, max_row_group_size=1_000_000)
    with pytest.raises(StoreError, match=r"a\.parquet: row group 0 would take 20,.*max_row_group"):
        store.get_many([0])
    noise = np.random.default_rng(0).bytes(3_000_000)
    pq.write_table(pa.table({"x": [noise[:1_000_000], noise[1_000_000:]]}), path)
    assert len(open_store(path, max_row_group_size=1_000_000).get_many([1])) == 1  # no bomb


@pytest.mark.parametrize("form", ["plain", "struct", "list"])
def test_parquet_whose_texts_repeat_is_not_expanded(tmp_path, form):
    path = tmp_path / "a.parquet"
    text = pa.array([b"x" * 1_000_000])  # which the file has once, and each row in memory
    column = pa.DictionaryArray.from_arrays(np.zeros(30, np.int32), text)
    if form == "struct":
        column = pa.StructArray.from_arrays([column], ["bytes"])
    elif form == "list":
        column = pa.ListArray.from_arrays([0, 30], column)
    # Without the schema of Arrow, by which it would stay a dictionary.
    pq.write_table(pa.table({"x": column}), path, compression="zstd", store_schema=False)
    with pytest.raises(StoreError, match="row group 0 would take 30,000,000 bytes"):
        open_store(path, max_row_group_size=20_000_000).get_many([0])


def test_the_limit_holds_for_a_column_whose_name_has_a_dot(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"x.label": pa.array([b"x" * 1_000_000] * 3)})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    with (
        contextlib.closing(Tables([path], 2_999_999)) as opened,
        pytest.raises(StoreError, match="row group 0 would take 3,000"),
    ):
        opened.column("x.label")


def test_a_column_whose_name_is_no_utf8_is_damage_of_its_file(tmp_path):
    path = write(tmp_path / "a.arrow", pa.table({"name": [1]}))
    path.write_bytes(path.read_bytes().replace(b"name", b"n\xffme"))
    refused(open_store(path), r"cannot read .*a\.arrow: 'utf-8' codec")


def test_a_store_that_is_dropped_closes_its_files(tmp_path):
    num_open = len(_tables._entries)
    store = open_store(write(tmp_path / "a.parquet", pair_table()))
    len(store)
    assert len(_tables._entries) == num_open + 1
    del store
    assert len(_tables._entries) == num_open


def test_only_some_row_groups_of_parquet_are_kept(tmp_path):
    path = write(tmp_path / "a.parquet", pair_table(), rows=1)
    with open_store(path) as store:
        assert [r.sample[0].data for r in store.get_many(range(COUNT))] == IMAGES
        assert len(store._open.thing._loaded) == 4


def group_store(tmp_path, num_groups, **options):
    """Return a store of groups of 10 images of 1,000 bytes, and what a group takes decoded."""
    images = [bytes([k]) * 1000 for k in range(10 * num_groups)]
    path = write(tmp_path / "a.parquet", pa.table({"image": images}), rows=10)
    kept = options.pop("kept", 0)
    size_bytes = pq.ParquetFile(path).read_row_group(0).nbytes
    return open_store(path, max_kept_size=kept * size_bytes, **options), size_bytes


def decodings(store):
    """Return the numbers of the groups that are decoded from here on, a list that grows."""
    len(store)
    found = []
    with store._using() as tables:

        def noted(number, load, columns):
            found.append(number)
            return load(columns)

        tables._loaders[:] = [
            functools.partial(noted, number, load) for number, load in enumerate(tables._loaders)
        ]
    return found


def read_epoch(store, sampler, batch_size=16):
    order = list(sampler)
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        assert [r.sample.data[0] for r in store.get_many(batch)] == batch


def test_by_shards_each_row_group_is_decoded_once_if_those_that_are_open_fit(tmp_path):
    store, _ = group_store(tmp_path, 24, kept=6)
    sampler = ShardSampler(
        store, num_nodes=1, node=0, ranks_per_node=1, local_rank=0, open_shards=6
    )
    read_epoch(store, sampler)  # it finds out how many are asked for again
    for epoch in (1, 2):
        sampler.set_epoch(epoch)
        decoded = decodings(store)
        read_epoch(store, sampler)
        assert sorted(decoded) == list(range(24))
    store.close()


def test_where_open_row_groups_do_not_fit_those_that_are_kept_are_read_first(tmp_path):
    store, _ = group_store(tmp_path, 12, kept=8)
    batch = np.arange(0, 120, 10)  # one image of each group
    decoded = decodings(store)
    for k in range(8):
        store.get_many(batch + k)
    assert len(decoded) < 8 * 12 * 0.6
    store.close()


def test_kept_row_groups_stay_below_their_bound_whatever_the_order(tmp_path):
    store, size_bytes = group_store(tmp_path, 20, kept=7)
    for order in np.random.default_rng(0).permuted(np.tile(np.arange(200), (3, 1)), axis=1):
        read_epoch(store, order.tolist())
        kept = store._open.thing._loaded.values()
        assert sum(table.nbytes for table in kept) == 7 * size_bytes
    store.close()


def test_a_row_group_above_the_bound_is_kept_alone(tmp_path):
    store, _ = group_store(tmp_path, 3)  # not one is to be kept
    decoded = decodings(store)
    read_epoch(store, range(30), batch_size=5)
    assert decoded == [0, 1, 2]
    assert list(store._open.thing._loaded) == [2]
    store.close()


def test_in_order_four_row_groups_are_kept_in_every_epoch(tmp_path):
    store, _ = group_store(tmp_path, 20, kept=9)
    for _ in range(3):
        read_epoch(store, range(200))
        assert len(store._open.thing._loaded) == 4
    store.close()


def test_a_row_group_that_two_threads_ask_for_is_decoded_once(tmp_path):
    opened = Tables([write(tmp_path / "a.parquet", pair_table())])
    lock, waits, decoded, got = opened._lock, threading.Event(), [], []
    other = threading.Thread(target=lambda: got.append(opened.piece(0)))

    class Noted:
        def __enter__(self):
            if threading.current_thread() is other:
                waits.set()
            lock.acquire()

        def __exit__(self, *_):
            lock.release()

    def load(columns):
        decoded.append(columns)
        if len(decoded) == 1:
            other.start()
            assert waits.wait(60)
        return first(columns)

    first, opened._loaders[0], opened._lock = opened._loaders[0], load, Noted()
    table = opened.piece(0)
    other.join()
    assert decoded == [None]
    assert got[0] is table
    opened.close()


def test_parquet_and_arrow_in_one_folder_are_an_error(tmp_path):
    write(tmp_path / "0.parquet", pair_table())
    write(tmp_path / "1.arrow", pair_table())
    refused(open_store(f"arrow:{tmp_path}"), "has Parquet and Arrow files: name one kind")


@pytest.mark.parametrize("name", FORMS)
def test_a_table_without_a_row_is_a_store(tmp_path, name):
    with open_store(f"arrow:{write(tmp_path / name, pair_table().slice(0, 0))}") as store:
        assert len(store) == 0
        assert list(store.scan()) == []


def test_the_python_of_the_page_runs(tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "stores-read-only.md"
    if not page.exists():
        pytest.skip("the pages are not there")
    monkeypatch.chdir(tmp_path)
    for folder in ("shards", "saved"):
        os.mkdir(folder)
    for number in range(16):
        with tarfile.open(f"shards/train-{number:03}.tar", "w") as tar:
            tar.addfile(tarfile.TarInfo(f"{number}.jpg"))
    table = pair_table()
    write(Path("train.parquet"), table)
    save_to_disk(tmp_path / "saved" / "train")
    for number in range(2):
        name = Path("saved/train", f"data-{number:05}-of-00002.arrow")
        part = table.slice(15 * number, 15).append_column("fine_label", pa.array(LABELS[:15]))
        write(name, part)
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [line for line in block.splitlines() if line.startswith("StoreDataset(")]
    names = {}
    exec(block, names)
    datasets = [eval(line, names) for line in lines]
    assert [len(dataset) for dataset in datasets] == [16, COUNT, COUNT]
    assert datasets[2].labels.tolist() == LABELS[:15] * 2
    for dataset in datasets:
        dataset.close()


def test_a_damaged_page_of_parquet_names_its_file(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pair_table(pa.binary()), path, compression="zstd", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[60:100] = bytes(40)
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"/a\.parquet is damaged: .*Restore it from a copy"):
        open_store(path).get_many([0])
