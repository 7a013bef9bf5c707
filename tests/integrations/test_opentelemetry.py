# SPDX-License-Identifier: Apache-2.0
"""Instruments are collected by the SDK of OpenTelemetry into memory."""

from __future__ import annotations

import gc

import pytest
from tests.support.processes import python

from penstock import Loader
from penstock.errors import ConfigError
from penstock.insight.stats import Span, Stats, Verdict

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import Gauge, InMemoryMetricReader, Sum

from penstock.integrations.opentelemetry import observe


class Counting:
    """Answers as a loader that has given some batches."""

    def __init__(self, **figures):
        self.num_batches = 10
        self.num_asked = 0
        self._figures = figures

    def stats(self):
        self.num_asked += 1
        run = Span(batches=self.num_batches, read_s=2.5, idle_s=1.5)
        return Stats(Verdict("cpu", "Busy."), run=run, **self._figures)


@pytest.fixture
def reader():
    return InMemoryMetricReader()


@pytest.fixture
def meter(reader):
    provider = MeterProvider([reader])
    yield provider.get_meter("training")
    provider.shutdown()


def collect(reader):
    """Return every metric by its name."""
    data = reader.get_metrics_data()
    if data is None:
        return {}
    return {
        metric.name: metric
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def values(metric):
    return {tuple(sorted(point.attributes.items())): point.value for point in
            metric.data.data_points}  # fmt: skip


def test_counters_only_grow_and_gauges_are_of_now(reader, meter):
    loader = Counting(num_workers=3, worker_rss_bytes={0: 1000, 2: 2000})
    observe(loader, meter)
    first = collect(reader)
    loader.num_batches = 20
    second = collect(reader)
    assert values(first["penstock.batches"]) == {(): 10}
    assert values(second["penstock.batches"]) == {(): 20}
    batches = second["penstock.batches"]
    assert isinstance(batches.data, Sum)
    assert batches.data.is_monotonic
    assert batches.unit == "{batch}"
    assert isinstance(first["penstock.workers"].data, Gauge)
    assert values(first["penstock.workers"]) == {(): 3}
    assert first["penstock.stage"].unit == "s"
    stages = values(first["penstock.stage"])
    assert stages[(("penstock.stage", "read"),)] == 2.5
    assert stages[(("penstock.stage", "idle"),)] == 1.5
    assert values(first["penstock.worker_memory_peak"]) == {
        (("penstock.worker", "0"),): 1000,
        (("penstock.worker", "2"),): 2000,
    }
    bottlenecks = values(first["penstock.bottleneck"])
    assert [key for key, is_it in bottlenecks.items() if is_it] == [
        (("penstock.bottleneck", "cpu"),)
    ]


def test_a_collection_computes_the_stats_of_a_loader_once(reader, meter):
    loader = Counting()
    observe(loader, meter)
    for num_collected in (1, 2, 3):
        collect(reader)
        assert loader.num_asked == num_collected


def test_two_loaders_of_a_meter_are_told_apart_by_attributes(reader, meter, caplog):
    train = Loader(list(range(64)), batch_size=4, num_workers=1)
    val = Loader(list(range(30)), batch_size=4)
    observe(train, meter, {"loader": "train"})
    observe(val, meter, {"loader": "val"})
    for _ in range(2):
        assert sum(1 for _ in train) == 16
    assert sum(1 for _ in val) == 8
    got = collect(reader)
    assert values(got["penstock.batches"]) == {(("loader", "train"),): 32, (("loader", "val"),): 8}
    assert values(got["penstock.samples"])[(("loader", "val"),)] == 30
    assert values(got["penstock.wait"])[(("loader", "train"),)] == train.stats().run.wait_s
    assert not caplog.records  # of the SDK: an instrument made twice


def test_a_loader_observed_again_gets_the_new_attributes(reader, meter):
    loader = Counting()
    observe(loader, meter, {"loader": "old"})
    collect(reader)
    observe(loader, meter, {"loader": "new"})
    assert list(values(collect(reader)["penstock.batches"])) == [(("loader", "new"),)]


def test_a_loader_that_is_gone_is_told_of_no_more(reader, meter):
    train, val = Counting(), Loader(list(range(8)), batch_size=4, num_workers=1)
    observe(train, meter, {"loader": "train"})
    observe(val, meter, {"loader": "val"})
    assert sum(1 for _ in val) == 2
    assert len(values(collect(reader)["penstock.batches"])) == 2
    del val
    gc.collect()
    assert list(values(collect(reader)["penstock.batches"])) == [(("loader", "train"),)]
    del train
    gc.collect()
    assert collect(reader) == {}


def test_a_meter_of_before_and_after_the_provider_was_set_is_one():
    got = python(
        "-c",
        """
        from opentelemetry.metrics import set_meter_provider
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from penstock import Loader
        from penstock.integrations.opentelemetry import observe

        loaders = {name: Loader(range(4)) for name in ("train", "val", "test")}
        observe(loaders["train"], None, {"loader": "train"})
        observe(loaders["val"], None, {"loader": "val"})
        reader = InMemoryMetricReader()
        provider = MeterProvider([reader])
        set_meter_provider(provider)
        observe(loaders["test"], attributes={"loader": "test"})
        (scope,) = reader.get_metrics_data().resource_metrics[0].scope_metrics
        print(*(point.attributes["loader"] for point in scope.metrics[0].data.data_points))
        provider.shutdown()
        """,
    )
    assert (got.stdout, got.stderr) == ("train val test\n", "")


def test_two_loaders_that_nothing_tells_apart_are_refused(reader, meter):
    one, other = Counting(), Counting()
    observe(one, meter)
    with pytest.raises(ConfigError, match="another loader has the labels"):
        observe(other, meter)
