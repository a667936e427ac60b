"""Names as people type them: ``speech``, ``speech/talker``, ``speech/1``, ``speech/talker/0``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from omni.v1 import pipeline_pb2
from omnicore.errors import NotFoundError
from omnictl import output
from omnictl.parser import usage_error

_MAX_ID = 2**32 - 1  # uint32 in the protos


@dataclasses.dataclass(frozen=True, slots=True)
class Selector:
    """Part of the cluster: a pipeline, one of its stages, or one replica. Empty fields select everything."""

    pipeline: str = ""
    stage: str = ""
    """Stage id or stage name, as typed."""
    replica_id: int | None = None

    def __str__(self) -> str:
        parts = [self.pipeline, self.stage, "" if self.replica_id is None else str(self.replica_id)]
        return "/".join(part for part in parts if part)


def parse_selector(text: str | None, *, depth: int, what: str) -> Selector:
    """``PIPELINE[/STAGE[/REPLICA]]`` with at most ``depth`` parts; ``what`` names the argument in errors."""
    if not text:
        return Selector()
    parts = text.split("/")
    forms = ["PIPELINE", "PIPELINE/STAGE", "PIPELINE/STAGE/REPLICA"][:depth]
    if len(parts) > depth or not all(parts):
        raise usage_error(f"{what}: must be {' or '.join(forms)}, got {text!r}")
    replica_id = _replica_id(parts[2], text, what) if len(parts) == 3 else None
    return Selector(parts[0], parts[1] if len(parts) > 1 else "", replica_id)


def parse_pipeline(text: str) -> Selector:
    """``PIPELINE``."""
    if not text or "/" in text:
        raise usage_error(f"NAME: must be the name of a pipeline, got {text!r}")
    return Selector(text)


def parse_replica(text: str) -> Selector:
    """``PIPELINE/STAGE/REPLICA``, complete."""
    parts = text.split("/")
    if len(parts) != 3 or not all(parts):
        raise usage_error(f"REPLICA: must be PIPELINE/STAGE/REPLICA, such as speech/1/0, got {text!r}")
    return Selector(parts[0], parts[1], _replica_id(parts[2], text, "REPLICA"))


def parse_stage(text: str) -> Selector:
    """``PIPELINE/STAGE``, complete."""
    selector = parse_stage_or_pipeline(text)
    if not selector.stage:
        raise usage_error(f"STAGE: must be PIPELINE/STAGE, such as speech/1, got {text!r}")
    return selector


def parse_stage_or_pipeline(text: str) -> Selector:
    """``PIPELINE`` or ``PIPELINE/STAGE``."""
    if not text:
        raise usage_error("STAGE: must be PIPELINE or PIPELINE/STAGE, got ''")
    return parse_selector(text, depth=2, what="STAGE")


def _replica_id(part: str, text: str, what: str) -> int:
    # Python itself refuses to read thousands of digits.
    if not part.isdecimal() or not part.isascii() or len(part) > 100 or int(part) > _MAX_ID:
        shown, whole = output.cut(part, 60), output.cut(text, 100)
        raise usage_error(
            f"{what}: the replica id must be a whole number from 0 to {_MAX_ID}, got {shown!r} in {whole!r}"
        )
    return int(part)


def stage_id_of(pipeline: pipeline_pb2.Pipeline, stage: str) -> int:
    """The id of the stage that ``stage``, an id or a name, means. Raises ``NotFoundError`` with those that exist."""
    for candidate in pipeline.stages:
        if stage == candidate.name or stage == str(candidate.stage_id):
            return candidate.stage_id
    known = ", ".join(f"{s.stage_id} ({s.name})" for s in pipeline.stages)
    raise NotFoundError(
        f"pipeline {pipeline.name!r} has no stage {stage!r}; it has {known}",
        reason="STAGE_NOT_FOUND",
        metadata={"pipeline": pipeline.name, "stage": stage},
    )


def names(pipelines: Iterable[pipeline_pb2.Pipeline]) -> dict[tuple[str, int], str]:
    """Stage names by (pipeline, stage id)."""
    return {(p.name, s.stage_id): s.name for p in pipelines for s in p.stages}
