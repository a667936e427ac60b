"""From a deploy file and flags to the plan in force, in the control plane's hands all the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from omni.v1 import pipeline_pb2
from omnicore.errors import InvalidRequestError, NotFoundError, OmniError
from omniplane.serve import devices, overlay
from omniplane.serve.config import ServeConfig
from omniplane.serve.overlay import Keys
from omniplane.serve.pipelines import ControlPlaneClient, plan_file, stage_of, with_replicas

# The control plane refuses more (ApplyPipelineRequest.deploy_yaml).
_MAX_DEPLOY_BYTES = 1024 * 1024


class DeployFileError(InvalidRequestError):
    """The deploy file, or what flags make of it, is wrong: ``lines`` say it, one fault each."""

    def __init__(self, label: str, error: OmniError) -> None:
        super().__init__(error.message, reason=error.reason, violations=error.violations)
        faults = [f"{violation.field}: {violation.description}" for violation in error.violations]
        self.lines = [f"{label}: {_one_line(text)}" for text in faults or [error.message]]


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """The plan in force, and what is worth knowing about it."""

    pipeline: pipeline_pb2.Pipeline
    warnings: tuple[str, ...]


def read_deploy_file(config: ServeConfig) -> str:
    """The text of the deploy file. Raises ``InvalidRequestError`` that names flag and path."""
    path = Path(config.deploy_file).expanduser()
    flag = "--deploy-config" if config.deploy_config else "--stage-configs-path"
    try:
        with path.open("rb") as stream:
            raw = stream.read(_MAX_DEPLOY_BYTES + 1)
        text = raw.decode()
    except OSError as error:
        raise _bad_file(flag, path, (error.strerror or str(error)).lower()) from error
    except UnicodeDecodeError as error:
        raise _bad_file(flag, path, f"not UTF-8 text (byte {error.start})") from error
    if len(raw) > _MAX_DEPLOY_BYTES:
        raise _bad_file(flag, path, "larger than 1 MiB, which no deploy file is")
    return text


async def put_into_force(
    plane: ControlPlaneClient, config: ServeConfig, file: str, single: Mapping[int, Keys], visible: str | None
) -> Planned:
    """Lay the flags over ``file`` and apply the whole. ``single``: keys of single stages; ``visible``:
    CUDA_VISIBLE_DEVICES. Raises ``DeployFileError`` where the control plane finds faults, nothing being stored then,
    ``NotFoundError`` for a stage that is not there."""
    own = config.stage_id
    engine, platform = config.engine, config.platform
    try:
        alone = await plan_file(plane, file, name=config.pipeline, model=config.model, engine=engine, platform=platform)
    except InvalidRequestError as error:
        raise DeployFileError(config.deploy_file, error) from error
    if own is not None:
        stage_of(alone, own)
    _check_stages(alone, single)
    top = overlay.top_keys(config)
    under, over = overlay.layers(alone, overlay.engine_keys(config), own, single)
    try:
        if own is not None:
            over = await _with_local_replicas(plane, config, alone.name, file, (under, over), visible)
        response = await plane.apply(
            overlay.text(file, top, under, over), name=alone.name, engine=engine, platform=platform
        )
    except InvalidRequestError as error:
        if isinstance(error, DeployFileError):
            raise
        raise DeployFileError(f"{config.deploy_file} with the flags", error) from error
    return Planned(response.pipeline, tuple(response.warnings))


async def _with_local_replicas(
    plane: ControlPlaneClient,
    config: ServeConfig,
    name: str,
    file: str,
    layers: tuple[dict[int, Keys], dict[int, Keys]],
    visible: str | None,
) -> dict[int, Keys]:
    """What is laid over the file, with the number of this head's replicas and, where the file's devices are too few
    for them, their devices."""
    under, over = layers
    assert config.stage_id is not None
    # One replica first: how many devices it needs is known only once everything else is in place.
    trial = overlay.text(file, overlay.top_keys(config), under, with_replicas(over, config.stage_id, 1, []))
    response = await plane.apply(trial, name=name, engine=config.engine, platform=config.platform, validate_only=True)
    stage = stage_of(response.pipeline, config.stage_id)
    count = config.omni_dp_size_local
    groups = devices.shares(stage, count, visible)
    suffices = len(stage.devices) >= count * devices.ranks(stage) and len(stage.devices) % count == 0
    return with_replicas(over, config.stage_id, count, [] if suffices else devices.listed(groups))


def _check_stages(pipeline: pipeline_pb2.Pipeline, single: Mapping[int, Keys]) -> None:
    for stage_id, keys in single.items():
        try:
            stage_of(pipeline, stage_id)
        except NotFoundError as error:
            flag = f"--stage-{stage_id}-{next(iter(keys), 'key').replace('_', '-')}"
            raise NotFoundError(error.message.replace("--stage-id", flag, 1), reason=error.reason) from error


def _bad_file(flag: str, path: Path, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{flag}: {path}: {why}", reason="BAD_FILE")


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))
