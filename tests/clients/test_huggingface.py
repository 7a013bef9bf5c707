# SPDX-License-Identifier: Apache-2.0
"""Hugging Face datasets: equal to torch's loader as they are, and gathered out of Arrow."""

from __future__ import annotations

import gc
import io
import pickle
import subprocess
import sys
import weakref

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import penstock.torch
from penstock import Loader
from penstock.collate import default_collate
from penstock.data import Subset
from penstock.data.dataset import batch_reader
from penstock.errors import CollateError, ConfigError
from penstock.images import decode_image
from penstock.integrations.huggingface import from_huggingface

datasets.disable_progress_bars()

ROWS = 23
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"]
FLOATS = ["float16", "float32", "float64"]


def assert_equal(a, b):
    """Assert that two batches are equal, in types and in every bit."""
    assert type(a) is type(b), (type(a), type(b))
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            assert_equal(left, right)
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.equal(b)
    elif isinstance(a, np.ndarray | np.generic):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b, strict=True)
    else:
        assert a == b


def numbers_of(name):
    if name == "bool":
        return st.booleans()
    if name in FLOATS:
        return st.floats(width=int(name[5:]), allow_nan=False)
    kind = np.iinfo(name)
    return st.integers(int(kind.min), int(kind.max))


@st.composite
def columns_of_numbers(draw):
    """A feature, and ROWS values of it."""
    name = draw(st.sampled_from([*INTEGERS, *FLOATS, "bool"]))
    value = datasets.Value(name)
    form = draw(st.sampled_from(["number", "list", "fixed", "matrix", "text"]))
    if form == "text":
        kind, values = draw(
            st.sampled_from([("string", st.text(max_size=5)), ("binary", st.binary(max_size=5))])
        )
        return datasets.Value(kind), [draw(values) for _ in range(ROWS)]
    numbers = numbers_of(name)
    size = draw(st.integers(1, 4))
    if form == "number":
        return value, draw(st.lists(numbers, min_size=ROWS, max_size=ROWS))
    row = st.lists(numbers, min_size=size, max_size=size)
    if form == "list":
        return datasets.List(value), [draw(row) for _ in range(ROWS)]
    if form == "fixed":
        return datasets.List(value, length=size), [draw(row) for _ in range(ROWS)]
    return (
        datasets.Array2D((2, size), name),
        [[draw(row), draw(row)] for _ in range(ROWS)],
    )


