"""The engine contract: what a stage worker asks of whatever does the work.

An engine serves many requests at once. The worker calls ``execute`` once per request and iterates; everything else is
called between requests or beside them. Engines know nothing of gRPC, gateways, etcd or connectors: their inputs arrive
as ``Payload`` streams and their outputs leave as ``EngineOutput``.

Guarantees an engine gives: outputs of one request come in order; the last output has ``finish``; an exception from the
iterator fails that request only, but for ``ENGINE_DEAD``; after ``aclose()`` of the iterator, or ``abort``, the request
holds nothing. ``probe`` answers only while the engine can make progress: it must go through the same thread, process or
queue as the work does, so that a hung engine does not answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from connectors.payload import Payload
from omni.v1 import pipeline_pb2, prompt_pb2, sampling_pb2, types_pb2
from omnicore.errors import InvalidRequestError, UnimplementedError

ENGINE_DEAD = "ENGINE_DEAD"
"""Reason of the ``UnavailableError`` with which a request fails because the engine will never make progress again. The
worker then asks ``probe`` at once, and ends if that fails, too; gateways begin the request again elsewhere."""
WITHOUT_LIBRARIES = "to do without it, start the pipeline with --engine sim"
"""What to add where an engine's library or model is not installed: a newcomer may only want to look."""

FEATURES = (
    "logprobs", "structured_output", "bot_task", "negative_prompt", "language", "instructions", "resume", "repeats",
)  # fmt: skip
"""What a call may ask for that many engines cannot do: fields of SamplingParams, Prompt and SpeechOptions; to go on
from tokens (``Resume``); and "repeats": a request with the same inputs and parameters brings the same chunks on any
replica, as many and with the same content, however it is batched. The consumer of a lost replica then goes on where it
is, in the midst of what another one makes."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine is."""

    model: str
    kv_layout: str = ""
    """Block size and dtype of the KV cache ("16:bfloat16"); empty without one."""
    max_num_seqs: int = 0
    """Requests worked on at a time; 0: no limit of its own."""
    details: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """For the log: versions, devices."""
    features: frozenset[str] = frozenset()
    """Those of ``FEATURES`` that it has. Calls that need another are refused before they reach it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Resume:
    """What another replica had made of a request before it was lost."""

    token_ids: Sequence[int]
    text: str
    """Of those tokens, as far as it was sent on."""


@dataclasses.dataclass(slots=True)
class EngineRequest:
    """One call, as the engine sees it. Not frozen, since that would make its making three times as dear; but nobody
    changes it."""

    request_id: str
    """Unique among the calls that run on this engine (request id and attempt)."""
    prompt: prompt_pb2.Prompt | None
    """Set at the stage where the request enters the pipeline."""
    inputs: Mapping[int, AsyncIterator[Payload]]
    """Upstream stage id → its chunks, in order. Ends after the last; raises if the producer failed. Payloads are
    valid until the next one is asked for: copy what must live longer."""
    sampling: sampling_pb2.SamplingParams
    """Complete: request over stage defaults."""
    speech: prompt_pb2.SpeechOptions
    wants_output: bool
    """The client wants this stage's text or media. False: only `chunk`s matter."""
    downstream: Sequence[int] = ()
    """Stages that read this call's chunks. Empty: make none."""
    trace_parent: str = ""
    resume: Resume | None = None
    """Only for engines with the feature "resume". Go on from there, as if this engine had made those tokens: limits,
    penalties, stops and the counts of ``finish`` include them. Outputs have only what follows ``text`` and the tokens;
    if they were the end, the first output has ``finish``."""
    companions: Mapping[tuple[int, str], AsyncIterator[Payload]] = dataclasses.field(default_factory=dict)
    """Upstream stage id and role ("cfg_text", …) → the chunks of that companion of the request, as ``inputs``; by the
    order of roles. ``stage_worker.companions`` says what guided models call them."""


