"""API keys, roles, the audit log and other origins, over real HTTP and gRPC."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from omni.v1 import inference_service_pb2, inference_service_pb2_grpc
from omnicore import api_keys, errors, rpc
from omnicore.api_keys import ApiKey, KeyRole
from omnictl.cli import main as omnictl
from tests.integration.gateway.conftest import USER, Stand, running_stand
from tests.integration.gateway.scripts import tokens
from tests.support.pipelines import text_pipeline
from tests.support.processes import wait_until

CLIENT, READER, ADMIN = (f"omni_{name}_{'k' * 32}" for name in ("client", "reader", "admin"))
ORIGIN = "https://chat.example.com"


def _line(key: str, key_id: str, role: KeyRole, **fields: Any) -> str:
    return api_keys.line(ApiKey(key_id, api_keys.hashed(key), roles=frozenset({role}), **fields))


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Stand]:
    """A gateway with three keys, one worker, and web pages of one origin."""
    keys = tmp_path / "keys"
    keys.write_text(
        "\n".join(
            (
                _line(CLIENT, "alice", KeyRole.CLIENT),
                _line(READER, "rita", KeyRole.READ),
                _line(ADMIN, "anna", KeyRole.ADMIN),
            )
        )
    )
    async with running_stand(text_pipeline(), api_keys=str(keys), cors_origin=(ORIGIN,)) as stand:
        await stand.cluster.add("text", 0, tokens(3))
        await stand.ready("text")
        yield stand


async def test_keys_roles_and_the_audit_log_over_http(
    guarded: Stand, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    body = {"model": "text", "messages": USER}

    async def status(path: str, key: str = "", **headers: str) -> tuple[int, dict[str, Any]]:
        headers |= _bearer(key) if key else {}
        method = "POST" if path.startswith("/v1/chat") else "GET"
        async with guarded.http.request(method, path, json=body, headers=headers) as response:
            assert ("www-authenticate" in response.headers) == (response.status == 401)
            plain = response.content_type != "application/json"
            return response.status, {} if plain else await response.json()

    for path in ("/health", "/ready", "/metrics"):
        assert (await status(path))[0] == 200
    code, answer = await status("/v1/chat/completions")
    assert (code, answer["error"]["code"]) == (401, "invalid_api_key")
    assert (await status("/v1/chat/completions", CLIENT + "x"))[0] == 401
    assert (await status("/v1/models"))[0] == 401
    assert (await status("/v1/models", READER))[0] == 200
    code, answer = await status("/v1/chat/completions", READER)
    assert (code, answer["error"]["code"]) == (403, "role_required")
    assert (await status("/v1/chat/completions", CLIENT))[0] == 200
    assert (await status("/v1/chat/completions", **{"x-api-key": ADMIN}))[0] == 200

    # A key that is taken away is refused once the file is seen to have changed.
    keys = tmp_path / "keys"
    keys.write_text(_line(READER, "rita", KeyRole.READ))
    async with openai.AsyncOpenAI(base_url=f"http://{guarded.addresses['http']}/v1", api_key=CLIENT) as client:
        codes: list[str | None] = []
        while not codes or codes[-1] == "":
            try:
                await client.models.list()
                codes.append("")
            except openai.AuthenticationError as error:
                codes.append(error.code)
        assert codes[-1] == "invalid_api_key"
    text = "\n".join(f"{r.getMessage()} {r.__dict__.get('fields')}" for r in caplog.records)
    assert "'key': 'rita', 'outcome': 'refused', 'reason': 'role_required'" in text
    assert not any(key in text for key in (CLIENT, READER, ADMIN))


async def test_the_same_keys_over_grpc(guarded: Stand, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with rpc.channel(guarded.addresses["grpc"]) as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        request = inference_service_pb2.GenerateRequest(model="text")
        request.prompt.text = "hello"

        async def code(key: str) -> tuple[grpc.StatusCode, str]:
            try:
                metadata = (("authorization", f"Bearer {key}"),) if key else ()
                async for _ in stub.Generate(request, metadata=metadata):
                    pass
            except grpc.aio.AioRpcError as error:
                return error.code(), error.details() or ""
            return grpc.StatusCode.OK, ""

        assert (await code(""))[0] is grpc.StatusCode.UNAUTHENTICATED
        assert (await code("x" * 40))[0] is grpc.StatusCode.UNAUTHENTICATED
        denied, details = await code(READER)
        assert denied is grpc.StatusCode.PERMISSION_DENIED
        assert "needs the role client; the key 'rita' has read" in details
        assert (await code(CLIENT))[0] is grpc.StatusCode.OK
        listed = await stub.ListModels(inference_service_pb2.ListModelsRequest(), metadata=(("x-api-key", READER),))
        assert [model.id for model in listed.models] == ["text"]
        channelz: Any = channel.unary_unary("/grpc.channelz.v1.Channelz/GetServers")  # type: ignore[call-arg]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channelz(b"", metadata=(("x-api-key", CLIENT),))
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        await channelz(b"", metadata=(("x-api-key", ADMIN),))

    # omnictl sends the key that a file holds.
    key_file = tmp_path / "own.key"
    key_file.write_text(READER)
    words = ["request", "get", "unknown", "--gateway", guarded.addresses["grpc"]]
    assert await asyncio.to_thread(omnictl, words) == errors.UnauthenticatedError.row.exit_code
    words += ["--api-key-file", str(key_file)]
    assert await asyncio.to_thread(omnictl, words) == errors.NotFoundError.row.exit_code

    def audited() -> list[dict[str, Any]]:
        return [r.__dict__["fields"] for r in caplog.records if r.getMessage() == "audit"]

    await wait_until(lambda: any(entry["outcome"] == "ok" for entry in audited()), what="the audit line")
    assert {"method": "/grpc.channelz.v1.Channelz/GetServers", "key": "anna", "outcome": "ok"} in audited()
    assert any(entry["key"] == "alice" and entry["outcome"] == "refused" for entry in audited())


async def test_pages_of_named_origins_may_ask(guarded: Stand) -> None:
    path = "/v1/chat/completions"
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    async with guarded.http.options(path, headers={"origin": ORIGIN, **asked}) as response:
        assert response.status == 200
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in response.headers["access-control-allow-methods"]
        assert response.headers["access-control-allow-headers"] == "authorization,content-type"
    async with guarded.http.options(path, headers={"origin": "https://evil.example", **asked}) as response:
        assert response.status == 403
        assert "access-control-allow-origin" not in response.headers
        assert response.headers["vary"] == "origin"
    # The response of a refused call can be read as well: the page shall see why.
    async with guarded.http.post(path, json={}, headers={"origin": ORIGIN}) as response:
        assert (response.status, response.headers["access-control-allow-origin"]) == (401, ORIGIN)
        assert "x-request-id" in response.headers["access-control-expose-headers"]
    async with guarded.http.get("/health", headers={"origin": "https://evil.example"}) as response:
        assert (response.status, response.headers.get("access-control-allow-origin")) == (200, None)
