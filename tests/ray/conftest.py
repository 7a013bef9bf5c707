# SPDX-License-Identifier: Apache-2.0
"""A real Ray cluster of two nodes, for all tests here, and what they are held to besides.

Two nodes on one machine: each has its own raylet, object store and workers, so what crosses from
one to the other crosses as between machines. The program is this process, on the near one.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import os
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tests.conftest import GRACE_S
from tests.support.holdings import Holdings

# Before anyone imports ray, which reads them then.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # else ray.init warns of a change to come

STARTS_A_RAY = ("test_two_hosts", "test_ray_data_page")
HERE = Path(__file__).parent
HAS_RAY = importlib.util.find_spec("ray") is not None
STORE_BYTES = 200_000_000
NUM_CPUS = 2
# A node that stops answering is given up after some 5 s, instead of Ray's 20 s and more.
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 4,
}
# A thread of Ray Data that logs just after its dataset ended opens the dataset's log again and does
# not close it (ray 2.60, SessionFileHandler.emit after close). Any test may run when it is freed.
RAY_DATA_LOG = (
    r"ignore:(?s).*FileIO name=.*ray-data-dataset:pytest.PytestUnraisableExceptionWarning"
)
CLEARED_S = 20.0  # after an actor's end, until the cluster has taken note of all that it held


def pytest_pycollect_makemodule(module_path, parent):
    """Skip the tests here, or fail, where there is no Ray."""
    if HAS_RAY:
        return
    reason = 'Ray is not installed: pip install "penstock-loader[ray]"'
    if os.environ.get("PENSTOCK_REQUIRE_RAY") == "1":
        pytest.fail(f"{reason}. PENSTOCK_REQUIRE_RAY=1 forbids to skip.")
    pytest.skip(reason, allow_module_level=True)


def pytest_collection_modifyitems(items):
    """Mark what starts a Ray: it runs in processes of its own, see the Makefile.

    A process that was connected once keeps native threads, which other tests' forks warn of.
    """
    for item in items:
        needs_ray = "cluster" in item.fixturenames or item.path.stem in STARTS_A_RAY
        if item.path.is_relative_to(HERE) and needs_ray:
            item.add_marker(pytest.mark.ray)
            item.add_marker(pytest.mark.filterwarnings(RAY_DATA_LOG))


class LocalCluster:
    """Two nodes, and further ones for tests that end them.

    Attributes:
        ray: The module, connected.
        near: Id of the node that this process is on: 2 CPUs, and 100 of the resource "near".
        far: Id of the other: 2 CPUs, and 100 of "far".
    """

    def __init__(self):
        import ray
        from ray.cluster_utils import Cluster

        self.ray = ray
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                **_node(resources={"near": 100}),
                "include_dashboard": False,
                "_system_config": HEALTH,
            },
        )
        self._started = {}
        try:
            far = self._cluster.add_node(**_node(resources={"far": 100}))
            ray.init(
                address=self.address,
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
        except BaseException:
            self.shutdown()
            raise
        self.near = ray.get_runtime_context().get_node_id()
        self.far = far.node_id

    @property
    def address(self):
        return self._cluster.address

    def add_node(self, **node_args):
        """Start another node; return its id. Who starts it ends it, see `extra_nodes`."""
        node = self._cluster.add_node(**_node(**node_args))
        self._started[node.node_id] = node
        return node.node_id

    def end_node(self, node_id, *, kill=True):
        """End a node's processes: at once, as when its plug is pulled, or as they want to."""
        self._cluster.remove_node(self._started.pop(node_id), allow_graceful=not kill)

    def wait_until_dead(self, node_id, timeout_s=60.0):
        """Wait until the cluster has given the node up."""
        assert _becomes(lambda: node_id not in self.alive_nodes(), timeout_s), (
            f"node {node_id} is not given up after {timeout_s} s"
        )

    def alive_nodes(self):
        return {node["NodeID"]: node for node in self.ray.nodes() if node["Alive"]}

    def raylet_pid(self, node_id):
        """Process of a node that `add_node` started, to stop or kill it."""
        processes = self._started[node_id].all_processes
        return processes["raylet"][0].process.pid

    def shutdown(self):
        self.ray.shutdown()
        self._cluster.shutdown()


def _node(**node_args):
    return {"num_cpus": NUM_CPUS, "object_store_memory": STORE_BYTES, **node_args}


@pytest.fixture(scope="session")
def cluster():
    """The two-node cluster, which this process is connected to."""
    with warnings.catch_warnings():
        # Ray leaves its pipes and sockets to the garbage collection.
        warnings.simplefilter("ignore", ResourceWarning)
        found = LocalCluster()
    yield found
    found.shutdown()


@pytest.fixture
def extra_nodes(cluster):
    """Start further nodes with `extra_nodes.add(...)`; what a test leaves of them is ended."""
    nodes = ExtraNodes(cluster)
    yield nodes
    nodes.close()


