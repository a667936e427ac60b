"""``omniplane.client``: what a program needs of a gateway."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from omnicore import errors
from omniplane.client import Client
from tests.integration.gateway.conftest import Stand
from tests.integration.gateway.scripts import endless, tokens


@pytest.fixture
async def client(stand: Stand) -> AsyncIterator[Client]:
    async with Client(stand.addresses["grpc"]) as opened:
        yield opened


async def test_generate_abort_and_health(stand: Stand, client: Client) -> None:
    await stand.cluster.add("text", 0, tokens(3))
    await stand.ready("text")
    assert await client.health() == {"speech": False, "text": True}
    for prompt in ("hello", [1, 2, 3], [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]):
        pieces = [piece async for piece in client.generate("text", prompt, sampling={"max_tokens": 3}, timeout_s=60)]
        assert "".join(piece.text for piece in pieces) == "t0 t1 t2 "
        assert pieces[-1].finish.completion_tokens == 3
    assert not await client.abort("nothing")
    with pytest.raises(errors.NotFoundError, match="known models: speech, text"):
        await anext(client.generate("nope", "hello"))
    with pytest.raises(errors.InvalidRequestError, match="temprature"):
        await anext(client.generate("text", "hello", sampling={"temprature": 1}))
    await stand.settled()


async def test_a_request_ends_by_its_id_or_with_its_iteration(stand: Stand, client: Client) -> None:
    worker = await stand.cluster.add("text", 0, endless)
    await stand.ready("text")
    async with contextlib.aclosing(client.generate("text", "hello", request_id="r1")) as pieces:
        assert (await anext(pieces)).request_id == "r1"
        assert await client.abort("r1")
        with pytest.raises(errors.RequestCancelledError):
            async for _ in pieces:
                pass
    async with contextlib.aclosing(client.generate("text", "hello")) as pieces:
        await anext(pieces)
    await stand.settled()
    assert len(worker.aborts) == 2
