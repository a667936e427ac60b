"""Engines whose every step a test decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from omni.v1 import types_pb2
from stage_worker.engine import EngineInfo, EngineOutput, EngineRequest, no_such_control

Script = Callable[[EngineRequest], AsyncIterator[EngineOutput]]


class ScriptedEngine:
    """Runs ``script`` for each request."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.running: set[str] = set()
        """Requests that are here, by the engine's name for them."""
        self.aborted: list[str] = []

    async def start(self) -> EngineInfo:
        """At once."""
        return EngineInfo(model="scripted")

    async def execute(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Run the script."""
        self.running.add(request.request_id)
        try:
            async for output in self.script(request):
                yield output
        finally:
            self.running.discard(request.request_id)

    async def abort(self, request_id: str) -> bool:
        """Take note."""
        self.aborted.append(request_id)
        return request_id in self.running

    def load(self) -> types_pb2.LoadReport:
        """Who is here."""
        return types_pb2.LoadReport(queue_length=len(self.running), running=len(self.running))

    async def probe(self) -> None:
        """Always well; a little later, as real engines are."""
        await asyncio.sleep(0.01)

    async def control(self, method: types_pb2.ControlMethod.ValueType, args: Mapping[str, Any]) -> dict[str, Any]:
        """None."""
        raise no_such_control("scripted", method)

    async def close(self) -> None:
        """Nothing to close."""
