"""The cheapest client that still is one: gRPC's wire format by hand, one TCP connection a replica, as workers have.

A fleet of 10,000 on the machine that is measured must cost next to nothing: a ``grpc.aio`` client takes more CPU per
beat than the server. What arrives at the server is the same: an HTTP/2 connection with a Register call, then a
Heartbeat stream with one DATA frame a beat. Left out is what a replica of a benchmark can do without: flow control
(windows are opened wide), header decoding (only errors are in them), and failing over.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
import time
import uuid
from collections.abc import Callable
from typing import Final, cast

from omni.v1 import registry_service_pb2 as pb
from omni.v1 import types_pb2
from omnicore.durations import to_seconds

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 0x1, 0x1, 0x4
_WIDE: Final = 2**31 - 1
_REGISTER_STREAM, _BEAT_STREAM = 1, 3
_SERVICE: Final = "/omni.v1.RegistryService/"
# Field 5 of HeartbeatRequest (load), length-delimited; what precedes it is the same in every beat.
_LOAD_TAG: Final = bytes([5 << 3 | 2])


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _text(value: str) -> bytes:
    raw = value.encode()
    assert len(raw) < 127, "longer strings need another length encoding"
    return bytes([len(raw)]) + raw


def _headers(stream: int, method: str) -> bytes:
    # HPACK, static table and literals only: POST, http, :path, :authority, content-type, te.
    block = b"\x83\x86\x04" + _text(_SERVICE + method) + b"\x01" + _text("localhost")
    block += b"\x0f\x10" + _text("application/grpc") + b"\x00" + _text("te") + _text("trailers")
    return _frame(_HEADERS, _END_HEADERS, stream, block)


def _data(stream: int, message: bytes, flags: int = 0) -> bytes:
    return _frame(_DATA, flags, stream, b"\0" + struct.pack(">I", len(message)) + message)


_HELLO: Final = (
    _PREFACE
    + _frame(_SETTINGS, 0, 0, struct.pack(">HI", 0x4, _WIDE))
    + _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _WIDE - 65_535))
)


class WireReplica(asyncio.Protocol):
    """One replica: registers when connected, then beats as it is told until closed. The load of each beat differs from
    the last one's, which is the most work a fleet can make."""

    def __init__(self, request: pb.RegisterRequest, registered: Callable[[WireReplica], None]) -> None:
        self.request = request
        self.claim = pb.RegisterResponse()
        self.asked_s = 0.0
        """When Register was sent, monotonic."""
        self.beats = 0
        self.directives: set[int] = set()
        self.fault = ""
        self._registered = registered
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._beat_head = b""
        self._interval_s = 0.0
        self._loads = itertools.count(1)

    def close(self) -> None:
        """Leave without a word."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register at once."""
        self._transport = cast(asyncio.Transport, transport)
        self.asked_s = time.monotonic()
        self._transport.write(
            _HELLO
            + _headers(_REGISTER_STREAM, "Register")
            + _data(_REGISTER_STREAM, self.request.SerializeToString(), _END_STREAM)
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """The server ended it, or ``close`` did."""
        if self._transport is not None:
            self._fail(f"connection lost: {exc}")

    def data_received(self, data: bytes) -> None:
        """Take complete frames."""
        buffer = self._buffer + data if self._buffer else data
        at = 0
        while len(buffer) - at >= 9:
            size = int.from_bytes(buffer[at : at + 3], "big")
            end = at + 9 + size
            if end > len(buffer):
                break
            stream = int.from_bytes(buffer[at + 5 : at + 9], "big")
            self._take(buffer[at + 3], buffer[at + 4], stream, buffer[at + 9 : end])
            at = end
        self._buffer = buffer[at:]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _DATA and len(payload) >= 5:
            # The server sends its small messages in one frame each.
            if stream == _BEAT_STREAM:
                self._answered(pb.HeartbeatResponse.FromString(payload[5:]))
            else:
                self.claim = pb.RegisterResponse.FromString(payload[5:])
                self._start_beating()
        elif kind == _SETTINGS and not flags & _ACK:
            self._send(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._send(_frame(_PING, _ACK, 0, payload))
        elif kind == _HEADERS and flags & _END_STREAM:
            if stream == _BEAT_STREAM or not self.claim.HasField("replica"):
                self._fail(f"call ended: {payload!r}")
        elif kind in (_RST_STREAM, _GOAWAY):
            self._fail(f"frame {kind}: {payload!r}")

    def _start_beating(self) -> None:
        self._beat_head = pb.HeartbeatRequest(
            replica=self.claim.replica,
            lease_id=self.claim.lease_id,
            instance_uuid=self.request.instance_uuid,
            state=types_pb2.REPLICA_STATE_READY,
        ).SerializeToString()
        self._interval_s = to_seconds(self.claim.heartbeat_interval)
        self._registered(self)
        self._send(_headers(_BEAT_STREAM, "Heartbeat"))
        self._beat()

    def _beat(self) -> None:
        if self._transport is None:
            return
        count = next(self._loads)
        load = types_pb2.LoadReport(queue_length=count % 100 + 1, running=count % 7, kv_usage_ratio=count % 13 / 13)
        raw = load.SerializeToString()
        self._send(_data(_BEAT_STREAM, self._beat_head + _LOAD_TAG + bytes([len(raw)]) + raw))

    def _answered(self, response: pb.HeartbeatResponse) -> None:
        self.beats += 1
        self.directives.add(response.directive)
        if response.HasField("next_interval"):
            self._interval_s = to_seconds(response.next_interval)
        asyncio.get_running_loop().call_later(self._interval_s, self._beat)

    def _send(self, frames: bytes) -> None:
        if self._transport is not None:
            self._transport.write(frames)

    def _fail(self, why: str) -> None:
        self.fault = self.fault or why
        self.close()


def registration(pipeline: str, config_sha256: str, endpoint: str, protocol_version: str) -> pb.RegisterRequest:
    """A READY replica of stage 0 of ``pipeline``."""
    return pb.RegisterRequest(
        instance_uuid=str(uuid.uuid4()),
        stage=types_pb2.StageRef(pipeline=pipeline, stage_id=0),
        endpoint=endpoint,
        fingerprint=types_pb2.StageFingerprint(
            config_sha256=config_sha256, tensor_parallel_size=1, protocol_version=protocol_version
        ),
        connectors=[
            types_pb2.ConnectorOffer(name="shm", healthy=True),
            types_pb2.ConnectorOffer(name="grpc", address=endpoint, healthy=True),
        ],
        placement=types_pb2.Placement(host="bench", boot_id=str(uuid.UUID(int=1)), devices=["0"]),
        state=types_pb2.REPLICA_STATE_READY,
        engine="sim",
    )
