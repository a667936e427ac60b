"""Every metric that a service exports, declared once; docs/metrics.md explains each, and a test compares the two.

Names are ``omni_<component>_<noun>_<unit>``. A service builds its own objects from these declarations, on a registry of
its own, so that several can live in one process.
"""

from __future__ import annotations

import dataclasses

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# From one engine step on a fast device to a long generation.
LATENCY_BUCKETS_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name as scraped (counters end in _total), what it is, and its labels."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()

    def counter(self, registry: CollectorRegistry) -> Counter:
        """A counter for a service's registry."""
        return Counter(self.name.removesuffix("_total"), self.help, self.labels, registry=registry)

    def gauge(self, registry: CollectorRegistry) -> Gauge:
        """A gauge for a service's registry."""
        return Gauge(self.name, self.help, self.labels, registry=registry)

    def histogram(self, registry: CollectorRegistry) -> Histogram:
        """A histogram of seconds for a service's registry."""
        return Histogram(self.name, self.help, self.labels, registry=registry, buckets=LATENCY_BUCKETS_S)


GATEWAY_REQUESTS = Metric(
    "omni_gateway_requests_total", "counter", "Requests that ended, by outcome.", ("pipeline", "task", "outcome")
)
GATEWAY_REQUEST_SECONDS = Metric(
    "omni_gateway_request_duration_seconds", "histogram", "From admission to the end.", ("pipeline", "task")
)
GATEWAY_FIRST_OUTPUT_SECONDS = Metric(
    "omni_gateway_first_output_seconds", "histogram", "From admission to the first output.", ("pipeline", "task")
)
GATEWAY_INFLIGHT = Metric("omni_gateway_inflight_requests", "gauge", "Requests admitted and not ended.")
GATEWAY_QUEUED = Metric(
    "omni_gateway_queued_requests", "gauge", "Requests waiting for admission, by class.", ("priority",)
)
GATEWAY_QUEUE_WAIT_SECONDS = Metric(
    "omni_gateway_queue_wait_seconds",
    "histogram",
    "From arrival to admission, also of what did not wait.",
    ("priority",),
)
GATEWAY_REJECTED = Metric(
    "omni_gateway_rejected_requests_total", "counter", "Requests not admitted, by reason.", ("reason",)
)
GATEWAY_KEY_ADMITTED = Metric(
    "omni_gateway_key_admitted_requests_total", "counter", "Requests admitted, by API key.", ("key",)
)
GATEWAY_KEY_REJECTED = Metric(
    "omni_gateway_key_rejected_requests_total", "counter", "Requests not admitted, by API key.", ("key", "reason")
)
GATEWAY_KEY_TOKENS = Metric(
    "omni_gateway_key_tokens_total", "counter", "Tokens read and made for requests that ended, by API key.", ("key",)
)
GATEWAY_KEY_ACTIVE = Metric(
    "omni_gateway_key_active_requests", "gauge", "Requests that run or wait, by API key.", ("key",)
)
GATEWAY_PROCESS_UP = Metric(
    "omni_gateway_process_up",
    "gauge",
    "Of several processes: 1 if the series of this one are in this answer, 0 if it is not there or does not answer.",
    ("process",),
)
GATEWAY_TRACE_SPANS = Metric(
    "omni_gateway_trace_spans_total",
    "counter",
    "Spans made for traces, those that the collector has taken, and those of which it has not.",
    ("outcome",),
)
GATEWAY_RETRIES = Metric(
    "omni_gateway_retries_total", "counter", "Attempts begun again before any output.", ("pipeline",)
)
GATEWAY_RETRIES_REFUSED = Metric(
    "omni_gateway_retries_refused_total", "counter", "Retries that the budget over all requests did not allow."
)
GATEWAY_REPLAYS = Metric(
    "omni_gateway_replays_total",
    "counter",
    "Stages that were lost after output had begun, by what became of the request.",
    ("pipeline", "stage", "outcome"),
)
GATEWAY_PROMPT_TOKENS = Metric(
    "omni_gateway_prompt_tokens_total", "counter", "Prompt tokens of finished requests.", ("pipeline",)
)
GATEWAY_COMPLETION_TOKENS = Metric(
    "omni_gateway_completion_tokens_total", "counter", "Tokens made for finished requests.", ("pipeline",)
)
GATEWAY_STAGE_CALLS = Metric(
    "omni_gateway_stage_calls_total",
    "counter",
    "Calls assigned to a replica since it joined.",
    ("pipeline", "stage", "replica"),
)
GATEWAY_STAGE_INFLIGHT = Metric(
    "omni_gateway_stage_inflight_calls",
    "gauge",
    "Calls of this gateway at a replica now.",
    ("pipeline", "stage", "replica"),
)
GATEWAY_REPLICAS = Metric(
    "omni_gateway_replicas", "gauge", "Replicas of a stage, as this gateway sees them.", ("pipeline", "stage", "state")
)
GATEWAY_SESSIONS_BROKEN = Metric(
    "omni_gateway_sessions_broken_total", "counter", "Sessions to replicas that broke.", ("pipeline", "stage")
)
GATEWAY_REPLICAS_HUNG = Metric(
    "omni_gateway_replicas_hung_total", "counter", "Replicas that were silent for too long.", ("pipeline", "stage")
)
GATEWAY_ABORTS_UNANSWERED = Metric(
    "omni_gateway_aborts_unanswered_total",
    "counter",
    "Aborted calls whose end the replica did not tell in time.",
    ("pipeline", "stage"),
)
GATEWAY_BINDINGS = Metric("omni_gateway_bindings", "gauge", "Requests bound to replicas, over all stages.")
GATEWAY_EDGE_INFLIGHT = Metric(
    "omni_gateway_edge_inflight_requests",
    "gauge",
    "Requests of this gateway that use an edge with max_inflight.",
    ("pipeline", "from_stage", "to_stage"),
)
GATEWAY_EDGE_WAITING = Metric(
    "omni_gateway_edge_waiting_requests",
    "gauge",
    "Requests of this gateway that wait for their turn at such an edge.",
    ("pipeline", "from_stage", "to_stage"),
)
GATEWAY_EDGE_PATHS = Metric(
    "omni_gateway_edge_paths_total",
    "counter",
    'Calls dispatched over an edge whose connector is "auto", by the path that was chosen.',
    ("pipeline", "from_stage", "to_stage", "connector", "backend"),
)
GATEWAY_CONTROL_PLANE_UP = Metric(
    "omni_gateway_control_plane_connected", "gauge", "1 while both watches have a control plane."
)
GATEWAY_TABLE_REVISION = Metric(
    "omni_gateway_table_revision", "gauge", "Store revision up to which replicas are known."
)

