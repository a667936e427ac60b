"""Several requests that answer one question of a client: they succeed together or fail together.

Each is a request of its own to everything below: admitted, routed, replayed and aborted by itself. Here their outputs
become the choices of one response, and the first failure ends all of them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Protocol

from gateway.admission import Admission
from gateway.graph import PipelineGraph
from gateway.http.body_fields import as_in_body
from gateway.http.events import COMMENT, DONE, HEADERS, error_event
from gateway.http.exchange import Exchange
from gateway.request import RequestState, Usage
from omni.v1 import sampling_pb2, stage_service_pb2
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

SEND_TIMEOUT_S = 60.0
"""One send that takes this long means a client that is there but does not read."""
_MAX_SEED = 2**63


class ChoiceEncoder(Protocol):
    """Makes the events of one choice."""

    def begin(self) -> bytes:
        """What comes first."""
        ...

    def chunks(self, events: Sequence[stage_service_pb2.StageEvent]) -> bytes:
        """The events of this output."""
        ...

    def finish(self, state: RequestState) -> bytes:
        """Its finish reason."""
        ...

    def usage(self, usage: Usage) -> bytes:
        """What the whole stream used, if that was asked for; of the last choice only."""
        ...


class Choices:
    """The requests, in order of their index."""

    def __init__(self, states: Sequence[RequestState], per_prompt: int) -> None:
        """``per_prompt``: how many neighbours answer the same prompt."""
        self.states = states
        self._per_prompt = per_prompt

    @property
    def usage(self) -> Usage:
        """The sum; a prompt that several choices answer counts once."""
        total = Usage(prompt_tokens=sum(s.usage.prompt_tokens for s in self.states[:: self._per_prompt]))
        for state in self.states:
            total.completion_tokens += state.usage.completion_tokens
            total.text_tokens += state.usage.text_tokens
        return total

    @property
    def replays(self) -> int:
        """Of all together."""
        return sum(state.replays for state in self.states)

    def abort(self, reason: str) -> None:
        """End all that run."""
        for state in self.states:
            state.abort(reason)

    async def collect(self) -> list[list[stage_service_pb2.StageEvent]]:
        """The outputs of all, at their end. Raises the first failure."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(state.collect()) for state in self.states]
        except BaseExceptionGroup as failures:
            raise _first(failures) from None
        finally:
            self.abort("its response has ended")
        return [task.result() for task in tasks]

    async def outputs(
        self, silence_s: float
    ) -> AsyncGenerator[tuple[int, list[stage_service_pb2.StageEvent]] | None, None]:
        """Outputs with their index as they come, the empty list at the end of each; None after every ``silence_s``
        without any. Raises the first failure. Close it."""
        reading = {asyncio.ensure_future(state.next()): index for index, state in enumerate(self.states)}
        try:
            while reading:
                done, _ = await asyncio.wait(reading, timeout=silence_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    yield None
                for task in done:
                    index, events = reading.pop(task), task.result()
                    # Not by its status: that may be newer than these events.
                    if events or not self.states[index].ended:
                        reading[asyncio.ensure_future(self.states[index].next())] = index
                    if events or self.states[index].ended:
                        yield index, events
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)


async def begin_choices(
    admission: Admission,
    exchange: Exchange,
    request_id: str,
    count: int,
    per_prompt: int,
    submit: Callable[[int, str], Awaitable[RequestState]],
) -> Choices:
    """Begin ``count`` requests by ``submit(index, id)``; the first has the client's id. What fails ends all.

    Raises ``InvalidRequestError`` if the caller may never have so many at once."""
    if count > 1:
        admission.check_together(exchange.caller, count, "n" if per_prompt > 1 else "prompt")
    states: list[RequestState] = []
    try:
        for index in range(count):
            state = await submit(index, f"{request_id}-{index}" if index else request_id)
            states.append(state)
    except BaseException:
        Choices(states, per_prompt).abort("another choice could not begin")
        raise
    choices = Choices(states, per_prompt)
    exchange.abort_on_disconnect(choices)
    return choices


def seeded(sampling: sampling_pb2.SamplingParams, graph: PipelineGraph, index: int) -> sampling_pb2.SamplingParams:
    """The sampling of one choice: choices of a request with a seed (or of a pipeline that has one) are reproducible and
    differ, the others differ."""
    if index == 0:
        return sampling
    derived = sampling_pb2.SamplingParams()
    derived.CopyFrom(sampling)
    defaults = (stage.default_sampling_params for _, stage in sorted(graph.stages.items()))
    base = next((params.seed for params in (sampling, *defaults) if params.HasField("seed")), None)
    seed = secrets.randbits(31) if base is None else base + index
    derived.seed = seed if seed < _MAX_SEED else seed - 2 * _MAX_SEED
    return derived


async def stream_choices(
    exchange: Exchange, choices: Choices, encoders: Sequence[ChoiceEncoder], keepalive_s: float
) -> None:
    """Write the whole stream, as ``sse.stream_events`` does for one. Raises the failure if nothing has been sent."""
    begun: set[int] = set()
    outputs = choices.outputs(keepalive_s)
    try:
        async for output in outputs:
            if output is None:
                await _send(exchange, COMMENT)
                continue
            index, events = output
            data = encoders[index].chunks(events) if events else encoders[index].finish(choices.states[index])
            if index not in begun:
                begun.add(index)
                data = encoders[index].begin() + data
            await _send(exchange, data)
        await _send(exchange, encoders[-1].usage(choices.usage) + DONE, more=False)
    except TimeoutError:
        # The response stays incomplete, so the connection breaks.
        _log.warning("client stalled", request_id=choices.states[0].request_id)
    except Exception as error:
        if not exchange.started:
            raise
        if not isinstance(error, errors.OmniError):
            _log.exception("stream failed", request_id=choices.states[0].request_id)
        told = as_in_body(errors.from_exception(error), exchange.path)
        await _send(exchange, error_event(told) + DONE, more=False)
    finally:
        choices.abort("its response has ended")
        await outputs.aclose()


async def _send(exchange: Exchange, data: bytes, *, more: bool = True) -> None:
    if not exchange.started:
        await exchange.start(200, HEADERS)
    async with asyncio.timeout(SEND_TIMEOUT_S):
        await exchange.body(data, more=more)


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure to tell: groups are flat here, and the others are echoes of the first."""
    return failures.exceptions[0]