@st.composite
def tables(draw):
    """A dataset in pieces, with or without a mapping of its rows."""
    found = draw(st.lists(columns_of_numbers(), min_size=1, max_size=3))
    features = datasets.Features({f"c{k}": feature for k, (feature, _) in enumerate(found)})
    rows = {f"c{k}": values for k, (_, values) in enumerate(found)}
    whole = datasets.Dataset.from_dict(rows, features=features)
    cut = draw(st.integers(0, ROWS - 1))
    if cut:
        parts = [range(cut), range(cut, ROWS)]
        # `select` of a range slices: pieces that do not begin where their buffers do.
        whole = datasets.concatenate_datasets([whole.select(part) for part in parts])
    if draw(st.booleans()):
        whole = whole.shuffle(seed=draw(st.integers(0, 9)))
    if draw(st.booleans()):
        whole = whole.select(range(2, ROWS))
    return whole


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(tables())
def test_rows_are_the_values_that_datasets_gives_in_the_types_of_the_columns(dataset):
    rows = from_huggingface(dataset)
    for index in (0, len(dataset) // 2, -1):
        expected = dataset[index]
        assert rows[index].keys() == expected.keys()
        for name, value in rows[index].items():
            feature = dataset.features[name]
            if isinstance(value, str | bytes):
                assert value == expected[name]
                continue
            if isinstance(feature, datasets.List):
                feature = feature.feature
            dtype = "bool" if feature.dtype == "bool" else feature.dtype
            np.testing.assert_array_equal(value, np.array(expected[name], dtype), strict=True)


@settings(max_examples=80, suppress_health_check=list(HealthCheck))
@given(tables(), st.sampled_from([None, "torch", "numpy"]))
def test_a_dataset_as_it_is_gives_what_it_gives_to_torchs_loader(dataset, form):
    dataset = dataset.with_format(form)
    with np.errstate(over="ignore"):  # datasets warns of numbers beyond float32
        expected = list(torch.utils.data.DataLoader(dataset, batch_size=5))
        given_ = list(penstock.torch.DataLoader(dataset, batch_size=5))
    assert_equal(given_, expected)


def tabular(count=400):
    rng = np.random.default_rng(0)
    return datasets.Dataset.from_dict(
        {
            "id": np.arange(count),
            "x": rng.standard_normal((count, 6)).astype(np.float32),
            "tokens": rng.integers(0, 1000, (count, 64)),
            "name": [f"row {k}" for k in range(count)],
        },
        features=datasets.Features(
            {
                "id": datasets.Value("int32"),
                "x": datasets.List(datasets.Value("float32"), length=6),
                "tokens": datasets.List(datasets.Value("int64")),
                "name": datasets.Value("string"),
            }
        ),
    )


def on_disk(folder, dataset, rows_per_piece=7):
    """Write a table as datasets does, in small pieces, and map it into memory."""
    path = folder / "table.arrow"
    with datasets.arrow_writer.ArrowWriter(
        path=str(path), features=dataset.features, writer_batch_size=rows_per_piece
    ) as writer:
        for example in dataset:
            writer.write(example)
        writer.finalize()
    return datasets.Dataset.from_file(str(path))


@pytest.mark.parametrize("form", [None, "torch"])
def test_which_datasets_as_they_are_are_gathered(form):
    dataset = tabular()
    assert batch_reader(dataset.with_format(form)) is not None
    assert batch_reader(dataset.with_format("numpy")) is None  # its text is of NumPy's type
    assert batch_reader(dataset.with_format("numpy", columns=["x"])) is not None
    assert batch_reader(dataset.with_format("torch", dtype=torch.float64)) is None
    assert batch_reader(dataset.with_format("numpy", ["x"], output_all_columns=True)) is None
    assert batch_reader(dataset.with_transform(lambda batch: batch)) is None
    assert batch_reader(dataset.add_column("maybe", [1, None] * 200)) is None
    assert batch_reader(dataset.add_column("deep", [[[1], [2, 3]]] * 400)) is None
    assert batch_reader(dataset.add_column("big", np.arange(400, dtype=np.uint64))) is None


def test_a_dataset_is_looked_at_again_when_its_format_changes():
    dataset = tabular()
    assert batch_reader(dataset) is not None
    dataset.set_format("torch", columns=["x"])
    assert list(batch_reader(dataset)(np.array([0]), np.empty)) == ["x"]
    dataset.set_format("numpy", columns=["name"])
    assert batch_reader(dataset) is None
    gone = weakref.ref(dataset)
    del dataset
    gc.collect()
    assert gone() is None


def test_a_dataset_without_images_needs_no_image_library():
    program = (
        "import sys; sys.modules['cv2'] = sys.modules['PIL'] = None\n"
        "import datasets, penstock\n"
        "from penstock.integrations.huggingface import from_huggingface\n"
        "rows = datasets.Dataset.from_dict({'x': [1, 2, 3]})\n"
        "for source in (rows, from_huggingface(rows)):\n"
        "    assert next(iter(penstock.Loader(source, 3)))['x'].tolist() == [1, 2, 3]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


class _Calls:
    """Counts calls of Python functions while it is entered."""

    def __enter__(self):
        self.count = 0
        gc.disable()
        sys.setprofile(self._called)
        return self

    def _called(self, frame, event, argument):
        self.count += event == "call"

    def __exit__(self, *raised):
        sys.setprofile(None)
        gc.enable()


@pytest.mark.parametrize("is_mapped", [False, True])
def test_no_function_is_called_per_row(tmp_path, is_mapped):
    dataset = tabular()
    if is_mapped:
        dataset = on_disk(tmp_path, dataset)
        assert dataset.data.table.column(0).num_chunks > 50
    for readers in (
        from_huggingface(dataset.shuffle(seed=1)).get_batch,
        batch_reader(dataset.shuffle(seed=1).with_format("torch")),
    ):
        counts = []
        for size in (8, 8, 256):  # the first one opens the table
            indices = np.random.default_rng(size).permutation(len(dataset))[:size]
            with _Calls() as calls:
                readers(indices, np.empty)
            counts.append(calls.count)
        assert counts[1] == counts[2]
        slow = dataset.with_format("torch")
        with _Calls() as few:
            slow.__getitems__(list(range(8)))
        with _Calls() as many:
            slow.__getitems__(list(range(256)))
        assert many.count > few.count + 256  # what is not to happen, and is counted


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_workers_give_the_same_from_a_file_that_is_mapped(tmp_path, start_method):
    mapped = on_disk(tmp_path, tabular(60)).shuffle(seed=2)
    rows = from_huggingface(mapped, ["tokens", "id"])
    assert len(pickle.dumps(rows)) < 20_000  # the path of the file, not its 30 KB of tokens
    arguments = {"batch_size": 16, "shuffle": True, "seed": 5}
    alone = list(Loader(rows, **arguments))
    together = list(Loader(rows, **arguments, num_workers=2, multiprocessing_context=start_method))
    assert_equal(together, alone)
    plain = list(
        penstock.torch.DataLoader(
            mapped.with_format("torch"),
            batch_size=16,
            num_workers=1,
            multiprocessing_context=start_method,
        )
    )
    assert_equal(
        plain, list(torch.utils.data.DataLoader(mapped.with_format("torch"), batch_size=16))
    )
    del mapped, rows
    gc.collect()


def test_subsets_and_columns_of_a_format():
    dataset = tabular().with_format("torch", columns=["id", "x"])
    rows = from_huggingface(dataset)
    assert list(rows[0]) == ["id", "x"]
    assert rows[0]["id"].dtype == np.int32  # the column's type, not that of the format
    part = Subset(rows, [7, 3])
    assert next(iter(Loader(part, batch_size=2)))["id"].tolist() == [7, 3]
    part = torch.utils.data.Subset(dataset, [7, 3])
    assert next(iter(penstock.torch.DataLoader(part, batch_size=2)))["id"].tolist() == [7, 3]


STRUCT = pa.struct({"i": pa.int64(), "s": pa.string()})


@pytest.mark.parametrize(
    ("kind", "values", "of_batch", "of_rows"),
    [
        (pa.float32(), [1.5, None], np.array([1.5, np.nan], np.float32), "the same"),
        (pa.list_(pa.float64()), [[None], [2.0]], np.array([[np.nan], [2.0]]), "the same"),
        (pa.int32(), [1, None], CollateError, np.array([1, None])),
        (pa.int32(), [None, 1], CollateError, TypeError),
        (pa.bool_(), [True, None], CollateError, np.array([True, None])),
        (pa.string(), ["a", None], ["a", None], "the same"),
        (pa.string(), [None, "a"], [None, "a"], TypeError),
        (pa.binary(), [None, b"a"], [None, b"a"], TypeError),
        (pa.list_(pa.int64()), [None, [1]], CollateError, TypeError),
        (pa.list_(pa.float32(), 2), [None, [1.0, 2.0]], CollateError, TypeError),
        (STRUCT, [{"i": 1, "s": "a"}, None], CollateError, TypeError),
        (STRUCT, [{"i": 1, "s": None}] * 2, {"i": np.array([1, 1]), "s": [None] * 2}, TypeError),
        (pa.date32(), [None] * 2, CollateError, TypeError),
    ],
)
def test_with_nulls_a_batch_may_be_another_than_its_rows_collated(kind, values, of_batch, of_rows):
    rows = from_huggingface(datasets.Dataset(pa.table({"x": pa.array(values, kind)})))

    def is_as_told(make, noted):
        if isinstance(noted, type):
            with pytest.raises(noted) as caught:
                make()
            assert type(caught.value) is noted
        else:
            assert_equal(make()["x"], noted)

    is_as_told(lambda: rows.get_batch(np.arange(2), np.empty), of_batch)
    of_rows = of_batch if isinstance(of_rows, str) else of_rows
    is_as_told(lambda: default_collate([rows[0], rows[1]]), of_rows)


@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_arrays_that_have_no_rows_in_them(form):
    def table(feature, *rows):
        return datasets.Dataset.from_dict(
            {"x": rows}, features=datasets.Features({"x": feature})
        ).with_format(form)

    flat, deep = (
        datasets.Array2D((None, 3), "float32"),
        datasets.Array3D((None, 2, 3), "float32"),
    )
    full = np.arange(12, dtype=np.float32).reshape(2, 2, 3).tolist()
    for dataset, shape in (
        (table(flat, [], []), (2, 0, 3)),
        (table(deep, [], []), None),
        # Two pieces, of which one has no lists in its lists; then the other way round.
        (datasets.concatenate_datasets([table(deep, full, full), table(deep, [], [])]), None),
        (datasets.concatenate_datasets([table(deep, [], []), table(deep, full, full)]), None),
    ):
        dataset = dataset.with_format(form)
        assert batch_reader(dataset) is not None
        given_ = list(penstock.torch.DataLoader(dataset, batch_size=2))
        assert_equal(given_, list(torch.utils.data.DataLoader(dataset, batch_size=2)))
        assert shape is None or given_[0]["x"].shape == shape


def test_a_batch_that_cannot_be_names_its_column():
    table = datasets.Dataset(pa.table({"tokens": [[1], None]}))
    with pytest.raises(CollateError) as caught:
        from_huggingface(table).get_batch(np.arange(2), np.empty)
    assert caught.value.__notes__[:1] == ["in the column 'tokens'"]


def test_ragged_lists_of_a_dataset_as_it_is_are_torchs_error():
    table = datasets.Dataset.from_dict({"tokens": [[1, 2], [3], [4, 5]]})
    with pytest.raises(RuntimeError, match="equal size"):
        next(iter(penstock.torch.DataLoader(table, batch_size=3)))


def encoded(array, form="PNG"):
    file = io.BytesIO()
    Image.fromarray(array).save(file, form)
    return file.getvalue()


def test_images_come_by_penstocks_decoder(tmp_path):
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 255, (3, 5, 4, 3), np.uint8)
    (tmp_path / "second.jpg").write_bytes(encoded(pictures[1], "JPEG"))
    table = datasets.Dataset.from_dict(
        {
            "image": [
                {"bytes": encoded(pictures[0]), "path": None},
                {"bytes": None, "path": str(tmp_path / "second.jpg")},
                {"bytes": encoded(pictures[2]), "path": "gone.png"},
            ],
            "label": [0, 1, 2],
        },
        features=datasets.Features(
            {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])}
        ),
    )
    rows = from_huggingface(table)
    (batch,) = Loader(rows, batch_size=3)
    np.testing.assert_array_equal(batch["image"][[0, 2]], pictures[[0, 2]], strict=True)
    np.testing.assert_array_equal(
        batch["image"][1], decode_image((tmp_path / "second.jpg").read_bytes())
    )
    assert_equal(batch, default_collate([rows[k] for k in range(3)]))
    small = from_huggingface(table, ["image"], decode=lambda data: decode_image(data)[:2, :2])
    assert small[0]["image"].shape == (2, 2, 3)
    assert batch_reader(table) is None  # as they are, images are Pillow's


