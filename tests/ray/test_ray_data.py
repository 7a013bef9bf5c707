# SPDX-License-Identifier: Apache-2.0
"""Ray Data's datasets in Penstock's loaders, and datasets as Ray Data's, against a real Ray."""

from __future__ import annotations

import datetime
import gc
import itertools
import json
import pickle
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")
torch = pytest.importorskip("torch")

from tests.conftest import Holdings  # noqa: E402
from tests.ray.conftest import InCluster  # noqa: E402

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
    """Ask until it holds, or time is up: the cluster tells nobody what it frees."""
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
    """The dataset, to be materialised in its order, which Ray Data keeps only where it is told."""
    dataset.context.execution_options.preserve_order = True
    return dataset


@pytest.fixture(scope="module")
def materialized():
    return in_order(plan()).materialize()


def check_equal(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            check_equal(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check_equal(one, other)
    elif isinstance(expected, (np.ndarray, np.generic)):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert found.numpy().tobytes() == expected.numpy().tobytes()
    else:
        assert found == expected


def check_all_equal(found, expected):
    found, expected = list(found), list(expected)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        check_equal(one, other)


# By index


@pytest.mark.parametrize("num_blocks", [1, 2, 5, 50])
def test_rows_come_back_bit_for_bit(num_blocks):
    table = from_ray_data(plan(num_blocks), streaming=False)
    plain = Dicts()
    assert len(table) == NUM_ROWS
    check_all_equal((table[k] for k in range(NUM_ROWS)), (plain[k] for k in range(NUM_ROWS)))


def test_a_batch_across_blocks_is_the_rows_collated(materialized):
    table = from_ray_data(materialized)
    indices = np.array([102, 0, 50, 50, -1, 7, 33])
    rows = [table[k] for k in indices]
    check_equal(table.get_batch(indices, np.empty), next(iter(Loader(rows, len(rows)))))
    check_all_equal(table.__getitems__(indices.tolist()), rows)


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


def test_in_the_drop_in_it_equals_a_plain_dataset(materialized):
    chosen = {"batch_size": 10, "shuffle": True, "seed": 11}
    check_all_equal(DataLoader(materialized, **chosen), DataLoader(Dicts(), **chosen))
    torch.manual_seed(3)
    found = list(DataLoader(materialized, batch_size=7, shuffle=True, drop_last=True))
    torch.manual_seed(3)
    check_all_equal(found, torch.utils.data.DataLoader(Dicts(), 7, shuffle=True, drop_last=True))


def test_it_goes_on_from_a_state_in_other_blocks():
    chosen = {"batch_size": 10, "shuffle": True, "seed": 11}
    first = Loader(in_order(plan(3)).materialize(), **chosen)
    batches = iter(first)
    begun = list(itertools.islice(batches, 4))
    state = json.loads(json.dumps(first.state_dict()))
    again = Loader(from_ray_data(plan(7), streaming=False), **chosen)
    again.load_state_dict(state)
    check_all_equal(begun + list(again), Loader(Dicts(), **chosen))


def test_materialising_keeps_the_order_of_the_plan():
    # The first of two tasks ends last: it waits for the second one's mark.
    def wait(batch):
        if 0 in batch["id"]:
            ray.get(marker.until_set.remote())
        else:
            ray.get(marker.set.remote())
        return batch

    marker = Marker.remote()
    dataset = ray.data.range(20, override_num_blocks=2).map_batches(wait, batch_size=None)
    table = from_ray_data(dataset, streaming=False)
    assert [int(table[k]["id"]) for k in range(20)] == list(range(20))


@ray.remote(num_cpus=0)
class Marker:
    def __init__(self):
        import asyncio

        self.event = asyncio.Event()

    async def set(self):
        self.event.set()

    async def until_set(self):
        await self.event.wait()


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


def test_samples_are_the_callers_own(materialized):
    table = from_ray_data(materialized)
    table[3]["image"][:] = 0
    assert table[3]["image"].any()


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
    ("num_blocks", "batch_size"),
    [(1, 1), (1, 8), (1, 103), (1, 200), (2, 8), (5, 1), (5, 8), (5, 103), (5, 200), (50, 8)],
)
def test_a_stream_equals_a_plain_dataset_in_order(num_blocks, batch_size):
    check_all_equal(Loader(plan(num_blocks), batch_size), Loader(Dicts(), batch_size))


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_stream_in_the_drop_in_equals_torchs_loader(drop_last):
    found = DataLoader(plan(), batch_size=10, drop_last=drop_last)
    check_all_equal(found, torch.utils.data.DataLoader(Dicts(), 10, drop_last=drop_last))


def test_a_stream_can_be_iterated_again():
    loader = Loader(plan(), 10)
    check_all_equal(loader, list(loader))


def test_a_batch_is_rays_own_memory_and_a_tensor_may_be_written_to():
    dataset = ray.data.range_tensor(64, shape=(3,), override_num_blocks=1)
    (batch,) = Loader(dataset, 64)
    assert not batch["data"].flags.writeable
    assert not batch["data"].flags.owndata
    for batch in DataLoader(dataset, batch_size=64):
        batch["data"].zero_()
    (again,) = Loader(dataset, 64)
    assert again["data"].any()


def test_a_stream_counts_samples():
    loader = Loader(plan(), 10)
    list(loader)
    assert loader.stats().run.samples == NUM_ROWS


def test_a_collate_function_of_the_user_gets_a_list_of_rows():
    def names(rows):
        assert all(type(row) is dict for row in rows)
        return [row["name"] for row in rows]

    assert list(Loader(plan(), 60, collate_fn=names))[1][-1] == "row 102"
    assert list(DataLoader(plan(), 60, collate_fn=names))[1][-1] == "row 102"


def test_without_a_batch_size_there_are_rows():
    check_all_equal(Loader(plan(), None), Dicts())


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


def state_after(num_rows):
    stream = from_ray_data(plan())
    rows = iter(stream)
    for _ in range(num_rows):
        next(rows)
    state = stream.state_dict()
    rows.close()
    return state


def test_a_stream_that_gives_other_rows_does_not_go_on():
    other = from_ray_data(plan().map_batches(lambda batch: {"id": batch["id"] + 1}))
    other.load_state_dict(state_after(10))
    with pytest.raises(StateError, match="row 9 of this stream"):
        next(iter(other))


def test_a_stream_that_became_shorter_does_not_go_on():
    shorter = from_ray_data(plan().limit(20))
    shorter.load_state_dict(state_after(50))
    with pytest.raises(StateError, match="saved after 50 rows, and has 20 now"):
        next(iter(shorter))


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


def test_a_stream_may_run_in_a_thread():
    found = Loader(plan(), 10, num_workers=1, backend="thread")
    check_all_equal(found, Loader(Dicts(), 10))


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


def kinds_of_values():
    return ray.data.from_items(
        [
            {
                "text": None if k == 1 else f"ö{k}",
                "bytes": bytes([k]),
                "float": None if k == 2 else k / 2,
                "list": [k, k + 1],
                "tensor": np.full((2, 2), k, np.int16),
                "struct": {"a": k},
            }
            for k in range(6)
        ]
    )


def test_values_of_all_kinds_are_the_same_by_index_and_as_a_stream():
    dataset = kinds_of_values()
    by_index, stream = from_ray_data(dataset), from_ray_data(dataset, streaming=True)
    check_all_equal(Loader(by_index, None), Loader(stream, None))
    check_all_equal(Loader(by_index, 4), Loader(stream, 4))
    batch = next(iter(Loader(dataset, 4)))
    assert batch["text"] == ["ö0", None, "ö2", "ö3"]
    assert batch["bytes"] == [b"\x00", b"\x01", b"\x02", b"\x03"]
    assert np.isnan(batch["float"]).tolist() == [False, False, True, False]
    assert batch["list"].tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]
    assert batch["tensor"].dtype == np.int16
    assert batch["struct"]["a"].tolist() == [0, 1, 2, 3]
    check_all_equal(
        DataLoader(by_index, batch_size=4),
        DataLoader([by_index[k] for k in range(6) if k != 6], batch_size=4),
    )


