# SPDX-License-Identifier: Apache-2.0
"""The cache of a machine: what it keeps, what it evicts, and what survives a kill."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import heapq
import multiprocessing
import os
import pickle
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.blobs.object_storage import bucket, object_server  # noqa: F401
from tests.support.processes import python

from penstock import Loader
from penstock.blobs import node_cache
from penstock.blobs.foresight import Foresight, next_uses
from penstock.blobs.node_cache import MOST_AHEAD_BYTES, CacheArguments, NodeCache
from penstock.blobs.order import NEVER, Counts, Order
from penstock.blobs.ranges import RecordRanges
from penstock.data import Subset
from penstock.errors import ConfigError, StoreError
from penstock.sampling import DistributedSampler
from penstock.stores import StoreDataset, create_store, open_store
from penstock.stores.records import encode_record

SIZES = np.arange(100, 200)


def data_of(number):
    return memoryview(bytes([number]) * int(SIZES[number]))


def opened(folder, limit="2kB", eviction="lru"):
    return NodeCache(CacheArguments(f"{folder}:{limit}", "d", eviction), SIZES)


def files_in(folder):
    """Return the files of records, by number."""
    return {
        int(file.parent.name + file.name, 16): file
        for file in Path(folder).glob("d/[0-9a-f]/*")
        if len(file.name) == 3
    }


def assert_right(cache, folder):
    """Assert that what the cache says is what is there."""
    files = files_in(folder)
    assert set(files) == set(np.flatnonzero(cache.has(np.arange(100))).tolist())
    assert cache.num_bytes == sum(file.stat().st_size for file in files.values())
    assert cache.num_bytes <= cache.max_bytes + cache.ahead_bytes
    for number, file in files.items():
        assert file.read_bytes() == data_of(number)


@given(st.lists(st.tuples(st.sampled_from("pgd"), st.integers(0, 99)), max_size=80))
def test_it_keeps_what_was_read_last_within_its_size(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("cache")
    cache, order = opened(folder), []
    for action, number in steps:
        if action == "p":
            cache.put(number, data_of(number))
        elif action == "d":
            cache.drop(number)
        elif (view := cache.get(number)) is not None:
            assert view == data_of(number)
        if action in "pg" and cache.has(np.array([number])).all():
            order = [n for n in order if n != number] + [number]
    assert_right(cache, folder)
    cache.close()


def test_without_an_order_nothing_is_evicted(tmp_path):
    cache = opened(tmp_path, eviction="foresight")
    for number in range(100):
        cache.put(number, data_of(number))
    kept = np.flatnonzero(cache.has(np.arange(100))).tolist()
    assert kept == list(range(len(kept)))
    assert cache.num_bytes <= 2000
    assert_right(cache, tmp_path)


def test_by_time_what_was_read_last_stays(tmp_path):
    cache = opened(tmp_path)
    for number in range(100):
        cache.put(number, data_of(number))
        assert cache.get(0) is not None
    assert cache.get(99) is not None
    assert cache.get(1) is None


def test_what_is_needed_last_goes_first_and_is_not_kept_in_its_place(tmp_path):
    cache = opened(tmp_path, eviction="foresight")
    order = Order.made(cache.folder, 100)
    order.due[:50] = np.arange(50)
    for number in range(49, -1, -1):
        cache.put(number, data_of(number))
    kept = np.flatnonzero(cache.has(np.arange(100))).tolist()
    assert kept == list(range(len(kept)))
    cache.put(49, data_of(49))
    assert cache.get(49) is None
    order.clock[0], order.due[0] = 1, 500  # it was used up
    cache.put(len(kept), data_of(len(kept)))
    assert cache.get(0) is None
    assert cache.get(len(kept)) is not None
    assert_right(cache, tmp_path)
    order.remove()


def test_the_order_of_a_rank_that_has_ended_is_forgotten(tmp_path, monkeypatch):
    cache = opened(tmp_path, eviction="foresight")
    order = Order.made(cache.folder, 100)
    for number in range(100):
        order.due[number] = number
        cache.put(number, data_of(number))
    assert len(os.listdir(cache.folder / "orders")) == 1
    del order  # it was killed
    before = files_in(tmp_path)
    for number in range(100):
        cache.put(number, data_of(number))
    assert os.listdir(cache.folder / "orders") == []
    assert files_in(tmp_path).keys() >= before.keys()


def _use(folder, seed):
    cache, rng = opened(folder), random.Random(seed)
    while True:
        number = rng.randrange(100)
        view = cache.get(number)
        if view is None:
            cache.put(number, data_of(number))
        elif view != data_of(number):
            os._exit(1)


def test_a_kill_at_any_moment_leaves_it_right(tmp_path):
    context, rng = multiprocessing.get_context("fork"), random.Random(7)
    users = [context.Process(target=_use, args=(tmp_path, seed)) for seed in (-1, -2)]
    for user in users:
        user.start()
    for seed in range(200):
        victim = context.Process(target=_use, args=(tmp_path, seed))
        victim.start()
        time.sleep(rng.random() / 100)  # the moment
        victim.kill()
        victim.join()
        assert victim.exitcode == -signal.SIGKILL
        for number, file in files_in(tmp_path).items():
            with contextlib.suppress(FileNotFoundError):  # evicted since
                assert file.read_bytes() == data_of(number)
    for user in users:
        assert user.is_alive()
        user.kill()
        user.join()
    cache = opened(tmp_path)
    assert_right(cache, tmp_path)
    assert not list(tmp_path.glob("d/*/new-*"))
    assert cache.num_bytes > 0


def test_nothing_is_deleted_that_is_not_its_own(tmp_path):
    cache = opened(tmp_path)
    cache.put(1, data_of(1))
    cache.close()
    precious = tmp_path / "precious"
    precious.mkdir()
    foreign = [precious / "001", tmp_path / "d" / "0" / "notes.txt", tmp_path / "d" / "0" / "1"]
    for path in (*foreign, tmp_path / "d" / "letter"):
        path.write_text("mine")
    (tmp_path / "d" / "0" / "fff").symlink_to(precious / "001")
    (tmp_path / "d" / "0" / "abc").mkdir()
    cache = opened(tmp_path, "100B")
    cache.put(2, data_of(2))
    assert all(path.read_text() == "mine" for path in foreign)
    assert (tmp_path / "d" / "0" / "abc").is_dir()
    assert (tmp_path / "d" / "letter").read_text() == "mine"
    cache.close()
    (tmp_path / "d" / "7").symlink_to(precious)
    with pytest.raises(StoreError, match="is no folder of this cache"):
        opened(tmp_path)
    assert (precious / "001").read_text() == "mine"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_takes_nothing_is_a_warning_and_tried_again(tmp_path, monkeypatch, code):
    monkeypatch.setattr(node_cache, "_PAUSE_S", 0)
    cache = opened(tmp_path)
    for number in range(10):
        cache.put(number, data_of(number))
    write = os.write

    def full(fd, data):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", full)
    with pytest.warns(UserWarning, match=rf"takes no more records \({os.strerror(code)}\)"):
        cache.put(50, data_of(50))
    assert cache.get(50) is None
    assert_right(cache, tmp_path)
    monkeypatch.setattr(os, "write", write)
    cache.put(50, data_of(50))
    assert cache.get(50) == data_of(50)
    assert_right(cache, tmp_path)


def test_a_record_larger_than_it_evicts_nothing(tmp_path):
    cache = opened(tmp_path, "150B")
    cache.put(0, data_of(0))
    cache.put(99, data_of(99))
    assert cache.get(0) == data_of(0)
    assert cache.get(99) is None


def test_a_long_record_is_written_and_read_in_parts(tmp_path, monkeypatch):
    cache = opened(tmp_path)
    write, pread = os.write, os.pread
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:40]))
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 40), offset))
    cache.put(99, data_of(99))
    assert cache.get(99) == data_of(99)
    assert_right(cache, tmp_path)


def test_one_whose_setup_was_killed_is_set_up_anew(tmp_path):
    cache = opened(tmp_path)
    cache.put(1, data_of(1))
    cache._header["magic"], cache._header["limit"] = b"", 0
    cache.close()
    cache = opened(tmp_path)
    cache.put(2, data_of(2))
    assert cache.get(2) == data_of(2)
    assert_right(cache, tmp_path)


def test_what_processes_that_were_killed_have_left_is_removed(tmp_path):
    cache = opened(tmp_path)
    for name in ("order-1-00000000", "counts-1-00000000", "orders/1-00000000"):
        (cache.folder / name).write_text("left")
    cache.close()
    cache = opened(tmp_path)
    assert sorted(os.listdir(cache.folder)) == ["lock", "orders", "table", "users"]
    assert os.listdir(cache.folder / "orders") == []


def _put_for_some_time(folder, seed):
    cache, rng = opened(folder), random.Random(seed)
    for _ in range(3000):
        number = rng.randrange(100)
        cache.put(number, data_of(number))


def test_several_at_a_time_leave_no_file_uncounted(tmp_path):
    context = multiprocessing.get_context("fork")
    users = [context.Process(target=_put_for_some_time, args=(tmp_path, n)) for n in range(4)]
    cache = opened(tmp_path)
    for user in users:
        user.start()
    for user in users:
        user.join()
        assert user.exitcode == 0
    assert_right(cache, tmp_path)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "d").write_text("a file")
    with pytest.raises(StoreError, match="cannot keep records in"):
        opened(tmp_path)


@given(st.integers(1, 20).flatmap(lambda n: st.tuples(
    st.just(n), st.lists(st.integers(0, n - 1)), st.lists(st.integers(0, n - 1), unique=True)
)))  # fmt: skip
def test_next_uses_are_those_that_one_finds_by_looking(case):
    num_records, *parts = case
    for now, later in (parts, parts[::-1]):
        order = now + later
        due, following, is_first = next_uses(len(now), np.array(order, np.int64), num_records)
        samples = list(enumerate(order))
        assert due.tolist() == [
            next((k for k, record in samples if record == number), NEVER)
            for number in range(num_records)
        ]
        assert following.tolist() == [
            next((k for k, record in samples[start + 1 :] if record == number), NEVER)
            for start, number in samples
        ]
        assert is_first.tolist() == [
            n not in part[:k] for part in (now, later) for k, n in enumerate(part)
        ]


def least_fetched(order, sizes, capacity):
    """Return what has to be fetched for each sample, at least: Belady's rule."""
    following, last = [NEVER] * len(order), {}
    for k in range(len(order) - 1, -1, -1):
        following[k] = last.get(order[k], NEVER)
        last[order[k]] = k
    kept, used, heap, fetched = {}, 0, [], []
    for k, number in enumerate(order):
        fetched.append(0 if number in kept else int(sizes[number]))
        used += fetched[-1]
        kept[number] = following[k]
        heapq.heappush(heap, (-following[k], number))
        while used > capacity:
            due, victim = heapq.heappop(heap)
            if kept.get(victim) == -due:
                used -= int(sizes[victim])
                del kept[victim]
    return fetched


