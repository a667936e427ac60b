"""What requests have in common that a replica may have cached: the beginning of their prompts. Pure."""

from __future__ import annotations

import hashlib
from typing import Final

from omni.v1 import prompt_pb2

PREFIX_BYTES: Final = 2048
"""Looked at of a prompt: a system prompt and the first question of most conversations; what is longer and equal so far
shares most of its cache anyway."""
_PREFIX_TOKENS: Final = PREFIX_BYTES // 4  # about four bytes of English are a token


def prefix_key(prompt: prompt_pb2.Prompt, session_id: str = "") -> int:
    """64 bits that are equal for requests which begin alike; those of one session always are.

    Of a conversation the messages up to the first of the user count, whatever follows: so all its turns, each of which
    repeats the ones before, have one key. Media counts by its bytes.
    """
    digest = hashlib.blake2b(digest_size=8)
    if session_id:
        digest.update(b"session\0" + session_id.encode())
        return int.from_bytes(digest.digest(), "big")
    kind = prompt.WhichOneof("kind")
    if kind == "text":
        digest.update(b"text\0" + prompt.text[:PREFIX_BYTES].encode())
    elif kind == "tokens":
        digest.update(b"tokens\0" + repr(prompt.tokens.token_ids[:_PREFIX_TOKENS]).encode())
    elif kind == "chat":
        _add_chat(digest, prompt.chat)
    return int.from_bytes(digest.digest(), "big")


def _add_chat(digest: hashlib.blake2b, chat: prompt_pb2.ChatPrompt) -> None:
    left = PREFIX_BYTES
    for message in chat.messages:
        digest.update(b"role\0" + message.role.encode())
        for part in message.parts:
            # What comes after the limit would be part of the key with one prompt and not with its continuation.
            data = part.media.data if part.HasField("media") else part.text[:left].encode()
            digest.update(b"part\0" + data[:left])
            left -= min(left, len(data))
            if not left:
                return
        if message.role == "user":
            return
