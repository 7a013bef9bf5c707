# SPDX-License-Identifier: Apache-2.0
"""Loaders whose workers are Ray actors: the same stream, whatever becomes of these."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import warnings
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.ray.conftest import InCluster, _becomes
from tests.ray.ray_datasets import Drawn, Stream, Suicidal, SuicidalStream, Table

from penstock import Loader, Ray
from penstock.engine.backends.ray import backend as ray_backend
from penstock.engine.backends.ray.backend import Call, Come
from penstock.engine.backends.ray.worker import versions_here
from penstock.errors import ConfigError, WorkerDied
from penstock.faults import FaultPolicy
from penstock.torch import DataLoader

ROOT = Path(__file__).parents[2]
FAR = {"num_cpus": 0, "resources": {"far": 1}}
ANY = {"num_cpus": 0}


@pytest.fixture(autouse=True)
def _connected(cluster):
    pass


def assert_same(batches, expected):
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        assert batch.keys() == other.keys()
        for key in batch:
            np.testing.assert_array_equal(np.asarray(batch[key]), np.asarray(other[key]), key)


def by_ray(dataset, loader_class=Loader, actor=ANY, **options):
    given = {"batch_size": 8, "seed": 5, "num_workers": 2, **options}
    return loader_class(dataset, backend=Ray(**actor), **given)


def without_workers(dataset, loader_class=Loader, **options):
    return list(loader_class(dataset, **{"batch_size": 8, "seed": 5, **options}))


def actor_of(backend, worker_id):
    return backend._table.workers[worker_id].actor


def of_processes(dataset):
    # Not forked: this process has Ray's threads.
    return list(
        Loader(dataset, batch_size=8, seed=5, num_workers=2, multiprocessing_context="forkserver")
    )


@pytest.mark.parametrize("loader_class", [Loader, DataLoader])
def test_the_stream_is_that_of_no_workers_epoch_after_epoch(loader_class):
    loader = by_ray(Drawn(), loader_class, shuffle=True, persistent_workers=True)
    expected = loader_class(Drawn(), batch_size=8, seed=5, shuffle=True)
    for _ in range(2):
        assert_same(list(loader), list(expected))
    close(loader)


def close(loader):
    """End the workers that a loader keeps."""
    kept = loader.__dict__.get("_stream") or loader.__dict__.get("_iterator")
    if kept is not None:
        kept.close()


def test_the_stream_is_the_same_on_another_node_and_out_of_order_it_is_the_same_set():
    got = list(by_ray(Drawn(), actor=FAR))
    assert_same(got, without_workers(Drawn()))
    shuffled = list(by_ray(Drawn(), actor=FAR, in_order=False))
    assert_same(sorted(shuffled, key=lambda batch: batch["index"][0]), got)


def test_the_stream_is_the_same_while_actors_are_killed_from_outside(cluster):
    loader = by_ray(Drawn(400), shuffle=True, on_error=FaultPolicy("skip", max_respawns=20))
    expected = without_workers(Drawn(400), shuffle=True)
    got = []
    with closing(iter(loader)) as stream, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it says how many have died
        for step, batch in enumerate(stream):
            got.append(batch)
            if step % 11 == 4:
                cluster.ray.kill(actor_of(stream.backend, step % 2))
    assert_same(got, expected)
    assert loader.failures == []


@pytest.mark.parametrize("kind", ["map-style", "iterable"])
def test_the_stream_is_the_same_while_samples_kill_their_actors_once(kind, tmp_path):
    policy = FaultPolicy("skip", max_respawns=20)
    if kind == "map-style":
        dataset, good = Suicidal(str(tmp_path), [3, 50, 131]), Drawn()
    else:
        dataset, good = SuicidalStream(str(tmp_path), [3, 50, 101]), Stream()
    loader = by_ray(dataset, on_error=policy, prefetch_factor=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        got = list(loader)
    expected = of_processes(good) if kind == "iterable" else without_workers(good)
    assert_same(got, expected)
    assert loader.failures == []
    assert len(os.listdir(tmp_path)) == 3  # each has killed one


def test_a_node_that_is_lost_is_nobody_s_fault_and_its_work_is_done_elsewhere(extra_nodes):
    nodes = [extra_nodes.add(num_cpus=1), extra_nodes.add(num_cpus=1)]
    options = {"num_cpus": 1, "resources": {"extra": 1}}
    loader = by_ray(Drawn(400), actor=options, num_workers=1)  # on_error="raise"
    got = []
    with closing(iter(loader)) as stream:
        for step, batch in enumerate(stream):
            got.append(batch)
            if step == 9:
                (worker,) = stream.backend._table.workers.values()
                extra_nodes.kill(worker.handshake.node_id)
                assert worker.handshake.node_id in nodes
    assert_same(got, without_workers(Drawn(400)))


@pytest.mark.parametrize("is_node_gone", [False, True])
def test_a_batch_that_is_lost_on_its_way_is_made_again_and_is_nobody_s_fault(
    cluster, is_node_gone, caplog
):
    errors = cluster.ray.exceptions
    said = [errors.ObjectLostError("00" * 28, "", "")]
    if is_node_gone:  # which Ray notices later
        said.append(errors.RayActorError("", "The actor is dead because its node has died."))
    loader = by_ray(Drawn(1600))
    with closing(iter(loader)) as stream:
        got = [next(stream)]
        # Both may have been on a machine that the test before this one took away.
        while not stream.backend._table.workers[0].is_ready:
            got.append(next(stream))
        caplog.clear()
        worker = stream.backend._table.workers[0]
        for error in said:
            future = Future()
            future.set_exception(error)
            worker.num_out += 1
            stream.backend._inbox.put(Come(Call(worker, "make"), future, 0))
        got += stream
    assert_same(got, without_workers(Drawn(1600)))
    assert loader.failures == []
    # Worker 1 may be on a machine that the test before this one took away.
    of_worker = [message for message in caplog.messages if "worker 0" in message]
    assert ("was lost with its machine" in of_worker[0]) == is_node_gone


def test_an_actor_that_dies_ends_the_epoch_where_none_may_take_its_place(cluster):
    with closing(iter(by_ray(Drawn(100_000)))) as stream:
        while not all(worker.is_ready for worker in stream.backend._table.workers.values()):
            next(stream)
        cluster.ray.kill(actor_of(stream.backend, 1))
        with pytest.raises(WorkerDied, match=r"worker 1 is gone .*Ray says: .*killed"):
            list(stream)


def test_in_a_placement_group_that_captures_actors_workers_are_outside_of_it(cluster):
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"CPU": 1}])
    inside = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)

    def train():
        return len(list(by_ray(Drawn(64), actor={"num_cpus": 1})))

    cluster.ray.get(group.ready(), timeout=30)
    task = cluster.ray.remote(num_cpus=1, scheduling_strategy=inside)(train)
    try:
        assert cluster.ray.get(task.remote(), timeout=60) == 8
    finally:
        remove_placement_group(group)


SCRIPT_OF_SHUTDOWN = """
    import sys
    import ray
    from penstock import Loader, Ray
    from penstock.errors import WorkerDied
    from tests.ray.ray_datasets import Drawn

    def batches():
        return iter(Loader(Drawn(100_000), batch_size=8, num_workers=1,
            backend=Ray(sys.argv[1], num_cpus=0)))

    stream = batches()
    next(stream)
    ray.shutdown()
    if sys.argv[2] == "again":
        ray.init(address=sys.argv[1], log_to_driver=False)
    try:
        list(stream)
    except WorkerDied as error:
        print(error)
    stream.close()
    print(len(next(batches())["index"]))
