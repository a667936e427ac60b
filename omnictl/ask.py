"""One question: streams the answer to the terminal and its speech into a WAV, and measures both."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import BinaryIO, TextIO, cast

import grpc
import grpc.aio

from omni.v1 import inference_service_pb2, output_pb2, prompt_pb2, sampling_pb2
from omnicore.clock import SYSTEM_CLOCK, Clock
from omnicore.errors import DataLossError, FailedPreconditionError, InvalidRequestError
from omnictl import connect
from omnictl.output import plural
from omnictl.wav import WavWriter

_PCM = "audio/pcm"  # signed 16-bit little-endian (MediaInfo.mime_type)


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """What to ask, and where the speech goes."""

    pipeline: str
    text: str
    system: str = ""
    audio: str = ""
    """File for the spoken answer, "-" for standard output; empty: text only."""
    sampling: sampling_pb2.SamplingParams = dataclasses.field(default_factory=sampling_pb2.SamplingParams)
    voice: str = ""
    session: str = ""

    def to_request(self) -> inference_service_pb2.GenerateRequest:
        """The call that asks it."""
        turns = [("system", self.system)] if self.system else []
        turns.append(("user", self.text))
        messages = [
            prompt_pb2.ChatMessage(role=role, parts=[prompt_pb2.ContentPart(text=text)]) for role, text in turns
        ]
        request = inference_service_pb2.GenerateRequest(
            model=self.pipeline,
            request_id=connect.request_id(),
            task="chat",
            prompt=prompt_pb2.Prompt(chat=prompt_pb2.ChatPrompt(messages=messages)),
            sampling=self.sampling,
            modalities=["text", "audio"] if self.audio else ["text"],
            session_id=self.session,
        )
        if self.voice:
            request.speech.voice = self.voice
        return request


@dataclasses.dataclass(slots=True)
class Answer:
    """What came back. Times are seconds since ``Asker`` was told to start counting; None: it never came."""

    request_id: str = ""
    text: str = ""
    first_text_s: float | None = None
    first_audio_s: float | None = None
    total_s: float = 0.0
    audio_s: float = 0.0
    """Playing time of the speech."""
    finish: output_pb2.CallFinish = dataclasses.field(default_factory=output_pb2.CallFinish)

    def summary(self, audio: str) -> str:
        """One line for people; ``audio`` is where the speech went."""
        parts = [plural(self.finish.completion_tokens, "token")]
        if self.first_text_s is not None:
            parts.append(f"first text after {self.first_text_s:.2f} s")
        if self.first_audio_s is not None:
            parts.append(f"first audio after {self.first_audio_s:.2f} s")
        parts.append(f"done after {self.total_s:.2f} s")
        if self.audio_s:
            parts.append(f"{self.audio_s:.1f} s of speech in {'standard output' if audio == '-' else audio}")
        if self.finish.reason not in ("", "stop"):
            parts.append(f"ended by {self.finish.reason}")
        return " · ".join(parts)

    def to_json(self) -> dict[str, object]:
        """Stable JSON for programs; times in seconds, rounded to the millisecond."""
        return {
            "request_id": self.request_id,
            "text": self.text,
            "finish_reason": self.finish.reason,
            "prompt_tokens": self.finish.prompt_tokens,
            "completion_tokens": self.finish.completion_tokens,
            "first_text_s": None if self.first_text_s is None else round(self.first_text_s, 3),
            "first_audio_s": None if self.first_audio_s is None else round(self.first_audio_s, 3),
            "total_s": round(self.total_s, 3),
            "audio_s": round(self.audio_s, 3),
        }


def check_audio_target(audio: str) -> None:
    """Raise before anything is asked if the speech could not be written."""
    if audio in ("", "-"):
        return
    path = Path(audio)
    if path.is_dir():
        raise InvalidRequestError(f"--audio: {audio} is a directory", reason="BAD_FILE")
    if not path.parent.is_dir():
        raise InvalidRequestError(f"--audio: there is no directory {path.parent}", reason="BAD_FILE")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidRequestError(f"--audio: {audio} cannot be written", reason="BAD_FILE")


async def ask(
    gateway: connect.Gateway,
    question: Question,
    *,
    text_to: TextIO | None,
    clock: Clock = SYSTEM_CLOCK,
    since_s: float | None = None,
) -> Answer:
    """Ask, writing text to ``text_to`` and speech to the question's file as they come.

    Times in the answer count from ``since_s`` on ``clock``, or from now. Leaving early, by an error or by
    cancellation, cancels the request everywhere; the WAV written so far stays valid.
    """
    start_s = clock.monotonic() if since_s is None else since_s
    answer = Answer()
    sink = _SpeechFile(question.audio)
    call = gateway.inference.Generate(question.to_request())
    ends_line = True
    try:
        async for event in call:
            answer.request_id = event.request_id
            if event.text:
                answer.text += event.text
                if answer.first_text_s is None:
                    answer.first_text_s = clock.monotonic() - start_s
                if text_to is not None:
                    text_to.write(event.text)
                    text_to.flush()
                    ends_line = event.text.endswith("\n")
            if event.HasField("media_info"):
                sink.begin(event.media_info)
            if event.media:
                if answer.first_audio_s is None:
                    answer.first_audio_s = clock.monotonic() - start_s
                sink.write(event.media)
            if event.HasField("finish"):
                answer.finish = event.finish
    except grpc.aio.AioRpcError as error:
        raise connect.reachable_error(error, f"gateway at {gateway.address}") from error
    finally:
        call.cancel()  # does nothing to a call that has ended
        answer.audio_s = sink.close()
        if text_to is not None and not ends_line:
            text_to.write("\n")
            text_to.flush()
    answer.total_s = clock.monotonic() - start_s
    if not answer.finish.ByteSize():
        raise DataLossError("the answer ended without its last message", reason="INCOMPLETE_ANSWER")
    if question.audio and answer.first_audio_s is None:
        raise DataLossError("the answer came without speech", reason="NO_AUDIO")
    return answer


class _SpeechFile:
    """The WAV file of an answer. It is created with the first speech, so that a refused question overwrites nothing."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._writer: WavWriter | None = None
        self._info: output_pb2.MediaInfo | None = None

    def begin(self, info: output_pb2.MediaInfo) -> None:
        """Take note of how to read the media that follows."""
        if info.mime_type.split(";")[0].strip() != _PCM:
            raise DataLossError(f"cannot write {info.mime_type!r} as WAV", reason="UNSUPPORTED_MEDIA")
        if self._writer is not None and self._info != info:
            raise DataLossError("the audio format changed in mid-answer", reason="UNSUPPORTED_MEDIA")
        self._info = info

    def write(self, pcm: bytes) -> None:
        """Append speech."""
        if not self._target:
            return
        if self._writer is None:
            if self._info is None:
                raise DataLossError("speech came without a description of its format", reason="UNSUPPORTED_MEDIA")
            self._writer = WavWriter(
                self._open(), sample_rate_hz=self._info.sample_rate_hz, channels=self._info.channels
            )
        self._writer.write(pcm)

    def close(self) -> float:
        """Close the file, if there is one; returns its playing time in seconds."""
        if self._writer is None:
            return 0.0
        seconds = self._writer.seconds
        self._writer.close()
        return seconds

    def _open(self) -> BinaryIO:
        if self._target == "-":
            return cast(BinaryIO, _Pipe(sys.stdout.buffer))
        try:
            return Path(self._target).open("wb")
        except OSError as error:
            raise FailedPreconditionError(f"--audio: {self._target}: {error.strerror}", reason="BAD_FILE") from error


class _Pipe:
    """Standard output as a stream that nobody rewinds, even one redirected to a file. Has what WavWriter uses."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw

    def seekable(self) -> bool:
        return False

    def write(self, data: bytes) -> int:
        return self._raw.write(data)

    def flush(self) -> None:
        self._raw.flush()

    def close(self) -> None:
        """Standard output stays open."""
