"""Metrics are declared once and documented."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from omnicore import metrics

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_every_metric_is_documented_with_its_type_and_labels() -> None:
    rows = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `omni_"):
            name, kind, labels = (cell.strip() for cell in line.split("|")[1:4])
            rows[name.strip("`")] = (kind, tuple(re.findall(r"`(\w+)`", labels)))
    assert rows == {metric.name: (metric.kind, metric.labels) for metric in metrics.ALL}


def test_names_follow_the_rule() -> None:
    for metric in metrics.ALL:
        assert re.fullmatch(r"omni_[a-z]+_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")


def test_declarations_make_metrics_of_their_own_registry() -> None:
    first, second = CollectorRegistry(), CollectorRegistry()
    for registry in (first, second):
        metrics.GATEWAY_REQUESTS.counter(registry).labels("p", "chat", "finished").inc()
        metrics.GATEWAY_INFLIGHT.gauge(registry).set(3)
        metrics.GATEWAY_REQUEST_SECONDS.histogram(registry).labels("p", "chat").observe(0.2)
        labels = {"pipeline": "p", "task": "chat", "outcome": "finished"}
        assert registry.get_sample_value("omni_gateway_requests_total", labels) == 1