NUM = 300


@pytest.fixture
def far(bucket):  # noqa: F811
    rng = np.random.default_rng(0)
    with contextlib.closing(create_store(bucket, shard_size=1_000_000)) as writer:
        for number in range(NUM):
            # Larger than the gap between two records that are read by one request all the same.
            sample = rng.bytes(int(rng.integers(66_000, 80_000))), number
            writer.put_many([encode_record(str(number), sample, number % 3)])
        writer.finish()
    return bucket


def dataset_of(far, tmp_path, limit="1GB", **options):
    return StoreDataset(far, local_cache=f"{tmp_path}/cache:{limit}", **options)


def numbers_in(batches):
    return [number for batch in batches for _, number in batch]


def fetched_bytes(server):
    """Return the bytes of shards that were asked for since the last time."""
    taken = [server.requests.pop(0) for _ in range(len(server.requests))]  # more may come
    asked = [range_ for _, path, range_ in taken if "/shards/" in path]
    ends = [range_.removeprefix("bytes=").split("-") for range_ in asked]
    return sum(int(last) - int(first) + 1 for first, last in ends)


@pytest.mark.parametrize(
    ("num_workers", "backend"),
    [(0, "process"), (1, "process"), (3, "process"), (2, "thread")],
)
@pytest.mark.parametrize("limit", ["1GB", "7MB"])
def test_batches_are_the_same_with_a_cache(far, tmp_path, num_workers, backend, limit):
    options = {"num_workers": num_workers, "backend": backend}
    if num_workers and backend == "process":
        options["multiprocessing_context"] = "fork"
    got = []
    for dataset in (StoreDataset(far), dataset_of(far, tmp_path, limit)):
        loader = Loader(dataset, 16, shuffle=True, seed=3, collate_fn=list, **options)
        batches = list(loader)
        stream = iter(loader)
        batches += [next(stream) for _ in range(5)]
        state = loader.state_dict()
        del stream
        loader.load_state_dict(state)
        got.append(batches + list(loader))
        dataset.close()
    assert got[0] == got[1]


