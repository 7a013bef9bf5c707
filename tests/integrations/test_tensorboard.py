# SPDX-License-Identifier: Apache-2.0
"""Curves are written into real event files, and read back by TensorBoard's own reader."""

from __future__ import annotations

import pytest
import torch  # noqa: F401 - without it the module is left out

from penstock.insight.stats import Span, Stats, Verdict
from penstock.integrations.tensorboard import StatsWriter

tensorboard = pytest.importorskip("torch.utils.tensorboard")

WINDOW = Span(
    batches=100, samples=3200, bytes=64_000_000, seconds=8.0, wait_s=2.0, consumer_s=6.0,
    idle_s=4.0, read_s=6.0, compute_s=5.0, collate_s=3.0, send_s=2.0,
)  # fmt: skip


def stats(batches, bottleneck="storage"):
    return Stats(
        Verdict(bottleneck, f"It is {bottleneck}.", "Do something."),
        window=WINDOW,
        run=Span(batches=batches, failed=7),
        num_workers=3,
        prefetch_factor=2,
        num_ready=1.5,
        slot_bytes=9_000_000,
        worker_rss_bytes={0: 1_000_000, 1: 2_000_000},
    )


@pytest.fixture
def read(tmp_path):
    """Return what a function wrote with the SummaryWriter that it is called with."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def run(write):
        with tensorboard.SummaryWriter(tmp_path) as writer:
            write(writer)
        events = EventAccumulator(str(tmp_path))
        events.Reload()
        return events

    return run


def points(events, tag):
    return [(event.step, event.value) for event in events.Scalars(tag)]


def texts(events, tag):
    tensors = events.Tensors(f"{tag}/text_summary")
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in tensors]


def test_curves_are_of_the_window_at_the_batch_of_the_run(read):
    def write(writer):
        callback = StatsWriter(writer, tag="train")
        callback(stats(500))
        callback(stats(600))

    events = read(write)
    expected = {
        "samples_per_s": 400.0, "bytes_per_s": 8e6, "wait_share": 0.25, "failed": 7,
        "worker_share/idle": 0.2, "worker_share/read": 0.3, "worker_share/compute": 0.25,
        "worker_share/collate": 0.15, "worker_share/send": 0.1, "batches_ready": 1.5,
        "workers": 3, "prefetch_factor": 2, "memory_bytes/slots": 9e6, "memory_bytes/workers": 3e6,
    }  # fmt: skip
    assert set(events.Tags()["scalars"]) == {f"train/{name}" for name in expected}
    for name, value in expected.items():
        got = points(events, f"train/{name}")
        assert got == [(500, pytest.approx(value)), (600, pytest.approx(value))]


def test_the_verdict_is_written_when_it_names_another_bottleneck(read):
    def write(writer):
        callback = StatsWriter(writer)
        for step, bottleneck in enumerate(["storage", "storage", "cpu", "cpu", "storage"]):
            callback(stats(step, bottleneck))

    assert texts(read(write), "penstock/verdict") == [
        (0, "It is storage. Do something."),
        (2, "It is cpu. Do something."),
        (4, "It is storage. Do something."),
    ]


def test_the_main_process_may_say_which_step_it_is(read):
    steps = iter([70_000, 80_000])

    def write(writer):
        callback = StatsWriter(writer, global_step=lambda: next(steps))
        callback(stats(1))
        callback(stats(2))

    events = read(write)
    assert [step for step, _ in points(events, "penstock/workers")] == [70_000, 80_000]


def test_stats_without_times_of_workers_are_written():
    tags = []

    class Writer:
        def add_scalar(self, tag, value, step):
            tags.append(tag)

        def add_text(self, tag, text, step):
            pass

    StatsWriter(Writer())(Stats(Verdict("nothing yet", "Too few.")))  # no worker has done a thing
    assert "penstock/wait_share" in tags
    assert not any("worker_share" in tag for tag in tags)
