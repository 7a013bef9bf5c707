# SPDX-License-Identifier: Apache-2.0
"""`loader.stats()` as metrics that Prometheus scrapes.

Names are `penstock_`, what it is, its base unit, and `_total` if it only grows:
`penstock_batches_total`, `penstock_wait_seconds_total`, `penstock_workers`, and
`penstock_stage_seconds_total` with the label `stage`. The share of the last five minutes that the
main process waited is `rate(penstock_wait_seconds_total[5m])`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from penstock.errors import ConfigError
from penstock.integrations.measures import MEASURES, Measure, WatchedLoaders
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

    from penstock.insight.monitor import Observed

__all__ = ["StatsCollector"]

_OWN_LABELS: Final = tuple(measure.label for measure in MEASURES if measure.label)
_LABEL: Final = re.compile(r"(?!__)[a-zA-Z_]\w*", re.ASCII)
_UNITS: Final = {"s": "_seconds", "By": "_bytes"}


class StatsCollector(Collector):
    """Reads the stats of loaders whenever Prometheus asks; nothing is done between.

    Loaders are referred to weakly. One that is gone has no metrics any more.

    Concurrency:
        One thread adds loaders; `prometheus_client` scrapes in one of its own.

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
        loader: Observed,
        labels: Mapping[str, str] | None = None,
        *,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """Watch a loader.

        Args:
            loader: The loader.
            labels: What tells it from other loaders, as `{"loader": "train"}`; None for no labels.
            registry: Where the collector registers itself; None leaves that to the caller.

        Raises:
            ConfigError: a label's name is none that Prometheus allows, or one that the metrics
                have themselves.
            ValueError: the registry has a collector of loaders already: `add` to that one.
        """
        self._label_names = tuple(labels or ())
        self._loaders = WatchedLoaders()
        self.add(loader, labels or {})
        if registry is not None:
            registry.register(self)

    def add(self, loader: Observed, labels: Mapping[str, str]) -> None:
        """Watch one more loader.

        Args:
            loader: The loader.
            labels: With the same names as those of the first, and another value.

        Raises:
            ConfigError: the names differ, or another loader has these labels.
        """
        names = sorted(self._label_names)
        wrong = [name for name in labels if name in _OWN_LABELS or not _LABEL.fullmatch(name)]
        if wrong or sorted(labels) != names:
            raise ConfigError(
                f"labels {sorted(labels)} cannot be: their names are letters, digits and "
                f"underscores, {_OWN_LABELS} are taken, and all loaders have the first's, {names}."
            )
        self._loaders.add(loader, {name: str(value) for name, value in labels.items()})

    def describe(self) -> list[Metric]:
        """Return the metrics without values, for the registry to know their names."""
        return [self._family(measure) for measure in MEASURES]

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, with a value for each loader that there is."""
        found = self._loaders.stats()
        for measure in MEASURES:
            family = self._family(measure)
            for labels, stats in found:
                own = [labels[name] for name in self._label_names]
                for value, number in measure.values(stats).items():
                    family.add_metric([*own, value] if measure.label else own, number)
            yield family

    def _family(self, measure: Measure) -> CounterMetricFamily | GaugeMetricFamily:
        kind = CounterMetricFamily if measure.is_counter else GaugeMetricFamily
        name = f"penstock_{measure.name}{_UNITS.get(measure.unit, '')}"
        labels = [*self._label_names, *([measure.label] if measure.label else [])]
        return kind(name, measure.text, labels=labels)