"""


@pytest.mark.parametrize("what", ["gone", "again"])
def test_a_stream_whose_connection_was_ended_says_so_and_the_next_one_works(cluster, what):
    process = run(SCRIPT_OF_SHUTDOWN, cluster.address, what)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    assert "ended by ray.shutdown()" in out
    assert out.splitlines()[-1] == "8"


def test_an_epoch_goes_on_from_its_state():
    loader = by_ray(Drawn(), shuffle=True)
    with closing(iter(loader)) as stream:
        got = [next(stream) for _ in range(7)]
        state = loader.state_dict()
    again = by_ray(Drawn(), shuffle=True, num_workers=1)
    again.load_state_dict(state)
    assert_same([*got, *again], without_workers(Drawn(), shuffle=True))


def test_a_batch_lies_in_the_object_store_and_may_be_written():
    loader = by_ray(Drawn(64, size=50_000))
    batches = list(loader)
    array = batches[3]["large"]
    assert "plasma" in mapped_at(array.__array_interface__["data"][0])
    array += 1
    assert (batches[3]["large"][0] == 25).all()
    assert (batches[2]["large"][0] == 16).all()
    (tensor,) = [b["large"] for b in by_ray(Drawn(8, size=50_000), DataLoader)]
    assert "plasma" in mapped_at(tensor.data_ptr())
    tensor.mul_(2)
    assert tensor[3, 0] == 6


def mapped_at(address):
    """Return what is mapped there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(n, 16) for n in line.split()[0].split("-"))
        if start <= address < end:
            return line
    return ""


