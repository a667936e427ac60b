"""Seconds and ``google.protobuf.Duration``."""

from __future__ import annotations

from google.protobuf import duration_pb2


def to_duration(seconds: float) -> duration_pb2.Duration:
    """``seconds``, cut to whole nanoseconds."""
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


def to_seconds(duration: duration_pb2.Duration) -> float:
    """``duration`` in seconds; 0 for one that is not set."""
    return duration.seconds + duration.nanos / 1e9