class ExtraNodes:
    """The nodes of one test: what `_node` says unless noted, and a resource "extra"."""

    def __init__(self, cluster):
        self._cluster = cluster
        self._ids = []

    def add(self, **node_args):
        node_args.setdefault("resources", {"extra": 100})
        self._ids.append(self._cluster.add_node(**node_args))
        return self._ids[-1]

    def kill(self, node_id):
        """Pull the plug; returns when its processes are gone, before the cluster has noticed."""
        self._ids.remove(node_id)
        self._cluster.end_node(node_id)

    def raylet_pid(self, node_id):
        return self._cluster.raylet_pid(node_id)

    def close(self):
        for node_id in list(self._ids):
            self.kill(node_id)


@dataclass(frozen=True)
class InCluster:
    """What tests hold of the cluster at one moment."""

    actors: frozenset[str]
    num_objects: int
    store_bytes: int
    taken: dict[str, float]

    @classmethod
    def now(cls, cluster):
        import grpc
        from ray._private import internal_api, state

        actors = state.actors()  # `ray.util.state` would need a dashboard
        stores = []
        for node in cluster.alive_nodes().values():
            with contextlib.suppress(grpc.RpcError):  # it is dead, which is not known yet
                stats = internal_api.node_stats(
                    node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False
                )
                stores.append(stats.store_stats)
        total, free = cluster.ray.cluster_resources(), cluster.ray.available_resources()
        return cls(
            actors=frozenset(
                f"{actor['ActorClassName']} {key} ({actor['State']})"
                for key, actor in actors.items()
                if actor["State"] != "DEAD"
            ),
            num_objects=sum(store.num_local_objects for store in stores),
            store_bytes=sum(store.object_store_bytes_used for store in stores),
            taken={
                name: amount - free.get(name, 0)
                for name, amount in total.items()
                if name in ("CPU", "near", "far", "extra") and amount != free.get(name, 0)
            },
        )

    def left_since(self, before):
        said = [f"actor {actor}" for actor in sorted(self.actors - before.actors)]
        num_more = self.num_objects - before.num_objects
        # Of an object whose owner has died Ray keeps a mark, of one byte, in each store.
        if self.store_bytes - before.store_bytes > max(num_more, 0):
            said.append(
                f"{self.num_objects} objects of {self.store_bytes} bytes in the object stores, "
                f"before {before.num_objects} of {before.store_bytes}"
            )
        said += [
            f"{amount:g} {name} taken"
            for name, amount in self.taken.items()
            if amount > before.taken.get(name, 0)
        ]
        return said


@pytest.fixture(autouse=True)
def no_leaks(request):
    """After a test nothing is left that it did not find, here and in the cluster."""
    cluster = _cluster_of(request)
    before = Holdings.now()
    in_cluster = None if cluster is None else InCluster.now(cluster)
    yield
    if cluster is not None and cluster.ray.is_initialized():
        _check_cluster(cluster, in_cluster)
    if not (left := _left_here(before)):
        return
    gc.collect()
    children = [p for p in Holdings.now().children - before.children if not _is_rays(p)]
    psutil.wait_procs(children, timeout=GRACE_S)
    _becomes(lambda: not _left_here(before), GRACE_S)
    left = _left_here(before)
    assert not left, "the test left behind:\n  " + "\n  ".join(left)


def _cluster_of(request):
    if "cluster" not in request.fixturenames:
        return None
    return request.getfixturevalue("cluster")


def _check_cluster(cluster, before):
    """The cluster hears of an end some time after it, so it is asked again for a while."""
    if not InCluster.now(cluster).left_since(before):
        return
    gc.collect()  # of references to objects and handles of actors
    _becomes(lambda: not InCluster.now(cluster).left_since(before), CLEARED_S)
    left = InCluster.now(cluster).left_since(before)
    assert not left, "the test left in the cluster:\n  " + "\n  ".join(left)


def _left_here(before):
    """As in every other test, without what Ray keeps while this process is connected.

    Its processes come and go, and so do the sockets by which this process reaches them.
    """
    now = Holdings.now()
    now = Holdings(
        children=frozenset(p for p in now.children if not _is_rays(p)),
        threads=now.threads,
        descriptors=frozenset(
            (number, target)
            for number, target in now.descriptors
            if not _is_rays_descriptor(target)
        ),
        shared_memory=frozenset(n for n in now.shared_memory if not n.startswith("plasma")),
        num_slots_mapped=now.num_slots_mapped,
    )
    return now.left_since(before)


def _is_rays(process):
    try:
        noted = " ".join(process.cmdline())
        parents = process.parents()
    except psutil.Error:
        return True  # it has ended, and a zombie of ours has a command line of its own
    return _names_ray(noted) or any(_names_ray(_line(parent)) for parent in parents)


def _line(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _names_ray(line):
    return line.startswith("ray::") or any(
        part in line for part in ("/ray/core/src/", "/ray/_private/", "/ray/dashboard/")
    )


def _is_rays_descriptor(target):
    return target.startswith(("socket:", "anon_inode:", "/dev/shm/plasma", "/tmp/ray/"))


def _becomes(holds, timeout_s):
    """Ask until it holds, or time is up; nothing tells of these, so it has to be asked."""
    never = threading.Event()
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        never.wait(0.05)
    return True
