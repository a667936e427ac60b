"""The events of calls: where they go, and what they say of an engine's output."""

from __future__ import annotations

from typing import Any, Protocol

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from omni.v1 import output_pb2, stage_service_pb2
from stage_worker.engine import EngineOutput, TokenChance


class EventFrame(Protocol):
    """What is sent to a gateway, as calls see it."""

    @property
    def events(self) -> RepeatedCompositeFieldContainer[stage_service_pb2.StageEvent]:
        """In order per call."""
        ...


class EventWriter(Protocol):
    """Where the events of calls go (``FrameWriter``)."""

    @property
    def blocked(self) -> bool:
        """True while its reader is too slow: await ``room``."""
        ...

    async def room(self) -> None:
        """Return when there is room."""
        ...

    def part(self, size_bytes: int) -> EventFrame:
        """The frame to add an event of that size to, at once."""
        ...

    def open(self, frame: Any) -> bool:
        """``frame`` has not left yet: what was added to it may still be changed."""
        ...


def fill(event: stage_service_pb2.StageEvent, output: EngineOutput) -> None:
    """Say what ``output`` brought; all but its media."""
    if output.text:
        event.text = output.text
    if output.token_ids:
        event.token_ids.extend(output.token_ids)
    if output.prompt_tokens:
        event.prompt_tokens = output.prompt_tokens
    for taken, top in output.logprobs:
        entry = event.logprobs.add()
        _fill_chance(entry.token, taken)
        for chance in top:
            _fill_chance(entry.top.add(), chance)
    info = output.media_info
    if info is not None:
        event.media_info.mime_type = info.mime_type
        event.media_info.sample_rate_hz = info.sample_rate_hz
        event.media_info.channels = info.channels


def _fill_chance(chance: output_pb2.TokenChance, made: TokenChance) -> None:
    chance.token_id, chance.text, chance.logprob = made
