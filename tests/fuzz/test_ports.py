"""Raw bytes at every port: the connection ends or is answered, nothing is kept of it, and memory does not grow."""

from __future__ import annotations

import random
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.conftest import Targets
from tests.fuzz.messages import fuzz

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
PORTS = ("control plane", "worker", "worker sessions", "gateway", "gateway http")
HEADS = (
    b"",
    PREFACE,
    PREFACE + SETTINGS,
    b"GET / HTTP/1.1\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999999999\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nffffffffff\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS handshake
)


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """One HTTP/2 frame, whose length may be a lie."""
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


FRAMES = st.builds(
    frame,
    st.integers(0, 12),
    st.integers(0, 255),
    st.one_of(st.integers(0, 5), st.integers(0, (1 << 32) - 1)),
    st.binary(max_size=60),
    st.one_of(st.none(), st.integers(0, (1 << 24) - 1)),
)
SENT = st.tuples(
    st.sampled_from(HEADS), st.one_of(st.binary(max_size=300), st.lists(FRAMES, max_size=6).map(b"".join))
).map(b"".join)


def throw(address: str, data: bytes) -> None:
    """Send it, say that there is no more, and wait for the other end to hang up."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
        except TimeoutError:
            pytest.fail(f"{address} keeps a connection after {data[:200]!r}")
        except OSError:
            pass  # a reset is a hang-up, too


@pytest.mark.parametrize("port", PORTS)
def test_any_bytes_end_in_a_hang_up(targets: Targets, port: str) -> None:
    address = targets.addresses[port]

    @fuzz(80)
    @given(SENT)
    def check(data: bytes) -> None:
        throw(address, data)

    check()


def test_memory_does_not_grow(targets: Targets) -> None:
    def round_of(seed: int) -> None:
        rng = random.Random(seed)
        for number in range(150):
            for address in targets.addresses.values():
                body = rng.randbytes(rng.randrange(20_000))
                throw(address, HEADS[number % len(HEADS)] + body)

    round_of(1)  # what a process needs once
    before = targets.resident_kib()
    round_of(2)
    after = targets.resident_kib()
    grown = {name: after[name] - before[name] for name in before}
    assert all(kib < 16 * 1024 for kib in grown.values()), f"KiB: {grown}"
