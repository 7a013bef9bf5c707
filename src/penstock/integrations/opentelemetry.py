# SPDX-License-Identifier: Apache-2.0
"""`loader.stats()` as observable instruments of OpenTelemetry.

Names are `penstock.` and what it is; units are UCUM's: `penstock.batches`, `penstock.wait` in "s",
`penstock.stage` in "s" with the attribute `penstock.stage`, `penstock.workers`.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Final

from penstock.integrations.measures import MEASURES, Measure, WatchedLoaders
from penstock.optional import missing_extra

try:
    from opentelemetry.metrics import Observation, get_meter
except ModuleNotFoundError as error:
    raise missing_extra(error, "this module") from error

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from opentelemetry.metrics import CallbackOptions, Meter

    from penstock.insight.monitor import Observed
    from penstock.insight.stats import Stats

__all__ = ["observe"]

_observers: Final[weakref.WeakKeyDictionary[Meter, _Observer]] = weakref.WeakKeyDictionary()


def observe(
    loader: Observed, meter: Meter | None = None, attributes: Mapping[str, str] | None = None
) -> None:
    """Have a meter read the stats of a loader whenever it collects.

    The loader is referred to weakly. Once it is gone it has no metrics, and another may have its
    attributes. Observing a loader again with the same meter gives it other attributes.

    Args:
        loader: The loader.
        meter: Whose instruments; None is that of "penstock" with the global provider.
        attributes: What tells the loader from others of the meter, as `{"loader": "train"}`.

    Raises:
        ConfigError: another loader of the meter has these attributes.

    Concurrency:
        One thread observes loaders; readers of OpenTelemetry collect in threads of their own.

    Example:
        >>> from opentelemetry.sdk.metrics import MeterProvider
        >>> from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        >>> from penstock.insight.stats import Span, Stats, Verdict
        >>> class Loader:
        ...     def stats(self):
        ...         return Stats(Verdict("nothing yet", "Too few batches."), run=Span(batches=3))
        >>> reader, loader = InMemoryMetricReader(), Loader()
        >>> provider = MeterProvider([reader])
        >>> observe(loader, provider.get_meter("training"), {"loader": "train"})
        >>> metric = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics[0]
        >>> metric.name, metric.data.data_points[0].value
        ('penstock.batches', 3)
        >>> provider.shutdown()

    Reference:
        OpenTelemetry, "Metrics API": an asynchronous instrument reports the sum itself, not what
        was added to it.
    """
    if meter is None:
        meter = _default_meter()
    observer = _observers.get(meter)
    if observer is None:
        observer = _observers[meter] = _Observer()
        # Each once for all loaders: of two with one name a meter drops the second's callback
        # without a word, and none can be taken away again.
        for measure in MEASURES:
            kind = "counter" if measure.is_counter else "gauge"
            getattr(meter, f"create_observable_{kind}")(
                f"penstock.{measure.name}",
                callbacks=[functools.partial(observer.observe, measure)],
                unit=measure.unit,
                description=measure.text,
            )
    observer.loaders.add(loader, dict(attributes or {}))


@functools.cache
def _default_meter() -> Meter:
    # Until a provider is set, each call of `get_meter` returns another stand-in for the one meter.
    return get_meter("penstock")


class _Observer:
    """The loaders of a meter, whose stats are computed once for each collection."""

    def __init__(self) -> None:
        self.loaders = WatchedLoaders()
        self._found: list[tuple[dict[str, str], Stats]] = []
        self._served = {measure.name for measure in MEASURES}

    def observe(self, measure: Measure, _: CallbackOptions) -> Iterable[Observation]:
        # A collection asks for one instrument after the other, and begins with one asked before.
        if measure.name in self._served:
            self._found, self._served = self.loaders.stats(), set()
        self._served.add(measure.name)
        for labels, stats in self._found:
            for value, number in measure.values(stats).items():
                own = {f"penstock.{measure.label}": value} if measure.label else {}
                yield Observation(number, {**labels, **own})
