"""Clients of bench.faults: requests at a steady rate or streams at once, and what exactly came of each."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import orjson

TIMEOUT_S = 10.0
"""Patience of a client, as in the peers' measurements."""


@dataclasses.dataclass(slots=True)
class Outcome:
    """One request. Times are monotonic."""

    begun_s: float
    ended_s: float = float("inf")
    error: str = ""
    """What went wrong; empty: a complete answer."""
    text: str = ""
    audio: bytes = b""
    events: int = 0
    done: bool = False
    first_text_s: float = 0.0
    last_text_s: float = 0.0
    first_audio_s: float = 0.0

    @property
    def took_s(self) -> float:
        """From when it was due to its end."""
        return self.ended_s - self.begun_s


@dataclasses.dataclass(slots=True)
class Client:
    """Asks one address for chat completions of one model."""

    port: int
    model: str
    timeout_s: float = TIMEOUT_S
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    running: list[Outcome] = dataclasses.field(default_factory=list)
    _session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=self.timeout_s)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def ask(self, question: str = "hello there", *, stream: bool = False, **fields: Any) -> Outcome:
        """One request, to its end."""
        outcome = Outcome(time.monotonic())
        fields.setdefault("max_tokens", 64)
        self.running.append(outcome)
        body = {"model": self.model, "messages": [{"role": "user", "content": question}], **fields}
        assert self._session is not None
        try:
            url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
            async with self._session.post(url, json={**body, "stream": stream}) as response:
                if response.status != 200:
                    outcome.error = f"HTTP {response.status}"
                    await response.read()
                elif stream:
                    await _read_stream(response, outcome)
                else:
                    outcome.text = orjson.loads(await response.read())["choices"][0]["message"]["content"] or ""
        except TimeoutError:
            outcome.error = "timeout"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            outcome.error = outcome.error or type(error).__name__
        outcome.ended_s = time.monotonic()
        self.running.remove(outcome)
        self.outcomes.append(outcome)
        return outcome

    async def steady(self, per_s: float, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Requests at a steady rate, whatever becomes of them, for a time or ``until``; then waits for the last."""
        begin_s = time.monotonic()
        async with asyncio.TaskGroup() as requests:
            for number in range(int(per_s * seconds)):
                await asyncio.sleep(max(0.0, begin_s + number / per_s - time.monotonic()))
                if until():
                    return
                requests.create_task(self.ask())

    def between(self, from_s: float, to_s: float) -> list[Outcome]:
        """Those that were due within a time."""
        return [outcome for outcome in self.outcomes if from_s <= outcome.begun_s < to_s]


async def _read_stream(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    finished = False
    async for raw in response.content:
        if not raw.startswith(b"data: "):
            continue
        data = raw[6:].strip()
        if data == b"[DONE]":
            outcome.done = True
            continue
        event = orjson.loads(data)
        if "error" in event:
            outcome.error = f"error event: {event['error'].get('code') or event['error'].get('message')}"
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            if text := delta.get("content"):
                outcome.text += text
                outcome.events += 1
                outcome.last_text_s = time.monotonic()
                outcome.first_text_s = outcome.first_text_s or outcome.last_text_s
            if data_of_audio := (delta.get("audio") or {}).get("data"):
                outcome.audio += base64.b64decode(data_of_audio)
                outcome.first_audio_s = outcome.first_audio_s or time.monotonic()
            finished = finished or choice.get("finish_reason") is not None
    if not outcome.error and not (outcome.done and finished):
        outcome.error = "cut off"


def difference(got: str, right: str) -> str:
    """In what a text differs from the right one."""
    same = next((at for at, (a, b) in enumerate(zip(got, right, strict=False)) if a != b), min(len(got), len(right)))
    kind = "shorter" if same == len(got) else "longer" if same == len(right) else "other"
    repeated = kind == "other" and len(got) > len(right) and got.endswith(right[same:])
    return f"wrong text, {'repeated' if repeated else kind} from {same / max(1, len(right)):.0%} on"


def count_errors(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Failures by kind."""
    kinds: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.error:
            kinds[outcome.error] = kinds.get(outcome.error, 0) + 1
    return kinds
