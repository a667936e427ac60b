"""Answers that real gateways give only when something is wrong."""

from __future__ import annotations

import io
import re
import wave
from collections.abc import Sequence
from pathlib import Path

import pytest

from omni.v1 import inference_service_pb2, output_pb2
from omnicore.errors import DataLossError, OmniError, UnavailableError
from omnictl import connect
from omnictl.ask import Answer, Question, ask
from tests.integration.omnictl.servers import Event, ScriptedGateway, serving, settings_for

_PCM = output_pb2.MediaInfo(mime_type="audio/pcm", sample_rate_hz=8000, channels=1)
_END = inference_service_pb2.GenerateResponse(
    finish=output_pb2.CallFinish(reason="stop", prompt_tokens=3, completion_tokens=2)
)


def _text(text: str) -> inference_service_pb2.GenerateResponse:
    return inference_service_pb2.GenerateResponse(request_id="r", text=text)


def _media(seconds: float, info: output_pb2.MediaInfo | None = None) -> inference_service_pb2.GenerateResponse:
    return inference_service_pb2.GenerateResponse(
        request_id="r", media=b"\x01\x02" * int(8000 * seconds), media_info=info
    )


async def _ask(script: Sequence[Event], audio: str = "") -> tuple[Answer, str, ScriptedGateway]:
    servicer = ScriptedGateway(script)  # type: ignore[abstract] # it implements what is asked
    out = io.StringIO()
    async with serving(servicer) as server, connect.gateway(settings_for(gateway=server.port)) as gateway:
        try:
            answer = await ask(gateway, Question("p", "Hello?", system="Be brief.", audio=audio), text_to=out)
        except OmniError as error:
            error.add_note(out.getvalue())
            raise
    return answer, out.getvalue(), servicer


async def test_the_request_and_the_summary(tmp_path: Path) -> None:
    audio = tmp_path / "a.wav"
    answer, out, gateway = await _ask([_text("Hel"), _media(0.5, _PCM), _text("lo"), _media(1), _END], str(audio))
    assert out == "Hello\n"
    assert answer.audio_s == pytest.approx(1.5)
    assert re.match(r"2 tokens · first text after \d+\.\d", answer.summary(str(audio)))
    assert answer.summary(str(audio)).endswith(f"1.5 s of speech in {audio}")
    (request,) = gateway.requests
    assert [(m.role, m.parts[0].text) for m in request.prompt.chat.messages] == [
        ("system", "Be brief."),
        ("user", "Hello?"),
    ]
    assert list(request.modalities) == ["text", "audio"]
    assert request.request_id.startswith("omnictl-")


async def test_an_error_in_mid_answer_keeps_what_came(tmp_path: Path) -> None:
    audio = tmp_path / "a.wav"
    script: list[Event] = [
        _text("So far"),
        _media(0.25, _PCM),
        UnavailableError("replica p/0/0 was lost", reason="REPLICA_LOST"),
    ]
    with pytest.raises(UnavailableError, match="replica p/0/0 was lost") as caught:
        await _ask(script, str(audio))
    assert caught.value.__notes__ == ["So far\n"]
    with wave.open(str(audio), "rb") as found:
        assert found.getnframes() == 2000


async def test_a_refused_question_overwrites_nothing(tmp_path: Path) -> None:
    audio = tmp_path / "a.wav"
    audio.write_bytes(b"precious")
    with pytest.raises(UnavailableError):
        await _ask([UnavailableError("no")], str(audio))
    assert audio.read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([_text("cut")], "without its last message"),
        ([_text("mute"), _END], "without speech"),
        ([_media(1), _END], "without a description"),
        ([_media(1, output_pb2.MediaInfo(mime_type="image/png"))], "cannot write 'image/png' as WAV"),
        (
            [
                _media(1, _PCM),
                _media(1, output_pb2.MediaInfo(mime_type="audio/pcm", sample_rate_hz=16000, channels=1)),
            ],
            "changed in mid-answer",
        ),
    ],
)
async def test_answers_that_are_none(script: list[Event], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataLossError, match=message):
        await _ask(script, str(tmp_path / "a.wav"))
