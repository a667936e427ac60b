"""Audio on its way out: headers and encodings, no signal processing. Pure."""

from __future__ import annotations

import binascii
import struct
from collections.abc import Iterable

from omni.v1 import output_pb2, stage_service_pb2
from omnicore import errors

_SAMPLE_BYTES = 2  # audio/pcm is signed 16-bit
# Where the length is not known yet; OpenAI streams WAV so, and players read until the end.
_UNKNOWN_SIZE = 0xFFFFFFFF
# What OpenAI's pcm16 is; used only where a request brought no audio at all.
_DEFAULT_INFO = output_pb2.MediaInfo(mime_type="audio/pcm", sample_rate_hz=24000, channels=1)


def pcm_info(events: Iterable[stage_service_pb2.StageEvent]) -> output_pb2.MediaInfo:
    """The format of the audio in ``events``. Raises ``InternalError`` if a stage made something other than PCM."""
    for event in events:
        if event.HasField("media_info"):
            return check_pcm(event.media_info)
    return _DEFAULT_INFO


def check_pcm(info: output_pb2.MediaInfo) -> output_pb2.MediaInfo:
    """``info`` if it is PCM."""
    if info.mime_type != "audio/pcm" or not info.sample_rate_hz or not info.channels:
        raise errors.InternalError(
            f"the audio stage gave {info.mime_type or 'no media type'} at {info.sample_rate_hz} Hz with"
            f" {info.channels} channels; this endpoint needs audio/pcm with both",
            reason="UNEXPECTED_MEDIA",
        )
    return info


def wav_header(info: output_pb2.MediaInfo, data_bytes: int | None) -> bytes:
    """The 44 bytes before the samples; None: the length is not known yet."""
    frame_bytes = info.channels * _SAMPLE_BYTES
    riff_bytes = _UNKNOWN_SIZE if data_bytes is None else 36 + data_bytes
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        b"RIFF", riff_bytes, b"WAVE",
        b"fmt ", 16, 1, info.channels, info.sample_rate_hz, info.sample_rate_hz * frame_bytes, frame_bytes, 16,
        b"data", _UNKNOWN_SIZE if data_bytes is None else data_bytes,
    )  # fmt: skip


def base64(data: bytes) -> bytes:
    """Base64 without line breaks."""
    return binascii.b2a_base64(data, newline=False)
