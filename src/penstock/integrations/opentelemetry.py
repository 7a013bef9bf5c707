# SPDX-License-Identifier: Apache-2.0
"""`loader.stats()` as observable instruments of OpenTelemetry.

Names are `penstock.` and what it is; units are UCUM's: `penstock.batches`, `penstock.wait` in "s",
`penstock.stage` in "s" with the attribute `penstock.stage`, `penstock.workers`.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Final

from penstock.errors import ConfigError
from penstock.integrations.measures import MEASURES, Watched
from penstock.optional import missing_extra

try:
    from opentelemetry.metrics import Observation, get_meter
except ModuleNotFoundError as error:
    raise missing_extra(error, "this module") from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from opentelemetry.metrics import CallbackOptions, Meter

    from penstock.insight.stats import Stats
    from penstock.integrations.measures import HasStats, Measure

__all__ = ["observe"]


def observe(
    loader: HasStats, meter: Meter | None = None, attributes: Mapping[str, str] | None = None
) -> None:
    """Have a meter read the stats of a loader whenever it collects.

    The loader is referred to weakly. Once it is gone, nothing is told of it; a
    later one with its attributes goes on from its sums. Observing it again
    with the same meter gives it other attributes.

    Args:
        loader: Whose stats are told.
        meter: Whose instruments; None is that of "penstock" with the global provider.
        attributes: What tells the loader from others of the meter, as `{"loader": "train"}`.

    Raises:
        ConfigError: another loader of the meter has these attributes.

    Concurrency:
        Any thread; readers of OpenTelemetry collect in threads of their own.

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
        meter = get_meter("penstock")
    with _lock:
        loaders = _known(meter)
        if loaders is None:
            loaders = _Loaders(meter)
            if _is_stand_in(meter):
                _stand_ins[meter.name] = meter, loaders
            else:
                _loaders_of[meter] = loaders
    loaders.add(loader, dict(attributes or {}))


def _known(meter: Meter) -> _Loaders | None:
    """Return what was made with the meter before.

    Until a provider is set, each call of `get_meter` returns another stand-in for one meter.
    """
    stand_in, loaders = _stand_ins.get(meter.name, (None, None))
    if _is_stand_in(meter) or getattr(stand_in, "_real_meter", None) is meter:
        return loaders
    return _loaders_of.get(meter)


def _is_stand_in(meter: Meter) -> bool:
    return type(meter).__name__ == "_ProxyMeter"


class _Loaders:
    """All that are observed with a meter.

    A meter knows an instrument by its name: made twice, it drops the second one's callback without
    a word. And none can be taken away again. So a meter has each instrument once, for all loaders.
    """

    def __init__(self, meter: Meter) -> None:
        self._lock = threading.Lock()
        self._watched: weakref.WeakKeyDictionary[HasStats, Watched] = weakref.WeakKeyDictionary()
        self._told: list[tuple[Watched, Stats]] = []
        self._served: set[str] | None = None
        self._gone: dict[tuple[tuple[str, str], ...], list[Stats]] = {}
        for measure in MEASURES:
            if measure.is_counter:
                create: Callable[..., object] = meter.create_observable_counter
            else:
                create = meter.create_observable_gauge
            create(
                f"penstock.{measure.name}",
                callbacks=[_callback(self, measure)],
                unit=measure.unit,
                description=measure.text,
            )

    def add(self, loader: HasStats, attributes: dict[str, str]) -> None:
        with self._lock:
            others = [each for other, each in self._watched.items() if other is not loader]
            if any(each.labels == attributes for each in others):
                raise ConfigError(
                    f"another loader of this meter has the attributes {attributes}: their numbers "
                    'would be told as one. Tell them apart, as with {"loader": "val"}.'
                )
            self._watched[loader] = Watched(loader, attributes)
            self._served = None

    def observations(self, measure: Measure) -> Iterable[Observation]:
        return [
            Observation(
                number + self._past_of(watched.labels, measure, value),
                _with_label(watched.labels, measure, value),
            )
            for watched, stats in self._stats_for(measure)
            for value, number in measure.values(stats).items()
        ]

    def _past_of(self, attributes: dict[str, str], measure: Measure, value: str) -> float:
        """Return what loaders that are gone had counted under the same attributes."""
        gone = self._gone.get(_key(attributes), [])
        return sum(measure.values(stats).get(value, 0) for stats in gone if measure.is_counter)

    def _stats_for(self, measure: Measure) -> list[tuple[Watched, Stats]]:
        """Return the stats of a collection, which asks for one instrument after the other.

        They are taken anew once an instrument is asked for the second time.
        """
        with self._lock:
            if self._served is None or measure.name in self._served:
                for each, stats in self._told:  # as told last
                    if each.is_gone:
                        self._gone.setdefault(_key(each.labels), []).append(stats)
                everyone = list(self._watched.values())
                told = [(each, each.stats()) for each in everyone]
                self._told = [(each, stats) for each, stats in told if stats is not None]
                self._served = set()
            self._served.add(measure.name)
            return [(each, stats) for each, stats in self._told if not each.is_gone]


def _key(attributes: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(attributes.items()))


def _callback(
    loaders: _Loaders, measure: Measure
) -> Callable[[CallbackOptions], Iterable[Observation]]:
    return lambda _: loaders.observations(measure)


def _with_label(attributes: dict[str, str], measure: Measure, value: str) -> dict[str, str]:
    return {**attributes, f"penstock.{measure.label}": value} if measure.label else attributes


_lock: Final = threading.Lock()
_loaders_of: Final[weakref.WeakKeyDictionary[Meter, _Loaders]] = weakref.WeakKeyDictionary()
_stand_ins: Final[dict[str, tuple[Meter, _Loaders]]] = {}
