"""Engine "hibari-acoustic": text to the spectrum of speech, one chunk per sentence, with the hibari-tts package.

Reads the text of its upstream stages, or a text prompt where a request enters the pipeline here. Each sentence goes
out as soon as it is computed, as the tensors of ``hibari_options.SPECTRUM_TENSORS`` and ``f0``, with metadata ``text``
(what is said) and ``sample_rate_hz``. ``engine_args.voice`` names one of the package's voices.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np

from connectors.payload import Payload
from omni.v1 import pipeline_pb2, prompt_pb2
from omnicore.errors import InvalidRequestError, UnavailableError
from stage_worker.chunking import SentenceCutter
from stage_worker.engine import EngineInfo, EngineOutput, EngineRequest, Finish
from stage_worker.engines.hibari_options import SPECTRUM_TENSORS, require_hibari, stage_options
from stage_worker.engines.speech_text import speakable
from stage_worker.engines.thread_engine import Job, ThreadEngine

_SPEEDS = (0.5, 2.0)  # what the package documents
_MIN_IDS = 3  # the model pads with one id on either side: fewer means nothing to say
# Clients of the OpenAI API must name one of these; a model with one voice speaks with that.
_OPENAI_VOICES = frozenset(
    ("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse")
)
_ENDS_SENTENCE = re.compile(r"[.!?…。！？][\"'”’»)\]*_]*\s*$|\n\s*$")


def create(stage: pipeline_pb2.Stage, devices: Sequence[str]) -> HibariAcousticEngine:
    """The engine of a stage, not started. Raises ``InvalidRequestError`` for an unknown voice or argument and
    ``UnavailableError`` without the package."""
    version = require_hibari()
    from hibari.voices import DEFAULT, VOICES

    voice = stage_options(stage, {"voice"}).get("voice", DEFAULT)
    if voice not in VOICES:
        raise InvalidRequestError.field("engine_args.voice", f"must be one of {', '.join(VOICES)}, got {voice!r}")
    return HibariAcousticEngine(stage, voice, version)


class HibariAcousticEngine(ThreadEngine):
    """See the module. One instance serves one replica."""

    def __init__(self, stage: pipeline_pb2.Stage, voice: str, version: str) -> None:
        super().__init__("hibari-acoustic")
        self._model = stage.model or "hibari-tts"
        self._max_num_seqs = stage.max_num_seqs
        self._voice = voice
        self._version = version
        self._tts: Any = None

    async def start(self) -> EngineInfo:
        """Load the model and say something once: the first call loads lexicons."""
        try:
            await self.in_thread(self._load)
        except RuntimeError as error:  # a voice outside of the package could not be downloaded
            raise UnavailableError(f"voice {self._voice!r}: {error}", reason="ENGINE_START_FAILED") from error
        return EngineInfo(
            model=self._model,
            max_num_seqs=self._max_num_seqs,
            details={"hibari": self._version, "voice": self._voice, "device": "cpu"},
        )

    async def execute(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """One chunk per sentence, then the finish."""
        self._check_voice(request.speech.voice)
        speed = self._checked_speed(request.speech.speed)
        with self.job(request.request_id) as job:
            async for sentence in _sentences(job, request):
                for phonemes in await job.call(self._phonemize, sentence):
                    chunk = await job.call(self._acoustic, phonemes, speed, sentence)
                    if chunk is not None:
                        yield EngineOutput(chunk=chunk)
            yield EngineOutput(finish=Finish("stop"))

    def _load(self) -> None:
        from hibari import Hibari

        self._tts = Hibari(voice=self._voice, threads=1)
        for phonemes in self._phonemize("Hello there."):
            self._acoustic(phonemes, 1.0, "")

    def _phonemize(self, sentence: str) -> list[str]:
        try:
            return list(self._tts.phonemize(sentence))
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            # The package's rules for numbers, dates and the like meet input that they were not written for.
            raise InvalidRequestError(f"cannot be spoken: {sentence[:80]!r}", reason="UNSPEAKABLE") from error

    def _acoustic(self, phonemes: str, speed: float, text: str) -> Payload | None:
        ids = self._tts.ids(phonemes)
        if len(ids) < _MIN_IDS:
            return None
        inputs = {"ids": np.asarray([ids], np.int64), "speed": np.asarray([speed], np.float32)}
        names = (*SPECTRUM_TENSORS, "f0")
        outputs = self._tts.sess.run(list(names), inputs)
        tensors = {name: output[0] for name, output in zip(names, outputs, strict=True)}
        return Payload(tensors=tensors, metadata={"text": text, "sample_rate_hz": int(self._tts.sample_rate)})

    def _check_voice(self, voice: str) -> None:
        if voice not in ("", "default", self._voice) and voice not in _OPENAI_VOICES:
            raise InvalidRequestError.field(
                "speech.voice", f"this model has the voice {self._voice!r}, got {voice!r}; leave it out for that"
            )

    def _checked_speed(self, speed: float) -> float:
        speed = speed or 1.0
        low, high = _SPEEDS
        if not low <= speed <= high:
            raise InvalidRequestError.field("speech.speed", f"this model speaks at {low:g} to {high:g}, got {speed:g}")
        return speed


async def _sentences(job: Job, request: EngineRequest) -> AsyncIterator[str]:
    """What to say, one speakable sentence at a time."""
    cutter = SentenceCutter()
    if request.prompt is not None:
        for sentence in _spoken([*cutter.feed(_prompt_text(request.prompt)), *cutter.flush()]):
            yield sentence
        return
    for stage_id in sorted(request.inputs):
        async for payload in job.each(request.inputs[stage_id]):
            if payload.text is None:
                raise InvalidRequestError(f"stage {stage_id} sends tensors; engine hibari-acoustic reads text")
            pieces = list(cutter.feed(payload.text))
            # A chunk that ends a sentence is spoken now. The cutter alone would wait for what follows.
            if _ENDS_SENTENCE.search(payload.text):
                pieces += cutter.flush()
            for sentence in _spoken(pieces):
                yield sentence
    for sentence in _spoken(cutter.flush()):
        yield sentence


def _spoken(pieces: Sequence[str]) -> Iterator[str]:
    return (sentence for piece in pieces if (sentence := speakable(piece)))


def _prompt_text(prompt: prompt_pb2.Prompt) -> str:
    if prompt.WhichOneof("kind") != "text":
        raise InvalidRequestError.field("prompt", "engine hibari-acoustic reads a text out; send prompt.text")
    return prompt.text
