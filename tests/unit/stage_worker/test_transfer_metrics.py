"""What a worker counts of its data plane."""

from __future__ import annotations

import asyncio
import contextlib

from prometheus_client.parser import text_string_to_metric_families

from connectors.publish import Usage
from connectors.times import ReadTimes
from omni.v1 import transfer_pb2
from omnicore import metrics
from omnicore.clock import ManualClock
from omnicore.metrics_http import MetricsServer
from stage_worker.retention import CAUSES, Retention
from stage_worker.transfer_metrics import TransferMetrics

EDGE = transfer_pb2.EdgeRef(request_id="r", from_stage=0, to_stage=1)
LABELS = {"pipeline": "speech", "from_stage": "0", "to_stage": "1", "connector": "shm", "backend": "shm"}


class Kept:
    """Who retains data, of a request of its own."""

    def __init__(self, keeper: Retention, size_bytes: int) -> None:
        self.request_id = f"r{size_bytes}"
        keeper.add(self, transfer_pb2.TransferHandle(size_bytes=size_bytes))

    def drop_retained(self) -> None:
        """Counted by its keeper."""


def counted() -> TransferMetrics:
    keeper = Retention(ManualClock(), limit_bytes=100_000)
    Kept(keeper, 10_000)
    Kept(keeper, 1_000_000)
    made = TransferMetrics("speech", lambda: {"shm": Usage(1000, 400, 2), "grpc": Usage(10, 10, 0)}, lambda: 3, keeper)
    path = made.path(0, 1, "shm", "shm")
    for size in (100, 70_000, 440_000_000, 10**12):
        path.size.observe(size)
    path.tx.observe(0.002)
    path.rx.observe(1e-5)
    path.wait.observe(0.0)
    handle = transfer_pb2.TransferHandle(edge=EDGE)
    handle.shm.SetInParent()
    made.freed(handle, "shm", 4.0)
    made.read(ReadTimes(query=0.0, alloc=0.001, read=0.02, sync=0.003, connector="shm"), 0.025)
    made.failed(EDGE, "CHUNK_TIMEOUT")
    return made


def test_all_five_histograms_of_an_edge_are_exported() -> None:
    registry = counted().registry
    for name, total in (("size_bytes", 4), ("tx_seconds", 1), ("rx_seconds", 1), ("in_flight_seconds", 1),
                        ("wait_seconds", 1)):  # fmt: skip
        assert registry.get_sample_value(f"omni_transfer_{name}_count", LABELS) == total, name
    size = "omni_transfer_size_bytes"
    assert registry.get_sample_value(f"{size}_sum", LABELS) == 100 + 70_000 + 440_000_000 + 10**12
    assert registry.get_sample_value(f"{size}_bucket", {**LABELS, "le": str(4.0**4)}) == 1
    assert registry.get_sample_value(f"{size}_bucket", {**LABELS, "le": str(4.0**15)}) == 3
    assert registry.get_sample_value(f"{size}_bucket", {**LABELS, "le": "+Inf"}) == 4


def test_parts_of_a_read_are_never_more_than_the_whole() -> None:
    registry = counted().registry
    sums = {
        phase: registry.get_sample_value("omni_transfer_read_phase_seconds_sum", {"connector": "shm", "phase": phase})
        for phase in ("query", "alloc", "read", "sync", "total")
    }
    assert sums == {"query": 0.0, "alloc": 0.001, "read": 0.02, "sync": 0.003, "total": 0.025}


def test_pools_flows_and_failures() -> None:
    registry = counted().registry
    for name, shm, grpc in (("pool_bytes", 1000, 10), ("pool_free_bytes", 400, 10), ("handles", 2, 0),
                            ("quarantined_bytes", 0, 0), ("leaked_buffers", 0, 0)):  # fmt: skip
        assert registry.get_sample_value(f"omni_transfer_{name}", {"connector": "shm"}) == shm
        assert registry.get_sample_value(f"omni_transfer_{name}", {"connector": "grpc"}) == grpc
    assert registry.get_sample_value("omni_transfer_flows") == 3
    failed = {"pipeline": "speech", "from_stage": "0", "to_stage": "1", "reason": "chunk_timeout"}
    assert registry.get_sample_value("omni_transfer_failures_total", failed) == 1


def test_what_is_retained() -> None:
    registry = counted().registry
    assert registry.get_sample_value("omni_transfer_retained_bytes") == 0
    dropped = {c: registry.get_sample_value("omni_transfer_retained_dropped_total", {"cause": c}) for c in CAUSES}
    assert dropped == {"limit": 2, "pool": 0, "age": 0}


def test_what_is_exported_is_what_is_declared() -> None:
    families = {family.name for family in text_string_to_metric_families(counted().scrape().decode())}
    declared = {m.name.removesuffix("_total") for m in metrics.ALL if m.name.startswith("omni_transfer_")}
    assert families == declared


async def test_metrics_over_http() -> None:
    server = MetricsServer(lambda: b"omni_x 1\n")
    port = await server.start("127.0.0.1", 0)

    async def ask(request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer

    try:
        good = await ask(b"GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\n\r\n")
        assert good.startswith(b"HTTP/1.1 200 OK\r\n")
        assert good.endswith(b"\r\n\r\nomni_x 1\n")
        assert (await ask(b"HEAD /metrics HTTP/1.1\r\n\r\n")).endswith(b"\r\n\r\n")
        assert (await ask(b"POST /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 405")
        assert (await ask(b"GET / HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404")
        with contextlib.suppress(ConnectionError):  # too long to be a request: closed, perhaps before all of it came
            assert await ask(b"x" * 40_000) == b""
        assert (await ask(b"GET /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200"), "it goes on"
    finally:
        await server.close()
