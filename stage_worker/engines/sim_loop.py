"""The step clock of the simulated engine: one loop advances every running request, as a batching engine does.

A sequence holds a place from admission to its end; at most ``max_num_seqs`` have one, the others wait in order of
arrival. The outputs of one step become ready in the same turn of the event loop. ``probe`` is answered by a step, so
a loop that hangs does not answer.
"""

from __future__ import annotations

import asyncio
import collections
import math
from collections.abc import Callable

from omnicore.errors import RequestCancelledError, UnavailableError
from stage_worker.engine import EngineOutput

_MOST_UNREAD = 64
"""Outputs that may lie unread before a sequence pauses: its reader is slow, the others go on."""


class SimSequence:
    """One request in the loop."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.made = 0
        self._work: Callable[[], EngineOutput | None] | None = None
        self._due_s = math.inf
        self._outputs: collections.deque[EngineOutput] = collections.deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def schedule(self, work: Callable[[], EngineOutput | None] | None, due_s: float = math.inf) -> None:
        """Run ``work`` in the first step at or after ``due_s``, and again until told otherwise; None: nothing to do."""
        self._work = work
        self._due_s = due_s if work is not None else math.inf

    def end(self, error: Exception) -> None:
        """Nothing more will be made; the reader gets ``error`` at once."""
        self._error = self._error or error
        self._outputs.clear()
        self.schedule(None)
        self._wake()

    @property
    def due_s(self) -> float:
        """When the next step of this sequence may be; infinite if it has nothing to do or is not read."""
        return self._due_s if len(self._outputs) < _MOST_UNREAD else math.inf

    def advance(self) -> None:
        """One step of this sequence."""
        assert self._work is not None
        try:
            output = self._work()
            if output is None:
                return
            self._outputs.append(output)
            self.made += 1
        except Exception as error:  # noqa: BLE001 -- one request's failure is given to its reader
            self._error = error
            self.schedule(None)
        self._wake()

    async def next_output(self) -> EngineOutput:
        """The oldest unread output; raises what ended the sequence."""
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._outputs.popleft()

    @property
    def was_paused(self) -> bool:
        """True if reading one output has just let a paused sequence go on."""
        return len(self._outputs) == _MOST_UNREAD - 1

    async def admitted(self, place: asyncio.Future[None]) -> None:
        """Wait for a place."""
        if self._error is not None:
            raise self._error
        self._waiter = place
        try:
            await place
        finally:
            self._waiter = None
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class StepLoop:
    """The clock. ``period_s``: time of one step; 0: as fast as the event loop turns."""

    def __init__(self, period_s: float, max_num_seqs: int) -> None:
        self._period_s = period_s
        self._max_num_seqs = max_num_seqs
        self._running: dict[str, SimSequence] = {}
        self._waiting: dict[str, tuple[SimSequence, asyncio.Future[None]]] = {}
        self._probes: list[asyncio.Future[None]] = []
        self._wakeup = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._dead: Exception | None = None
        self._hung = False
        self.paused = False
        """Asleep: no request advances, probes are answered."""

    @property
    def running(self) -> int:
        """Sequences with a place."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences without one."""
        return len(self._waiting)

    def start(self) -> None:
        """Begin to step."""
        self._task = asyncio.create_task(self._run(), name="sim-step-loop")

    async def admit(self, request_id: str) -> SimSequence:
        """A sequence with a place; waits for one. Leave by ``remove``, also when this was cancelled."""
        self._check_alive()
        sequence = SimSequence(request_id)
        if self._max_num_seqs and len(self._running) >= self._max_num_seqs:
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[request_id] = (sequence, place)
            await sequence.admitted(place)
        else:
            self._running[request_id] = sequence
        return sequence

    def remove(self, request_id: str) -> None:
        """Give the place to the next in line."""
        self._waiting.pop(request_id, None)
        if self._running.pop(request_id, None) is None:
            return
        for waiting_id, (sequence, place) in list(self._waiting.items()):
            del self._waiting[waiting_id]
            if not place.done():
                self._running[waiting_id] = sequence
                place.set_result(None)
                return

    def abort(self, request_id: str) -> bool:
        """End one sequence."""
        sequence = self._running.get(request_id) or next(iter(self._waiting.get(request_id, ())), None)
        if not isinstance(sequence, SimSequence):
            return False
        sequence.end(RequestCancelledError(f"{request_id}: aborted"))
        return True

    def changed(self) -> None:
        """A sequence got work, or room for outputs."""
        self._wakeup.set()

    async def probe(self) -> None:
        """Return when a step has been made after this call. Raises ``UnavailableError`` once the loop has died."""
        self._check_alive()
        probe: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._probes.append(probe)
        self._wakeup.set()
        try:
            await probe
        finally:
            if probe in self._probes:
                self._probes.remove(probe)

    def hang(self) -> None:
        """Stop stepping for ever, as an engine stuck in a kernel does."""
        self._hung = True

    def die(self, error: Exception) -> None:
        """End the loop and everything in it."""
        self._dead = error
        for sequence in [*self._running.values(), *(sequence for sequence, _ in self._waiting.values())]:
            sequence.end(error)
        for probe in self._probes:
            if not probe.done():
                probe.set_exception(error)

    async def close(self) -> None:
        """Stop stepping and fail what is left."""
        self.die(self._dead or UnavailableError("the engine is closed", reason="ENGINE_CLOSED"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            begin_s = loop.time()
            self._step(begin_s + self._period_s / 2)  # what is due within half a step belongs to it
            if self._hung or self._dead is not None:
                await loop.create_future()
            await asyncio.sleep(max(0.0, begin_s + self._period_s - loop.time()))
            await self._until_due(loop)

    def _step(self, until_s: float) -> None:
        if not self.paused:
            for sequence in list(self._running.values()):
                if sequence.due_s <= until_s:
                    sequence.advance()
                    if self._hung or self._dead is not None:
                        return
        for probe in self._probes:
            if not probe.done():
                probe.set_result(None)
        self._probes.clear()

    async def _until_due(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._probes:
            due_s = math.inf if self.paused else min((s.due_s for s in self._running.values()), default=math.inf)
            if due_s <= loop.time() + self._period_s / 2:
                return
            self._wakeup.clear()
            alarm = loop.call_at(due_s, self._wakeup.set) if due_s < math.inf else None
            try:
                await self._wakeup.wait()
            finally:
                if alarm is not None:
                    alarm.cancel()