def test_indices_outside_of_the_dataset():
    rows = from_huggingface(tabular(5))
    for index in (5, -6):
        with pytest.raises(IndexError, match=f"index {index} is out of range for 5 rows"):
            rows[index]
        with pytest.raises(IndexError, match=f"index {index} is out of range for 5 rows"):
            rows.get_batch(np.array([0, index]), np.empty)
        with pytest.raises(IndexError):
            batch_reader(tabular(5))(np.array([index]), np.empty)


def test_what_is_no_dataset_is_refused():
    table = tabular(5)
    with pytest.raises(TypeError, match=r"got DatasetDict. Choose one of \['test', 'train'\]"):
        from_huggingface(datasets.DatasetDict(train=table, test=table))
    with pytest.raises(ValueError, match="'y'"):
        from_huggingface(table, ["id", "y"])
    with pytest.raises(ConfigError, match="set_transform"):
        from_huggingface(table.with_transform(lambda batch: batch))


# Streams


def stream(num_shards=4):
    return tabular(48).select_columns(["id", "x"]).to_iterable_dataset(num_shards=num_shards)


def ids(batches):
    return [batch["id"].tolist() for batch in batches]


def all_ids(batches):
    return [number for batch in ids(batches) for number in batch]


@pytest.mark.parametrize(("num_workers", "method"), [(0, None), (2, "fork"), (2, "spawn")])
def test_a_stream_as_it_is_gives_what_it_gives_to_torchs_loader(num_workers, method):
    dataset = stream().shuffle(seed=1, buffer_size=8).with_format("torch")
    ours = penstock.torch.DataLoader(
        dataset, batch_size=5, num_workers=num_workers, multiprocessing_context=method
    )
    theirs = torch.utils.data.DataLoader(
        dataset,
        batch_size=5,
        num_workers=num_workers,
        multiprocessing_context=method and "fork",  # quicker, and the same
    )
    assert_equal(list(ours), list(theirs))


