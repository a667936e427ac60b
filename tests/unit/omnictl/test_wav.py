from __future__ import annotations

import io
import itertools
import wave
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnictl.wav import WavWriter


def _read(path: Path) -> tuple[int, int, bytes]:
    with wave.open(str(path), "rb") as found:
        assert found.getsampwidth() == 2
        return found.getframerate(), found.getnchannels(), found.readframes(found.getnframes())


def test_the_file_is_valid_after_every_write(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    with path.open("wb") as file:
        writer = WavWriter(file, sample_rate_hz=24000, channels=1)
        assert _read(path) == (24000, 1, b"")
        writer.write(b"\x01\x00" * 10)
        assert _read(path) == (24000, 1, b"\x01\x00" * 10)
        writer.write(b"\x02\x00" * 14390)
        assert _read(path)[2] == b"\x01\x00" * 10 + b"\x02\x00" * 14390
        assert writer.seconds == pytest.approx(0.6)


@given(pcm=st.binary(max_size=64).filter(lambda b: len(b) % 4 == 0), cuts=st.lists(st.integers(0, 64), max_size=6))
def test_pieces_may_end_inside_a_frame(pcm: bytes, cuts: list[int]) -> None:
    file = io.BytesIO()
    writer = WavWriter(file, sample_rate_hz=8000, channels=2)
    edges = [0, *sorted(cuts), len(pcm)]
    for begin, end in itertools.pairwise(edges):
        writer.write(pcm[begin:end])
    file.seek(0)
    with wave.open(file, "rb") as found:
        assert found.readframes(found.getnframes()) == pcm


def test_a_pipe_gets_a_header_of_unknown_length() -> None:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

    pipe = Pipe()
    WavWriter(pipe, sample_rate_hz=8000, channels=1).write(b"\x01\x02")
    assert pipe.getvalue()[40:44] == b"\xff\xff\xff\xff"
    assert pipe.getvalue()[44:] == b"\x01\x02"


@pytest.mark.parametrize(("rate", "channels"), [(0, 1), (8000, 0)])
def test_nonsense_formats_are_refused(rate: int, channels: int) -> None:
    with pytest.raises(ValueError, match="cannot be written as WAV"):
        WavWriter(io.BytesIO(), sample_rate_hz=rate, channels=channels)
