"""Does an instance fit the stage it wants to serve, and can others reach it? Pure."""

from __future__ import annotations

import ipaddress
import urllib.parse
from collections.abc import Iterable, Sequence

from control_plane.keys import StageKey
from omni.v1 import pipeline_pb2, types_pb2
from omnicore import protocol
from omnicore.errors import FailedPreconditionError, NotFoundError


def shorten(text: str, limit: int = 200) -> str:
    """``text`` as a message may quote it: error details share 8 KiB of trailers."""
    return text if len(text) <= limit else f"{text[:limit]}…"


def _listed(names: Iterable[str], limit: int = 20) -> str:
    found = list(names)
    more = f" and {len(found) - limit} more" if len(found) > limit else ""
    return ", ".join(found[:limit]) + more


def find_stage(pipeline: pipeline_pb2.Pipeline, stage_id: int) -> pipeline_pb2.Stage:
    """The stage with this id. Raises ``NotFoundError`` naming those that exist."""
    for stage in pipeline.stages:
        if stage.stage_id == stage_id:
            return stage
    known = _listed(f"{stage.stage_id} ({shorten(stage.name)})" for stage in pipeline.stages)
    raise NotFoundError(
        f"pipeline {pipeline.name!r} has no stage {stage_id}; it has {known}",
        reason="STAGE_NOT_FOUND",
        metadata={"pipeline": pipeline.name, "stage": stage_id, "known": known},
    )


def no_pipeline(name: str, known: Iterable[str]) -> NotFoundError:
    """The error for a pipeline that does not exist, naming those that do."""
    names = _listed(sorted(known)) or "none"
    return NotFoundError(
        f"no pipeline {name!r}; known: {names}",
        reason="PIPELINE_NOT_FOUND",
        metadata={"pipeline": name, "known": names},
    )


def check_fingerprint(
    offered: types_pb2.StageFingerprint,
    stage: StageKey,
    plan: pipeline_pb2.Stage,
    peers: Iterable[types_pb2.Replica],
) -> None:
    """Raise ``FailedPreconditionError`` with both values of everything that differs.

    Model, config and parallelism must be the plan's; the KV layout, which only engines know, must be that of the
    ``peers`` that run the same config. Peers of an older config are being replaced and have no say.
    """
    major = int(offered.protocol_version.partition(".")[0])
    differing: list[tuple[str, object, object]] = []
    if major != protocol.MAJOR:
        differing.append(("protocol_version", offered.protocol_version, f"{protocol.MAJOR}.x"))
    for field in ("model", "config_sha256", "tensor_parallel_size"):
        theirs, ours = getattr(offered, field), getattr(plan, field)
        if theirs != ours:
            differing.append((field, theirs, ours))
    differing += _other_layouts(offered, peers)
    if differing:
        raise _mismatch(stage, differing)


def check_kv_layout(offered: types_pb2.StageFingerprint, stage: StageKey, peers: Iterable[types_pb2.Replica]) -> None:
    """The part of ``check_fingerprint`` for an instance that learns its KV layout only when its engine has started."""
    if differing := _other_layouts(offered, peers):
        raise _mismatch(stage, differing)


def _other_layouts(
    offered: types_pb2.StageFingerprint, peers: Iterable[types_pb2.Replica]
) -> list[tuple[str, object, object]]:
    # Empty: no KV cache, or not known before the engine runs.
    if not offered.kv_layout:
        return []
    for peer in peers:
        theirs = peer.fingerprint.kv_layout
        if theirs and peer.fingerprint.config_sha256 == offered.config_sha256:
            # One speaks for all: each of them was checked against those before it.
            return [] if theirs == offered.kv_layout else [("kv_layout", offered.kv_layout, theirs)]
    return []


def _mismatch(stage: StageKey, differing: Sequence[tuple[str, object, object]]) -> FailedPreconditionError:
    pairs = [(field, shorten(str(theirs)), shorten(str(ours))) for field, theirs, ours in differing]
    text = "; ".join(f"{field} is {theirs!r}, the stage has {ours!r}" for field, theirs, ours in pairs)
    metadata: dict[str, object] = {"stage": stage}
    for field, theirs, ours in pairs:
        metadata |= {f"{field}.offered": theirs, f"{field}.expected": ours}
    return FailedPreconditionError(
        f"the instance does not fit stage {stage}: {text}", reason="FINGERPRINT_MISMATCH", metadata=metadata
    )


def check_reachable(endpoint: str, peer: str) -> None:
    """Refuse a loopback endpoint that a worker on another host offers: it would send everyone to themselves.

    ``peer`` is the caller's address as gRPC tells it: "ipv4:10.0.0.5:41234", "ipv6:%5B::1%5D:41234", "unix:…".
    """
    caller = _peer_address(peer)
    if caller is None or caller.is_loopback or not _is_loopback(endpoint.rpartition(":")[0]):
        return
    raise FailedPreconditionError(
        f"endpoint {endpoint} is a loopback address, but the worker calls from {caller}: "
        f"advertise an address that other hosts reach, such as {caller}",
        reason="UNROUTABLE_ENDPOINT",
        metadata={"endpoint": endpoint, "peer": caller},
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _peer_address(peer: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    family, _, rest = urllib.parse.unquote(peer).partition(":")
    if family not in ("ipv4", "ipv6"):
        return None
    try:
        address = ipaddress.ip_address(rest.rpartition(":")[0].strip("[]"))
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address
