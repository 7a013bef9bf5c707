# SPDX-License-Identifier: Apache-2.0
"""Ray Data's datasets in Penstock's loaders, and datasets as Ray Data's, against a real Ray."""

from __future__ import annotations

import gc
import itertools
import json
import pickle
import threading
import time

import numpy as np
import pytest
import torch

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")

from tests.conftest import Holdings  # noqa: E402
from tests.ray.conftest import InCluster  # noqa: E402
from tests.support.comparing import assert_same  # noqa: E402

from penstock import Loader, Ray  # noqa: E402
from penstock.data import ArrayDataset, Subset  # noqa: E402
from penstock.errors import CollateError, ConfigError, StateError  # noqa: E402
from penstock.ray import from_ray_data, to_ray_data  # noqa: E402
from penstock.torch import DataLoader  # noqa: E402

# Ray Data says so of its own settings when it reads them.
pytestmark = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\.data\.context")

NUM_ROWS = 103  # no multiple of any number of blocks or batch size below


@pytest.fixture(scope="module", autouse=True)
def ray_data(cluster):
    """Ray Data on the cluster, with the actor that it keeps for its statistics."""
    ray.data.DataContext.get_current().enable_progress_bars = False
    ray.data.range(1).materialize()
    # It may be starting still, and `no_leaks` would take it for another one when it has started.
    assert becomes(lambda: all(a.endswith("(ALIVE)") for a in InCluster.now(cluster).actors))


@pytest.fixture(autouse=True)
def no_leaks(cluster):
    """As in the other tests here, but for blocks: Ray Data frees some when it runs next."""
    threads, actors = Holdings.now().threads, InCluster.now(cluster).actors
    yield
    assert becomes(lambda: InCluster.now(cluster).actors <= actors)
    assert Holdings.now().threads <= threads


def becomes(holds, timeout_s=20.0):
    """Ask until it holds, or time is up: the cluster does not say what it frees."""
    never, deadline = threading.Event(), time.monotonic() + timeout_s
    while not holds() and time.monotonic() < deadline:
        gc.collect()
        never.wait(0.05)
    return holds()


def arrays():
    draw = np.random.default_rng(5)
    return {
        "id": np.arange(NUM_ROWS),
        "small": draw.integers(0, 255, NUM_ROWS).astype(np.uint8),
        "weight": draw.random(NUM_ROWS).astype(np.float32),
        "half": draw.random(NUM_ROWS).astype(np.float16),
        "flag": draw.random(NUM_ROWS) < 0.5,
        "image": draw.integers(0, 255, (NUM_ROWS, 4, 3, 3)).astype(np.uint8),
        "mask": draw.random((NUM_ROWS, 2, 2)) < 0.5,
    }


class Dicts:
    """The same rows as samples of a plain dataset."""

    def __init__(self):
        self.arrays = arrays()

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        row = {name: array[index] for name, array in self.arrays.items()}
        return {**row, "name": f"row {index}"}


def plan(num_blocks=5):
    """A lazy ray.data.Dataset of the rows."""
    return to_ray_data(Dicts(), override_num_blocks=num_blocks)


def in_order(dataset):
    """The dataset, to be materialised in its order, which Ray Data keeps only on request."""
    dataset.context.execution_options.preserve_order = True
    return dataset


@pytest.fixture(scope="module")
def materialized():
    return in_order(plan()).materialize()


def check_all_equal(found, expected):
    assert_same(list(expected), list(found))


# By index


@pytest.mark.parametrize("num_blocks", [1, 2, 5, 50])
def test_rows_come_back_bit_for_bit(num_blocks):
    table = from_ray_data(plan(num_blocks), streaming=False)
    plain = Dicts()
    assert len(table) == NUM_ROWS
    check_all_equal((table[k] for k in range(NUM_ROWS)), (plain[k] for k in range(NUM_ROWS)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2, "backend": "thread"},
        {"num_workers": 2, "backend": Ray(num_cpus=0)},
    ],
)
def test_shuffled_and_seeded_it_equals_a_plain_dataset(materialized, options):
    chosen = {"batch_size": 10, "shuffle": True, "seed": 11}
    loader, plain = Loader(materialized, **chosen, **options), Loader(Dicts(), **chosen)
    for _ in range(2):
        check_all_equal(loader, plain)


