# SPDX-License-Identifier: Apache-2.0
"""Metrics are read back from Prometheus's text format by its own parser, and over HTTP."""

from __future__ import annotations

import gc

import pytest

from penstock import Loader
from penstock.errors import ConfigError
from penstock.insight.stats import Span, Stats, Verdict

prometheus_client = pytest.importorskip("prometheus_client")
from prometheus_client.openmetrics import exposition as openmetrics  # noqa: E402
from prometheus_client.openmetrics import parser as openmetrics_parser  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families as parse  # noqa: E402

from penstock.integrations.prometheus import StatsCollector  # noqa: E402

RUN = Span(
    batches=100, samples=3200, failed=7, bytes=64_000_000, seconds=8.0, wait_s=2.5, consumer_s=5.5,
    trainer_cpu_s=4.5, trainer_starved_s=0.5, idle_s=4.0, read_s=6.0, compute_s=5.0, collate_s=3.0,
    send_s=2.0, slot_s=0.25, starved_s=0.75, worker_cpu_s=9.5,
)  # fmt: skip
STATS = Stats(
    Verdict("storage", "Slow reads."),
    run=RUN,
    epoch_number=4,
    num_workers=3,
    prefetch_factor=2,
    num_ready=1.5,
    slot_bytes=9_000_000,
    worker_rss_bytes={0: 1_000_000, 2: 2_000_000},
)


class Fixed:
    """Answers as a loader does, with known figures."""

    def __init__(self, stats=STATS):
        self._stats = stats

    def stats(self):
        return self._stats


@pytest.fixture
def registry():
    return prometheus_client.CollectorRegistry()


def samples(registry):
    """Return the value of each line, by its name and labels."""
    text = prometheus_client.generate_latest(registry).decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parse(text)
        for sample in family.samples
    }


def test_every_metric_has_the_figure_of_the_stats(registry):
    loader = Fixed()
    registry.register(StatsCollector(loader))
    got = samples(registry)
    bottlenecks = {key: value for key, value in got.items() if key[0] == "penstock_bottleneck"}
    stages = {"idle": 4.0, "read": 6.0, "compute": 5.0, "collate": 3.0, "send": 2.0}
    plain = {
        "penstock_batches_total": 100, "penstock_samples_total": 3200,
        "penstock_samples_failed_total": 7, "penstock_data_bytes_total": 64e6,
        "penstock_wait_seconds_total": 2.5, "penstock_consumer_seconds_total": 5.5,
        "penstock_trainer_cpu_seconds_total": 4.5, "penstock_trainer_starved_seconds_total": 0.5,
        "penstock_slot_making_seconds_total": 0.25, "penstock_worker_cpu_seconds_total": 9.5,
        "penstock_worker_starved_seconds_total": 0.75, "penstock_workers": 3,
        "penstock_prefetch_factor": 2, "penstock_batches_ready": 1.5,
        "penstock_slot_peak_bytes": 9e6, "penstock_epoch": 4,
    }  # fmt: skip
    assert {key: value for key, value in got.items() if key not in bottlenecks} == {
        **{(name,): value for name, value in plain.items()},
        **{("penstock_stage_seconds_total", ("stage", k)): v for k, v in stages.items()},
        ("penstock_worker_memory_peak_bytes", ("worker", "0")): 1e6,
        ("penstock_worker_memory_peak_bytes", ("worker", "2")): 2e6,
    }
    assert [key[1] for key, is_it in bottlenecks.items() if is_it] == [("bottleneck", "storage")]
    assert len(bottlenecks) > 5


def test_the_strict_parser_of_openmetrics_takes_it(registry):
    loaders = [Fixed(), Fixed()]
    collector = StatsCollector(loaders[0], {"loader": "train"}, registry=registry)
    collector.add(loaders[1], {"loader": 'odd "name"\n'})
    text = openmetrics.generate_latest(registry).decode()
    families = list(openmetrics_parser.text_string_to_metric_families(text))
    types = {family.name: family.type for family in families}
    assert types["penstock_batches"] == "counter"
    assert types["penstock_workers"] == "gauge"
    names = {sample.labels["loader"] for family in families for sample in family.samples}
    assert names == {"train", 'odd "name"\n'}


def test_a_loader_that_is_gone_is_told_of_no_more_and_leaves_its_labels(registry):
    loader = Fixed()
    collector = StatsCollector(loader, {"loader": "train"}, registry=registry)
    assert ("penstock_workers", ("loader", "train")) in samples(registry)
    del loader
    gc.collect()
    assert samples(registry) == {}
    again = Fixed()
    collector.add(again, {"loader": "train"})
    assert samples(registry)["penstock_batches_total", ("loader", "train")] == 100


def test_a_second_collector_in_a_registry_is_refused(registry):
    loader = Fixed()
    StatsCollector(loader, registry=registry)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        StatsCollector(loader, registry=registry)


def test_labels_of_other_names_are_refused():
    first, second = Fixed(), Fixed()
    collector = StatsCollector(first, {"loader": "train"})
    with pytest.raises(
        ConfigError, match=r"labels \['name'\] cannot be: .* the first's, \['loader'\]"
    ):
        collector.add(second, {"name": "val"})


def test_labels_are_texts_and_names_that_cannot_be_are_refused():
    loader = Loader([1, 2], batch_size=1)
    for name in ("stage", "worker", "bottleneck", "my-loader", "1st", "__name__"):
        with pytest.raises(ConfigError, match="cannot be: "):
            StatsCollector(loader, {name: "train"})
    (batches,) = [m for m in StatsCollector(loader, {"_rank": 0}).collect()
                  if m.name == "penstock_batches"]  # fmt: skip
    assert batches.samples[0].labels == {"_rank": "0"}
