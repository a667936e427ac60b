"""What the simulated engine can be told, under ``engine_args.sim`` of a stage."""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing

from google.protobuf import json_format

from omni.v1 import pipeline_pb2
from omnicore.errors import InvalidRequestError

OUTPUTS = ("text", "tensor", "audio", "image")


@dataclasses.dataclass(frozen=True, slots=True)
class SimOptions:
    """Times are in milliseconds of wall time; 0 is as fast as it comes."""

    output: str = "text"
    """One of ``OUTPUTS``. Default: the stage's final_output_type; else "text" for a comprehension or first stage,
    "tensor" for others."""
    start_ms: float = 0.0
    """Loading takes this long."""
    ttft_ms: float = 0.0
    """From begin of work on a request, or on an input, to its first output."""
    tpot_ms: float = 0.0
    """Between the outputs of one request."""
    step_ms: float = 0.0
    """One engine step, shared by all running requests; 0: ``tpot_ms``."""
    tokens: int = 48
    """Tokens of a text answer, unless ``max_tokens`` is less."""
    max_model_len: int = 0
    """Longest prompt of a text answer, in words; 0: any."""
    chunks: int = 0
    """Outputs per input chunk; 0: one. A request that enters with a prompt has one input per sentence of it."""
    chunk_bytes: int = 4096
    """Bytes of one tensor chunk, at least 4."""
    seconds_per_chunk: float = 0.5
    """Length of one audio chunk."""
    seed: int = 0
    """Goes into every output, with the request's own seed."""
    checksum: bool = True
    """Write and check a CRC-32 in the metadata of chunks."""
    fail_after_tokens: int = -1
    """A failing request fails after that many outputs; -1: at once, if ``fail_rate`` picks it."""
    fail_rate: float = -1.0
    """Share of requests that fail, chosen by their content. -1: none, or all if ``fail_after_tokens`` is set."""
    hang_after_tokens: int = -1
    """The whole engine stops for ever once a request has made that many outputs; -1: never."""
    crash_after_tokens: int = -1
    """The engine dies, as a real one that lost its device does, once a request has made that many outputs."""


def sim_options(stage: pipeline_pb2.Stage) -> SimOptions:
    """Read and check ``engine_args.sim``. Raises ``InvalidRequestError`` naming the key and what is accepted."""
    given: dict[str, object] = {}
    if "sim" in stage.engine_args.fields:
        value = stage.engine_args.fields["sim"]
        if value.WhichOneof("kind") != "struct_value":
            raise _wrong("", "must be a mapping")
        given = json_format.MessageToDict(value.struct_value)
    hints = typing.get_type_hints(SimOptions)
    values: dict[str, object] = {}
    for key, raw in given.items():
        if key not in hints:
            near = difflib.get_close_matches(key, hints, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise _wrong(key, f"unknown key{hint} (known: {', '.join(hints)})")
        values[key] = _checked(key, raw, hints[key])
    if "output" not in values:
        values["output"] = _default_output(stage)
    if values["output"] not in OUTPUTS:
        raise _wrong("output", f"must be one of {', '.join(OUTPUTS)}, got {values['output']!r}")
    return SimOptions(**values)  # type: ignore[arg-type]


def _default_output(stage: pipeline_pb2.Stage) -> str:
    if stage.final_output_type:
        return stage.final_output_type
    return "text" if stage.is_comprehension or stage.stage_id == 0 else "tensor"


def _checked(key: str, raw: object, hint: type) -> object:
    if hint is str or hint is bool:
        if not isinstance(raw, hint):
            raise _wrong(key, f"must be {'a text' if hint is str else 'true or false'}, got {raw!r}")
        return raw
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not math.isfinite(raw):
        raise _wrong(key, f"must be a number, got {raw!r}")
    if hint is int and raw != int(raw):
        raise _wrong(key, f"must be a whole number, got {raw:g}")
    low = {"seed": -math.inf, "chunk_bytes": 4}.get(key, -1 if key.startswith(("fail", "hang", "crash")) else 0)
    if raw < low or (key == "fail_rate" and raw > 1):
        raise _wrong(key, f"must be {'-1 to 1' if key == 'fail_rate' else f'at least {low:g}'}, got {raw:g}")
    return hint(raw)


def _wrong(key: str, text: str) -> InvalidRequestError:
    return InvalidRequestError.field(".".join(filter(None, ("engine_args.sim", key))), text)
