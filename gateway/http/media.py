"""Media that clients send: what it is, told from its first bytes, and whether it is what its place in a body asks for.

Pure. A client's own word for the type counts for nothing: engines decode what the bytes are.
"""

from __future__ import annotations

import base64
import binascii

from omni.v1 import prompt_pb2
from omnicore import errors

MAX_MEDIA_BYTES = 32 * 1024 * 1024
"""Of one picture or clip."""
KINDS = {
    "image": "PNG, JPEG, GIF, WebP or BMP",
    "audio": "WAV, MP3, FLAC, Ogg, WebM or MP4",
    "video": "MP4, WebM or QuickTime",
}
"""Kinds of media, with what is known of each."""

# (offset, bytes, media types): the first that matches decides. A container may hold several kinds.
_MAGIC: tuple[tuple[int, bytes, tuple[str, ...]], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", ("image/png",)),
    (0, b"\xff\xd8\xff", ("image/jpeg",)),
    (0, b"GIF87a", ("image/gif",)),
    (0, b"GIF89a", ("image/gif",)),
    (8, b"WEBP", ("image/webp",)),
    (8, b"WAVE", ("audio/wav",)),
    (0, b"BM", ("image/bmp",)),
    (0, b"fLaC", ("audio/flac",)),
    (0, b"OggS", ("audio/ogg",)),
    (0, b"ID3", ("audio/mpeg",)),
    (0, b"\x1aE\xdf\xa3", ("audio/webm", "video/webm")),
    (4, b"ftypqt  ", ("video/quicktime",)),
    (4, b"ftyp", ("audio/mp4", "video/mp4")),
)


def sniff(data: bytes, kind: str) -> str:
    """The media type of ``data`` if it is of that ``kind``, else ""."""
    for offset, magic, types in _MAGIC:
        if data.startswith(magic, offset) and (offset != 8 or data.startswith(b"RIFF")):
            return next((name for name in types if name.startswith(kind + "/")), "")
    # MP3 without tags: a frame's eleven sync bits, then a layer that is not "reserved".
    if kind == "audio" and len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0 and data[1] & 0x06:
        return "audio/mpeg"
    return ""


def media_part(path: str, kind: str, data: bytes) -> prompt_pb2.MediaPart:
    """Checked media for a prompt. Raises ``InvalidRequestError`` naming ``path``."""
    if len(data) > MAX_MEDIA_BYTES:
        raise errors.InvalidRequestError.field(
            path, f"must be at most {MAX_MEDIA_BYTES} bytes, got {len(data)}", reason="MEDIA_TOO_LARGE"
        )
    mime_type = sniff(data, kind)
    if not mime_type:
        what = "is empty" if not data else f"is not {'an' if kind[0] in 'ai' else 'a'} {kind} that is known here"
        raise errors.InvalidRequestError.field(path, f"{what}: {KINDS[kind]}", reason="UNSUPPORTED_MEDIA")
    return prompt_pb2.MediaPart(mime_type=mime_type, data=data)


def decode_base64(path: str, text: str) -> bytes:
    """The bytes. Raises ``InvalidRequestError`` naming ``path``."""
    if len(text) > MAX_MEDIA_BYTES * 4 // 3 + 4:
        raise errors.InvalidRequestError.field(
            path, f"must be at most {MAX_MEDIA_BYTES} bytes after decoding", reason="MEDIA_TOO_LARGE"
        )
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise errors.InvalidRequestError.field(path, "must be base64") from None


def from_data_uri(path: str, kind: str, uri: str) -> prompt_pb2.MediaPart:
    """Media out of ``data:image/png;base64,…``. Raises ``InvalidRequestError`` naming ``path``."""
    head, comma, data = uri.partition(",")
    if not comma or not head[:5].lower() == "data:" or not head.endswith(";base64"):
        raise errors.InvalidRequestError.field(path, f"must be a data URI of base64 (data:{kind}/…;base64,…)")
    return media_part(path, kind, decode_base64(path, data))
