"""Edges of requests as keys, and by name."""

from __future__ import annotations

from omni.v1 import transfer_pb2

FlowKey = tuple[str, int, int, int]
ReaderKey = tuple[str, int, int, int, int]


def flow_key(edge: transfer_pb2.EdgeRef) -> FlowKey:
    """An edge reference as a dictionary key."""
    return edge.request_id, edge.attempt, edge.from_stage, edge.to_stage


def reader_key(edge: transfer_pb2.EdgeRef) -> ReaderKey:
    """As ``flow_key``, with the attempt that reads: a worker may hold two readers of one flow, one of them ending."""
    return edge.request_id, edge.attempt, edge.from_stage, edge.to_stage, edge.reader_attempt


def reading_attempt(edge: transfer_pb2.EdgeRef) -> int:
    """The attempt that reads, which may be a later one than the producer's."""
    return edge.reader_attempt or edge.attempt


def edge_name(edge: transfer_pb2.EdgeRef) -> str:
    """ "0→1"."""
    return f"{edge.from_stage}→{edge.to_stage}"


def flow_name(edge: transfer_pb2.EdgeRef) -> str:
    """The flow of one request, for people."""
    return f"{edge_name(edge)} of {edge.request_id} (attempt {edge.attempt})"
