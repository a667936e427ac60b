"""Traces: contexts as W3C writes them, the decision whether a request is traced, and spans.

A span is made when what it tells of is over, from times that were noted on the way: what is not traced pays for one
comparison. Where spans go is ``trace_export``'s concern; a ``SpanSink`` takes them and never fails.
"""

from __future__ import annotations

import dataclasses
import random
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

AttributeValue = str | int | float | bool
Kind = Literal["server", "client", "internal"]

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_LONGEST_TRACESTATE = 512
"""Of which W3C wants at least so much passed on; what is longer is not."""
_MOST_MEMBERS = 32
"""Of a tracestate, and what each of them is: as W3C Trace Context has it."""
_MEMBER = re.compile(
    r"([a-z][_0-9a-z*/-]{0,255}|[a-z0-9][_0-9a-z*/-]{0,240}@[a-z][_0-9a-z*/-]{0,13})"
    r"=[ -+\--<>-~]{0,255}[!-+\--<>-~]"
)
_SAMPLED = 0x01


@dataclasses.dataclass(frozen=True, slots=True)
class TraceContext:
    """Which span of which trace: what travels from service to service."""

    trace_id: int
    """128 bits, never 0."""
    span_id: int
    """64 bits, never 0."""
    sampled: bool = True
    state: str = ""
    """Of other tracing systems, as it came (``tracestate``); empty if W3C does not allow it."""

    @classmethod
    def parse(cls, traceparent: str, tracestate: str = "") -> TraceContext | None:
        """The context that both headers tell; None for what is not one, by the rules of W3C Trace Context: lower-case
        hexadecimal, no id of zeros, version ff never, more fields only after version 00."""
        found = _TRACEPARENT.fullmatch(traceparent)
        if found is None:
            return None
        version, trace_id, span_id, flags, more = found.groups()
        if version == "ff" or (version == "00" and more is not None):
            return None
        context = cls(
            int(trace_id, 16),
            int(span_id, 16),
            bool(int(flags, 16) & _SAMPLED),
            tracestate if _is_state(tracestate) else "",
        )
        return context if context.trace_id and context.span_id else None

    @classmethod
    def new(cls) -> TraceContext:
        """The first span of a new trace that is sampled."""
        return cls(_fresh(128), _fresh(64))

    def child(self, span_id: int = 0) -> TraceContext:
        """Another span of the same trace, with a new id unless one is given."""
        return dataclasses.replace(self, span_id=span_id or _fresh(64))

    @property
    def traceparent(self) -> str:
        """As it travels."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


class Sampler:
    """Which requests are traced: as their caller decided, else ``share`` of them (0 to 1)."""

    def __init__(self, share: float, draw: Callable[[], float] = random.random) -> None:
        """``draw`` gives numbers from 0 up to, but not, 1."""
        self._share = share
        self._draw = draw

    def begin(self, traceparent: str, tracestate: str = "") -> tuple[TraceContext, int] | None:
        """Context of the request's own span, and the id of its parent (0: it has none); None: it is not traced."""
        if traceparent and (parent := TraceContext.parse(traceparent, tracestate)) is not None:
            return (parent.child(), parent.span_id) if parent.sampled else None
        return (TraceContext.new(), 0) if self._draw() < self._share else None


@dataclasses.dataclass(slots=True)
class SpanEvent:
    """Something that happened at a moment of a span."""

    name: str
    time_s: float
    """Wall time, since the epoch; as all times here."""
    attributes: Mapping[str, AttributeValue] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class Span:
    """One thing that took time."""

    name: str
    context: TraceContext
    parent_id: int
    """0: it is the first of its trace."""
    begin_s: float
    end_s: float
    kind: Kind = "internal"
    attributes: dict[str, AttributeValue] = dataclasses.field(default_factory=dict)
    events: list[SpanEvent] = dataclasses.field(default_factory=list)
    error: str = ""
    """Why it failed; empty: it did not."""


class SpanSink(Protocol):
    """Where spans go."""

    def add(self, spans: Sequence[Span]) -> None:
        """Take spans that are over. Neither waits nor fails."""
        ...


def _is_state(tracestate: str) -> bool:
    """OpenTelemetry would write a line of log for each span of one that is not."""
    if len(tracestate) > _LONGEST_TRACESTATE:
        return False
    members = [member for part in tracestate.split(",") if (member := part.strip(" \t"))]
    return len(members) <= _MOST_MEMBERS and all(map(_MEMBER.fullmatch, members))


def _fresh(bits: int) -> int:
    return secrets.randbits(bits) or 1
