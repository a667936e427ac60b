"""Metrics are declared once and documented, and those that we count ourselves read as the client library's."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from gateway.request_metrics import RequestMetrics
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


def _scraped(registry: CollectorRegistry) -> set[str]:
    """The lines of a scrape, without the times at which series began."""
    return {
        re.sub(r"^(\S+_created(?:{.*})?) \S+$", r"\1", line) for line in generate_latest(registry).decode().splitlines()
    }


def test_ended_requests_read_as_from_the_client_library() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    ended = RequestMetrics()
    ours.register(ended)
    requests = metrics.GATEWAY_REQUESTS.counter(theirs)
    seconds = metrics.GATEWAY_REQUEST_SECONDS.histogram(theirs)
    first_output = metrics.GATEWAY_FIRST_OUTPUT_SECONDS.histogram(theirs)
    prompt_tokens = metrics.GATEWAY_PROMPT_TOKENS.counter(theirs)
    completion_tokens = metrics.GATEWAY_COMPLETION_TOKENS.counter(theirs)
    assert _scraped(ours) == _scraped(theirs), "of what there is none yet"

    bounds = metrics.LATENCY_BUCKETS_S
    durations = [0.0, *bounds, *(bound * 1.01 for bound in bounds), 1e6]
    for number, duration in enumerate(durations):
        pipeline, task = ("a", 'b "quoted"\n')[number % 2], ("chat", "speech")[number % 3 % 2]
        outcome = ("finished", "cancelled", "unavailable", "finished")[number % 4]
        first_s = duration / 2 if number % 3 else None
        tokens = (number, 3 * number) if outcome == "finished" else None
        ended.ended(pipeline, task, outcome, seconds=duration, first_output_s=first_s, tokens=tokens)
        requests.labels(pipeline, task, outcome).inc()
        seconds.labels(pipeline, task).observe(duration)
        of_first = first_output.labels(pipeline, task)
        if first_s is not None:
            of_first.observe(first_s)
        for counter, more in zip((prompt_tokens, completion_tokens), tokens or (0, 0), strict=True):
            counter.labels(pipeline).inc(more)
        assert _scraped(ours) == _scraped(theirs)
