"""What is counted when a request ends.

Plain numbers, in place of the client library's counters and histograms: those take a lock for each step, which a
gateway with one event loop does not need and which cost more than the rest of a request's end. What is scraped is the
same.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from omnicore import metrics
from omnicore.metrics import LATENCY_BUCKETS_S

_BOUNDS = [*map(floatToGoString, LATENCY_BUCKETS_S), "+Inf"]


class _Count:
    """A number that grows."""

    __slots__ = ("created_s", "value")

    def __init__(self) -> None:
        self.value = 0
        self.created_s = time.time()


class _Seconds:
    """Durations by the buckets of ``LATENCY_BUCKETS_S``, not cumulated; the last bucket is for what is above all."""

    __slots__ = ("counts", "created_s", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * len(_BOUNDS)
        self.sum_s = 0.0
        self.created_s = time.time()


class _Series:
    """What one kind of request (pipeline and task) moves."""

    __slots__ = ("completion_tokens", "first_output", "outcomes", "prompt_tokens", "seconds")

    def __init__(self, prompt_tokens: _Count, completion_tokens: _Count) -> None:
        self.outcomes: dict[str, _Count] = {}
        self.seconds = _Seconds()
        self.first_output = _Seconds()
        self.prompt_tokens = prompt_tokens
        """Of the pipeline, for all tasks."""
        self.completion_tokens = completion_tokens
        """Likewise."""


class RequestMetrics(Collector):
    """Counters and histograms over requests that ended. Used, and scraped, from one thread."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], _Series] = {}
        self._prompt_tokens: dict[str, _Count] = {}
        self._completion_tokens: dict[str, _Count] = {}

    def ended(
        self,
        pipeline: str,
        task: str,
        outcome: str,
        *,
        seconds: float,
        first_output_s: float | None,
        tokens: tuple[int, int] | None,
    ) -> None:
        """Count one.

        ``seconds`` from admission to the end, ``first_output_s`` to the first output (None: there was none);
        ``tokens`` read and made (None: they do not count).
        """
        series = self._series.get((pipeline, task))
        if series is None:
            series = self._series[pipeline, task] = _Series(
                self._prompt_tokens.setdefault(pipeline, _Count()),
                self._completion_tokens.setdefault(pipeline, _Count()),
            )
        count = series.outcomes.get(outcome)
        if count is None:
            count = series.outcomes[outcome] = _Count()
        count.value += 1
        durations = series.seconds
        durations.counts[bisect.bisect_left(LATENCY_BUCKETS_S, seconds)] += 1
        durations.sum_s += seconds
        if first_output_s is not None:
            durations = series.first_output
            durations.counts[bisect.bisect_left(LATENCY_BUCKETS_S, first_output_s)] += 1
            durations.sum_s += first_output_s
        if tokens is not None:
            series.prompt_tokens.value += tokens[0]
            series.completion_tokens.value += tokens[1]

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry would otherwise collect once to learn the names."""
        return []

    def collect(self) -> Iterable[Metric]:
        """The numbers as they are now."""
        yield _counters(
            metrics.GATEWAY_REQUESTS,
            (
                ((*kind, outcome), count)
                for kind, series in self._series.items()
                for outcome, count in series.outcomes.items()
            ),
        )
        yield _histograms(
            metrics.GATEWAY_REQUEST_SECONDS, ((kind, series.seconds) for kind, series in self._series.items())
        )
        yield _histograms(
            metrics.GATEWAY_FIRST_OUTPUT_SECONDS, ((kind, series.first_output) for kind, series in self._series.items())
        )
        for metric, counts in (
            (metrics.GATEWAY_PROMPT_TOKENS, self._prompt_tokens),
            (metrics.GATEWAY_COMPLETION_TOKENS, self._completion_tokens),
        ):
            yield _counters(metric, (((pipeline,), count) for pipeline, count in counts.items()))


def _counters(metric: metrics.Metric, counts: Iterable[tuple[tuple[str, ...], _Count]]) -> Metric:
    family = CounterMetricFamily(metric.name.removesuffix("_total"), metric.help, labels=metric.labels)
    for labels, count in counts:
        family.add_metric(labels, count.value, created=count.created_s)
    return family


def _histograms(metric: metrics.Metric, of: Iterable[tuple[tuple[str, ...], _Seconds]]) -> Metric:
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, durations in of:
        counts = itertools.accumulate(durations.counts)
        family.add_metric(labels, list(zip(_BOUNDS, counts, strict=True)), durations.sum_s)
        family.add_sample(f"{metric.name}_created", dict(zip(metric.labels, labels, strict=True)), durations.created_s)
    return family