@pytest.mark.parametrize("eviction", ["foresight", "lru"])
def test_what_is_fetched_is_little_more_than_what_has_to_be(
    far, tmp_path, object_server, eviction  # noqa: F811
):  # fmt: skip
    dataset = dataset_of(far, tmp_path, "13MB", eviction=eviction)
    sizes = dataset.store._both[1].sizes
    object_server.requests.clear()
    loader = Loader(
        dataset, 16, shuffle=True, seed=3, collate_fn=list, num_workers=2,
        multiprocessing_context="fork",
    )  # fmt: skip
    order, fetched = [], []
    for _ in range(3):
        order += numbers_in(loader)
        num_requests = len(object_server.requests)
        fetched.append(fetched_bytes(object_server))
    cache = dataset.store._cached.cache
    for _ in range(1000):  # what is read ahead of the next epoch comes in
        fetched[-1] += fetched_bytes(object_server)
        traffic = dataset.traffic
        if traffic.bytes_fetched == sum(fetched):
            break
        time.sleep(0.01)
    assert traffic.num_read == 3 * NUM
    assert traffic.bytes_read == 3 * sizes.sum()
    assert traffic.bytes_fetched == sum(fetched)
    assert 0 < num_requests < traffic.num_requests <= 3 * NUM
    assert 0 <= traffic.num_found <= traffic.num_read
    assert str(traffic) in str(loader.stats())
    capacity, ahead_bytes = cache.max_bytes, cache.ahead_bytes
    dataset.close()
    least = sum(least_fetched(order, sizes, capacity + ahead_bytes))
    assert sum(fetched) > 0.95 * least  # records of several sizes: somewhat less can do
    most = sum(least_fetched(order, sizes, capacity)[NUM:])
    later = sum(fetched[1:])
    if eviction == "foresight":
        assert later <= 1.01 * most
    else:
        assert later > 1.2 * most


