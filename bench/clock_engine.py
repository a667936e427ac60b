"""The token source of bench.gateway behind our own workers: the tokens of ``gateway_mock.c``, as an engine makes them.

An engine of another package, as any would be: its entry point is laid out beside the worker (``bench.gateway_ours``).
``engine_args.clock`` of the stage says what it makes: ``tokens``, ``ttft_ms``, ``itl_ms`` and ``step_tokens``. With
``itl_ms`` one engine step serves every running request, so their tokens leave together; without, tokens come as fast as
they can be made, ``step_tokens`` of them a turn of the event loop. With ``tokens: 1`` it answers in one piece.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from google.protobuf import json_format

from omni.v1 import pipeline_pb2, types_pb2
from stage_worker.engine import EngineInfo, EngineOutput, EngineRequest, Finish, no_such_control

_PROMPT_TOKENS, _COMPLETION_TOKENS = 32, 64  # what gateway_mock.c says
_WHOLE_ANSWER = "t%020d The quick brown fox jumps over the lazy dog and then does it again, port 12345."


def create(stage: pipeline_pb2.Stage, devices: Sequence[str]) -> ClockEngine:
    """The factory that the entry point names."""
    options = json_format.MessageToDict(stage.engine_args).get("clock", {})
    return ClockEngine(stage.max_num_seqs, **options)


class ClockEngine:
    """One replica's."""

    def __init__(
        self, max_num_seqs: int, *, tokens: float, ttft_ms: float = 0, itl_ms: float = 0, step_tokens: float = 1
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._tokens = int(tokens)
        self._ttft_s, self._itl_s = ttft_ms / 1e3, itl_ms / 1e3
        self._step_tokens = int(step_tokens)
        self._running = 0
        self._phase_s = 0.0
        self._steps: dict[int, asyncio.Future[None]] = {}

    async def start(self) -> EngineInfo:
        """There is nothing to load."""
        return EngineInfo(model="clock", max_num_seqs=self._max_num_seqs)

    async def execute(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """The tokens of one request; the last has the finish."""
        due_s = asyncio.get_running_loop().time() + self._ttft_s
        if not self._running:
            self._phase_s = due_s  # an engine that was idle begins its steps when there is work
        self._running += 1
        try:
            for index in range(self._tokens):
                if self._itl_s:
                    await self._step(due_s)
                    due_s += self._itl_s
                elif index and index % self._step_tokens == 0:
                    await asyncio.sleep(0)
                last = index == self._tokens - 1
                form = _WHOLE_ANSWER if self._tokens == 1 else "t%020d "
                finish = Finish("stop", _PROMPT_TOKENS, _COMPLETION_TOKENS) if last else None
                yield EngineOutput(text=form % time.monotonic_ns(), token_ids=(index,), finish=finish)
        finally:
            self._running -= 1

    async def _step(self, due_s: float) -> None:
        """Return in the engine step nearest to ``due_s``, with every request that is due then."""
        number = round((due_s - self._phase_s) / self._itl_s)
        step = self._steps.get(number)
        if step is None:
            loop = asyncio.get_running_loop()
            step = self._steps[number] = loop.create_future()
            loop.call_at(self._phase_s + number * self._itl_s, self._run_step, number)
        await asyncio.shield(step)  # it is everybody's: one request that is aborted must not end it

    def _run_step(self, number: int) -> None:
        self._steps.pop(number).set_result(None)

    async def abort(self, request_id: str) -> bool:
        """Nothing to do beyond leaving the iterator."""
        return False

    def load(self) -> types_pb2.LoadReport:
        """Requests running."""
        return types_pb2.LoadReport(queue_length=self._running, running=self._running)

    async def probe(self) -> None:
        """It always makes progress."""

    async def control(self, method: types_pb2.ControlMethod.ValueType, args: Mapping[str, Any]) -> dict[str, Any]:
        """None."""
        raise no_such_control("clock", method)

    async def close(self) -> None:
        """Nothing to free."""
