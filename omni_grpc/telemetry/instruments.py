"""Counters and histograms that one event loop writes, and whoever asks reads.

prometheus-client's own take a lock for each event, and give each counter a second series for when it was made unless a
switch of the whole process is turned. These have one writer, and become its metric families when they are read.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.utils import floatToGoString

from omni_grpc.telemetry.declared import Kind, Metric

Labels = tuple[str, ...]
Buckets = tuple[Sequence[int], float]
"""How many values each bucket has, the one above all bounds included, and the sum of all values."""
Readings = Mapping[Metric, Mapping[Labels, float | Buckets]]
OTHER = "other"


class Counter:
    """Only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        self.value += amount

    def read(self) -> float:
        return self.value


class Histogram:
    """Counts values by the first bound that is not less."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def read(self) -> Buckets:
        return tuple(self._counts), self._sum


class Readable(Protocol):
    """What has a value that can be read."""

    def read(self) -> float | Buckets: ...


Instrument = TypeVar("Instrument", bound=Readable)


class Children(Generic[Instrument]):
    """The instruments of a metric, by the values of its labels. Whoever has many events keeps the one it needs."""

    def __init__(self, metric: Metric, make: Callable[[], Instrument]) -> None:
        self._metric = metric
        self._make = make
        self._made: dict[Labels, Instrument] = {}

    def of(self, *labels: str) -> Instrument:
        found = self._made.get(labels)
        if found is None:
            assert len(labels) == len(self._metric.labels), f"{self._metric.name} has {self._metric.labels}"
            found = self._made[labels] = self._make()
        return found

    def read(self) -> dict[Labels, float | Buckets]:
        return {labels: one.read() for labels, one in self._made.items()}


class Instruments:
    """Those of one server."""

    def __init__(self) -> None:
        self._counters: dict[Metric, Children[Counter]] = {}
        self._histograms: dict[Metric, Children[Histogram]] = {}

    def counter(self, metric: Metric) -> Children[Counter]:
        assert metric.kind is Kind.COUNTER, metric.name
        return self._counters.setdefault(metric, Children(metric, Counter))

    def histogram(self, metric: Metric) -> Children[Histogram]:
        assert metric.kind is Kind.HISTOGRAM, metric.name
        return self._histograms.setdefault(metric, Children(metric, lambda: Histogram(metric.buckets)))

    def read(self) -> dict[Metric, Mapping[Labels, float | Buckets]]:
        """What they have now. To be called on the loop that writes them."""
        counters = {metric: children.read() for metric, children in self._counters.items()}
        return {**counters, **{metric: children.read() for metric, children in self._histograms.items()}}


class Bounded:
    """The first `most` values of a label as they are; "other" for all that come after them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()

    def __call__(self, value: str) -> str:
        if value not in self._known:
            if len(self._known) >= self._most:
                return OTHER
            self._known.add(value)
        return value


def families(readings: Readings) -> Iterator[Family]:
    """As prometheus-client writes them."""
    for metric, children in readings.items():
        match metric.kind:
            case Kind.HISTOGRAM:
                yield _histogram_family(metric, children)
            case Kind.COUNTER:
                yield _filled(CounterMetricFamily(metric.name, metric.help, labels=metric.labels), children)
            case Kind.GAUGE:
                yield _filled(GaugeMetricFamily(metric.name, metric.help, labels=metric.labels), children)


F = TypeVar("F", CounterMetricFamily, GaugeMetricFamily)


def _filled(family: F, children: Mapping[Labels, float | Buckets]) -> F:
    for labels, value in children.items():
        assert not isinstance(value, tuple), "buckets are those of histograms"
        family.add_metric(labels, value)
    return family


def _histogram_family(metric: Metric, children: Mapping[Labels, float | Buckets]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    bounds = [floatToGoString(bound) for bound in (*metric.buckets, float("inf"))]  # type: ignore[no-untyped-call]
    for labels, value in children.items():
        assert isinstance(value, tuple), "histograms have buckets"
        counts, total = value
        seen, cumulated = 0, []
        for bound, count in zip(bounds, counts, strict=True):
            seen += count
            cumulated.append((bound, float(seen)))
        family.add_metric(labels, cumulated, total)
    return family