def test_rows_are_those_of_iter_rows():
    dataset = kinds_of_values()
    table = from_ray_data(dataset)
    for found, expected in zip(table, dataset.iter_rows(), strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if name == "float" and value is None:
                assert np.isnan(found[name])
            elif name in ("list", "tensor"):
                assert found[name].tolist() == (value if name == "list" else value.tolist())
            else:
                assert found[name] == value


@pytest.mark.parametrize("streaming", [False, True])
def test_a_missing_number_is_named(streaming):
    rows = [{"n": k, "m": None if k == 5 else k} for k in range(8)]
    loader = Loader(from_ray_data(ray.data.from_items(rows), streaming=streaming), 4)
    batches = iter(loader)
    assert next(batches)["m"].dtype == np.int64
    named = "number 1 of the batch" if not streaming else "sample 1 of the batch"
    with pytest.raises(CollateError, match=f"{named}.* has no value in the column 'm'"):
        next(batches)


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
    check_equal(list(Loader(dataset, 3)), [{"a": np.array([1, 2, 3]), "b": ["x", "y", "z"]}])
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


def test_columns_can_be_named_and_chosen():
    pairs = to_ray_data([(1, "x"), (2, "y")], columns=("number", "letter"))
    assert in_order(pairs).take_all() == [
        {"number": 1, "letter": "x"},
        {"number": 2, "letter": "y"},
    ]
    assert to_ray_data([{"a": 1, "b": 2}], columns=["b"]).take_all() == [{"b": 2}]
    with pytest.raises(ConfigError, match=r"sample 0 has 2 values, and columns= names \['a'\]"):
        to_ray_data([(1, 2)], columns=["a"])
    with pytest.raises(ConfigError, match=r"sample 0 has \['a'\], and columns= names \['b'\]"):
        to_ray_data([{"a": 1}], columns=["b"])


def test_as_many_tasks_read_as_asked_for_and_the_dataset_travels_once():
    dataset = to_ray_data(Big(), override_num_blocks=4)
    assert dataset.materialize().num_blocks() == 4
    assert len(ray.cloudpickle.dumps(dataset)) < Big.BYTES / 10


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


def test_a_subset_is_an_order():
    order = [5, 3, 1]
    rows = in_order(to_ray_data(Subset(ArrayDataset(np.arange(6)), order), columns=["n"]))
    assert [row["n"] for row in rows.take_all()] == order


def test_an_empty_dataset_has_no_rows():
    assert to_ray_data([]).count() == 0


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([1, object()], r"sample 1 has a object in the column 'item'"),
        ([{"a": 1}, {"b": 1}], r"sample 1 has the columns \['b'\], sample 0 has \['a'\]"),
        ([1, 1j], r"sample 1 has a complex in the column"),
    ],
)
def test_what_no_table_holds_is_named(samples, message):
    with pytest.raises(Exception, match=message):
        to_ray_data(samples, override_num_blocks=1).materialize()