@dataclasses.dataclass(frozen=True, slots=True)
class MediaInfo:
    """How to read media bytes."""

    mime_type: str
    """"audio/pcm" is signed 16-bit little-endian, interleaved."""
    sample_rate_hz: int = 0
    channels: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Finish:
    """The end of a request."""

    reason: str
    """"stop" or "length" for token engines; "stop" for others."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


class TokenChance(NamedTuple):
    """A token, and how likely it was."""

    token_id: int
    text: bytes
    """UTF-8; may be a part of a character."""
    logprob: float
    """Natural logarithm, 0 or less."""


class TokenLogprob(NamedTuple):
    """The token that was taken, and the likeliest ones at its place."""

    token: TokenChance
    top: Sequence[TokenChance] = ()


@dataclasses.dataclass(slots=True)
class EngineOutput:
    """What one step brought for one request. All parts are optional; empty outputs are not sent on. Not frozen, as
    ``EngineRequest``: there is one for every token. The worker changes nothing of it."""

    text: str = ""
    """Text added. The worker also cuts it into chunks for text edges (by step, sentence or at the end), so a text
    engine never fills ``chunk``."""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    """One for each of ``token_ids``, if ``sampling.logprobs`` is set."""
    prompt_tokens: int = 0
    """Tokens of the request's own prompt, with its first tokens, where the engine counts them."""
    media: bytes = b""
    media_info: MediaInfo | None = None
    """With the first media bytes of a request."""
    chunk: Payload | None = None
    """Tensors or bytes for downstream stages."""
    finish: Finish | None = None
    """In the last output only."""


class Engine(Protocol):
    """One replica's engine. Constructed by ``stage_worker.engines.create_engine`` with the stage's plan."""

    async def start(self) -> EngineInfo:
        """Load everything; the replica becomes READY when this returns. Raises ``InvalidRequestError`` for engine
        arguments that are wrong, ``UnavailableError`` for a library or device that is not there."""
        ...

    def execute(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Run one request."""
        ...

    async def abort(self, request_id: str) -> bool:
        """End a request now; its iterator then ends or raises. False: it is not here."""
        ...

    def load(self) -> types_pb2.LoadReport:
        """Load now; the worker fills in the transfer fields. Cheap: called every beat."""
        ...

    async def probe(self) -> None:
        """Return as soon as the engine has shown that it can make progress. Raises when it never will again: the worker
        then deregisters and exits. Waits, and is cancelled, while the engine hangs."""
        ...

    async def control(self, method: types_pb2.ControlMethod.ValueType, args: Mapping[str, Any]) -> dict[str, Any]:
        """sleep, wake_up, profile, reset_prefix_cache. Raises ``UnimplementedError`` where there is no such thing."""
        ...

    async def close(self) -> None:
        """Free everything. May be called more than once, and after a failed ``start``."""
        ...


class Tokens(NamedTuple):
    """What a prompt is to a model."""

    token_ids: Sequence[int]
    texts: Sequence[str]
    """The model's own name of each; they need not be parts of the prompt."""
    max_model_len: int = 0
    """Most tokens of a prompt with its answer; 0: no limit is known."""


@runtime_checkable
class Tokenizing(Protocol):
    """What an engine with a tokenizer has besides."""

    async def tokenize(
        self, prompt: prompt_pb2.Prompt, *, add_special_tokens: bool, add_generation_prompt: bool
    ) -> Tokens:
        """The tokens of a text or chat. Raises ``InvalidRequestError`` for what the model cannot read."""
        ...

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Their text. Raises ``InvalidRequestError`` for tokens that the model does not have."""
        ...


class EngineFactory(Protocol):
    """What the entry-point group ``omniplane.engines`` holds."""

    def __call__(self, stage: pipeline_pb2.Stage, devices: Sequence[str]) -> Engine:
        """An engine that is not started yet. Raises ``InvalidRequestError`` for wrong engine arguments."""
        ...


def no_such_control(engine: str, method: types_pb2.ControlMethod.ValueType) -> UnimplementedError:
    """What an engine raises for a control method that it does not have."""
    name = types_pb2.ControlMethod.Name(method).removeprefix("CONTROL_METHOD_").lower()
    return UnimplementedError(f"engine {engine} has no {name}")


def prompt_too_long(tokens: int, limit: int) -> InvalidRequestError:
    """What an engine raises for a prompt that leaves no room for an answer: it takes ``limit`` tokens at most."""
    return InvalidRequestError.field(
        "prompt",
        f"has {tokens} tokens; this model takes at most {limit}",
        reason="CONTEXT_LENGTH_EXCEEDED",
    )