def assert_goes_on_with_the_third_batch(make):
    first = make()
    batches = iter(first)
    next(batches)
    next(batches)
    state = first.state_dict()
    rest = ids(batches)
    again = make()
    again.load_state_dict(state)
    assert ids(again) == rest


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_as_it_is_goes_on_from_a_state(num_workers):
    def loader():
        return penstock.torch.DataLoader(
            stream().with_format("torch"), batch_size=5, num_workers=num_workers, seed=1
        )

    assert_goes_on_with_the_third_batch(loader)


@pytest.mark.parametrize("make", [Loader, penstock.torch.DataLoader])
@pytest.mark.parametrize("num_workers", [0, 2, 5])
def test_workers_share_the_shards_of_a_stream(make, num_workers):
    loader = make(from_huggingface(stream()), batch_size=5, num_workers=num_workers, seed=1)
    assert sorted(all_ids(loader)) == list(range(48))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_goes_on_from_a_state(num_workers):
    def loader():
        rows = from_huggingface(stream(), ["id"])
        return Loader(rows, batch_size=5, num_workers=num_workers, seed=1)

    assert_goes_on_with_the_third_batch(loader)


def test_an_epoch_of_a_stream_is_shuffled_by_its_number():
    loader = Loader(from_huggingface(stream().shuffle(seed=1, buffer_size=8)), batch_size=6)
    epochs = [all_ids(loader) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])
    loader.set_epoch(0)
    assert all_ids(loader) == epochs[0]
