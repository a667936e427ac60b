"""Engine "hibari-vocoder": the chunks of hibari-acoustic to sound: 24 kHz, mono, signed 16-bit little-endian.

Each chunk's audio leaves as soon as it is computed. The noise part of the sound is drawn from the request's seed (0 if
it has none), so the same request sounds the same on every replica.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import numpy as np
import numpy.typing as npt

from connectors.payload import Payload
from omni.v1 import pipeline_pb2
from omnicore.errors import InvalidRequestError
from stage_worker.engine import EngineInfo, EngineOutput, EngineRequest, Finish, MediaInfo
from stage_worker.engines.hibari_options import SPECTRUM_TENSORS, require_hibari, stage_options
from stage_worker.engines.thread_engine import ThreadEngine

SAMPLE_RATE_HZ = 24_000  # hibari.dsp.SR
_BINS = 601
# The model leaves up to a second of silence around a sentence. This much of it is a natural pause between sentences.
_LEAD_S, _TAIL_S = 0.1, 0.25
_SILENCE = 0.003  # of full scale, about -50 dB
_FADE_S = 0.005  # at both ends of a sentence, against clicks
_MEDIA = MediaInfo("audio/pcm", SAMPLE_RATE_HZ, 1)


def create(stage: pipeline_pb2.Stage, devices: Sequence[str]) -> HibariVocoderEngine:
    """The engine of a stage, not started. Raises ``InvalidRequestError`` for engine arguments and
    ``UnavailableError`` without the package."""
    version = require_hibari()
    stage_options(stage, ())
    return HibariVocoderEngine(stage, version)


class HibariVocoderEngine(ThreadEngine):
    """See the module. One instance serves one replica."""

    def __init__(self, stage: pipeline_pb2.Stage, version: str) -> None:
        super().__init__("hibari-vocoder")
        self._model = stage.model or "hibari-tts"
        self._max_num_seqs = stage.max_num_seqs
        self._version = version

    async def start(self) -> EngineInfo:
        """Make a moment of silence: the first call loads what the vocoder needs."""
        frames = 8
        silence = {name: np.full((_BINS, frames), -20.0, np.float32) for name in SPECTRUM_TENSORS}
        await self.in_thread(_synthesize, silence | {"f0": np.zeros(frames, np.float32)}, np.random.default_rng(0))
        return EngineInfo(
            model=self._model, max_num_seqs=self._max_num_seqs, details={"hibari": self._version, "device": "cpu"}
        )

    async def execute(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Audio of each chunk, then the finish."""
        if request.prompt is not None:
            raise InvalidRequestError.field("prompt", "engine hibari-vocoder reads the chunks of hibari-acoustic only")
        noise = np.random.default_rng(request.sampling.seed & 0xFFFFFFFFFFFFFFFF)
        first = True
        with self.job(request.request_id) as job:
            for stage_id in sorted(request.inputs):
                async for payload in job.each(request.inputs[stage_id]):
                    tensors = _checked(stage_id, payload)
                    if not tensors:
                        continue
                    samples = await job.call(_synthesize, tensors, noise)
                    pcm = to_pcm(samples)
                    chunk = Payload(tensors={"pcm": pcm}, metadata=payload.metadata) if request.downstream else None
                    yield EngineOutput(media=pcm.tobytes(), media_info=_MEDIA if first else None, chunk=chunk)
                    first = False
            yield EngineOutput(finish=Finish("stop"))


def to_pcm(samples: npt.NDArray[np.float32]) -> npt.NDArray[np.int16]:
    """Samples in -1 to 1 as 16-bit integers: long silence at the ends cut, ends faded, peaks clipped."""
    samples = np.nan_to_num(np.asarray(samples, np.float32))
    loud = np.flatnonzero(np.abs(samples) > _SILENCE)
    if len(loud):
        begin = max(0, int(loud[0]) - int(_LEAD_S * SAMPLE_RATE_HZ))
        samples = samples[begin : int(loud[-1]) + int(_TAIL_S * SAMPLE_RATE_HZ)].copy()
    fade = min(int(_FADE_S * SAMPLE_RATE_HZ), len(samples) // 2)
    if fade:
        ramp = np.linspace(0.0, 1.0, fade, endpoint=False, dtype=np.float32)
        samples[:fade] *= ramp
        samples[-fade:] *= ramp[::-1]
    return (np.clip(samples, -1.0, 1.0) * 32767.0).astype("<i2")


def _synthesize(tensors: dict[str, npt.NDArray[np.float32]], noise: np.random.Generator) -> npt.NDArray[np.float32]:
    from hibari import dsp

    samples: npt.NDArray[np.float32] = dsp.synth(*(tensors[name] for name in SPECTRUM_TENSORS), tensors["f0"], noise)
    return samples


def _checked(stage_id: int, payload: Payload) -> dict[str, npt.NDArray[np.float32]]:
    """The tensors of a chunk; none for an empty one. Raises ``InvalidRequestError`` for anything else."""
    if payload.text is None and not payload.tensors:
        return {}
    missing = [name for name in (*SPECTRUM_TENSORS, "f0") if name not in payload.tensors]
    if missing:
        raise InvalidRequestError(
            f"stage {stage_id} sends {sorted(payload.tensors) or 'text'}; engine hibari-vocoder needs {missing[0]!r}"
        )
    frames = payload.tensors["f0"].shape[-1] if payload.tensors["f0"].ndim == 1 else -1
    for name in SPECTRUM_TENSORS:
        if payload.tensors[name].shape != (_BINS, frames):
            raise InvalidRequestError(
                f"stage {stage_id}: tensor {name!r} has shape {payload.tensors[name].shape}, not ({_BINS}, {frames})"
            )
    if frames == 0:
        return {}
    return {name: np.asarray(payload.tensors[name], np.float32) for name in (*SPECTRUM_TENSORS, "f0")}
