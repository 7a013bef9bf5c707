# SPDX-License-Identifier: Apache-2.0
"""Measures, for scale_sim.py, what batches cost on a Ray cluster on this machine.

Each measurement is a process of its own (`scale_sim.py --part JSON`), which says when it is warm,
waits to be told to go, and says when it is done: so that two can run at once, and the CPU seconds
of all of Ray's processes can be looked up in between.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from _runner import as_table, check, machine_facts, write

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scale_sim import Costs, Scene

__all__ = ["calibrate", "part"]

_BATCH_SIZE: Final = 64
_BATCH_BYTES: Final = _BATCH_SIZE * 224 * 224 * 3
_STORE_BYTES: Final = 250_000_000  # of each node: two trainers with two workers have 86 MB at most
_PREFETCH_FACTOR: Final = 2
_PATIENCE_S: Final = 300.0


# One measurement.


def _dataset(kind: str, num_batches: int) -> Any:  # noqa: ANN401
    if kind == "tiny":
        from penstock.data import ArrayDataset

        return ArrayDataset(np.zeros((num_batches * _BATCH_SIZE, 1), np.float32))
    import jpeg_pipeline

    size = jpeg_pipeline.Size(num_batches * _BATCH_SIZE, 1)
    return jpeg_pipeline.photos("penstock, uint8", size)


def _say(what: dict[str, Any]) -> None:
    write("PART " + json.dumps(what))


def part(text: str) -> int:
    """Carry out one measurement, as its JSON says."""
    wanted = json.loads(text)
    if wanted["kind"] == "make":
        _make(wanted["num_batches"])
    else:
        _train(**wanted)
    return 0


def _make(num_batches: int) -> None:
    """Make batches in this thread."""
    import cv2

    from penstock import Loader

    cv2.setNumThreads(0)
    warm = max(num_batches // 4, 2)
    batches = iter(Loader(_dataset("jpeg", warm + num_batches), batch_size=_BATCH_SIZE))
    for _ in islice(batches, warm):
        pass
    _say({"ready": True})
    sys.stdin.readline()
    cpu_s = []
    for _ in range(num_batches):
        start_s = time.process_time()
        next(batches)
        cpu_s.append(time.process_time() - start_s)
    _say({"cpu_s": statistics.mean(cpu_s), "spread": statistics.stdev(cpu_s)})
    sys.stdin.readline()


def _train(kind: str, num_batches: int, num_workers: int, address: str, where: str) -> None:
    """Take batches from Ray workers, and do nothing with them."""
    from penstock import Loader, Ray

    ahead = num_workers * _PREFETCH_FACTOR + 2
    warm = max(num_batches // 8, ahead)
    # Some more at the end, so that the workers are still at work when the last one is counted.
    loader = Loader(
        _dataset(kind, warm + ahead + num_batches + ahead),
        batch_size=_BATCH_SIZE,
        num_workers=num_workers,
        prefetch_factor=_PREFETCH_FACTOR,
        backend=Ray(address, num_cpus=0.01, resources={where: 0.01}),
        seed=1,
    )
    batches = iter(loader)
    for batch in islice(batches, warm):
        check(kind == "tiny" or batch[0].shape == (_BATCH_SIZE, 224, 224, 3), str(batch[0].shape))
    _say({"ready": True})
    sys.stdin.readline()
    for batch in islice(batches, ahead):  # those that were made while it waited
        _ = batch[0].ravel()[-1]
    waited_s = 0.0
    start_s, thread_s, process_s = time.perf_counter(), time.thread_time(), time.process_time()
    for _ in range(num_batches):
        asked_s = time.perf_counter()
        batch = next(batches)
        waited_s += time.perf_counter() - asked_s
        _ = int(batch[0].ravel()[0]) + int(batch[0].ravel()[-1])
    wall_s = time.perf_counter() - start_s
    _say(
        {
            "wall_s": wall_s,
            "waited": waited_s / wall_s,
            "thread_s": (time.thread_time() - thread_s) / num_batches,
            "process_s": (time.process_time() - process_s) / num_batches,
            "num_batches": num_batches,
            "num_counted": num_batches + ahead,
        }
    )
    sys.stdin.readline()
    del batch, batches, loader


# Several at once.


class _Part:
    """A measurement in a process of its own."""

    def __init__(self, **wanted: Any) -> None:  # noqa: ANN401
        file = Path(__file__).with_name("scale_sim.py")
        self._process = subprocess.Popen(
            [sys.executable, str(file), "--part", json.dumps(wanted)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.wanted = wanted

    def said(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("PART "):
                said: dict[str, Any] = json.loads(line.removeprefix("PART "))
                return said
        raise RuntimeError(f"a part ended with {self._process.wait()}: {self.wanted}")

    def tell(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.tell()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _at_once(parts: list[_Part]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Run parts at the same time; return what they say, and CPU seconds: whose, and in all."""
    try:
        for each in parts:
            each.said()
        before = _cpu_of_ray()
        for each in parts:
            each.tell()
        told = [each.said() for each in parts]
        after = _cpu_of_ray()
        return told, {kind: after[kind] - before[kind] for kind in after}
    finally:
        for each in parts:
            each.end()


