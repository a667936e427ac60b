"""Pictures on their way out. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from gateway.http.audio import base64
from omni.v1 import stage_service_pb2
from omnicore import errors


class Picture(NamedTuple):
    """One, complete."""

    mime_type: str
    data: bytes

    @property
    def base64(self) -> str:
        """As JSON can hold it."""
        return base64(self.data).decode()

    def content_part(self) -> dict[str, Any]:
        """As a part of a chat message."""
        return {"type": "image_url", "image_url": {"url": f"data:{self.mime_type};base64,{self.base64}"}}


class PictureCollector:
    """Puts pictures together, which come in pieces: only the first piece of each tells what it is."""

    def __init__(self) -> None:
        self._pieces: list[tuple[str, bytearray]] = []

    def take(self, events: Iterable[stage_service_pb2.StageEvent]) -> None:
        """What has come."""
        for event in events:
            if not event.media:
                continue
            if event.HasField("media_info") or not self._pieces:
                self._pieces.append((event.media_info.mime_type, bytearray()))
            self._pieces[-1][1].extend(event.media)

    def pictures(self) -> list[Picture]:
        """All. Raises ``InternalError`` if a stage made something else."""
        for mime_type, _ in self._pieces:
            if not mime_type.startswith("image/"):
                raise errors.InternalError(
                    f"the image stage gave {mime_type or 'no media type'}; this endpoint needs image/…",
                    reason="UNEXPECTED_MEDIA",
                )
        return [Picture(mime_type, bytes(data)) for mime_type, data in self._pieces]


def pictures(events: Iterable[stage_service_pb2.StageEvent]) -> list[Picture]:
    """Those of a whole answer."""
    collector = PictureCollector()
    collector.take(events)
    return collector.pictures()