_PATH = ("pipeline", "from_stage", "to_stage", "connector", "backend")
TRANSFER_SIZE_BYTES = Metric("omni_transfer_size_bytes", "histogram", "Bytes of a chunk, at its producer.", _PATH)
TRANSFER_TX_SECONDS = Metric("omni_transfer_tx_seconds", "histogram", "Publishing a chunk: put.", _PATH)
TRANSFER_RX_SECONDS = Metric("omni_transfer_rx_seconds", "histogram", "Reading a chunk: get and decode.", _PATH)
TRANSFER_IN_FLIGHT_SECONDS = Metric(
    "omni_transfer_in_flight_seconds", "histogram", "From a chunk's publication to its last release.", _PATH
)
TRANSFER_WAIT_SECONDS = Metric(
    "omni_transfer_wait_seconds", "histogram", "How long a consumer that was ready waited for a chunk.", _PATH
)
TRANSFER_PHASE_SECONDS = Metric(
    "omni_transfer_read_phase_seconds",
    "histogram",
    "Parts of reading a chunk that is not inline.",
    ("connector", "phase"),
)
TRANSFER_FAILURES = Metric(
    "omni_transfer_failures_total",
    "counter",
    "Flows that ended because their consumer could not read on.",
    ("pipeline", "from_stage", "to_stage", "reason"),
)
TRANSFER_POOL_BYTES = Metric("omni_transfer_pool_bytes", "gauge", "Room for published data.", ("connector",))
TRANSFER_POOL_FREE_BYTES = Metric("omni_transfer_pool_free_bytes", "gauge", "Room that is not taken.", ("connector",))
TRANSFER_HANDLES = Metric("omni_transfer_handles", "gauge", "Handles published and not yet freed.", ("connector",))
TRANSFER_QUARANTINED_BYTES = Metric(
    "omni_transfer_quarantined_bytes", "gauge", "Memory that a failed read may still write to.", ("connector",)
)
TRANSFER_LEAKED = Metric(
    "omni_transfer_leaked_buffers", "gauge", "Buffers whose holder has gone without giving them back.", ("connector",)
)
TRANSFER_RETAINED_BYTES = Metric(
    "omni_transfer_retained_bytes", "gauge", "What is kept of what consumers have read, in case one of them is lost."
)
TRANSFER_RETAINED_DROPPED = Metric(
    "omni_transfer_retained_dropped_total",
    "counter",
    "Requests that gave up what was retained for them.",
    ("cause",),
)
TRANSFER_FLOWS = Metric("omni_transfer_flows", "gauge", "Flows out of this worker that are not over.")

ALL: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
