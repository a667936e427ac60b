"""Clients of a cluster under faults: what each request came to, and when."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp

from tests.fault.cluster import PIPELINE, Cluster, Unit

CLIENTS = 4
"""Each asks one question after the other, at the gateways in turn."""
PATIENCE_S = 60.0


@dataclasses.dataclass(slots=True)
class Outcome:
    """How one request ended for its client. Times are monotonic."""

    gateway: str
    started_s: float
    ended_s: float = float("inf")
    text: str = ""
    error: str = ""
    """The code of the error event or answer, or what became of the connection. Empty: complete."""

    @property
    def ok(self) -> bool:
        """Complete, to the last token."""
        return not self.error

    @property
    def took_s(self) -> float:
        """From question to end."""
        return self.ended_s - self.started_s

    def open_at(self, moment_s: float) -> bool:
        """It was running then."""
        return self.started_s <= moment_s <= self.ended_s


class Load:
    """Requests in the background; ``outcomes`` of all that have ended."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.running: list[Outcome] = []

    @property
    def failed(self) -> list[Outcome]:
        """Those that did not complete."""
        return [outcome for outcome in self.outcomes if not outcome.ok]

    async def begun(self) -> None:
        """Wait until output has come to every running request: what breaks now, breaks in the middle of answers."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.running or not all(outcome.text for outcome in self.running):
                await asyncio.sleep(0.005)

    async def ended(self, moment_s: float, timeout_s: float) -> float:
        """Wait until whatever ran at a moment has ended; the seconds from then to the end of the last."""
        async with asyncio.timeout(timeout_s):
            while any(outcome.started_s <= moment_s for outcome in self.running):
                await asyncio.sleep(0.02)
        return max((o.ended_s - moment_s for o in self.outcomes if o.open_at(moment_s)), default=0.0)

    def after(self, moment_s: float) -> list[Outcome]:
        """Those that began after a moment."""
        return [outcome for outcome in self.outcomes if outcome.started_s > moment_s]

    def longest_s(self) -> float:
        """The longest that any of them took."""
        return max((outcome.took_s for outcome in self.outcomes), default=0.0)

    def count(self) -> str:
        """For the table: how many there were and how many failed."""
        return f"{len(self.outcomes)} requests, {len(self.failed)} failed"


async def ask(
    session: aiohttp.ClientSession, gateway: Unit, *, max_tokens: int | None = None, **fields: Any
) -> Outcome:
    """Stream one answer; ``fields`` are further ones of the body."""
    outcome = Outcome(gateway.name, time.monotonic())
    await _ask(session, gateway, outcome, max_tokens, **fields)
    return outcome


async def _ask(
    session: aiohttp.ClientSession, gateway: Unit, outcome: Outcome, max_tokens: int | None = None, **fields: Any
) -> None:
    messages = [{"role": "user", "content": "Go on."}]
    body: dict[str, Any] = {"model": PIPELINE, "messages": messages, "stream": True, **fields}
    if max_tokens is not None:
        body |= {"max_tokens": max_tokens, "ignore_eos": True}
    finished = done = False
    try:
        async with session.post(f"http://{gateway.http}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                outcome.error = str((await response.json())["error"]["code"])
            async for raw in response.content:
                line = raw.decode().strip()
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        outcome.error = str(event["error"]["code"])
                    for choice in event.get("choices", ()):
                        outcome.text += choice["delta"].get("content") or ""
                        finished = finished or choice["finish_reason"] is not None
    except (aiohttp.ClientError, TimeoutError) as error:
        outcome.error = outcome.error or type(error).__name__
    if not outcome.error and not (done and finished):
        outcome.error = "cut off"
    outcome.ended_s = time.monotonic()


@contextlib.asynccontextmanager
async def http_session() -> AsyncIterator[aiohttp.ClientSession]:
    """A connection per request: a client that keeps none has nothing to lose but its request."""
    connector = aiohttp.TCPConnector(force_close=True)
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session


@contextlib.asynccontextmanager
async def load(
    cluster: Cluster | None,
    *,
    clients: int = CLIENTS,
    gateways: Sequence[Unit] = (),
    max_tokens: int | None = None,
) -> AsyncIterator[Load]:
    """Ask all the time, from before the block until its end; then every running request is awaited. ``max_tokens`` is
    also how many come."""
    running = Load()
    stop = asyncio.Event()
    places = gateways or (cluster.gateways if cluster is not None else ())

    async def client(number: int, session: aiohttp.ClientSession) -> None:
        turns = itertools.cycle(places)
        for _ in range(number):
            next(turns)
        while not stop.is_set():
            outcome = Outcome((gateway := next(turns)).name, time.monotonic())
            running.running.append(outcome)
            await _ask(session, gateway, outcome, max_tokens)
            running.running.remove(outcome)
            running.outcomes.append(outcome)
            await asyncio.sleep(0.01)

    async with http_session() as session, asyncio.TaskGroup() as tasks:
        for number in range(clients):
            tasks.create_task(client(number, session))
        try:
            async with asyncio.timeout(PATIENCE_S):
                while len(running.outcomes) < clients:
                    await asyncio.sleep(0.02)
            yield running
        finally:
            stop.set()


async def serves(cluster: Cluster | None, gateways: Sequence[Unit] = ()) -> None:
    """One question at each gateway, answered."""
    async with http_session() as session:
        for gateway in gateways or (cluster.gateways if cluster is not None else ()):
            outcome = await ask(session, gateway)
            assert outcome.ok, outcome
