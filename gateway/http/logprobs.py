"""Log probabilities of tokens, in the forms of the two endpoints that give them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from omni.v1 import output_pb2, stage_service_pb2


def of_events(events: Iterable[stage_service_pb2.StageEvent]) -> list[output_pb2.TokenLogprob]:
    """Those of all tokens, in order."""
    return [entry for event in events for entry in event.logprobs]


def chat_logprobs(entries: Iterable[output_pb2.TokenLogprob]) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat."""
    return {
        "content": [
            {**_chance(entry.token), "top_logprobs": [_chance(chance) for chance in entry.top]} for entry in entries
        ],
        "refusal": None,
    }


def completion_logprobs(entries: Iterable[output_pb2.TokenLogprob], offset: int) -> dict[str, Any]:
    """``choices[].logprobs`` of a completion; ``offset`` is where its text begins, in characters."""
    offsets, tokens, chances, tops = list[int](), list[str](), list[float](), list[dict[str, float]]()
    for entry in entries:
        text = _text(entry.token)
        offsets.append(offset)
        offset += len(text)
        tokens.append(text)
        chances.append(entry.token.logprob)
        tops.append({_text(chance): chance.logprob for chance in entry.top})
    return {"text_offset": offsets, "tokens": tokens, "token_logprobs": chances, "top_logprobs": tops}


def _chance(chance: output_pb2.TokenChance) -> dict[str, Any]:
    return {"token": _text(chance), "logprob": chance.logprob, "bytes": list(chance.text)}


def _text(chance: output_pb2.TokenChance) -> str:
    return chance.text.decode(errors="replace")