def _cpu_of_ray() -> dict[str, float]:
    """Return the CPU seconds of Ray's workers, and of its other processes, so far."""
    import psutil

    found = {"workers": 0.0, "others": 0.0}  # and of the whole machine, below
    for process in psutil.Process().children(recursive=True):
        try:
            command, times = " ".join(process.cmdline()), process.cpu_times()
        except psutil.Error:
            continue
        if "--part" not in command:
            kind = "workers" if command.startswith("ray::") else "others"
            found[kind] += times.user + times.system
    machine = psutil.cpu_times()
    found["machine"] = sum(machine) - machine.idle - machine.iowait
    return found


def _cpu_of_all() -> float:
    found = _cpu_of_ray()
    return found["workers"] + found["others"] + time.process_time()


@contextlib.contextmanager
def _cluster() -> Iterator[str]:
    """Start two nodes on this machine; yield the address."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    common = {"num_cpus": 4, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**common, "resources": {"near": 1.0}})
    try:
        cluster.add_node(num_cpus=4, object_store_memory=_STORE_BYTES, resources={"far": 1.0})
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        cluster.shutdown()


def _store_and_link(address: str, num_times: int) -> dict[str, float]:
    """Measure the copy into a store, and the way from one store to another."""
    import ray

    ray.init(address=address, log_to_driver=False)

    @ray.remote(num_cpus=0, resources={"far": 0.01})
    class Far:
        def make(self, number: int) -> Any:  # noqa: ANN401
            return np.full(_BATCH_BYTES, number, np.uint8)

    try:
        batch = np.ones(_BATCH_BYTES, np.uint8)
        put_s = []
        for _ in range(num_times + 2):
            start_s = time.thread_time()
            reference = ray.put(batch)
            put_s.append(time.thread_time() - start_s)
            del reference
        far = Far.remote()
        rates, cpu_s = [], []
        for number in range(num_times + 1):
            references = [far.make.remote(number) for _ in range(4)]
            ray.wait(references, num_returns=4, fetch_local=False)
            before_s = _cpu_of_all()
            start_s = time.perf_counter()
            values = ray.get(references)
            rates.append(4 * _BATCH_BYTES / (time.perf_counter() - start_s))
            cpu_s.append(_cpu_of_all() - before_s)
            check(all(value[-1] == number for value in values), "another object came")
            del values, references
        return {
            "store_s_per_byte": statistics.median(put_s[2:]) / _BATCH_BYTES,
            "link_bytes_per_s": statistics.median(rates[1:]),
            # Counted in ticks of 10 ms: the mean of all, not the median.
            "link_cpu_s_per_byte": statistics.mean(cpu_s[1:]) / 4 / _BATCH_BYTES,
        }
    finally:
        ray.shutdown()


def _costs(address: str, *, is_small: bool) -> Costs:
    from scale_sim import Costs

    num_made, num_tiny = (8, 200) if is_small else (60, 3000)
    write("calibration: one process makes batches", to=sys.stderr)
    (alone,), _ = _at_once([_Part(kind="make", num_batches=num_made)])
    num_cores = os.cpu_count() or 1
    write(f"calibration: {num_cores} processes make batches", to=sys.stderr)
    crowd, _ = _at_once([_Part(kind="make", num_batches=num_made) for _ in range(num_cores)])
    write("calibration: batches of nothing", to=sys.stderr)
    tiny = _Part(kind="tiny", num_batches=num_tiny, num_workers=1, address=address, where="near")
    (told,), ray_s = _at_once([tiny])
    write("calibration: store and link", to=sys.stderr)
    bytes_cost = _store_and_link(address, 3 if is_small else 12)
    slowest = statistics.mean(each["cpu_s"] for each in crowd)
    return Costs(
        cpu_s=alone["cpu_s"],
        spread=alone["spread"] / alone["cpu_s"],
        slowdown=max(slowest / alone["cpu_s"], 1.0),
        dispatch_s=told["thread_s"],
        worker_s=ray_s["workers"] / told["num_counted"],
        background_s=ray_s["others"] / told["num_counted"] + told["process_s"] - told["thread_s"],
        **bytes_cost,
    )


def _points(costs: Costs) -> dict[str, tuple[Scene, int, int, str]]:
    """Return scenes that can be measured here: scene, trainers, workers of each, where they are."""
    from scale_sim import Scene

    one = Scene(
        costs,
        batch_size=_BATCH_SIZE,
        batch_bytes=_BATCH_BYTES,
        cores=os.cpu_count() or 1,
        prefetch_factor=_PREFETCH_FACTOR,
        is_one_machine=True,
        num_batches=300,
    )
    two = replace(one, num_trainers=2, trainers_per_node=2, workers_per_trainer=2)
    return {
        "1 trainer, 1 worker": (one, 1, 1, "near"),
        "1 trainer, 2 workers": (replace(one, workers_per_trainer=2), 1, 2, "near"),
        "2 trainers, 2 workers each": (two, 2, 2, "near"),
        "1 trainer, 1 worker on the other node": (replace(one, worker_nodes=1), 1, 1, "far"),
        "1 trainer, 2 workers on the other node": (
            replace(one, worker_nodes=1, workers_per_trainer=2),
            *(1, 2, "far"),
        ),
    }


def calibrate(*, is_saved: bool, is_small: bool) -> int:
    """Measure the costs of a batch, predict the throughput of some runs by them, and measure it."""
    from scale_sim import check_simulation, simulate

    check_simulation(600)
    rows = [
        [
            *("", "predicted", "measured", "error", "waiting: predicted", "measured"),
            *("worker CPU ms/batch", "cores busy with other things"),
        ]
    ]
    points = []
    with _cluster() as address:
        costs = _costs(address, is_small=is_small)
        write(json.dumps(asdict(costs), indent=1))
        for name, (scene, num_trainers, num_workers, where) in _points(costs).items():
            outcome = simulate(scene)  # before it is measured
            write(f"measuring: {name}", to=sys.stderr)
            wanted = {
                "kind": "jpeg",
                "num_batches": 12 if is_small else 150,
                "num_workers": num_workers,
                "address": address,
                "where": where,
            }
            told, cpu_s = _at_once([_Part(**wanted) for _ in range(num_trainers)])
            num_counted = sum(each["num_counted"] for each in told)
            ours_s = cpu_s["workers"] + cpu_s["others"]
            ours_s += sum(each["process_s"] * each["num_counted"] for each in told)
            strange = (cpu_s["machine"] - ours_s) / max(each["wall_s"] for each in told)
            measured = sum(each["num_batches"] / each["wall_s"] for each in told) * _BATCH_SIZE
            waited = statistics.mean(each["waited"] for each in told)
            error = outcome.samples_per_s / measured - 1
            rows.append(
                [
                    *(name, f"{outcome.samples_per_s:.0f}", f"{measured:.0f}", f"{error:+.0%}"),
                    *(f"{outcome.waiting:.0%}", f"{waited:.0%}"),
                    *(f"{cpu_s['workers'] / num_counted * 1e3:.1f}", f"{strange:.2f}"),
                ]
            )
            points.append({"point": name, "predicted": outcome.samples_per_s, "measured": measured})
    write("\nscale_sim: JPEG images/s")
    write(as_table(rows))
    if is_saved and not is_small:
        from scale_sim import CALIBRATION

        CALIBRATION.parent.mkdir(exist_ok=True)
        result = {"machine": machine_facts(), "costs": asdict(costs), "points": points}
        CALIBRATION.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        write(f"saved results/{CALIBRATION.name}", to=sys.stderr)
    return 0