def test_it_goes_on_from_a_state_in_other_blocks():
    chosen = {"batch_size": 10, "shuffle": True, "seed": 11}
    first = Loader(in_order(plan(3)).materialize(), **chosen)
    batches = iter(first)
    begun = list(itertools.islice(batches, 4))
    state = json.loads(json.dumps(first.state_dict()))
    again = Loader(from_ray_data(plan(7), streaming=False), **chosen)
    again.load_state_dict(state)
    check_all_equal(begun + list(again), Loader(Dicts(), **chosen))


def test_the_users_own_dataset_is_left_as_it_was():
    dataset = ray.data.range(5)
    assert not dataset.context.execution_options.preserve_order
    from_ray_data(dataset, streaming=False)
    list(Loader(dataset, 2))
    assert not dataset.context.execution_options.preserve_order


def test_a_pickle_holds_no_rows_and_is_read_by_rays_workers():
    rows = ray.data.range_tensor(64, shape=(64, 64), override_num_blocks=2)
    table = from_ray_data(rows, streaming=False)
    list(Loader(table, 16))
    assert len(pickle.dumps(table)) < 2000
    read = ray.remote(lambda dataset, index: dataset[index]["data"])
    found = ray.get(read.remote(table, 63))
    assert found.shape == (64, 64)
    assert (found == 63).all()


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning")
def test_worker_processes_say_that_they_have_no_ray(materialized, context):
    loader = Loader(materialized, 10, num_workers=1, multiprocessing_context=context)
    with pytest.raises(ConfigError, match="no connection to Ray"):
        next(iter(loader))


def test_blocks_are_freed_with_the_table(cluster):
    def store_bytes():
        return InCluster.now(cluster).store_bytes

    before = store_bytes()
    table = from_ray_data(
        ray.data.range_tensor(64, shape=(64, 1024), override_num_blocks=4), streaming=False
    )
    rows = [table[k] for k in range(0, 64, 8)]
    batches = list(Loader(table, 16, shuffle=True))
    assert store_bytes() > before + (32 << 20)
    del table
    assert becomes(lambda: store_bytes() < before + (8 << 20))
    assert (rows[1]["data"] == 8).all()
    assert sum(len(batch["data"]) for batch in batches) == 64


def test_indices_out_of_range_are_errors(materialized):
    table = from_ray_data(materialized)
    for index in (NUM_ROWS, -NUM_ROWS - 1):
        with pytest.raises(IndexError, match=f"index {index} is out of range: there are 103 rows"):
            table[index]


@pytest.mark.parametrize("empty", [[], None])
def test_of_no_rows_there_are_no_batches(empty):
    dataset = ray.data.from_items([]) if empty == [] else ray.data.range(9).limit(0).materialize()
    table = from_ray_data(dataset)
    assert len(table) == 0
    assert list(Loader(dataset, 4)) == []
    assert list(Loader(from_ray_data(dataset, streaming=True), 4)) == []
    with pytest.raises(IndexError):
        table[0]
    assert Loader(table, 4).state_dict()["batches"] == 0


# As a stream


@pytest.mark.parametrize(
    ("num_blocks", "batch_size"), [(1, 200), (5, 1), (5, 8), (50, 8), (5, None)]
)
@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "backend": "thread"}])
def test_a_stream_equals_a_plain_dataset_in_order(num_blocks, batch_size, options):
    loader = Loader(plan(num_blocks), batch_size, **options)
    for _ in range(2):
        check_all_equal(loader, Loader(Dicts(), batch_size))
    assert loader.stats().run.samples == 2 * NUM_ROWS


@pytest.mark.parametrize("drop_last", [False, True])
def test_in_the_drop_in_both_equal_torchs_loader(materialized, drop_last):
    expected = list(torch.utils.data.DataLoader(Dicts(), 10, drop_last=drop_last))
    check_all_equal(DataLoader(plan(), batch_size=10, drop_last=drop_last), expected)
    check_all_equal(DataLoader(materialized, batch_size=10, drop_last=drop_last), expected)


def test_a_collate_function_of_the_user_gets_a_list_of_rows():
    def names(rows):
        assert all(type(row) is dict for row in rows)
        return [row["name"] for row in rows]

    assert list(Loader(plan(), 60, collate_fn=names))[1][-1] == "row 102"
    assert list(DataLoader(plan(), 60, collate_fn=names))[1][-1] == "row 102"


