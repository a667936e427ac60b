"""The gateway's metrics: counted where they happen, or read from its tables when scraped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.admission_metrics import admission_metrics
from gateway.control_plane_watch import ControlPlaneWatch
from gateway.orchestrator import Orchestrator
from gateway.request import RequestState
from gateway.request_metrics import RequestMetrics
from gateway.router import Router
from omnicore import metrics


class GatewayMetrics:
    """Observes every request's end, and everything else at scrape time: nothing is paid per token."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._control_plane: ControlPlaneWatch | None = None
        self._ended = RequestMetrics()
        self.registry.register(self._ended)

    def request_ended(self, state: RequestState) -> None:
        """Count a request; call it once for each."""
        spec, usage, since_s, first_s = state.spec, state.usage, state.started_s, state.first_output_s
        self._ended.ended(
            spec.graph.name,
            spec.task,
            state.status if state.error is None else state.error.reason.lower(),
            seconds=time.monotonic() - since_s,
            first_output_s=None if first_s is None else first_s - since_s,
            tokens=(usage.prompt_tokens, usage.completion_tokens) if state.status == "finished" else None,
        )

    @property
    def control_plane_connected(self) -> bool:
        """A control plane tells us of changes now."""
        return self._control_plane is not None and self._control_plane.connected

    def watch(self, router: Router, orchestrator: Orchestrator, control_plane: ControlPlaneWatch) -> None:
        """Read these at every scrape."""
        self._control_plane = control_plane
        self.registry.register(_Tables(router, orchestrator, control_plane))

    def watch_spans(self, counts: Callable[[], dict[str, int]]) -> None:
        """Read at every scrape what has become of the spans that were made (outcome → how many)."""
        self.registry.register(_Spans(counts))

    def scrape(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)


class _Spans(Collector):
    def __init__(self, counts: Callable[[], dict[str, int]]) -> None:
        self._counts = counts

    def describe(self) -> Iterable[Metric]:
        """As of ``_Tables``."""
        return []

    def collect(self) -> Iterable[Metric]:
        """The counts as they are now."""
        yield _counter(metrics.GATEWAY_TRACE_SPANS, {(outcome,): n for outcome, n in self._counts().items()})


class _Tables(Collector):
    def __init__(self, router: Router, orchestrator: Orchestrator, control_plane: ControlPlaneWatch) -> None:
        self._router = router
        self._orchestrator = orchestrator
        self._control_plane = control_plane

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry would otherwise collect once to learn the names."""
        return []

    def collect(self) -> Iterable[Metric]:
        """The tables as they are now."""
        admission = self._orchestrator.admission
        yield _gauge(metrics.GATEWAY_INFLIGHT, admission.inflight)
        yield _gauge(metrics.GATEWAY_BINDINGS, self._router.bindings)
        yield _gauge(metrics.GATEWAY_CONTROL_PLANE_UP, int(self._control_plane.connected))
        yield _gauge(metrics.GATEWAY_TABLE_REVISION, self._router.table.revision)
        yield _counter(metrics.GATEWAY_REJECTED, {(reason,): n for reason, n in admission.rejected.items()})
        yield _counter(metrics.GATEWAY_RETRIES, {(name,): n for name, n in self._orchestrator.counts.retries.items()})
        replays: dict[tuple[str, ...], int] = {
            (name, str(stage), outcome): n for (name, stage, outcome), n in self._orchestrator.counts.replays.items()
        }
        yield _counter(metrics.GATEWAY_REPLAYS, replays)
        yield _counter(metrics.GATEWAY_RETRIES_REFUSED, {(): self._orchestrator.budget.refused})
        broken: dict[tuple[str, ...], int] = {
            (name, str(stage)): n for (name, stage), n in self._router.sessions_broken.items()
        }
        yield _counter(metrics.GATEWAY_SESSIONS_BROKEN, broken)
        yield from admission_metrics(admission)
        for metric, counts in (
            (metrics.GATEWAY_REPLICAS_HUNG, self._router.replicas_hung),
            (metrics.GATEWAY_ABORTS_UNANSWERED, self._router.aborts_unanswered),
        ):
            yield _counter(metric, {(name, str(stage)): n for (name, stage), n in counts.items()})
        yield from self._edges()
        yield from self._pools()

    def _edges(self) -> Iterable[Metric]:
        inflight, waiting = (
            GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            for metric in (metrics.GATEWAY_EDGE_INFLIGHT, metrics.GATEWAY_EDGE_WAITING)
        )
        for (pipeline, from_stage, to_stage), (holding, queued) in self._orchestrator.edges.counts().items():
            labels = [pipeline, str(from_stage), str(to_stage)]
            inflight.add_metric(labels, holding)
            waiting.add_metric(labels, queued)
        yield inflight
        yield waiting
        paths = self._orchestrator.paths.calls
        calls: dict[tuple[str, ...], int] = {
            (name, str(producer), str(consumer), *path): n for (name, producer, consumer, *path), n in paths.items()
        }
        yield _counter(metrics.GATEWAY_EDGE_PATHS, calls)

    def _pools(self) -> Iterable[Metric]:
        calls: dict[tuple[str, ...], int] = {}
        inflight = GaugeMetricFamily(
            metrics.GATEWAY_STAGE_INFLIGHT.name,
            metrics.GATEWAY_STAGE_INFLIGHT.help,
            labels=metrics.GATEWAY_STAGE_INFLIGHT.labels,
        )
        replicas = GaugeMetricFamily(
            metrics.GATEWAY_REPLICAS.name, metrics.GATEWAY_REPLICAS.help, labels=metrics.GATEWAY_REPLICAS.labels
        )
        for (pipeline, stage_id), pool in self._router.pools.items():
            stage = str(stage_id)
            suspect = sum(slot.view.routable and slot.view.suspect for slot in pool.slots.values())
            replicas.add_metric([pipeline, stage, "routable"], pool.routable - suspect)
            replicas.add_metric([pipeline, stage, "suspect"], suspect)
            replicas.add_metric([pipeline, stage, "unroutable"], len(pool.slots) - pool.routable)
            for (_, _, replica_id), slot in pool.slots.items():
                calls[pipeline, stage, str(replica_id)] = slot.calls
                inflight.add_metric([pipeline, stage, str(replica_id)], slot.inflight)
        yield _counter(metrics.GATEWAY_STAGE_CALLS, calls)
        yield inflight
        yield replicas


def _gauge(metric: metrics.Metric, value: float) -> Metric:
    return GaugeMetricFamily(metric.name, metric.help, value=value)


def _counter(metric: metrics.Metric, values: dict[tuple[str, ...], int]) -> Metric:
    family = CounterMetricFamily(metric.name.removesuffix("_total"), metric.help, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
