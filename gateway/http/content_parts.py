"""The messages of a chat body as our own, with their pictures and sounds. Pure: what lies elsewhere is only noted."""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Collection
from typing import Any

from gateway import validation
from gateway.http import media
from gateway.http.fields import Fields, kind
from omni.v1 import prompt_pb2
from omnicore import errors

NOT_OFFERED = "not supported by this server; leave it out"
_AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg", "webm", "m4a")
_LINKED = {"image_url": "image", "audio_url": "audio", "video_url": "video"}
"""Types of parts that have ``{"url": …}``; all but the first are vLLM's."""
PART_TYPES = ("text", "image_url", "input_audio", "audio_url", "video_url")
_TOOL_CALLS: dict[str, tuple[Any, ...]] = {"tool_calls": ([],), "function_call": ()}
_MESSAGE_REFUSED: dict[str, tuple[Any, ...]] = {"audio": ()}
_MESSAGE_KNOWN = (
    _TOOL_CALLS.keys() | _MESSAGE_REFUSED.keys() | {"role", "content", "name", "refusal", "tool_call_id", "annotations"}
)


@dataclasses.dataclass(frozen=True, slots=True)
class RemoteMedia:
    """Media that a body names by a web address: to be fetched, checked and put into ``part``."""

    path: str
    kind: str
    url: str
    part: prompt_pb2.MediaPart
    """Empty until then."""


class Messages:
    """Reads the messages of one body into ``prompt``."""

    def __init__(self, prompt: prompt_pb2.Prompt, domains: Collection[str] = ()) -> None:
        """``domains``: hosts that media may be fetched from."""
        self.remote: list[RemoteMedia] = []
        self._prompt = prompt
        self._domains = domains

    def read(self, messages: list[Any], path: str = "messages") -> None:
        """All of them. Raises ``InvalidRequestError`` naming what is wrong."""
        if not messages:
            raise errors.InvalidRequestError.field(path, "must have at least one message")
        validation.check_parts(path, len(messages))
        parts = 0
        for index, message in enumerate(messages):
            made = self._prompt.chat.messages.add()
            self._message(Fields(message, f"{path}[{index}]"), made)
            parts += len(made.parts) or 1
            validation.check_parts(path, parts)

    def _message(self, fields: Fields, message: prompt_pb2.ChatMessage) -> None:
        role = fields.string("role", required=True)
        if role not in validation.ROLES:
            raise errors.InvalidRequestError.field(
                fields.at("role"), f"must be one of: {', '.join(validation.ROLES)}; got {role!r}"
            )
        message.role = role
        # Before the content, which a message that only calls tools does not have.
        fields.refuse(_TOOL_CALLS, "tools are not offered by this server; say what was called in the content")
        fields.refuse(_MESSAGE_REFUSED, NOT_OFFERED)
        content = fields.raw("content")
        if isinstance(content, str):
            message.parts.add(text=content)
        elif isinstance(content, list):
            validation.check_parts(fields.at("content"), len(content))
            if not content:
                raise errors.InvalidRequestError.field(fields.at("content"), "must have at least one part")
            for index, part in enumerate(content):
                self._part(Fields(part, f"{fields.at('content')}[{index}]"), message)
        elif content is None:
            raise errors.InvalidRequestError.field(
                fields.at("content"), "required; must be a string or a list of content parts"
            )
        else:
            raise errors.InvalidRequestError.field(
                fields.at("content"), f"must be a string or a list of content parts, got {kind(content)}"
            )
        fields.finish(_MESSAGE_KNOWN)

    def _part(self, fields: Fields, message: prompt_pb2.ChatMessage) -> None:
        part = fields.choice("type", PART_TYPES, "")
        if part == "text":
            message.parts.add(text=fields.string("text", required=True) or "")
            fields.finish({"type", "text"})
            return
        inner = fields.object(part)
        if inner is None:
            raise errors.InvalidRequestError.field(fields.at(part), "required; must be an object")
        if part == "input_audio":
            inner.choice("format", _AUDIO_FORMATS, "wav")  # the bytes say it, too, and they decide
            data = media.decode_base64(inner.at("data"), inner.string("data", required=True) or "")
            message.parts.add(media=media.media_part(inner.at("data"), "audio", data))
            inner.finish({"data", "format"})
        else:
            self._link(inner, _LINKED[part], message)
            inner.finish({"url", "detail"})
        fields.finish({"type", part})

    def _link(self, fields: Fields, kind: str, message: prompt_pb2.ChatMessage) -> None:
        path, url = fields.at("url"), fields.string("url", required=True) or ""
        scheme = url[:8].partition(":")[0].lower()
        if scheme not in ("http", "https"):
            message.parts.add(media=media.from_data_uri(path, kind, url))
            return
        check_remote(path, url, self._domains)
        part = message.parts.add(media=prompt_pb2.MediaPart()).media
        self.remote.append(RemoteMedia(path, kind, url, part))


def check_remote(path: str, url: str, domains: Collection[str]) -> None:
    """The address is of a host that media may come from. Raises ``InvalidRequestError`` naming ``path``."""
    if not domains:
        raise errors.InvalidRequestError.field(
            path,
            "must be a data URI (data:image/png;base64,…); this server fetches nothing",
            reason="MEDIA_NOT_FETCHED",
        )
    try:
        parsed = urllib.parse.urlsplit(url)
        host, port = parsed.hostname or "", parsed.port
    except ValueError:
        raise errors.InvalidRequestError.field(path, "is not a URL") from None
    allowed = parsed.scheme.lower() in ("http", "https") and parsed.username is None
    if not allowed or port not in (None, 80, 443) or host.lower() not in domains:
        raise errors.InvalidRequestError.field(
            path,
            f"media may come from: {', '.join(sorted(domains))} (http or https, their own ports)",
            reason="MEDIA_NOT_FETCHED",
        )
