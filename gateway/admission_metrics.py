"""The metrics of admission, read from its tables when they are scraped."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from gateway.admission import WAIT_BUCKETS_S, Admission
from omnicore import metrics
from omnicore.api_keys import Priority


def admission_metrics(admission: Admission) -> Iterable[Metric]:
    """The queue, and what each key used."""
    queued = GaugeMetricFamily(
        metrics.GATEWAY_QUEUED.name, metrics.GATEWAY_QUEUED.help, labels=metrics.GATEWAY_QUEUED.labels
    )
    wait = HistogramMetricFamily(
        metrics.GATEWAY_QUEUE_WAIT_SECONDS.name,
        metrics.GATEWAY_QUEUE_WAIT_SECONDS.help,
        labels=metrics.GATEWAY_QUEUE_WAIT_SECONDS.labels,
    )
    bounds = [*map(str, WAIT_BUCKETS_S), "+Inf"]
    for priority in Priority:
        queued.add_metric([priority.label], admission.queued_of(priority))
        waits = admission.waits[priority]
        counts = [waits.counts[0] + waits.at_once, *waits.counts[1:]]
        wait.add_metric([priority.label], list(zip(bounds, itertools.accumulate(counts), strict=True)), waits.sum_s)
    yield queued
    yield wait
    yield from _keys(admission)


def _keys(admission: Admission) -> Iterable[Metric]:
    admitted: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    active: Counter[str] = Counter()
    rejected: Counter[tuple[str, str]] = Counter()
    for label, account in admission.accounts.labelled():
        admitted[label] += account.admitted
        tokens[label] += account.tokens_used
        active[label] += account.active
        for reason, count in account.rejected.items():
            rejected[label, reason] += count
    for metric, values in ((metrics.GATEWAY_KEY_ADMITTED, admitted), (metrics.GATEWAY_KEY_TOKENS, tokens)):
        family = CounterMetricFamily(metric.name.removesuffix("_total"), metric.help, labels=metric.labels)
        for label, value in values.items():
            family.add_metric([label], value)
        yield family
    refused = CounterMetricFamily(
        metrics.GATEWAY_KEY_REJECTED.name.removesuffix("_total"),
        metrics.GATEWAY_KEY_REJECTED.help,
        labels=metrics.GATEWAY_KEY_REJECTED.labels,
    )
    for labels, value in rejected.items():
        refused.add_metric(list(labels), value)
    yield refused
    gauge = GaugeMetricFamily(
        metrics.GATEWAY_KEY_ACTIVE.name, metrics.GATEWAY_KEY_ACTIVE.help, labels=metrics.GATEWAY_KEY_ACTIVE.labels
    )
    for label, value in active.items():
        gauge.add_metric([label], value)
    yield gauge