def test_a_dataset_is_put_into_the_store_once_and_its_arrays_are_views_of_it(cluster):
    table = Table(100_000, 10)
    size = table.rows.nbytes
    before = objects_of(size, cluster)
    loader = by_ray(table, num_workers=3, actor=FAR)
    with closing(iter(loader)) as stream:
        batch = next(stream)
        assert batch["is_view"].all()
        while not all(worker.is_ready for worker in stream.backend._table.workers.values()):
            next(stream)
        reference = stream.backend._spec
        # One object for the three workers, with one copy here, where it was put, and one there.
        assert objects_of(size, cluster) - before == {reference.hex()}
        found = cluster.ray.experimental.get_object_locations([reference])[reference]
        assert set(found["node_ids"]) == {cluster.near, cluster.far}


def objects_of(num_bytes, cluster):
    """Return the ids of all objects at least so large that any process of the cluster refers to."""
    from ray._private import internal_api

    return {
        reference.object_id.hex()
        for node in cluster.alive_nodes().values()
        for process in internal_api.node_stats(
            node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=True
        ).core_workers_stats
        for reference in process.object_refs
        if reference.object_size >= num_bytes
    }


def test_the_numbers_of_the_account_are_of_this_clock_and_of_all_workers():
    loader = by_ray(Drawn())
    list(loader)
    stats = loader.stats()
    assert stats.backend == "ray"
    assert stats.epoch.samples == 200
    assert 0 < stats.epoch.compute_s + stats.epoch.read_s < stats.epoch.seconds * 2
    assert set(stats.worker_rss_bytes) in ({0}, {1}, {0, 1})  # one may have started late


def test_a_worker_of_other_versions_is_refused(monkeypatch):
    ours = versions_here().replace(f"numpy {np.__version__}", "numpy 0.1")
    monkeypatch.setattr(ray_backend, "versions_here", lambda: ours)
    with pytest.raises(ConfigError, match=r"numpy 0\.1.*Install the same versions of"):
        list(by_ray(Drawn()))


def test_who_waits_for_ray_is_told_what_is_missing_and_goes_on_when_it_comes(
    monkeypatch, extra_nodes
):
    monkeypatch.setattr(ray_backend, "_DOUBT_S", 7.0)  # longer than the timeout
    loader = by_ray(Drawn(), actor={"resources": {"extra": 1}}, timeout=6)
    noted = []

    def tell(message, *_):
        noted.append(str(message))
        extra_nodes.add()

    monkeypatch.setattr(ray_backend, "warn_user", lambda text, *_: tell(text))
    assert_same(list(loader), without_workers(Drawn()))
    assert "wait" in noted[0]
    assert "'resources': {'extra': 1}" in noted[0]


def run(text, *arguments, **options):
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", textwrap.dedent(text), *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, **options
    )


SCRIPT_OF_MAIN = """
    import sys
    import numpy as np
    from penstock import Loader, Ray

    class Mine:
        scale = 3
        def __len__(self):
            return 20
        def __getitem__(self, index):
            return Sample(index * self.scale)

    class Sample:
        def __init__(self, value):
            self.value = value

    def collate(samples):
        return samples

    def load():
        return Loader(Mine(), batch_size=4, num_workers=2,
            backend=Ray(sys.argv[1], num_cpus=0), collate_fn=collate)

    batches = list(load())
    assert all(type(sample) is Sample for batch in batches for sample in batch)
    print([sample.value for batch in batches for sample in batch])
"""


def test_classes_of_a_notebook_or_script_cross_by_value(cluster):
    process = run(SCRIPT_OF_MAIN, cluster.address)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    assert str([3 * k for k in range(20)]) in out


SCRIPT_OF_ENDINGS = """
    import sys, time
    from penstock import Loader, Ray
    from tests.ray.ray_datasets import Drawn

    loader = Loader(Drawn(100_000), batch_size=8, num_workers=2,
        backend=Ray(sys.argv[1], num_cpus=0, resources={"far": 1}))
    for step, batch in enumerate(loader):
        print(step, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_actor_outlives_its_trainer_however_that_ends(cluster, number):
    before = InCluster.now(cluster)
    process = run(SCRIPT_OF_ENDINGS, cluster.address, stderr=subprocess.DEVNULL)
    try:
        while process.stdout.readline().strip() != "5":
            assert process.poll() is None
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode != 0
    finally:
        process.kill()
        process.wait()
    assert _becomes(lambda: not InCluster.now(cluster).left_since(before), 30.0)