def test_the_first_sample_is_looked_at_at_once():
    with pytest.raises(TypeError, match="sample 0 has a object"):
        to_ray_data([object()])
    with pytest.raises(TypeError, match=r"tensor of torch\.bfloat16"):
        to_ray_data([torch.zeros(2, dtype=torch.bfloat16)])


def test_what_cannot_be_dealt_out_is_refused():
    with pytest.raises(TypeError, match=r"give the \.dataset"):
        to_ray_data(Loader([1]))
    with pytest.raises(TypeError, match="has not both"):
        to_ray_data(iter([1]))
    with pytest.raises(TypeError, match="got list"):
        from_ray_data([1])


def test_options_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match="shuffle=True"):
        from_ray_data(plan(), streaming=False, local_shuffle_buffer_size=10)
    with pytest.raises(ConfigError, match="needs a local_shuffle_buffer_size"):
        from_ray_data(plan(), local_shuffle_seed=1)
    with pytest.raises(ConfigError, match="can only be streamed"):
        from_ray_data(plan().streaming_split(1)[0], streaming=False)


def test_dates_come_as_iter_rows_gives_them():
    day = datetime.datetime(2020, 1, 2, 3)
    dataset = ray.data.from_items([{"day": day}])
    assert from_ray_data(dataset)[0] == {"day": day}


def test_importing_it_imports_no_ray():
    code = "import penstock.ray, penstock.data.dataset, sys; print('ray' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
