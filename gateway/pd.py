"""Stages that are split in prefill, which makes the KV cache of a prompt, and decode, which goes on from it. Pure.

Which stages form pairs, what each half is asked, what passes between them, and what becomes of the one half when the
other fails. Pairs are of stages: each half has as many replicas as it likes, and each request takes any of either.

Nothing here is called yet: executions do not run pairs so far.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence

from google.protobuf import struct_pb2

from omni.v1 import pipeline_pb2, sampling_pb2, stage_service_pb2
from omnicore import errors

KV_PARAMS = "kv_transfer_params"
"""vLLM's name for what a KV connector wants to know of a request; also the key in a handle's metadata."""
ENGINE_ARGS = "extra_args"
"""Where vLLM's ``SamplingParams`` has them."""
# Of vLLM's own sampling parameters those about stops, and those that ask for what nobody reads.
_NEUTRALISED_EXTRA = ("include_stop_str_in_output", "prompt_logprobs")


@dataclasses.dataclass(frozen=True, slots=True)
class StagePair:
    """The stage ids of two halves."""

    prefill: int
    decode: int


def is_prefill_only(stage: pipeline_pb2.Stage) -> bool:
    """It makes KV caches for another stage."""
    return _flag(stage, "is_prefill_only")


def is_decode_only(stage: pipeline_pb2.Stage) -> bool:
    """It reads KV caches of another stage."""
    return _flag(stage, "is_decode_only")


def _flag(stage: pipeline_pb2.Stage, name: str) -> bool:
    return name in stage.engine_args.fields and stage.engine_args.fields[name].bool_value


def stage_pairs(pipeline: pipeline_pb2.Pipeline) -> tuple[StagePair, ...]:
    """The pairs of a plan, by ascending prefill stage; none where no stage is split.

    Halves belong together by the edge between them, so a plan may have several pairs. Raises ``ValueError``, which
    names the stage, for a stage that is both halves, and for a half without its one other half. The control plane has
    refused most of those before.
    """
    prefill = {stage.stage_id for stage in pipeline.stages if is_prefill_only(stage)}
    decode = {stage.stage_id for stage in pipeline.stages if is_decode_only(stage)}
    if both := prefill & decode:
        raise ValueError(f"{pipeline.name}: stage {min(both)} is prefill only and decode only")
    found = sorted(
        {(e.from_stage, e.to_stage) for e in pipeline.edges if e.from_stage in prefill and e.to_stage in decode}
    )
    for half, ids, mine in (("decode", prefill, 0), ("prefill", decode, 1)):
        for stage_id in sorted(ids):
            others = [pair[1 - mine] for pair in found if pair[mine] == stage_id]
            if len(others) != 1:
                told = ", ".join(map(str, others)) or "none"
                raise ValueError(f"{pipeline.name}: stage {stage_id} has edges with {told}: it needs one {half} stage")
    return tuple(StagePair(*pair) for pair in found)


# -- what the halves are asked --


def prefill_sampling(asked: sampling_pb2.SamplingParams, transfer_id: str) -> sampling_pb2.SamplingParams:
    """What the prefill half is asked, where ``asked`` is what the stage as a whole would be: ``asked`` stays as it is.

    One token, which is thrown away, and which nothing but the length may end: engines hand a cache over only then. So a
    stop that the first token would match, and the end-of-sequence token, are decode's to see.
    """
    result = sampling_pb2.SamplingParams()
    result.CopyFrom(asked)
    result.max_tokens = 1
    if result.min_tokens > 1:
        result.min_tokens = 1
    result.ignore_eos = True
    for name in ("stop", "stop_token_ids", "logprobs", "structured_output"):
        result.ClearField(name)
    for name in _NEUTRALISED_EXTRA:
        result.extra.fields.pop(name, None)
    _put(result, {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id})
    return result


def decode_sampling(asked: sampling_pb2.SamplingParams, kv: struct_pb2.Struct) -> sampling_pb2.SamplingParams:
    """What the decode half is asked: all of ``asked``, which stays as it is, and where the cache is (``decode_kv``)."""
    result = sampling_pb2.SamplingParams()
    result.CopyFrom(asked)
    _engine_args(result)[KV_PARAMS] = kv
    return result


def _put(sampling: sampling_pb2.SamplingParams, values: dict[str, bool | str]) -> None:
    kv = struct_pb2.Struct()
    kv.update(values)
    _engine_args(sampling)[KV_PARAMS] = kv


def _engine_args(sampling: sampling_pb2.SamplingParams) -> struct_pb2.Struct:
    """The engine's own parameters in ``sampling``, made if there are none."""
    return sampling.extra.fields[ENGINE_ARGS].struct_value


