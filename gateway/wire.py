"""Protobuf messages that are put together from encoded parts, where a message object would cost more than all that is
done with it.

A message is its fields one after the other, in any order; each is its tag and its value, and a text, bytes or a message
within it has its length before it. Tags are made from the numbers that the generated classes tell.
"""

from __future__ import annotations

from collections.abc import Iterable

from omni.v1 import prompt_pb2

_VARINT, _SIZED = 0, 2  # wire types
_ONE_BYTE = [bytes((number,)) for number in range(128)]


def varint(number: int) -> bytes:
    """As protobuf encodes a length or an unsigned number: seven bits a byte, the least first."""
    if number < 128:
        return _ONE_BYTE[number]
    if number < 16384:
        return bytes((number & 127 | 128, number >> 7))
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def number_tag(field: int) -> bytes:
    """What comes before a number."""
    return varint(field << 3 | _VARINT)


def sized_tag(field: int) -> bytes:
    """What comes before the length of a text, bytes or a message."""
    return varint(field << 3 | _SIZED)


_CHAT = sized_tag(prompt_pb2.Prompt.CHAT_FIELD_NUMBER)
_MESSAGE = sized_tag(prompt_pb2.ChatPrompt.MESSAGES_FIELD_NUMBER)
_PART = sized_tag(prompt_pb2.ChatMessage.PARTS_FIELD_NUMBER)
_TEXT = sized_tag(prompt_pb2.ContentPart.TEXT_FIELD_NUMBER)


def role(name: str) -> bytes:
    """The field ``role`` of a message, as ``text_message`` takes it."""
    encoded = name.encode()
    return sized_tag(prompt_pb2.ChatMessage.ROLE_FIELD_NUMBER) + varint(len(encoded)) + encoded


def text_message(encoded_role: bytes, content: str) -> bytes:
    """A message of a conversation that says ``content``. Raises ``UnicodeEncodeError`` for a text that is none."""
    text = content.encode()
    part = _TEXT + varint(len(text)) + text
    message = encoded_role + _PART + varint(len(part)) + part
    return _MESSAGE + varint(len(message)) + message


def chat_prompt(messages: Iterable[bytes]) -> bytes:
    """A ``Prompt`` that is a conversation."""
    chat = b"".join(messages)
    return _CHAT + varint(len(chat)) + chat
