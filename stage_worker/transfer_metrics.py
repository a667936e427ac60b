"""What the data plane of one worker does, as histograms by edge and path.

Chunks are counted as they pass, so it must cost next to nothing: two additions and a search in a short list for each
observation. Everything runs in the worker's event loop; a handle that is freed in another thread may, rarely, be lost
to the count.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from connectors.base import ConnectorUsage
from connectors.times import PHASES, ReadTimes
from omni.v1 import transfer_pb2
from omnicore import metrics
from stage_worker.retention import CAUSES, Retention

# A token is some bytes, the KV cache of a long prompt is hundreds of megabytes.
_BYTES = tuple(float(4**power) for power in range(3, 16))
# From handing over a reference (10 µs) to what a client still waits for.
_SECONDS = (
    1e-5, 2.5e-5, 1e-4, 2.5e-4, 1e-3, 2.5e-3, 1e-2, 2.5e-2, 0.1, 0.25, 1.0, 2.5, 10.0, 30.0, 120.0,
)  # fmt: skip
Labels = tuple[str, ...]


class Observations:
    """One histogram series."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus wants them: upper bound → how many are not above it."""
        names = [*(str(bound) for bound in self.bounds), "+Inf"]
        return list(zip(names, (float(count) for count in accumulate(self.counts)), strict=True))


class PathSeries:
    """The histograms of one edge over one path."""

    __slots__ = ("in_flight", "rx", "size", "tx", "wait")

    def __init__(self) -> None:
        self.size = Observations(_BYTES)
        self.tx = Observations(_SECONDS)
        self.rx = Observations(_SECONDS)
        self.in_flight = Observations(_SECONDS)
        self.wait = Observations(_SECONDS)


class TransferMetrics:
    """The counts of one worker. ``usage``: connector kind → its pool now; ``flows``: how many are open; ``keeper``:
    what is retained."""

    def __init__(
        self,
        pipeline: str,
        usage: Callable[[], Mapping[str, ConnectorUsage]],
        flows: Callable[[], int],
        keeper: Retention | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self.paths: dict[tuple[int, int, str, str], PathSeries] = {}
        self.phases: dict[Labels, Observations] = {}
        self.failures: dict[Labels, int] = {}
        self._pipeline = pipeline
        self.registry.register(_Counts(self, pipeline, usage, flows, keeper))

    def path(self, from_stage: int, to_stage: int, connector: str, backend: str) -> PathSeries:
        """The series of an edge and a path: there are few."""
        key = (from_stage, to_stage, connector, backend)
        series = self.paths.get(key)
        if series is None:
            series = self.paths[key] = PathSeries()
        return series

    def freed(self, handle: transfer_pb2.TransferHandle, kind: str, held_s: float) -> None:
        """A handle of this worker is gone (a ``FreedHandle``)."""
        backend = handle.WhichOneof("backend") or ""
        edge = handle.edge
        connector = backend if backend == "inline" else kind
        self.path(edge.from_stage, edge.to_stage, connector, backend).in_flight.observe(held_s)

    def read(self, times: ReadTimes, total_s: float) -> None:
        """Bytes were read that were not inline; ``total_s`` is the whole of it."""
        for phase in PHASES:
            self._phase(times.connector, phase).observe(getattr(times, phase))
        self._phase(times.connector, "total").observe(total_s)

    def failed(self, edge: transfer_pb2.EdgeRef, reason: str) -> None:
        """A consumer here could not read on."""
        labels = (self._pipeline, str(edge.from_stage), str(edge.to_stage), reason.lower())
        self.failures[labels] = self.failures.get(labels, 0) + 1

    def scrape(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def _phase(self, connector: str, phase: str) -> Observations:
        key = (connector, phase)
        series = self.phases.get(key)
        if series is None:
            series = self.phases[key] = Observations(_SECONDS)
        return series


class _Counts(Collector):
    def __init__(
        self,
        counts: TransferMetrics,
        pipeline: str,
        usage: Callable[[], Mapping[str, ConnectorUsage]],
        flows: Callable[[], int],
        keeper: Retention | None,
    ) -> None:
        self._keeper = keeper
        self._counts = counts
        self._pipeline = pipeline
        self._usage = usage
        self._flows = flows

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry would otherwise collect once to learn the names."""
        return []

    def collect(self) -> Iterable[Metric]:
        """All of it, now."""
        for metric, name in (
            (metrics.TRANSFER_SIZE_BYTES, "size"),
            (metrics.TRANSFER_TX_SECONDS, "tx"),
            (metrics.TRANSFER_RX_SECONDS, "rx"),
            (metrics.TRANSFER_IN_FLIGHT_SECONDS, "in_flight"),
            (metrics.TRANSFER_WAIT_SECONDS, "wait"),
        ):
            series: dict[Labels, Observations] = {
                (self._pipeline, str(from_stage), str(to_stage), connector, backend): getattr(path, name)
                for (from_stage, to_stage, connector, backend), path in self._counts.paths.items()
            }
            yield _histogram(metric, series)
        yield _histogram(metrics.TRANSFER_PHASE_SECONDS, self._counts.phases)
        failures = CounterMetricFamily(
            metrics.TRANSFER_FAILURES.name.removesuffix("_total"),
            metrics.TRANSFER_FAILURES.help,
            labels=metrics.TRANSFER_FAILURES.labels,
        )
        for labels, count in self._counts.failures.items():
            failures.add_metric(labels, count)
        yield failures
        yield from self._pools()
        if self._keeper is not None:
            yield from _retained(self._keeper)
        yield GaugeMetricFamily(metrics.TRANSFER_FLOWS.name, metrics.TRANSFER_FLOWS.help, value=self._flows())

    def _pools(self) -> Iterable[Metric]:
        usages = self._usage()
        for metric, field in (
            (metrics.TRANSFER_POOL_BYTES, "pool_bytes"),
            (metrics.TRANSFER_POOL_FREE_BYTES, "free_bytes"),
            (metrics.TRANSFER_HANDLES, "handles"),
            # Only connectors to transfer engines have these.
            (metrics.TRANSFER_QUARANTINED_BYTES, "quarantined_bytes"),
            (metrics.TRANSFER_LEAKED, "leaked"),
        ):
            family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            for kind, usage in usages.items():
                family.add_metric([kind], getattr(usage, field, 0))
            yield family


def _retained(keeper: Retention) -> Iterable[Metric]:
    kept, dropped = metrics.TRANSFER_RETAINED_BYTES, metrics.TRANSFER_RETAINED_DROPPED
    yield GaugeMetricFamily(kept.name, kept.help, value=keeper.size_bytes)
    family = CounterMetricFamily(dropped.name.removesuffix("_total"), dropped.help, labels=dropped.labels)
    for cause in CAUSES:
        family.add_metric([cause], keeper.dropped[cause])
    yield family


def _histogram(metric: metrics.Metric, series: Mapping[Labels, Observations]) -> Metric:
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, observations in series.items():
        if any(observations.counts):
            family.add_metric(labels, observations.buckets(), observations.total)
    return family