class _Zeros:
    """Sessions that find zeros everywhere."""

    def __init__(self):
        self.asked = []

    async def read_one(self, _place, request):
        self.asked.append((request.start, request.stop))
        return memoryview(bytes(request.stop - request.start))


def ranges_of(num, size=100):
    """Return ranges that are too far from each other to be one request."""
    starts = np.arange(num) * (size + 999_900)
    return RecordRanges([""], [""], np.zeros(num, np.int32), starts, starts + size)


def looked_at(tmp_path, ranges, limit, num_now, samples, look, *, reads_ahead=False):
    """Return what `look` does of a loader that is followed, and the bytes that were asked for."""
    sessions = _Zeros()
    cache = CacheArguments(f"{tmp_path}:{limit}B", "d", "foresight").open(ranges.sizes)
    order = Order.made(cache.folder, len(ranges))

    async def follow():
        foresight = Foresight(sessions, None, ranges, cache)
        if not reads_ahead:
            foresight._read_ahead = lambda _: asyncio.Event().wait()
        counts = Counts.made(cache.folder)
        await foresight.follow(order.path, counts.path, num_now, samples)
        cache.find_orders()
        return await look(foresight, order, cache)

    found = asyncio.run(asyncio.wait_for(follow(), 30))
    order.remove()
    cache.close()
    return found, sessions.asked


