"""Which devices each local replica gets. Pure.

Device ids of a deploy file are logical: positions in the set that is visible to whoever starts a worker
(CUDA_VISIBLE_DEVICES). Every launcher counts them in its own set, so "0" of a headless process that sees devices 2
and 3 is device 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format

from omni.v1 import pipeline_pb2
from omnicore.errors import InvalidRequestError

Shares = list[tuple[str, ...]]


def ranks(stage: pipeline_pb2.Stage) -> int:
    """Devices that one replica needs: the product of its parallel sizes, as the control plane counts them when it
    plans (``control_plane/deploy/devices.py``)."""
    args = json_format.MessageToDict(stage.engine_args)
    inner = args.get("parallel_config", {})

    def size(name: str, default: int = 1) -> int:
        return int(args.get(name, inner.get(name, default)))

    degrees = size("ulysses_degree") * size("ring_degree") * size("allgather_degree")
    needed = max(size("sequence_parallel_size"), degrees) * math.prod(
        size(name) for name in ("pipeline_parallel_size", "data_parallel_size", "cfg_parallel_size")
    )
    needed *= max(1, stage.tensor_parallel_size)
    if args.get("use_hsdp", inner.get("use_hsdp")):
        needed = max(needed, size("hsdp_shard_size", -1) * size("hsdp_replicate_size"))
    return needed


def shares(stage: pipeline_pb2.Stage, count: int, visible: str | None) -> Shares:
    """Logical devices for each of ``count`` replicas on this machine; empty ones: host only, or not narrowed.

    The stage's devices go to the first replicas. Where they do not suffice they are taken for a pattern, which goes on
    with the next ids: [0, 1] for two ranks and two replicas is [0, 1] and [2, 3]. ``visible`` is
    CUDA_VISIBLE_DEVICES; a stage without devices gets a share of it if it is large enough. Raises
    ``InvalidRequestError`` with the counts where that cannot be.
    """
    each = ranks(stage)
    present = None if visible is None else [part for part in visible.split(",") if part.strip()]
    devices = list(stage.devices)
    if not devices:
        if present is None or len(present) < each * count:
            return [()] * count
        devices = [str(position) for position in range(each * count)]
    if len(devices) % each:
        raise _uneven(stage, len(devices), each)
    groups = [tuple(devices[start : start + each]) for start in range(0, len(devices), each)][:count]
    if len(groups) < count:
        if not all(device.isdecimal() for device in devices):
            raise _too_few(stage, count, each, f"its devices are {', '.join(devices)}")
        following = max(map(int, devices)) + 1
        for start in range(following, following + (count - len(groups)) * each, each):
            groups.append(tuple(str(device) for device in range(start, start + each)))
    if present is not None:
        beyond = [d for group in groups for d in group if d.isdecimal() and int(d) >= len(present)]
        if beyond:
            raise _too_few(
                stage,
                count,
                each,
                f"device {beyond[0]} of {', '.join(d for group in groups for d in group)} is outside the "
                f"{len(present)} that CUDA_VISIBLE_DEVICES={visible} shows",
            )
    return groups


def rendezvous(port: int) -> Mapping[str, str]:
    """Environment of a replica whose ranks meet at ``port``: two replicas of one host must not share it."""
    return {"MASTER_PORT": str(port)}


def _uneven(stage: pipeline_pb2.Stage, have: int, each: int) -> InvalidRequestError:
    return InvalidRequestError.field(
        f"stages[{stage.stage_id}].devices", f"{have} devices cannot be split into replicas of {each} rank(s) each"
    )


def _too_few(stage: pipeline_pb2.Stage, count: int, each: int, why: str) -> InvalidRequestError:
    return InvalidRequestError.field(
        f"stages[{stage.stage_id}].devices",
        f"{count} replica(s) × {each} rank(s) need {count * each} devices here, but {why}",
    )


def listed(groups: Shares) -> list[Any]:
    """All devices of ``groups``, in order."""
    return [device for group in groups for device in group]
