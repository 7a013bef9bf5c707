# SPDX-License-Identifier: Apache-2.0
"""`loader.stats()` as curves in TensorBoard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.integrations.measures import stage_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.insight.stats import Stats

__all__ = ["StatsWriter"]


class StatsWriter:
    """Writes the stats that it is called with: subscribe it to a loader.

    Curves are of the last batches, `Stats.window`: `samples_per_s`, `bytes_per_s`, `wait_share` (of
    the main process's time, 0 to 1), `worker_share/idle`, `.../read`, `.../compute`, `.../collate`,
    `.../send` (of the time of all workers, together 1), `batches_ready`, `workers`,
    `prefetch_factor`, `memory_bytes/slots` and `memory_bytes/workers` (at their peaks). `failed` is
    the sum since the loader was made. The verdict is a text, written when it names another
    bottleneck.

    Concurrency:
        One thread at a time; a loader calls its subscribers in the main process's.

    Example:
        >>> from penstock.insight.stats import Span, Stats, Verdict
        >>> class Printer:  # or torch.utils.tensorboard.SummaryWriter("runs/first")
        ...     def add_scalar(self, tag, value, step):
        ...         if tag == "train/samples_per_s":
        ...             print(step, tag, value)
        ...     def add_text(self, tag, text, step):
        ...         print(step, tag, text)
        >>> write = StatsWriter(Printer(), tag="train")
        >>> span = Span(batches=10, samples=320, seconds=2.0)
        >>> write(Stats(Verdict("trainer", "Batches lie ready."), window=span, run=span))
        10 train/samples_per_s 160.0
        10 train/verdict Batches lie ready.
    """

    def __init__(
        self,
        writer: Any,  # noqa: ANN401 - whatever has `add_scalar` and `add_text`
        tag: str = "penstock",
        *,
        global_step: Callable[[], int] | None = None,
    ) -> None:
        """Write nothing yet.

        Args:
            writer: A `torch.utils.tensorboard.SummaryWriter`, or what has its `add_scalar` and
                `add_text`; it is not closed.
            tag: What tags begin with; another one for each loader of the writer.
            global_step: Returns the step that points belong to. None counts the batches since the
                loader was made, which begins again at 0 when a training is resumed.
        """
        self._writer = writer
        self._tag = tag
        self._global_step = global_step
        self._bottleneck = ""

    def __call__(self, stats: Stats) -> None:
        """Write one point of each curve, and the verdict if it names another bottleneck."""
        step = stats.run.batches if self._global_step is None else self._global_step()
        for name, value in _curves(stats).items():
            self._writer.add_scalar(f"{self._tag}/{name}", value, step)
        if stats.verdict.bottleneck != self._bottleneck:
            self._bottleneck = stats.verdict.bottleneck
            self._writer.add_text(f"{self._tag}/verdict", str(stats.verdict), step)


def _curves(stats: Stats) -> dict[str, float]:
    window = stats.window
    stages = stage_seconds(window)
    total_s = sum(stages.values())
    return {
        "samples_per_s": window.samples_per_s,
        "bytes_per_s": window.bytes_per_s,
        "wait_share": window.wait_share,
        **{f"worker_share/{name}": s / total_s for name, s in stages.items() if total_s},
        "failed": stats.run.failed,
        "batches_ready": stats.num_ready,
        "workers": stats.num_workers,
        "prefetch_factor": stats.prefetch_factor,
        "memory_bytes/slots": stats.slot_bytes,
        "memory_bytes/workers": sum(stats.worker_rss_bytes.values()),
    }