@pytest.mark.parametrize("num_given", [0, 1, 4, 10, 11])
@pytest.mark.parametrize("kind", [Loader, DataLoader])
def test_a_stream_goes_on_from_a_state(kind, num_given):
    first = kind(plan(), batch_size=10, seed=1)
    batches = iter(first)
    begun = list(itertools.islice(batches, num_given))
    state = json.loads(json.dumps(first.state_dict()))
    again = kind(plan(3), batch_size=10, seed=1)
    again.load_state_dict(state)
    rest = list(again)
    if num_given < 11:
        check_all_equal(begun + rest, kind(Dicts(), batch_size=10, seed=1))


@pytest.mark.parametrize(
    ("num_rows", "other"),
    [
        (10, lambda rows: rows.map_batches(lambda batch: {"id": batch["id"] + 1})),
        (50, lambda rows: rows.limit(20)),
    ],
)
def test_a_stream_that_gives_other_rows_or_fewer_does_not_go_on(num_rows, other):
    stream = from_ray_data(plan())
    rows = iter(stream)
    list(itertools.islice(rows, num_rows))
    state = stream.state_dict()
    rows.close()
    again = from_ray_data(other(plan()))
    again.load_state_dict(state)
    with pytest.raises(StateError, match=f"row {num_rows - 1} of this stream"):
        next(iter(again))


def test_a_stream_without_order_does_not_go_on():
    loader = Loader(from_ray_data(plan(), preserve_order=False), 10)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    del batches
    loader.load_state_dict(state)
    with pytest.raises(StateError, match="no order that could be found again"):
        list(loader)


def test_a_buffer_shuffles_each_epoch_otherwise_and_goes_on():
    def shuffled():
        stream = from_ray_data(plan(), local_shuffle_buffer_size=40, local_shuffle_seed=3)
        return Loader(stream, 10)

    def ids(loader):
        return np.concatenate([batch["id"] for batch in loader]).tolist()

    first, second = shuffled(), shuffled()
    epochs = ids(first), ids(first)
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(NUM_ROWS))
    assert epochs[0] != epochs[1]
    assert epochs[0] != list(range(NUM_ROWS))
    assert (ids(second), ids(second)) == epochs

    third = shuffled()
    third.set_epoch(1)
    batches = iter(third)
    begun = [next(batches)["id"].tolist() for _ in range(3)]
    state = third.state_dict()
    fourth = shuffled()
    fourth.load_state_dict(state)
    assert [k for ids_ in begun for k in ids_] + ids(fourth) == epochs[1]


def test_consumers_of_a_split_get_every_row_once():
    @ray.remote(num_cpus=0)
    def consume(shard):
        return [batch["id"].tolist() for batch in Loader(shard, 10)]

    shards = plan().streaming_split(2)
    found = ray.get([consume.remote(shard) for shard in shards])
    assert sorted(k for shard in found for batch in shard for k in batch) == list(range(NUM_ROWS))


def test_a_rank_that_would_get_all_rows_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="each of 2 ranks would get all rows"):
        list(Loader(plan(), 10))


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning")
def test_a_stream_takes_no_worker_processes(num_workers):
    loader = Loader(plan(), 10, num_workers=num_workers, multiprocessing_context="fork")
    with pytest.raises(ConfigError, match="expected num_workers=0"):
        list(loader)


@pytest.mark.parametrize("kind", [Loader, DataLoader])
@pytest.mark.parametrize("order", [{"shuffle": True}, {"sampler": [1, 2]}])
def test_a_plan_cannot_be_shuffled_by_the_loader(kind, order):
    with pytest.raises(ConfigError, match=r"got (shuffle|sampler)\. .*materialize\(\)"):
        kind(plan(), 10, **order)


def test_a_plan_is_read_no_further_once_the_loop_is_left():
    loader = Loader(plan(50), 2)
    for _ in loader:
        break
    check_all_equal(loader, Loader(Dicts(), 2))


# Values


