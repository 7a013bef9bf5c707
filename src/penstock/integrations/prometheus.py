# SPDX-License-Identifier: Apache-2.0
"""`loader.stats()` as metrics that Prometheus scrapes.

Names are `penstock_`, what it is, its base unit, and `_total` if it only grows:
`penstock_batches_total`, `penstock_wait_seconds_total`, `penstock_workers`, and
`penstock_stage_seconds_total` with the label `stage`. The share of the last five minutes that the
main process waited is `rate(penstock_wait_seconds_total[5m])`.
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Final

from penstock.errors import ConfigError
from penstock.integrations.measures import MEASURES, Watched
from penstock.optional import missing_extra

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise missing_extra(error, "this module") from error

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

    from penstock.integrations.measures import HasStats, Measure

__all__ = ["StatsCollector"]

_OWN_LABELS: Final = tuple(measure.label for measure in MEASURES if measure.label)
_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_UNITS: Final = {"s": "_seconds", "By": "_bytes"}


class StatsCollector(Collector):
    """Reads the stats of loaders whenever Prometheus asks; nothing is done between.

    Loaders are referred to weakly. One that is gone is no longer told of.

    Concurrency:
        Any thread; `prometheus_client` scrapes in one of its own.

    Example:
        >>> from prometheus_client import CollectorRegistry, generate_latest
        >>> from penstock.insight.stats import Span, Stats, Verdict
        >>> class Loader:
        ...     def stats(self):
        ...         return Stats(Verdict("nothing yet", "Too few batches."), run=Span(batches=3))
        >>> registry, loader = CollectorRegistry(), Loader()
        >>> collector = StatsCollector(loader, {"loader": "train"}, registry=registry)
        >>> print(generate_latest(registry).decode())  # doctest: +ELLIPSIS
        # HELP penstock_batches_total Batches given to the main process.
        # TYPE penstock_batches_total counter
        penstock_batches_total{loader="train"} 3.0
        ...

    Reference:
        Prometheus, "Metric and label naming" and "Writing client libraries": base units, and
        collectors that read what another system counts.
    """

    def __init__(
        self,
        loader: HasStats,
        labels: Mapping[str, str] | None = None,
        *,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """Watch a loader.

        Args:
            loader: Whose stats are told.
            labels: What tells it from other loaders, as `{"loader": "train"}`; None for no labels.
            registry: Where the collector registers itself; None leaves that to the caller.

        Raises:
            ConfigError: the registry has a collector of loaders already, or a label's name is none
                that Prometheus allows, or one that the metrics have themselves.
        """
        self._lock = threading.Lock()
        given = _checked(labels or {})
        self._label_names = tuple(given)
        self._watched = [Watched(loader, given)]
        if registry is not None:
            self._register(registry)

    def _register(self, registry: CollectorRegistry) -> None:
        try:
            registry.register(self)
        except ValueError as error:
            raise ConfigError(
                "this registry has metrics of Penstock already. It takes one StatsCollector; "
                'tell that of the other loader: collector.add(loader, {"loader": "val"}).'
            ) from error

    def add(self, loader: HasStats, labels: Mapping[str, str]) -> None:
        """Watch one more loader.

        Args:
            loader: Whose stats are told.
            labels: With the same names as those of the first, and another value.

        Raises:
            ConfigError: the names differ, or another loader has these labels.
        """
        labels = _checked(labels)
        with self._lock:
            names = sorted(self._label_names)
            # Those that are gone leave their labels to others.
            self._watched = [watched for watched in self._watched if not watched.is_gone]
            if sorted(labels) != names:
                raise ConfigError(
                    f"loaders of one collector have labels of the same names: got "
                    f"{sorted(labels)}, and the first has {names}"
                )
            if any(watched.labels == labels for watched in self._watched):
                raise ConfigError(
                    f"another loader has the labels {labels}: give each its own value"
                )
            self._watched = [*self._watched, Watched(loader, labels)]

    def describe(self) -> list[Metric]:
        """Return the metrics without values, for the registry to know their names."""
        return [self._family(measure) for measure in MEASURES]

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, with a value for each loader that there is."""
        with self._lock:
            watched = self._watched
        told = [(each, stats) for each in watched if (stats := each.stats()) is not None]
        for measure in MEASURES:
            family = self._family(measure)
            for each, stats in told:
                own = [each.labels[name] for name in self._label_names]
                for value, number in measure.values(stats).items():
                    family.add_metric([*own, value] if measure.label else own, number)
            yield family

    def _family(self, measure: Measure) -> CounterMetricFamily | GaugeMetricFamily:
        kind = CounterMetricFamily if measure.is_counter else GaugeMetricFamily
        name = f"penstock_{measure.name}{_UNITS.get(measure.unit, '')}"
        labels = [*self._label_names, *([measure.label] if measure.label else [])]
        return kind(name, measure.text, labels=labels)


def _checked(labels: Mapping[str, object]) -> dict[str, str]:
    """Return labels as texts."""
    for name in labels:
        if name in _OWN_LABELS or name.startswith("__") or not _LABEL.fullmatch(name):
            raise ConfigError(
                f"{name!r} cannot be a label: names are letters, digits and underscores, do not "
                f"begin with a digit or two underscores, and {', '.join(_OWN_LABELS)} are taken."
            )
    return {name: str(value) for name, value in labels.items()}
