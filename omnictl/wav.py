"""WAV files that are valid at every moment while they grow."""

from __future__ import annotations

import struct
from types import TracebackType
from typing import BinaryIO, Self

_HEADER_BYTES = 44  # RIFF, fmt and data chunk headers of a PCM file
_SAMPLE_BYTES = 2  # signed 16-bit little-endian, the only PCM that services send
_UNKNOWN_SIZE = 0xFFFFFFFF  # what players take as "until the stream ends"


class WavWriter:
    """Writes 16-bit PCM as it comes. In a seekable file the sizes in the header are right after every ``write``; in a
    pipe they say "until the end", as players expect of a live stream."""

    def __init__(self, file: BinaryIO, *, sample_rate_hz: int, channels: int) -> None:
        if sample_rate_hz <= 0 or channels <= 0:
            raise ValueError(f"audio of {sample_rate_hz} Hz in {channels} channels cannot be written as WAV")
        self._file = file
        self._rate_hz = sample_rate_hz
        self._channels = channels
        self._data_bytes = 0
        self._odd = b""
        self._seekable = file.seekable()
        file.write(self._header(0 if self._seekable else _UNKNOWN_SIZE))
        file.flush()

    def write(self, pcm: bytes) -> None:
        """Append samples. A piece may end inside a frame; the rest of the frame must come with the next one."""
        pcm = self._odd + pcm
        frame_bytes = _SAMPLE_BYTES * self._channels
        whole = len(pcm) - len(pcm) % frame_bytes
        self._odd = pcm[whole:]
        if not whole:
            return
        self._file.write(pcm[:whole])
        self._data_bytes += whole
        if self._seekable:
            self._file.seek(0)
            self._file.write(self._header(self._data_bytes))
            self._file.seek(0, 2)
        self._file.flush()

    @property
    def seconds(self) -> float:
        """Playing time so far."""
        return self._data_bytes / (_SAMPLE_BYTES * self._channels * self._rate_hz)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _header(self, data_bytes: int) -> bytes:
        frame_bytes = _SAMPLE_BYTES * self._channels
        return struct.pack(
            "<4sI4s4sIHHIIHH4sI",
            b"RIFF",
            min(data_bytes + _HEADER_BYTES - 8, _UNKNOWN_SIZE),
            b"WAVE",
            b"fmt ",
            16,
            1,
            self._channels,
            self._rate_hz,
            self._rate_hz * frame_bytes,
            frame_bytes,
            8 * _SAMPLE_BYTES,
            b"data",
            data_bytes,
        )