def test_values_are_those_of_rays_numpy_batches():
    rows = [
        {"text": f"ö{k}", "bytes": bytes([k]), "list": [k, k + 1], "struct": {"a": k}, "n": k}
        for k in range(6)
    ]
    for streaming in (False, True):
        dataset = ray.data.from_items(rows, override_num_blocks=1)
        batch = next(iter(Loader(from_ray_data(dataset, streaming=streaming), 4)))
        assert batch["text"] == ["ö0", "ö1", "ö2", "ö3"]
        assert batch["bytes"] == [b"\x00", b"\x01", b"\x02", b"\x03"]
        assert batch["list"].tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]
        assert batch["struct"]["a"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_missing_integer_changes_no_other_and_a_missing_float_is_nan(streaming):
    large = 2**53 + 1  # no float64
    rows = [{"n": large, "x": 0.5}, {"n": None, "x": None}, {"n": large, "x": 1.5}]
    dataset = ray.data.from_items(rows, override_num_blocks=1)
    (found,) = Loader(from_ray_data(dataset, streaming=streaming), 3, collate_fn=list)
    assert [row["n"] for row in found] == [large, None, large]
    assert type(found[0]["n"]) is np.int64
    assert [str(row["x"]) for row in found] == ["0.5", "nan", "1.5"]


@pytest.mark.parametrize("streaming", [False, True])
def test_images_of_unequal_shapes(streaming):
    images = [np.full((k + 1, 3, 3), k, np.uint8) for k in range(5)]
    dataset = to_ray_data([(image, k) for k, image in enumerate(images)], columns=["image", "k"])
    rows = list(Loader(from_ray_data(dataset, streaming=streaming), 2, collate_fn=list))
    check_all_equal([row["image"] for batch in rows for row in batch], images)
    with pytest.raises(CollateError, match=r"shape \(1, 3, 3\).*shape \(2, 3, 3\)"):
        next(iter(Loader(from_ray_data(dataset, streaming=streaming), 2)))


def test_blocks_of_pandas_are_read():
    import pandas as pd

    frame = pd.DataFrame({"a": [1, 2, 3], "b": ["x", "y", "z"]})
    dataset = ray.data.from_pandas(frame).map_batches(lambda f: f, batch_format="pandas")
    expected = [{"a": np.array([1, 2, 3]), "b": ["x", "y", "z"]}]
    check_all_equal(Loader(dataset, 3), expected)
    assert from_ray_data(dataset, streaming=False)[1] == {"a": 2, "b": "y"}


# The other way


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (ArrayDataset(np.arange(6), np.arange(6) / 2), ["0", "1"]),
        (torch.utils.data.TensorDataset(torch.arange(6), torch.ones(6, 2)), ["0", "1"]),
        (list(range(6)), ["item"]),
        ([{"a": k} for k in range(6)], ["a"]),
    ],
)
def test_columns_have_names(dataset, expected):
    found = to_ray_data(dataset)
    assert found.count() == 6
    assert found.columns() == expected


class Big:
    BYTES = 8 << 20

    def __init__(self, num_bytes=BYTES):
        self.array = np.zeros(num_bytes, np.uint8)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"value": self.array[index]}


def test_the_arrays_of_a_dataset_are_freed_once_it_is_read(cluster):
    before = InCluster.now(cluster).store_bytes
    rows = to_ray_data(Big(32 << 20), override_num_blocks=4).materialize()
    assert rows.count() == 8
    assert becomes(lambda: InCluster.now(cluster).store_bytes < before + (16 << 20))


def test_columns_can_be_named_and_chosen():
    order = Subset(ArrayDataset(np.arange(6), np.arange(6) * 2), [5, 3])
    pairs = to_ray_data(order, columns=("number", "double"))
    assert in_order(pairs).take_all() == [
        {"number": 5, "double": 10},
        {"number": 3, "double": 6},
    ]
    assert to_ray_data([{"a": 1, "b": 2}], columns=["b"]).take_all() == [{"b": 2}]
    assert to_ray_data([]).count() == 0


@pytest.mark.parametrize(
    ("samples", "columns", "error"),
    [([(1, 2)], ["a"], ValueError), ([{"a": 1}], ["b"], KeyError)],
)
def test_what_does_not_fit_the_first_sample_is_an_error_at_once(samples, columns, error):
    with pytest.raises(error) as caught:
        to_ray_data(samples, columns=columns)
    assert f"columns={columns}, of sample 0" in caught.value.__notes__[0]


def test_rows_of_other_columns_are_named():
    rows = to_ray_data([{"a": 1}, {"b": 1}], override_num_blocks=1)
    with pytest.raises(Exception, match=r"columns \['b'\], others \['a'\]"):
        rows.materialize()


def test_what_is_no_dataset_and_what_contradicts_itself_is_refused():
    with pytest.raises(TypeError, match=r"give the \.dataset"):
        to_ray_data(Loader([1]))
    with pytest.raises(TypeError, match="got list"):
        from_ray_data([1])
    with pytest.raises(ConfigError, match="shuffle=True"):
        from_ray_data(plan(), streaming=False, local_shuffle_buffer_size=10)
