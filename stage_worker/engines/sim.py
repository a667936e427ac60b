"""The simulated engine: real batching, admission, streams and failures, invented content.

For tests, benches and trying a pipeline without its models. What it makes is a function of the prompt or input, the
stage's seed and the request's seed, so the same request gives the same output on every replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from connectors.payload import Payload
from omni.v1 import pipeline_pb2, prompt_pb2, sampling_pb2, types_pb2
from omnicore.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidRequestError,
    UnavailableError,
)
from omnicore.log import get_logger
from stage_worker.chunking import split_sentences
from stage_worker.companions import applied_keys
from stage_worker.engine import (
    ENGINE_DEAD,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    Finish,
    MediaInfo,
    Resume,
    Tokens,
    no_such_control,
    prompt_too_long,
)
from stage_worker.engines import sim_content as content
from stage_worker.engines.sim_loop import SimSequence, StepLoop
from stage_worker.engines.sim_options import SimOptions, sim_options

_FEATURES = frozenset(("logprobs", "bot_task", "negative_prompt", "language", "instructions", "repeats"))
_MOST_PIXELS = 2048  # of a side: pictures are made on the event loop
_log = get_logger(__name__)
_AUDIO = MediaInfo("audio/pcm", content.SAMPLE_RATE_HZ, 1)


def create(stage: pipeline_pb2.Stage, devices: Sequence[str]) -> SimEngine:
    """The engine of a stage. Raises ``InvalidRequestError`` for wrong options."""
    return SimEngine(stage, sim_options(stage))


class SimEngine:
    """See the module. One instance serves one replica."""

    def __init__(self, stage: pipeline_pb2.Stage, options: SimOptions) -> None:
        self._model = stage.model
        self._max_num_seqs = stage.max_num_seqs
        self._options = options
        self._loop = StepLoop((options.step_ms or options.tpot_ms) / 1e3, stage.max_num_seqs)

    async def start(self) -> EngineInfo:
        """Take ``start_ms``, then step."""
        await asyncio.sleep(self._options.start_ms / 1e3)
        self._loop.start()
        return EngineInfo(
            model=self._model,
            max_num_seqs=self._max_num_seqs,
            details={"output": self._options.output},
            features=_FEATURES | {"resume"} if self._options.output == "text" else _FEATURES,
        )

    async def execute(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Run one request."""
        if self._loop.paused:
            raise FailedPreconditionError("the engine is asleep", reason="ASLEEP")
        try:
            sequence = await self._loop.admit(request.request_id)
            run = self._text if self._options.output == "text" else self._media
            async with contextlib.aclosing(run(request, sequence)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._loop.remove(request.request_id)

    async def abort(self, request_id: str) -> bool:
        """End a request at once, even while the engine hangs."""
        return self._loop.abort(request_id)

    def load(self) -> types_pb2.LoadReport:
        """Counts of the step loop."""
        running, waiting = self._loop.running, self._loop.waiting
        usage = running / self._max_num_seqs if self._max_num_seqs else 0.0
        return types_pb2.LoadReport(
            queue_length=running + waiting, running=running, waiting=waiting, kv_usage_ratio=min(1.0, usage)
        )

    async def probe(self) -> None:
        """Return after the next step."""
        await self._loop.probe()

    async def control(self, method: types_pb2.ControlMethod.ValueType, args: Mapping[str, Any]) -> dict[str, Any]:
        """sleep, wake_up and reset_prefix_cache."""
        if method == types_pb2.CONTROL_METHOD_SLEEP:
            if self._loop.running or self._loop.waiting:
                raise FailedPreconditionError(
                    f"{self._loop.running + self._loop.waiting} requests are running: a busy engine does not sleep",
                    reason="BUSY",
                )
            self._loop.paused = True
        elif method == types_pb2.CONTROL_METHOD_WAKE_UP:
            self._loop.paused = False
        elif method == types_pb2.CONTROL_METHOD_RESET_PREFIX_CACHE:
            return {}  # there is none
        else:
            raise no_such_control("sim", method)
        return {"asleep": self._loop.paused}

    async def tokenize(
        self, prompt: prompt_pb2.Prompt, *, add_special_tokens: bool, add_generation_prompt: bool
    ) -> Tokens:
        """Words of the lexicon, and bytes. It has no special tokens."""
        ids, texts = content.tokens_of(content.prompt_text(prompt))
        return Tokens(ids, texts, self._options.max_model_len)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of tokens."""
        return content.text_of(token_ids)

    async def close(self) -> None:
        """Stop; may be called more than once."""
        await self._loop.close()

    # --- text -------------------------------------------------------------------------------------------------------

    async def _text(self, request: EngineRequest, sequence: SimSequence) -> AsyncGenerator[EngineOutput, None]:
        parts = [content.prompt_text(request.prompt)] if request.prompt is not None else []
        async for payload in _interleaved(request.inputs):
            text = payload.text if payload.text is not None else f"<{self._digest(payload):08x}>"
            parts.append(text)
        source = "\n".join(parts)
        limit = self._options.max_model_len
        if limit and (length := len(source.split())) > limit:
            raise prompt_too_long(length, limit)
        tokens = _Answer(source, self._options, request.sampling, tells_prompt=request.prompt is not None)
        if request.resume is not None:
            rest = tokens.resume(request.resume)
            if rest.text or rest.finish is not None:
                yield rest
            if rest.finish is not None:
                return
        fails_at = self._fails_at(zlib.crc32(source.encode()))
        loop = asyncio.get_running_loop()

        def step() -> EngineOutput | None:
            if self._stops_here(sequence, fails_at):
                return None
            output = tokens.step()
            sequence.schedule(None if output.finish else step, loop.time() + self._options.tpot_ms / 1e3)
            return output

        sequence.schedule(step, loop.time() + self._options.ttft_ms / 1e3)
        self._loop.changed()
        while True:
            output = await self._next(sequence)
            yield output
            if output.finish is not None:
                return

    # --- tensors, audio, pictures -----------------------------------------------------------------------------------

    async def _media(self, request: EngineRequest, sequence: SimSequence) -> AsyncGenerator[EngineOutput, None]:
        options = self._options
        seed = options.seed + request.sampling.seed
        loop = asyncio.get_running_loop()
        overall = _picture_seed(request.sampling) if options.output == "image" else 0
        prompt_tokens = len(content.prompt_text(request.prompt).split()) if request.prompt is not None else 0
        async for payload in self._sources(request):
            source = self._digest(payload)
            overall = zlib.crc32(source.to_bytes(4, "big"), overall)
            if options.output == "image":
                continue
            fails_at = self._fails_at(source)
            for index in range(options.chunks or 1):

                def step(source: int = source, index: int = index, fails_at: int = fails_at) -> EngineOutput | None:
                    if self._stops_here(sequence, fails_at):
                        return None
                    sequence.schedule(None)
                    return self._chunk(request, source, index, seed, first=sequence.made == 0)

                delay_ms = options.tpot_ms if index else options.ttft_ms
                sequence.schedule(step, loop.time() + delay_ms / 1e3)
                self._loop.changed()
                yield await self._next(sequence)

        if options.output == "image":
            overall = await self._guided(request, overall)

        def last() -> EngineOutput | None:
            if self._stops_here(sequence, self._fails_at(overall)):
                return None
            sequence.schedule(None)
            return self._picture(request, overall)

        if options.output == "image":
            sequence.schedule(last, loop.time() + options.ttft_ms / 1e3)
            self._loop.changed()
            yield await self._next(sequence)
        yield EngineOutput(finish=Finish("stop", prompt_tokens, sequence.made))

    async def _guided(self, request: EngineRequest, overall: int) -> int:
        """``overall`` with what companions made: each role's data, in its place, changes the picture."""
        for (_, role), payloads in request.companions.items():
            digests = [self._digest(payload) async for payload in payloads]
            overall = content.guided(overall, role, digests)
        if request.companions:
            keys = applied_keys(role for _, role in request.companions)
            _log.debug("cfg applied", request_id=request.request_id, keys=",".join(keys))
        return overall

    async def _sources(self, request: EngineRequest) -> AsyncIterator[Payload]:
        if request.prompt is not None:
            manner = f" <{request.speech.instructions}>" if request.speech.instructions else ""
            for sentence in split_sentences(content.prompt_text(request.prompt)):
                yield Payload(text=sentence + manner)
        async for payload in _interleaved(request.inputs):
            yield payload

    def _chunk(self, request: EngineRequest, source: int, index: int, seed: int, first: bool) -> EngineOutput:
        options = self._options
        if options.output == "audio":
            samples = content.tone(source + index, options.seconds_per_chunk)
            metadata = {"source": source, "index": index, "sample_rate_hz": content.SAMPLE_RATE_HZ}
            return EngineOutput(
                media=samples.tobytes() if request.wants_output else b"",
                media_info=_AUDIO if first and request.wants_output else None,
                chunk=Payload({"pcm": samples}, metadata=metadata) if request.downstream else None,
            )
        payload = content.tensor_chunk(source, index, seed, options.chunk_bytes, options.checksum)
        wanted = request.wants_output
        return EngineOutput(
            media=payload.tensors["hidden"].tobytes() if wanted else b"",
            media_info=MediaInfo("application/octet-stream") if first and wanted else None,
            chunk=payload if request.downstream else None,
        )

    def _picture(self, request: EngineRequest, source: int) -> EngineOutput:
        sampling = request.sampling
        for name in ("width", "height"):
            if getattr(sampling, name) > _MOST_PIXELS:
                raise InvalidRequestError.field(f"sampling.{name}", f"must be at most {_MOST_PIXELS}")
        png = content.picture(source + self._options.seed + sampling.seed, sampling.width, sampling.height)
        return EngineOutput(media=png, media_info=MediaInfo("image/png"))

    # --- shared -----------------------------------------------------------------------------------------------------

    def _digest(self, payload: Payload) -> int:
        return content.checked_digest(payload) if self._options.checksum else content.payload_digest(payload)

    async def _next(self, sequence: SimSequence) -> EngineOutput:
        output = await sequence.next_output()
        if sequence.was_paused:
            self._loop.changed()
        return output

    def _fails_at(self, digest: int) -> int:
        options = self._options
        rate = options.fail_rate if options.fail_rate >= 0 else float(options.fail_after_tokens >= 0)
        if rate <= 0 or random.Random(f"fail|{options.seed}|{digest}").random() >= rate:
            return -1
        return max(0, options.fail_after_tokens)

    def _stops_here(self, sequence: SimSequence, fails_at: int) -> bool:
        """Apply the configured faults before an output: raises, or True if the engine hangs from now on."""
        made, options = sequence.made, self._options
        if made == options.crash_after_tokens:
            error = UnavailableError(f"sim engine: died after {made} outputs, as configured", reason=ENGINE_DEAD)
            self._loop.die(error)
            raise error
        if 0 <= fails_at <= made:
            raise InternalError(f"sim engine: failed after {made} outputs, as configured", reason="SIM_FAILURE")
        if made == options.hang_after_tokens:
            self._loop.hang()
            return True
        return False


def _picture_seed(sampling: sampling_pb2.SamplingParams) -> int:
    """What steers diffusion, as a number; 0 where nothing was said."""
    steering = [str(getattr(sampling, n)) for n in ("num_inference_steps", "guidance_scale") if sampling.HasField(n)]
    return zlib.crc32("|".join(steering).encode())


class _Answer:
    """The tokens of one text answer, with its end."""

    def __init__(
        self, source: str, options: SimOptions, sampling: sampling_pb2.SamplingParams, *, tells_prompt: bool = False
    ) -> None:
        if sampling.HasField("max_tokens") and sampling.max_tokens < 1:
            raise InvalidRequestError.field("sampling.max_tokens", "must be at least 1")
        most = sampling.max_tokens if sampling.HasField("max_tokens") else options.tokens
        count = most if sampling.ignore_eos else min(most, options.tokens)
        self._reason = "length" if count == most and sampling.HasField("max_tokens") else "stop"
        self._left = max(1, count)
        self._made = 0
        self._prompt_tokens = len(source.split())
        self._tells_prompt = tells_prompt
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._top = sampling.logprobs if sampling.HasField("logprobs") else -1
        self._tokens = content.answer_tokens(source, options.seed + sampling.seed)
        if sampling.stop:
            self._tokens = _cut_at_stop(self._tokens, list(sampling.stop))

    def step(self) -> EngineOutput:
        """The next token."""
        token_id, text = next(self._tokens, (-1, ""))
        self._left -= 1
        self._made += 1
        reason = ""
        if token_id in self._stop_ids or token_id < 0:
            reason, text = "stop", text if token_id < 0 else ""
        elif self._left <= 0:
            reason = self._reason
            if reason == "stop" and not text.endswith("."):
                text += "."
        finish = Finish(reason, self._prompt_tokens, self._made) if reason else None
        if token_id < 0:
            return EngineOutput(text=text, finish=finish)
        logprobs = (content.chances(token_id, text, self._top),) if self._top >= 0 else ()
        prompt_tokens = self._prompt_tokens if self._tells_prompt and self._made == 1 else 0
        return EngineOutput(
            text=text, token_ids=(token_id,), logprobs=logprobs, prompt_tokens=prompt_tokens, finish=finish
        )

    def resume(self, resume: Resume) -> EngineOutput:
        """Make again, in silence, what was made: what is left of it, and its end if that was all."""
        text, finish, most = "", None, len(resume.token_ids)
        for index, token_id in enumerate(resume.token_ids):
            made = self.step()
            if tuple(made.token_ids) != (token_id,) or (made.finish is not None and index < most - 1):
                raise _mismatch(f"resume.token_ids[{index}]", f"{token_id} is not what this engine makes there")
            text += made.text
            finish = made.finish
        if not text.startswith(resume.text):
            raise _mismatch("resume.text", "is not the text of those tokens")
        return EngineOutput(text=text[len(resume.text) :], finish=finish)


def _mismatch(path: str, text: str) -> InvalidRequestError:
    return InvalidRequestError.field(path, text, reason="RESUME_MISMATCH")


def _cut_at_stop(tokens: Iterator[tuple[int, str]], stops: list[str]) -> Iterator[tuple[int, str]]:
    """The tokens up to the first stop text, which may span tokens: text that may begin one is held back."""
    longest = max(map(len, stops))
    held: list[tuple[int, str]] = []
    for token_id, text in tokens:
        held.append((token_id, text))
        joined = "".join(part for _, part in held)
        found = [at for stop in stops if (at := joined.find(stop)) >= 0]
        if found:
            yield from _prefix(held, min(found))
            return
        while held and len(joined) - len(held[0][1]) >= longest - 1:
            joined = joined[len(held[0][1]) :]
            yield held.pop(0)


def _prefix(tokens: list[tuple[int, str]], length: int) -> Iterator[tuple[int, str]]:
    for token_id, text in tokens:
        if length <= 0:
            return
        yield token_id, text[:length]
        length -= len(text)


async def _interleaved(inputs: Mapping[int, AsyncIterator[Payload]]) -> AsyncIterator[Payload]:
    """One chunk of each upstream stage in turn, in order of stage id, until all have ended: deterministic."""
    streams = [inputs[stage_id] for stage_id in sorted(inputs)]
    while streams:
        for stream in list(streams):
            try:
                yield await anext(stream)
            except StopAsyncIteration:
                streams.remove(stream)