async def there(cache, *numbers):
    """Return when records are in the cache."""
    while not cache.has(np.array(numbers)).all():
        await asyncio.sleep(0.001)


def test_a_record_that_comes_several_times_is_fetched_once_and_read_far_ahead(tmp_path):
    samples = np.repeat([0, 1, 2, 3, 4], 30)

    async def fetched(foresight, _, cache):
        await there(cache, *range(5))  # there is room for all
        return len(await foresight.fetch([3, 3, 1, 3]))

    found, asked = looked_at(
        tmp_path, ranges_of(5), 3200, len(samples), samples, fetched, reads_ahead=True
    )
    assert found == 4
    assert sorted(asked) == [(k * 1_000_000, k * 1_000_000 + 100) for k in range(5)]


def test_a_record_that_is_larger_than_what_is_read_ahead_is_read_ahead(tmp_path):
    async def used_up(_, order, cache):
        for clock, number in ((0, 0), (5, 1), (35, 4)):  # there is room for four
            order.clock[0] = clock
            await there(cache, number)

    samples = np.repeat(np.arange(5), 10)
    _, asked = looked_at(tmp_path, ranges_of(5), 400, 50, samples, used_up, reads_ahead=True)
    assert len(asked) == 5


def test_the_next_record_is_read_ahead_where_there_is_no_room(tmp_path):
    async def ahead(foresight, *_):
        await foresight.fetch([0])
        (walk,) = foresight._walks.values()
        return [foresight._ahead(walk, at, 10)[0].tolist() for at in (10, 11)]

    samples = np.repeat(np.arange(5), 10)
    found, _ = looked_at(tmp_path, ranges_of(5), 150, 50, samples, ahead)
    assert found == [[1], []]


