"""Devices of a stage: what ids are accepted, how many its replicas need, who shares one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from control_plane.deploy.document import Value, type_name
from control_plane.deploy.faults import Faults, shorten

MAX_DEVICES = 4096
_ID = re.compile(r"\d{1,5}|(?:GPU|MIG)-[A-Za-z0-9/-]{1,80}")
_ACCEPTS = 'device ids: 0, "0,1" or [0, 1] (numbers, or GPU-… and MIG-… ids)'


class Share(NamedTuple):
    """What one stage asks of its devices."""

    stage_id: int
    devices: Sequence[str]
    memory: float
    """Its gpu_memory_utilization; 0 if it names none."""
    place: Value


def parse_devices(value: Value, faults: Faults) -> list[str] | None:
    """The ids as text, or None after a fault. ``""`` and ``[]`` are no devices: the stage runs on the host."""
    data = value.data
    if isinstance(data, bool) or not isinstance(data, int | str | list):
        faults.error(value, f"expected {_ACCEPTS}, got {type_name(value)}")
        return None
    if isinstance(data, list):
        parts: list[Any] = [item.data for item in data]
    else:
        parts = [part.strip() for part in data.split(",")] if isinstance(data, str) and data.strip() else []
        parts = [data] if isinstance(data, int) else parts
    if len(parts) > MAX_DEVICES:
        faults.error(value, f"at most {MAX_DEVICES} devices, got {len(parts)}")
        return None
    devices: dict[str, None] = {}
    for part in parts:
        text = str(part) if isinstance(part, int | str) and not isinstance(part, bool) else ""
        if _ID.fullmatch(text) is None:
            shown = shorten(repr(part)) if isinstance(part, str | int | float) else "something else"
            hint = "; leave `devices` out to run on the host" if text.lower() in ("cpu", "none", "host") else ""
            faults.error(value, f"expected {_ACCEPTS}, got {shown}{hint}")
            return None
        device = str(int(text)) if text.isdigit() else text
        if device in devices:
            faults.error(value, f"device {device} is listed twice")
            return None
        devices[device] = None
    return list(devices)


def parallel_size(stage: Value, fields: Mapping[str, Any], name: str, faults: Faults) -> int:
    """A parallel size, from the stage or its ``parallel_config``; saying two different ones is a fault."""
    inner = fields.get("parallel_config", {})
    own, nested = fields.get(name), inner.get(name)
    if own is not None and nested is not None and own != nested:
        at = stage.at("parallel_config").at(name)
        faults.error(at, f"{nested} disagrees with {stage.at(name).path} ({own}, {stage.at(name).where})")
    value = own if own is not None else nested
    return int(value) if value is not None else 1


def ranks(stage: Value, fields: Mapping[str, Any], faults: Faults) -> int:
    """Devices that one replica needs: the product of its parallel sizes."""

    def size(name: str) -> int:
        return parallel_size(stage, fields, name, faults)

    degrees = size("ulysses_degree") * size("ring_degree") * size("allgather_degree")
    sequence = max(size("sequence_parallel_size"), degrees)
    if degrees > 1 and sequence % degrees:
        faults.error(
            stage.at("parallel_config").at("sequence_parallel_size"),
            f"{sequence} is not a multiple of ulysses × ring × allgather degree = {degrees}",
        )
    needed = sequence * math.prod(
        size(name)
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "cfg_parallel_size")
    )
    inner = fields.get("parallel_config", {})
    if fields.get("use_hsdp", inner.get("use_hsdp")):
        shards = fields.get("hsdp_shard_size", inner.get("hsdp_shard_size", -1))
        copies = fields.get("hsdp_replicate_size", inner.get("hsdp_replicate_size", 1))
        needed = max(needed, shards * copies)
    return needed


def check_counts(stage: Value, devices: Sequence[str], num_replicas: int, needed: int, faults: Faults) -> None:
    """Enough devices for all local replicas, and the same number for each."""
    if not devices:
        return
    total = num_replicas * needed
    have = f"{len(devices)} device{'s' if len(devices) != 1 else ''}"
    if len(devices) < total:
        faults.error(
            stage.at("devices"),
            f"{have} given, {total} needed: {num_replicas} replica(s) × {needed} rank(s) each",
        )
    elif len(devices) % num_replicas:
        faults.error(stage.at("devices"), f"{have} cannot be split evenly among {num_replicas} replicas")
    elif len(devices) > total:
        faults.warn(
            stage.at("devices"),
            f"{have} given, {total} needed ({num_replicas} replica(s) × {needed} rank(s) each): some stay idle",
        )


def warn_shared(shares: Sequence[Share], faults: Faults) -> None:
    """Warn where the stages on one device claim more than all of its memory. Sharing itself is fine."""
    claims: dict[str, list[Share]] = {}
    for share in shares:
        for device in share.devices:
            claims.setdefault(device, []).append(share)
    told: set[tuple[int, ...]] = set()
    for device, users in claims.items():
        claimed = [user for user in users if user.memory > 0]
        total = sum(user.memory for user in claimed)
        who = tuple(user.stage_id for user in claimed)
        if len(claimed) > 1 and total > 1 + 1e-9 and who not in told:
            told.add(who)
            stages = ", ".join(f"stage {user.stage_id}: {user.memory:g}" for user in claimed)
            faults.warn(
                claimed[-1].place.at("gpu_memory_utilization"),
                f"the stages on device {device} claim {total:g} of its memory ({stages})",
            )
