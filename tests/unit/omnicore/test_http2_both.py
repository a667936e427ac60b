"""Our two ends of a gRPC stream against each other."""

from __future__ import annotations

import itertools

import grpc
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from omnicore.http2_client import GrpcClientConnection
from omnicore.http2_server import GrpcServerConnection
from tests.support.http2 import LIMIT, METHOD

Code = grpc.StatusCode


@examples(max_examples=30)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 30_000)), max_size=9),
    st.sampled_from(list(Code)),
    st.text(),
    st.lists(
        st.tuples(st.just("x-bin"), st.binary(max_size=300))
        | st.tuples(st.just("x"), st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E)))
    ),
    st.lists(st.integers(1, 40_000), min_size=1, max_size=5),
)
def test_our_client_reads_what_our_server_says(
    steps: list[tuple[bool, int]], code: Code, text: str, trailing: list[tuple[str, str | bytes]], cuts: list[int]
) -> None:
    client = GrpcClientConnection("worker:1", METHOD, scheme="http", user_agent="test", max_message_bytes=LIMIT)
    server = GrpcServerConnection(LIMIT)
    lengths = itertools.cycle([*cuts, 50_000])
    there, here = bytearray(client.take_outgoing()), bytearray(server.take_outgoing())
    sent: tuple[list[bytes], list[bytes]] = ([], [])
    got: tuple[list[bytes], list[bytes]] = ([], [])

    def carry() -> None:
        while there or here:
            length = next(lengths)
            got[0].extend(server.receive(bytes(there[:length])))
            got[1].extend(client.receive(bytes(here[:length])))
            del there[:length], here[:length]
            there.extend(client.take_outgoing())
            here.extend(server.take_outgoing())

    carry()
    if steps:
        server.respond()
    for number, (by_client, size) in enumerate(steps):
        message = bytes([number]) * size
        sent[not by_client].append(message)
        (there if by_client else here).extend((client if by_client else server).send(message))
        if number % 3:
            carry()
    carry()
    server.finish(code, text, trailing)
    here += server.take_outgoing()
    carry()
    assert got == sent
    assert client.status is not None
    assert (client.status.code(), client.status.details()) == (code, text)
    told: list[object] = list(client.status.trailing_metadata() or ())
    assert told == [pair for key in dict(trailing) for pair in trailing if pair[0] == key], "gRPC groups them"
    assert (client.queued_bytes, server.queued_bytes, server.gone) == (0, 0, "")


@pytest.mark.parametrize("size", [10_000, 16_384, 40_000])
def test_trailers_of_any_length(size: int) -> None:
    client = GrpcClientConnection("worker:1", METHOD, scheme="http", user_agent="test", max_message_bytes=LIMIT)
    server = GrpcServerConnection(LIMIT)
    server.receive(client.take_outgoing())
    content = bytes(range(256)) * (size // 256)
    server.finish(Code.INTERNAL, "m", [("x-bin", content)])
    client.receive(server.take_outgoing())
    assert client.status is not None
    told: list[object] = list(client.status.trailing_metadata() or ())
    assert told == [("x-bin", content)]
