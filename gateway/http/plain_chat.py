"""Bodies of chats as nearly all are, read by the shortest way: turns of text, a few sampling parameters.

Anything else, and anything that is wrong, is left to ``chat_schema``, which reads these bodies alike. Pure.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from typing import Any

from gateway import validation, wire
from gateway.graph import PipelineGraph
from omni.v1 import sampling_pb2

HARMLESS = frozenset((
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls",
))  # fmt: skip
"""Fields that change nothing here, whatever they say."""

# Values that need no second look: type float stands for any number, and the bounds are those that ``validation`` and
# the fields of SamplingParams set, both accepted. Anything else is read in full.
_VALUES: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0, sys.float_info.max),
    "top_p": (float, math.ulp(0.0), 1),
    "presence_penalty": (float, -2, 2),
    "frequency_penalty": (float, -2, 2),
    "repetition_penalty": (float, math.ulp(0.0), sys.float_info.max),
    "top_k": (int, 1, 2**31 - 1),
    "seed": (int, -(2**63), 2**63 - 1),
    "max_tokens": (int, 1, 2**32 - 1),
    "max_completion_tokens": (int, 1, 2**32 - 1),
    "ignore_eos": (bool, False, True),
}
_OTHERS = HARMLESS | {"model", "messages", "stream", "stream_options", "session_id"}
_ROLES = {name: wire.role(name) for name in validation.ROLES}
_ID = re.compile(rf"[!-~]{{0,{validation.MAX_ID_CHARS}}}")
_MODALITIES = ("text",)

_SAMPLING: dict[tuple[tuple[str, Any, type], ...], sampling_pb2.SamplingParams] = {}
_MOST_SAMPLING = 256


class PlainChat:
    """What such a body asks; its other side is ``chat_schema.ChatRequest``."""

    __slots__ = ("graph", "include_usage", "prompt", "sampling", "session_id", "stream")

    # As of a ChatRequest, and the same of every one of these.
    modalities = _MODALITIES
    logprobs = continuous_usage = False

    def __init__(
        self,
        graph: PipelineGraph,
        prompt: bytes,
        sampling: sampling_pb2.SamplingParams,
        stream: bool,
        include_usage: bool,
        session_id: str,
    ) -> None:
        self.graph = graph
        self.prompt = prompt
        """An encoded ``Prompt``."""
        self.sampling = sampling
        """Others may have the same object: not to be changed."""
        self.stream = stream
        self.include_usage = include_usage
        self.session_id = session_id


def plain_chat(body: Any, pipelines: Mapping[str, PipelineGraph], prompt_limit_bytes: int) -> PlainChat | None:
    """What the full way would make of such a body. None for any other, valid or not: what is wrong with it is said in
    one place only."""
    if type(body) is not dict or type(model := body.get("model")) is not str:
        return None
    graph = pipelines.get(model)
    if graph is None or "chat" not in graph.entrypoints or "text" not in graph.modalities("chat"):
        return None
    stream, options = body.get("stream"), body.get("stream_options")
    session_id, include_usage = body.get("session_id"), False
    if stream is not None and type(stream) is not bool:
        return None
    if options is not None:
        if not stream or type(options) is not dict or options.keys() != {"include_usage"}:
            return None
        if type(include_usage := options["include_usage"]) is not bool:
            return None
    if session_id is not None and (type(session_id) is not str or _ID.fullmatch(session_id) is None):
        return None
    sampling = _sampling(body)
    prompt = _prompt(body.get("messages")) if sampling is not None else None
    if sampling is None or prompt is None or len(prompt) > prompt_limit_bytes:
        return None
    return PlainChat(graph, prompt, sampling, stream or False, include_usage, session_id or "")


def _sampling(body: dict[str, Any]) -> sampling_pb2.SamplingParams | None:
    """Of the same parameters the same object, not to be changed: clients send few kinds of them."""
    # With their types, since 1, 1.0 and true are equal keys.
    asked = tuple([(name, value, type(value)) for name, value in body.items() if name not in _OTHERS])
    try:
        known = _SAMPLING.get(asked)
    except TypeError:  # a list is no plain value
        return None
    if known is None and (known := _new_sampling(body)) is not None and "seed" not in body:
        if len(_SAMPLING) >= _MOST_SAMPLING:
            _SAMPLING.clear()
        _SAMPLING[asked] = known
    return known


def _new_sampling(body: dict[str, Any]) -> sampling_pb2.SamplingParams | None:
    given: dict[str, Any] = {}
    for name, value in body.items():
        if (accepted := _VALUES.get(name)) is None:
            if name not in _OTHERS:
                return None
        elif value is not None:
            wanted, low, high = accepted
            kind: type = type(value)
            if kind is not wanted and not (wanted is float and kind is int):
                return None
            if not low <= value <= high:  # so says not a number, too
                return None
            given[name] = value
    if (limit := given.pop("max_completion_tokens", None)) is not None and given.setdefault(
        "max_tokens", limit
    ) != limit:
        return None
    return sampling_pb2.SamplingParams(**given)


def _prompt(messages: Any) -> bytes | None:
    if type(messages) is not list or not 0 < len(messages) <= validation.MAX_MESSAGE_PARTS:
        return None
    encoded = []
    try:
        for message in messages:
            if type(message) is not dict or len(message) != 2:
                return None
            role, content = message.get("role"), message.get("content")
            if type(role) is not str or type(content) is not str or (encoded_role := _ROLES.get(role)) is None:
                return None
            encoded.append(wire.text_message(encoded_role, content))
    except UnicodeEncodeError:
        return None
    return wire.chat_prompt(encoded)