def expand_sampling(
    given: Sequence[sampling_pb2.SamplingParams], stage_ids: Sequence[int], pairs: Iterable[StagePair]
) -> list[sampling_pb2.SamplingParams]:
    """One set of parameters for each stage, before defaults are filled in.

    Who does not think of the split gives as many as there are stages with each pair counted once: both halves then get
    copies of the same. It is the caller's to warn of that, which is so where the result is longer than ``given``.
    Raises ``ValueError`` for any other number, with those that are accepted.
    """
    decode = {pair.decode: pair.prefill for pair in pairs}
    if len(given) == len(stage_ids):
        expanded = dict(zip(stage_ids, given, strict=True))
    elif len(given) == len(stage_ids) - len(decode):
        whole = [stage_id for stage_id in stage_ids if stage_id not in decode]
        expanded = dict(zip(whole, given, strict=True))
        expanded |= {half: expanded[other] for half, other in decode.items()}
    else:
        counts = sorted({len(stage_ids) - len(decode), len(stage_ids)})
        accepted = " or ".join(map(str, counts))
        raise ValueError(f"{len(given)} sets of sampling parameters for {len(stage_ids)} stages; accepted: {accepted}")
    result = []
    for stage_id in stage_ids:
        own = sampling_pb2.SamplingParams()
        own.CopyFrom(expanded[stage_id])
        result.append(own)
    return result


# -- what passes from prefill to decode --


def captured_kv(outputs: Iterable[stage_service_pb2.StageOutput], decode_stage: int) -> struct_pb2.Struct:
    """The KV parameters that a prefill call gave for its decode stage, in the metadata of a handle; a copy.

    Raises ``InternalError`` (KV_PARAMS_MISSING, KV_PARAMS_AMBIGUOUS) unless there is exactly one set of them.
    """
    found = [
        handle.metadata.fields[KV_PARAMS].struct_value
        for output in outputs
        if output.to_stage == decode_stage
        for handle in output.handles
        if KV_PARAMS in handle.metadata.fields
        and handle.metadata.fields[KV_PARAMS].WhichOneof("kind") == "struct_value"
    ]
    if len(found) != 1:
        raise errors.InternalError(
            f"prefill gave {len(found)} sets of {KV_PARAMS} for stage {decode_stage}: exactly one is needed",
            reason="KV_PARAMS_AMBIGUOUS" if found else "KV_PARAMS_MISSING",
            metadata={"stage": decode_stage},
        )
    result = struct_pb2.Struct()
    result.CopyFrom(found[0])
    return result


def decode_kv(captured: struct_pb2.Struct, *, transfer_id: str, prefill_request_id: str) -> struct_pb2.Struct:
    """What decode is told: all that prefill gave, with the flags of a reader. ``captured`` stays as it is.

    ``prefill_request_id``: as which the prefill engine knows the request, where it does not say so itself. Raises
    ``InternalError`` (KV_PARAMS_FOREIGN) for the cache of another transfer: nobody may go on from another's prompt.
    """
    told = captured.fields["transfer_id"].string_value if "transfer_id" in captured.fields else transfer_id
    if told != transfer_id:
        raise errors.InternalError(
            f"prefill gave the KV cache of transfer {told!r}, not of {transfer_id!r}", reason="KV_PARAMS_FOREIGN"
        )
    result = struct_pb2.Struct()
    result.CopyFrom(captured)
    if "remote_request_id" not in captured.fields:
        result["remote_request_id"] = prefill_request_id
    result.update({"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer_id})
    return result


# -- when one half fails --


class Leg(enum.Enum):
    """The half of a pair that a call is for."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> Leg:
        """Its other half."""
        return Leg.DECODE if self is Leg.PREFILL else Leg.PREFILL


class LegState(enum.Enum):
    """How far a call of a pair is."""

    WAITING = "waiting"
    """Not sent to any replica."""
    RUNNING = "running"
    """It has not ended."""
    FINISHED = "finished"
    """It ended well. Prefill's replica keeps the cache until decode has read it, or it is told to let go."""
    ENDED = "ended"
    """It failed or was aborted: its replica has let go of everything."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cleanup:
    """What is to be done about the calls of a pair that will not succeed."""

    withhold: frozenset[Leg] = frozenset()
    """Must not be begun any more."""
    abort: frozenset[Leg] = frozenset()
    """Are to be aborted now."""
    release_kv: bool = False
    """Prefill's replica still keeps a cache that nobody will read."""


def after_failure(failed: Leg, other: LegState) -> Cleanup:
    """One half failed, and so does the other, whatever it does: neither waits for what will not come.

    Decode that has ended well needs its prefill no more; nothing is undone then.
    """
    if failed is Leg.PREFILL and other is LegState.FINISHED:
        return Cleanup()
    states = {failed: LegState.ENDED, failed.other: other}
    return after_abort(states[Leg.PREFILL], states[Leg.DECODE])


def after_abort(prefill: LegState, decode: LegState) -> Cleanup:
    """The request as a whole is over before its end: by its client, its deadline, or another stage."""
    legs = {Leg.PREFILL: prefill, Leg.DECODE: decode}
    return Cleanup(
        withhold=frozenset(leg for leg, state in legs.items() if state is LegState.WAITING),
        abort=frozenset(leg for leg, state in legs.items() if state is LegState.RUNNING),
        release_kv=prefill is LegState.FINISHED and decode is not LegState.FINISHED,
    )
