"""Companions of a request, for classifier-free guidance: which there are, and what they are asked. Pure.

Guidance compares what a model makes of a prompt with what it makes without part of it. At a stage with a
``CompanionPlan`` a request therefore runs as a bundle: itself, and under ids of their own its companions. A bundle is
dispatched whole or not at all, to one replica; it ends whole: a companion that fails fails the stage; and the stages
that read from it begin when all of it is there.
"""

from __future__ import annotations

from gateway.graph import StageStep
from omni.v1 import pipeline_pb2, prompt_pb2

TEXT = "cfg_text"
"""The prompt without its words, or with those that are not wanted; pictures stay."""
IMAGE = "cfg_img"
"""The prompt without its pictures."""


def companion_id(request_id: str, role: str) -> str:
    """As workers and people know a companion; of the request itself (role "") its own id."""
    return f"{request_id}__{role}" if role else request_id


def roles(step: StageStep, prompt: prompt_pb2.Prompt) -> tuple[str, ...]:
    """The companions of a request at a stage: none where nobody reads them."""
    if not step.companions:
        return ()
    plan = step.stage.companions
    return tuple(role for role in plan.roles if _has(role, plan, prompt))


def _has(role: str, plan: pipeline_pb2.CompanionPlan, prompt: prompt_pb2.Prompt) -> bool:
    if role == TEXT:
        return bool(prompt.negative_prompt) or not plan.only_if_negative
    if role == IMAGE:
        return any(part.HasField("media") for message in prompt.chat.messages for part in message.parts)
    return True  # of a control plane that knows more than we do; it gets the whole prompt


def companion_prompt(role: str, prompt: prompt_pb2.Prompt) -> prompt_pb2.Prompt:
    """What a companion is asked; ``prompt`` itself is not changed."""
    result = prompt_pb2.Prompt()
    result.CopyFrom(prompt)
    result.negative_prompt = ""
    if role == TEXT:
        if prompt.WhichOneof("kind") == "chat":
            _without_words(result.chat, prompt.negative_prompt)
        else:
            # A chat, since a template makes something even of no words; engines refuse a text of none.
            result.chat.CopyFrom(_question(prompt.negative_prompt))
    elif role == IMAGE:
        for message in result.chat.messages:
            kept = [part for part in message.parts if not part.HasField("media")]
            del message.parts[:]
            message.parts.extend(kept)
    return result


def _without_words(chat: prompt_pb2.ChatPrompt, negative: str) -> None:
    """Instructions of the system stay, and all pictures; of everything else only the roles."""
    asked = None
    for message in chat.messages:
        if message.role in ("system", "developer"):
            continue
        kept = [part for part in message.parts if part.HasField("media")]
        del message.parts[:]
        message.parts.extend(kept)
        if message.role == "user":
            asked = message
    if asked is None:
        asked = chat.messages.add(role="user")
    asked.parts.add(text=negative)


def _question(text: str) -> prompt_pb2.ChatPrompt:
    message = prompt_pb2.ChatMessage(role="user", parts=[prompt_pb2.ContentPart(text=text)])
    return prompt_pb2.ChatPrompt(messages=[message])
