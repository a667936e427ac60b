"""What the command line adds to a deploy file, as documents before and after it. Pure.

A deploy file is read by the control plane only. What flags say is laid under and over it in the same YAML stream:
documents before the file hold what it may replace, a document after it replaces what it says.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import json_format

from omni.v1 import pipeline_pb2
from omnicore.errors import InvalidRequestError
from omniplane.serve.config import ENGINE_FLAGS, ServeConfig

Keys = dict[str, Any]

_STAGE_FLAG = re.compile(r"--stage-(\d+)-([a-z][a-z0-9-]*)(?:=(.*))?", re.DOTALL)
# Keys that a stage may also have in its parallel_config; two different values are then a fault of the file.
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size")


@dataclasses.dataclass(frozen=True, slots=True)
class StageKeys:
    """Keys that single stages are given on the command line, by stage id; they go before every other flag."""

    by_stage: Mapping[int, Keys]


def split_stage_flags(argv: Sequence[str]) -> tuple[list[str], StageKeys]:
    """``argv`` without its ``--stage-N-KEY VALUE`` flags, and those. A flag without value means true.

    Values are JSON if they can be, else text; ``null`` takes the file's own key away.
    """
    rest: list[str] = []
    found: dict[int, Keys] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        match = _STAGE_FLAG.fullmatch(word)
        if match is None:
            rest.append(word)
            continue
        text = match[3]
        if text is None:
            text = words.pop(0) if words and not words[0].startswith("--") else "true"
        found.setdefault(int(match[1]), {})[match[2].replace("-", "_")] = _value(text)
    return rest, StageKeys(found)


def stage_keys(config: ServeConfig, flags: StageKeys) -> dict[int, Keys]:
    """All keys that the command line gives to single stages: --stage-overrides, and over it --stage-N-KEY. Raises
    ``InvalidRequestError`` for an override that is not readable."""
    try:
        given = json.loads(config.stage_overrides) if config.stage_overrides else {}
    except ValueError as error:
        raise _bad_overrides(f"not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise _bad_overrides('expected a mapping, such as {"0": {"max_num_seqs": 8}}')
    found: dict[int, Keys] = {}
    for name, keys in given.items():
        if not name.isdecimal():
            raise _bad_overrides(f"stages go by their numbers, got {name!r}")
        if not isinstance(keys, dict):
            raise _bad_overrides(f"expected a mapping of stage keys for stage {name}")
        found[int(name)] = dict(keys)
    for stage_id, keys in flags.by_stage.items():
        found[stage_id] = {**found.get(stage_id, {}), **keys}
    return found


def engine_keys(config: ServeConfig) -> Keys:
    """The engine flags that were given, as keys of a stage."""
    return {name: value for name in ENGINE_FLAGS if (value := getattr(config, name)) not in (None, "")}


def top_keys(config: ServeConfig) -> Keys:
    """What flags say about the whole pipeline."""
    keys: Keys = {"model": config.model} if config.model else {}
    if config.async_chunk is not None:
        keys["async_chunk"] = config.async_chunk
    return keys


def layers(
    plan: pipeline_pb2.Pipeline, keys: Keys, own_stage: int | None, single: Mapping[int, Keys]
) -> tuple[dict[int, Keys], dict[int, Keys]]:
    """Stage keys to lay under the file, and over it.

    Engine flags go over the file: for the own stage of a head, or for every stage where there is none. The other
    stages of a head, whose processes used to get the same flags on their own command lines, have them under the file.
    ``plan`` is the file's own.
    """
    under: dict[int, Keys] = {}
    over: dict[int, Keys] = {}
    for stage in plan.stages:
        own = own_stage is None or stage.stage_id == own_stage
        mine = _placed(stage, keys, own=own)
        (over if own else under)[stage.stage_id] = mine
    for stage_id, given in single.items():
        over[stage_id] = {**over.get(stage_id, {}), **given}
    return {k: v for k, v in under.items() if v}, {k: v for k, v in over.items() if v}


def _placed(stage: pipeline_pb2.Stage, keys: Keys, *, own: bool) -> Keys:
    """``keys`` where the stage has them: sizes in its parallel_config, if that is where the file says them."""
    nested = json_format.MessageToDict(stage.engine_args).get("parallel_config", {})
    inner = {name: value for name, value in keys.items() if name in _PARALLEL and name in nested}
    outer = {name: value for name, value in keys.items() if name not in inner}
    return {**outer, "parallel_config": inner} if inner and own else outer


def text(file: str, top: Keys, under: Mapping[int, Keys], over: Mapping[int, Keys]) -> str:
    """``file`` with what is laid under and over it. JSON is YAML."""
    parts = [file]
    if under:
        parts.insert(0, _document({}, under))
    if top or over:
        parts.append(_document(top, over))
    return "\n---\n".join(parts)


def disagreements(stage: pipeline_pb2.Stage, keys: Keys) -> list[str]:
    """Keys that ``stage``'s plan does not have as ``keys`` say, as "KEY: GIVEN, planned PLANNED"."""
    found = []
    known = json_format.MessageToDict(stage.engine_args)
    nested = known.get("parallel_config", {})
    fields = {"tensor_parallel_size": stage.tensor_parallel_size, "max_num_seqs": stage.max_num_seqs or None}
    for name, value in keys.items():
        planned = fields.get(name, known.get(name, nested.get(name)))
        if planned != value and not (value is False and planned is None):
            found.append(f"{name}: {_shown(value)} here, {_shown(planned)} in the plan")
    return found


def pipeline_name(model: str) -> str:
    """A pipeline name out of a model's name or path; empty if nothing of it can be used."""
    last = model.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).lstrip("._-")


def _document(top: Keys, stages: Mapping[int, Keys]) -> str:
    listed = [{"stage_id": stage_id, **keys} for stage_id, keys in sorted(stages.items())]
    return json.dumps({**top, **({"stages": listed} if listed else {})})


def _value(raw: str) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)


def _bad_overrides(text: str) -> InvalidRequestError:
    return InvalidRequestError(f"--stage-overrides: {text}", reason="USAGE")