def test_a_record_that_another_loader_asks_for_moves_no_window(tmp_path):
    async def fetched(foresight, _, cache):
        await foresight.fetch([19])
        await there(cache, *range(3))

    samples = np.arange(20)
    _, asked = looked_at(tmp_path, ranges_of(20), 400, 20, samples, fetched, reads_ahead=True)
    assert {start // 1_000_000 for start, _ in asked} <= {0, 1, 2, 3, 19}


def test_what_was_just_used_up_is_not_taken_for_what_is_never_needed(tmp_path):
    num = 5

    async def used_up_and_fetched(foresight, order, cache):
        for number in range(num):
            order.clock[0] = number
            await foresight.fetch([number])
        return cache.has(np.arange(num)).tolist()

    samples = np.array([0, 1, 2, 3, 4, *(0, 4, 3, 1, 2)])
    found, _ = looked_at(tmp_path, ranges_of(num), 400, num, samples, used_up_and_fetched)
    assert found == [True, True, False, True, True]


def test_what_will_be_lost_makes_room_for_reads_far_ahead(tmp_path):
    num, limit = 100, 60
    most = limit + limit // 16
    now, later = np.arange(num), np.random.default_rng(0).permutation(num)

    async def far_ahead(foresight, order, cache):
        assert most == (cache.max_bytes + cache.ahead_bytes) // 100
        await foresight.fetch(now[:most].tolist())
        (walk,) = foresight._walks.values()
        found = []
        for clock in (0, 50):
            order.clock[0] = clock
            assert walk.catch_up() == clock
            records, num_ahead = foresight._ahead(walk, most, clock)
            assert records.tolist() == now[most : most + num_ahead].tolist()
            found.append(num_ahead)
        await foresight.fetch(now[most : most + num_ahead].tolist())
        assert cache.has(later[: most + 1][later[: most + 1] < 50]).all()
        return found

    used_up_later = np.flatnonzero(later < 50)  # when each of them is needed again
    num_lost = int((used_up_later > most).sum())
    samples = np.concatenate((now, later))
    found, _ = looked_at(tmp_path, ranges_of(num), limit * 100, num, samples, far_ahead)
    assert found == [0, num_lost]
    assert num_lost > 10


def test_a_record_of_many_samples_is_counted_once_when_it_will_be_lost(tmp_path):
    async def spared(foresight, order, _):
        (walk,) = foresight._walks.values()
        for clock in (5, 10, 20):  # record 0 is needed again last of all, 1 before it
            order.clock[0] = clock
            walk.catch_up()
        return walk.num_spared_bytes

    now = np.repeat([0, 1, 2, 3], 10)
    samples = np.concatenate((now, now[::-1]))
    assert looked_at(tmp_path, ranges_of(4), 100, len(now), samples, spared)[0] == 200


def test_reading_far_ahead_holds_no_more_in_memory_than_reading_near(tmp_path):
    num, size = 100, 64 << 20

    async def ahead(foresight, order, _):
        (walk,) = foresight._walks.values()
        order.clock[0] = 50
        walk.catch_up()
        assert walk.num_spared_bytes > 10 * size
        found = []
        for num_under_way in (0, 3):
            foresight._num_bytes_under_way = num_under_way * size
            found.append(foresight._ahead(walk, 60, 50)[1])
        return found

    now = np.arange(num)
    most = MOST_AHEAD_BYTES // size
    samples = np.concatenate((now, now[::-1]))
    found, _ = looked_at(tmp_path, ranges_of(num, size), 60 * size, num, samples, ahead)
    assert found == [most, most - 3]


def test_two_ranks_with_two_workers_fetch_each_byte_once(far, tmp_path, object_server):  # noqa: F811
    datasets = [dataset_of(far, tmp_path) for _ in range(2)]
    size = int(datasets[0].store._both[1].sizes.sum())
    loaders = [
        Loader(
            dataset, 16, num_workers=2, multiprocessing_context="fork", collate_fn=list, seed=3,
            sampler=DistributedSampler(dataset, num_replicas=2, rank=rank),
        )
        for rank, dataset in enumerate(datasets)
    ]  # fmt: skip
    object_server.requests.clear()
    for epoch in range(2):
        seen = []
        for pair in zip(*loaders, strict=True):
            seen += numbers_in(pair)
        assert sorted(seen) == list(range(NUM))
        assert fetched_bytes(object_server) == (0 if epoch else size)
    for dataset in datasets:
        dataset.close()


def test_small_records_come_with_others_and_few_come_twice(
    bucket, tmp_path, object_server  # noqa: F811
):  # fmt: skip
    with contextlib.closing(create_store(bucket, shard_size=1_000_000)) as writer:
        for number in range(500):
            writer.put_many([encode_record(str(number), (bytes(5000), number), 0)])
        writer.finish()
    dataset = dataset_of(bucket, tmp_path)
    size = int(dataset.store._both[1].sizes.sum())
    object_server.requests.clear()
    for epoch in range(2):
        seen = numbers_in(Loader(dataset, 16, shuffle=True, seed=3, collate_fn=list))
        assert sorted(seen) == list(range(500))
        fetched = fetched_bytes(object_server)
        assert fetched == 0 if epoch else size <= fetched <= 2 * size
    dataset.close()


def test_loaders_of_one_dataset_have_orders_of_their_own(far, tmp_path, object_server):  # noqa: F811
    dataset = dataset_of(far, tmp_path, "13MB")
    sizes = dataset.store._both[1].sizes
    train, val = (
        Loader(Subset(dataset, part), 16, shuffle=shuffle, seed=3, collate_fn=list)
        for part, shuffle in ((range(250), True), (range(250, NUM), False))
    )
    object_server.requests.clear()
    order, fetched = [], []
    for _ in range(3):
        for step, batch in enumerate(train):
            order += numbers_in([batch])
            if step % 10 == 5:
                order += numbers_in(val)
        fetched.append(fetched_bytes(object_server))
    most = sum(least_fetched(order, sizes, 13_000_000))
    assert sum(fetched) <= 1.05 * most
    assert len(list(tmp_path.glob("cache/*/orders/*"))) == 2
    del train
    assert len(list(tmp_path.glob("cache/*/orders/*"))) == 1
    dataset.close()


def test_a_copy_of_a_loader_takes_no_order_away(far, tmp_path):
    dataset = dataset_of(far, tmp_path)
    loader = Loader(dataset, 16, shuffle=True, seed=3)
    stream = iter(loader)
    copy = pickle.loads(pickle.dumps(loader))
    assert copy._followed is None
    copy.dataset.close()
    del copy
    assert len(list(tmp_path.glob("cache/*/orders/*"))) == 1
    del stream
    dataset.close()


def test_two_folders_are_two_caches(far, tmp_path):
    for name in ("one", "other"):
        dataset = dataset_of(far, tmp_path / name)
        assert len(numbers_in(Loader(dataset, 16, seed=3, collate_fn=list))) == NUM
        assert dataset.store._cached.cache.has(np.arange(NUM)).all()
        dataset.close()


def test_the_rank_goes_on_when_its_fetcher_is_killed(far, tmp_path):
    dataset = dataset_of(far, tmp_path, "13MB")
    loader = Loader(
        dataset, 16, shuffle=True, seed=3, collate_fn=list, num_workers=2,
        multiprocessing_context="fork",
    )  # fmt: skip
    for _ in range(2):
        stream = iter(loader)
        seen = numbers_in([next(stream)])
        with dataset.store._blobs.caller() as fetcher:
            os.kill(fetcher._process.pid, signal.SIGKILL)
        seen += numbers_in(stream)
        assert sorted(seen) == list(range(NUM))
    dataset.close()


def test_a_damaged_copy_is_fetched_anew(far, tmp_path):
    dataset = dataset_of(far, tmp_path)
    right = dataset.store.get_many([5])
    (file,) = (tmp_path / "cache").glob("*/0/005")
    file.write_bytes(bytes(file.stat().st_size))
    assert dataset.store.get_many([5]) == right
    assert dataset.store.get_many([5]) == right
    file.write_bytes(b"short")
    assert dataset.store.get_many([5]) == right
    dataset.close()


def test_a_part_of_a_dataset_is_read_ahead_too(far, tmp_path, object_server):  # noqa: F811
    dataset = dataset_of(far, tmp_path)
    sizes = dataset.store._both[1].sizes
    part = Subset(dataset, range(-50, 0))
    object_server.requests.clear()
    for _ in range(2):
        seen = numbers_in(Loader(part, 16, shuffle=True, seed=3, collate_fn=list))
        assert sorted(seen) == list(range(NUM - 50, NUM))
    assert fetched_bytes(object_server) == sizes[-50:].sum()
    dataset.close()


def test_a_cache_is_for_far_data_and_evicts_as_it_can(far, tmp_path):
    with pytest.raises(ConfigError, match='eviction=\'fifo\': it is "foresight" or "lru"'):
        open_store(far, local_cache=str(tmp_path), eviction="fifo")
    with pytest.raises(ConfigError, match="for data that are far away"):
        StoreDataset(f"shards:{tmp_path}", local_cache=str(tmp_path)).close()


def test_a_smaller_size_is_kept_to_by_the_next_program(tmp_path):
    cache = opened(tmp_path)
    for number in range(30):
        cache.put(number, data_of(number))
    cache.close()
    del cache
    cache = opened(tmp_path, "500B")
    assert 0 < cache.num_bytes <= 500
    assert_right(cache, tmp_path)
    cache.close()


SCRIPT = """
from penstock.stores import StoreDataset
from penstock.torch import DataLoader

dataset = StoreDataset({address!r}, local_cache={cache!r})
loader = DataLoader(dataset, 16, seed=3, shuffle=True, collate_fn=list)
print(sum(len(batch) for batch in loader))
"""


def test_a_script_that_ends_with_its_loader_says_nothing(far, tmp_path):
    pytest.importorskip("torch")
    done = python("-c", SCRIPT.format(address=far, cache=f"{tmp_path}/cache:1GB"))
    assert (done.stdout, done.stderr) == (f"{NUM}\n", "")
    assert list(tmp_path.glob("cache/*/orders/*")) == []
