"""The REST API over a real connection: RPCs of the gateway itself, and what every RPC has in common."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp
import orjson
import pytest

from omnicore import errors
from tests.integration.gateway.conftest import Stand, running_stand
from tests.integration.gateway.scripts import broken, endless, tokens
from tests.support.pipelines import text_pipeline
from tests.support.processes import wait_until

PROMPT = {"chat": {"messages": [{"role": "user", "parts": [{"text": "hello"}]}]}}
EVENTS = {"accept": "text/event-stream"}


def lines(data: bytes) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in data.splitlines()]


def sent_events(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Event name and data of each."""
    found = []
    for part in data.decode().removesuffix("\n\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in part.splitlines())
        if "data" in fields:
            found.append((fields.get("event", "message"), orjson.loads(fields["data"])))
    return found


async def generate(stand: Stand, headers: dict[str, str] | None = None, **fields: Any) -> tuple[int, str, bytes]:
    """Status, content type and body."""
    body = {"model": "text", "prompt": PROMPT, **fields}
    async with stand.http.post("/api/v1/generate", json=body, headers=headers) as response:
        return response.status, response.content_type, await response.read()


async def test_a_stream_as_lines_and_as_events(stand: Stand) -> None:
    await stand.cluster.add("text", 0, tokens(4, prompt=3))
    await stand.ready("text")
    status, content_type, data = await generate(stand, requestId="r-1", sampling={"maxTokens": 4})
    assert (status, content_type) == (200, "application/x-ndjson")
    messages = lines(data)
    assert "".join(message["text"] for message in messages) == "t0 t1 t2 t3 "
    assert {message["requestId"] for message in messages} == {"r-1"}
    finish = {"reason": "stop", "promptTokens": 3, "completionTokens": 4}
    assert finish.items() <= messages[-1]["finish"].items()
    assert all("finish" not in message for message in messages[:-1])

    status, content_type, data = await generate(stand, EVENTS)
    assert (status, content_type) == (200, "text/event-stream")
    *events, last = sent_events(data)
    assert last == ("done", {})
    assert "".join(message["text"] for _, message in events) == "t0 t1 t2 t3 "

    async with stand.http.get("/api/v1/requests/r-1") as response:
        record = await response.json()
    assert record["status"] == "finished"
    assert record["timeline"][0]["event"] == "admitted"
    await stand.settled()


async def test_errors_before_and_after_the_first_message(stand: Stand) -> None:
    await stand.cluster.add("text", 0, broken(errors.DataLossError("gone", reason="TEST_LOSS"), after=2))
    await stand.ready("text")
    status, content_type, data = await generate(stand, model="nope")
    assert (status, content_type) == (404, "application/json")
    error = orjson.loads(data)["error"]
    assert (error["status"], error["type"]) == ("NOT_FOUND", "not_found_error")
    status, _, data = await generate(stand, sampling={"temperature": -1})
    assert status == 400
    assert orjson.loads(data)["error"]["param"] == "sampling.temperature"

    status, _, data = await generate(stand)
    assert status == 200, "it had begun"
    *messages, last = lines(data)
    assert "t0 t1 ".startswith("".join(message["text"] for message in messages))
    assert (last["error"]["status"], last["error"]["code"]) == ("DATA_LOSS", "test_loss")
    assert last["error"]["details"][0]["reason"] == "TEST_LOSS"
    _, _, data = await generate(stand, EVENTS)
    name, event = sent_events(data)[-1]
    assert (name, event["error"]["code"]) == ("error", "test_loss")
    await stand.settled()


@pytest.mark.parametrize("headers", [{}, EVENTS], ids=["lines", "events"])
async def test_who_leaves_aborts(stand: Stand, headers: dict[str, str]) -> None:
    worker = await stand.cluster.add("text", 0, endless)
    await stand.ready("text")
    body = {"model": "text", "prompt": PROMPT}
    async with stand.http.post("/api/v1/generate", json=body, headers=headers) as response:
        assert b"more" in await response.content.readline()
        response.close()
    await stand.settled()
    assert len(worker.aborts) == 1


async def test_abort_from_elsewhere(stand: Stand) -> None:
    await stand.cluster.add("text", 0, endless)
    await stand.ready("text")
    body = {"model": "text", "prompt": PROMPT, "requestId": "a/b"}
    async with stand.http.post("/api/v1/generate", json=body) as response:
        await response.content.readline()
        async with stand.http.post("/api/v1/requests/a%2Fb:abort") as aborted:
            assert await aborted.json() == {"found": True}
        rest = await response.read()
    assert lines(rest)[-1]["error"]["status"] == "CANCELLED"
    async with stand.http.post("/api/v1/requests/a%2Fb:abort", json={}) as aborted:
        assert await aborted.json() == {"found": False}
    await stand.settled()


async def test_route_and_release(stand: Stand) -> None:
    worker = await stand.cluster.add("text", 0, tokens(1))
    await stand.ready("text")
    stage = {"pipeline": "text"}
    status, routed = await stand.post("/api/v1/route", {"request_id": "a", "stage": stage, "maxWait": "5s"})
    assert (status, routed["endpoint"]) == (200, worker.endpoint)
    assert routed["replica"]["stage"] == {"pipeline": "text", "stageId": 0}
    assert isinstance(routed["revision"], str), "64 bits do not fit a number of JavaScript"
    assert await stand.post("/api/v1/route:release", {"requestId": "a"}) == (200, {"released": 1})
    status, refused = await stand.post("/api/v1/route", {"requestId": "b", "stage": {"pipeline": "text", "stageId": 9}})
    assert (status, refused["error"]["status"]) == (404, "NOT_FOUND")
    await stand.settled()


async def test_who_leaves_stops_waiting(stand: Stand) -> None:
    await wait_until(lambda: "text" in stand.gateway.table.pipelines, what="pipeline")
    before = len(asyncio.all_tasks())
    body = {"requestId": "a", "stage": {"pipeline": "text"}, "maxWait": "600s"}
    waiting = asyncio.create_task(stand.post("/api/v1/route", body))
    await wait_until(lambda: bool(stand.gateway.router.pools["text", 0].waiting), what="the call waits for a replica")
    waiting.cancel()
    await wait_until(lambda: not stand.gateway.router.pools["text", 0].waiting, what="it waits no more")
    await wait_until(lambda: len(asyncio.all_tasks()) <= before, what="nothing of it runs")


async def test_what_is_no_call_is_refused_in_the_same_shape(stand: Stand) -> None:
    http = stand.http
    json = {"content-type": "application/json"}
    url = "/api/v1/generate"
    for status, code, sent in (
        (404, "path_not_found", http.get("/api/v1/nothing")),
        (405, "method_not_allowed", http.get(url)),
        (405, "method_not_allowed", http.delete("/api/v1/models")),
        (415, "unsupported_media_type", http.post(url, data=b"{}", headers={"content-type": "text/plain"})),
        (415, "unsupported_media_type", http.post(url, data=b"{}", headers={"content-type": ""})),
        (400, "invalid_json", http.post(url, data=b"{", headers=json)),
        (400, "unknown_field", http.post(url, json={"modell": "x"})),
        (400, "unknown_field", http.get("/api/v1/models?x=1")),
        (400, "invalid_request", http.get("/api/v1/requests/%ff%fe")),
        (400, "invalid_request", http.post(url)),
    ):
        async with sent as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (status, code), error
            assert error["message"]
            assert error["status"] == ("NOT_FOUND" if status == 404 else "INVALID_ARGUMENT")
    async with http.delete("/api/v1/pipelines", headers={"x-request-id": "mine"}) as response:
        assert response.headers["x-request-id"] == "mine"
        assert response.headers["allow"] == "GET, POST"


async def test_bodies_are_bounded() -> None:
    async with running_stand(text_pipeline(), max_body_bytes=1000) as stand:
        status, body = await stand.post("/api/v1/generate", {"model": "x" * 1000})
        assert (status, body["error"]["code"]) == (413, "body_too_large")


async def test_administrators_are_known_or_on_this_machine() -> None:
    evict = {"replica": {"stage": {"pipeline": "text"}}}
    async with running_stand(text_pipeline(), http="0.0.0.0:0") as stand:
        port = stand.addresses["http"].rpartition(":")[2]
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            async with http.post("/api/v1/replicas:evict", json=evict) as response:
                assert response.status == 403, "anybody could be behind a connection"
                assert (await response.json())["error"]["code"] == "role_required"
            async with http.get("/api/v1/models") as response:
                assert response.status == 200
    async with running_stand(text_pipeline()) as stand:
        # The scripted control plane has no such method: the call was made.
        async with stand.http.post("/api/v1/replicas:evict", json=evict) as response:
            assert response.status == 501
        rebound = {"host": "evil.example:8000"}
        async with stand.http.post("/api/v1/replicas:evict", json=evict, headers=rebound) as response:
            assert (await response.json())["error"]["code"] == "host_not_allowed"
        async with stand.http.get("/api/v1/models", headers=rebound) as response:
            assert response.status == 200


async def test_a_watch_ends_with_its_client_or_the_gateway(stand: Stand) -> None:
    await stand.cluster.add("text", 0, tokens(1))
    async with stand.http.get("/api/v1/replicas:watch?pipelines=text") as response:
        first = orjson.loads(await response.content.readline())
        assert first["snapshot"] is True
        watchers = stand.cluster.control_plane.watchers
        response.close()
    await wait_until(lambda: stand.cluster.control_plane.watchers < watchers, what="the watch has ended")
    async with stand.http.get("/api/v1/replicas:watch", headers=EVENTS) as response:
        await response.content.readline()
        await stand.gateway.drain()
        name, last = sent_events(b"\n" + await response.read())[-1]
    assert (name, last["error"]["code"]) == ("error", "shutting_down")


async def test_the_document_and_its_page(stand: Stand) -> None:
    async with stand.http.get("/openapi.json") as response:
        assert (await response.json())["openapi"] == "3.1.0"
    async with stand.http.get("/docs") as response:
        assert response.content_type == "text/html"
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert "/api/v1/generate" in await response.text()


async def test_no_request_of_whatever_shape_is_our_fault(stand: Stand) -> None:
    """Random paths, queries and bodies around those that exist, as bytes: any answer but a 500."""
    await wait_until(lambda: "text" in stand.gateway.table.pipelines, what="pipeline")
    dice = random.Random(5)
    paths = ["generate", "requests/x", "requests/x:abort", "models", "route", "route:release", "nothing", ""]
    alphabet = [*"abz09/:{}[]\"'=&?.-_~!*", "%00", "%ff", "%2F", "%C3%A9", "requestId", "stage", "null", "1e99", "é"]
    values: list[Any] = [None, True, -1, 1e300, "", "x" * 300, [], {}, [[]], {"stage": {}}, {"pipeline": "text"}]
    names = ["model", "prompt", "requestId", "stage", "sampling", "timeout", "maxWait", "exclude", "modalities", "q"]
    for _ in range(150):
        tail = "".join(dice.choices(alphabet, k=dice.randrange(6)))
        query = "".join(dice.choices(alphabet, k=dice.randrange(8)))
        url = f"/api/v1/{dice.choice(paths)}{tail}{'?' + query if query else ''}"
        body = orjson.dumps({dice.choice(names): dice.choice(values) for _ in range(dice.randrange(4))})
        if dice.random() < 0.2:
            body = body[: dice.randrange(len(body))] + dice.randbytes(3)
        target = url.encode().replace(b" ", b"%20")
        response = await exchange(stand, dice.choice([b"GET", b"POST", b"POST", b"DELETE"]), target, body)
        status = int(response.split(b" ", 2)[1])
        # 501 and 503: the control plane of this test has no such method.
        assert status < 500 or status in (501, 503), (target, body, response)
    await stand.settled()


async def exchange(stand: Stand, verb: bytes, target: bytes, body: bytes) -> bytes:
    """One request on a connection of its own; the whole response."""
    reader, writer = await asyncio.open_connection(*stand.addresses["http"].split(":"))
    writer.write(
        b"%b %b HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (verb, target, len(body), body)
    )
    data = await reader.read()
    writer.close()
    return data
