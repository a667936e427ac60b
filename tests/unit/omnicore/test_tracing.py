"""Trace contexts, sampling, and export to a real receiver."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import TraceState

from omnicore.trace_config import collector as collector_address
from omnicore.trace_config import share
from omnicore.trace_export import SpanExport
from omnicore.tracing import Sampler, Span, SpanEvent, TraceContext
from tests.support.collectors import Collector
from tests.support.collectors import collector as collector  # a fixture

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_a_context_is_read_as_it_is_written(trace_id: int, span_id: int, sampled: bool) -> None:
    context = TraceContext(trace_id, span_id, sampled)
    assert len(context.traceparent) == 55
    assert TraceContext.parse(context.traceparent) == context


@given(st.text() | st.text("0123456789abcdefABCDEF-", min_size=50, max_size=60))
def test_whatever_comes_is_a_context_that_is_written_the_same_or_none(text: str) -> None:
    context = TraceContext.parse(text)
    if context is not None and text.startswith("00"):
        assert context.traceparent[:53] == text[:53]


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        CALLER[:-1],
        CALLER + "-",
        CALLER + "\n",
        CALLER.upper(),
        CALLER.replace("00-4", "ff-4"),
        "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01",
        CALLER.replace("-", "_"),
        "٠٠" + CALLER[2:],
    ],
)
def test_what_is_no_context_is_none(wrong: str) -> None:
    assert TraceContext.parse(wrong) is None


def test_later_versions_may_have_more() -> None:
    context = TraceContext.parse("01" + CALLER[2:] + "-more", "a=1")
    assert context is not None
    assert (context.traceparent, context.state) == (CALLER, "a=1")
    assert TraceContext.parse(CALLER, "a=" + "1" * 600) == TraceContext.parse(CALLER)


@given(st.text("ab1@=, \t", max_size=12) | st.text() | st.lists(st.integers(0, 40)).map(lambda keys: _members(*keys)))
def test_of_what_other_systems_say_nothing_is_passed_on_that_the_library_complains_of(said: str) -> None:
    context = TraceContext.parse(CALLER, said)
    assert context is not None
    assert context.state in (said, "")
    complaints: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        complaints.append(record.getMessage())
        return False

    library = logging.getLogger("opentelemetry.trace.span")
    library.addFilter(note)
    try:
        TraceState.from_header([context.state])
        assert not complaints
        if not context.state and len(said) <= 512 and TraceState.from_header([said]):
            assert complaints, "and nothing is dropped that it takes"
    finally:
        library.removeFilter(note)


def _members(*keys: int) -> str:
    return " ,\t".join(f"k{key}={key};x" for key in keys)


def test_a_caller_decides_for_its_request() -> None:
    assert Sampler(1.0).begin(CALLER[:-1] + "0") is None
    begun = Sampler(0.0).begin(CALLER, "a=1")
    assert begun is not None
    context, parent_id = begun
    assert f"{context.trace_id:032x}" == CALLER[3:35]
    assert f"{parent_id:016x}" == CALLER[36:52]
    assert context.span_id != parent_id
    assert context.state == "a=1"


def test_without_a_caller_that_decides_a_share_is_traced() -> None:
    draw = random.Random(1).random
    begun = [Sampler(0.25, draw).begin("nonsense" if n % 2 else "") for n in range(4000)]
    traced = [context for context in begun if context is not None]
    assert 850 < len(traced) < 1150
    assert len({context.trace_id for context, _ in traced}) == len(traced)
    assert {parent_id for _, parent_id in traced} == {0}
    assert all(Sampler(1.0, draw).begin("") for _ in range(100))
    assert not any(Sampler(0.0, draw).begin("") for _ in range(100))


@pytest.mark.parametrize(
    "wrong",
    ["localhost:4317", "http://", "http://host", "http://host:x", "grpc://host:1", "http://h:1/v1", "http://u@h:1"],
)
def test_wrong_collectors_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"must be http://host:port or https://host:port .*got"):
        collector_address(wrong)


def test_right_values_are_accepted() -> None:
    for address in ("", "http://127.0.0.1:4317", "https://[::1]:4317", "https://collector.example:443"):
        collector_address(address)
    share(0.0)
    share(1.0)
    with pytest.raises(ValueError, match=r"must be a share from 0 to 1, got 1\.5"):
        share(1.5)
    with pytest.raises(ValueError, match="must be a share"):
        share(float("nan"))


async def test_spans_arrive_as_they_were_made(collector: Collector) -> None:
    export = SpanExport(collector.address, "a service", instance="one", attributes={"omni.stage": 2})
    context = TraceContext(2**127 + 1, 2**63 + 1, True, "a=1,b=2")
    events = [SpanEvent("something", 1000.5, {"omni.detail": "so"})]
    export.add([Span("first", context, 0, 1000.0, 1001.0, "server", {"number": 1, "yes": True}, events)])
    export.add([Span("second", context.child(5), context.span_id, 1000.0, 999.0, error="it broke")])
    await export.close()
    assert export.counts() == {"made": 2, "exported": 2, "failed": 0}
    first, second = sorted(collector.spans, key=lambda span: span.name)
    assert first.trace_id == second.trace_id == f"{2**127 + 1:032x}"
    assert (first.span_id, first.parent_id) == (f"{2**63 + 1:016x}", "")
    assert (second.span_id, second.parent_id) == (f"{5:016x}", first.span_id)
    assert (first.kind, second.kind) == ("server", "internal")
    assert first.attributes == {"number": 1, "yes": True}
    assert first.events == [("something", {"omni.detail": "so"})]
    assert (first.begin_ns, first.end_ns) == (1000 * 10**9, 1001 * 10**9)
    assert second.begin_ns == second.end_ns
    assert (first.error, second.error) == ("", "it broke")
    assert second.trace_state == "a=1,b=2"
    assert first.resource["service.name"] == "a service"
    assert (first.resource["service.instance.id"], first.resource["omni.stage"]) == ("one", 2)
    export.add([Span("late", context, 0, 1.0, 2.0)])
    await export.close()


async def test_a_collector_that_is_away_costs_spans_only(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as bound:  # nobody listens there, and nobody else gets the port
        bound.bind(("127.0.0.1", 0))
        export = SpanExport(f"http://127.0.0.1:{bound.getsockname()[1]}", "a service", instance="one")
        export.add([Span("lost", TraceContext.new(), 0, 1.0, 2.0)])
        await export.close(timeout_s=0.2)
    assert export.counts()["exported"] == 0
    assert [record.getMessage() for record in caplog.records if record.name.startswith("opentelemetry")] == []
    assert "not all spans have left" in caplog.text


async def test_spans_that_are_refused_are_counted_and_told(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.refuses = True
    export = SpanExport(collector.address, "a service", instance="one")
    export.add([Span("refused", TraceContext.new(), 0, 1.0, 2.0)] * 1100)
    await export.close(timeout_s=30.0)
    assert export.counts() == {"made": 1100, "exported": 0, "failed": 1100}
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    # What an earlier test gave up may be told only now.
    told = [record for record in warnings if vars(record)["fields"].get("endpoint") == collector.address]
    assert [record.getMessage() for record in told] == ["spans are lost"]  # of three batches
    assert "not today" in vars(told[0])["fields"]["reason"]


async def test_without_a_collector_nothing_is_loaded_for_it() -> None:
    told = "import sys, gateway.app, stage_worker.app; print([n for n in sys.modules if n.startswith('opentelemetry')])"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", told, stdout=asyncio.subprocess.PIPE)
    assert (await process.communicate())[0].decode().strip() == "[]"
