"""The door: is each field of a request what it has to be? Pure; says nothing about whether it fits the cluster.

All faults of a message are collected, so the caller sees them at once. Values are shortened where a message quotes
them: a name of ten megabytes must not come back in the trailers.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Final

from google.protobuf import duration_pb2

from control_plane import states
from control_plane.keys import NAME_RULE, ReplicaKey, StageKey, is_name, is_uuid
from omni.v1 import registry_service_pb2 as registry_pb
from omni.v1 import types_pb2
from omnicore.durations import to_seconds
from omnicore.errors import FieldViolation, InvalidRequestError

MAX_TEXT_LENGTH: Final = 1024  # model paths, host names, device ids
MAX_ITEMS: Final = 64  # connectors or devices of one replica
MAX_COUNT: Final = 1_000_000  # requests or transfers at one replica; anything above is a broken counter
MAX_LIMIT_S: Final = 366 * 86_400.0
MAX_POOL_BYTES: Final = 1 << 50  # a pebibyte on one host: a number below zero that was taken for one above
# Errors travel in HTTP/2 trailers, where peers may refuse more than 8 KiB (gRPC's default).
MAX_VIOLATIONS: Final = 16
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_VERSION = re.compile(r"[0-9]{1,6}\.[0-9]{1,6}", re.ASCII)


def shown(value: str, limit: int = 80) -> str:
    """``value`` quoted for a message, shortened to ``limit`` characters."""
    return repr(value) if len(value) <= limit else f"{value[:limit]!r}… ({len(value)} characters)"


class Faults:
    """Collects what is wrong with a request, then raises it as one error."""

    def __init__(self) -> None:
        self._violations: list[FieldViolation] = []

    def __bool__(self) -> bool:
        return bool(self._violations)

    def add(self, field: str, description: str) -> None:
        """One more fault."""
        self._violations.append(FieldViolation(field, description))

    def raise_if_any(self) -> None:
        """Raise ``InvalidRequestError`` if there was a fault."""
        if self._violations:
            text = "; ".join(f"{v.field}: {v.description}" for v in self._violations[:3])
            more = len(self._violations) - 3
            raise InvalidRequestError(
                text + (f"; and {more} more" if more > 0 else ""), violations=self._violations[:MAX_VIOLATIONS]
            )

    def text(self) -> str:
        """All faults in one line."""
        return "; ".join(f"{v.field}: {v.description}" for v in self._violations)

    def name(self, field: str, value: str) -> None:
        """A pipeline name."""
        if not is_name(value):
            self.add(field, f"must be {NAME_RULE}, got {shown(value)}")

    def uuid(self, field: str, value: str) -> None:
        """An instance uuid."""
        if not is_uuid(value):
            self.add(field, f"must be a UUID such as 3f0c…, lower-case with dashes, got {shown(value)}")

    def short(self, field: str, value: str, *, required: bool = False) -> None:
        """Free text of bounded length."""
        if required and not value:
            self.add(field, "required")
        elif len(value) > MAX_TEXT_LENGTH:
            self.add(field, f"at most {MAX_TEXT_LENGTH} characters, got {len(value)}")

    def count(self, field: str, value: int) -> None:
        """A number of requests or transfers."""
        if value > MAX_COUNT:
            self.add(field, f"must be 0 to {MAX_COUNT}, got {value}")


def endpoint_fault(value: str) -> str:
    """What is wrong with a "host:port" that others shall dial; empty if nothing. The port must be above 0 and the
    host one that can be dialled, which the wildcard address cannot."""
    host, separator, port = value.rpartition(":")
    if not separator or not (port.isascii() and port.isdigit()) or not 0 < int(port[:6]) <= 65535:
        return f"must be host:port with a port of 1 to 65535, got {shown(value)}"
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return f"the host is not an IPv6 address, got {shown(value)}"
        return f"{host} cannot be dialled; advertise one address of the machine" if address.is_unspecified else ""
    if _HOST.fullmatch(host) is None:
        return f"must be host:port (an IPv6 host in brackets), got {shown(value)}"
    if host == "0.0.0.0":
        return "0.0.0.0 cannot be dialled; advertise one address of the machine"
    return ""


def stage_ref(faults: Faults, field: str, ref: types_pb2.StageRef, *, present: bool) -> None:
    """A reference to a stage."""
    if not present:
        faults.add(field, "required")
    else:
        faults.name(f"{field}.pipeline", ref.pipeline)


def replica_ref(
    faults: Faults, field: str, ref: types_pb2.ReplicaRef, *, present: bool, epoch_required: bool = False
) -> None:
    """A reference to a replica."""
    if not present:
        faults.add(field, "required")
        return
    stage_ref(faults, f"{field}.stage", ref.stage, present=ref.HasField("stage"))
    if epoch_required and ref.epoch == 0:
        faults.add(f"{field}.epoch", "required: the epoch that Register gave")


def replica_key(ref: types_pb2.ReplicaRef) -> ReplicaKey:
    """The key behind a reference that was found valid."""
    return ReplicaKey(ref.stage.pipeline, ref.stage.stage_id, ref.replica_id)


def stage_key(ref: types_pb2.StageRef) -> StageKey:
    """The key behind a reference that was found valid."""
    return StageKey(ref.pipeline, ref.stage_id)


def register_request(request: registry_pb.RegisterRequest) -> None:
    """Raise ``InvalidRequestError`` with every fault of ``request``."""
    faults = Faults()
    faults.uuid("instance_uuid", request.instance_uuid)
    stage_ref(faults, "stage", request.stage, present=request.HasField("stage"))
    if fault := endpoint_fault(request.endpoint):
        faults.add("endpoint", fault)
    if request.session_endpoint and (fault := endpoint_fault(request.session_endpoint)):
        faults.add("session_endpoint", fault)
    if request.state not in (states.STARTING, states.READY):
        faults.add("state", f"must be STARTING or READY, got {states.name(request.state)}")
    faults.short("engine", request.engine)
    duration(faults, "drain_limit", request.drain_limit, MAX_LIMIT_S)
    _fingerprint(faults, request)
    connectors(faults, request.connectors)
    placement = request.placement
    faults.short("placement.host", placement.host)
    faults.short("placement.boot_id", placement.boot_id)
    faults.short("placement.topology_domain", placement.topology_domain)
    if len(placement.devices) > MAX_ITEMS:
        faults.add("placement.devices", f"at most {MAX_ITEMS}, got {len(placement.devices)}")
    for i, device in enumerate(placement.devices[:MAX_ITEMS]):
        faults.short(f"placement.devices[{i}]", device, required=True)
    faults.raise_if_any()


def duration(faults: Faults, field: str, value: duration_pb2.Duration, most_s: float, *, above_0: bool = False) -> None:
    """A length of time from 0 to ``most_s`` seconds; one that is not set is 0."""
    seconds = to_seconds(value)
    if not 0 <= value.nanos < 1_000_000_000 or not 0 <= seconds <= most_s or (above_0 and not seconds):
        wanted = f"above 0 and at most {most_s:g} s" if above_0 else f"0 to {most_s:g} s"
        faults.add(field, f"must be {wanted}, got {seconds:g} s")


def _fingerprint(faults: Faults, request: registry_pb.RegisterRequest) -> None:
    if not request.HasField("fingerprint"):
        faults.add("fingerprint", "required")
        return
    fingerprint = request.fingerprint
    faults.short("fingerprint.model", fingerprint.model)
    faults.short("fingerprint.kv_layout", fingerprint.kv_layout)
    if _SHA256.fullmatch(fingerprint.config_sha256) is None:
        faults.add("fingerprint.config_sha256", f"must be 64 hex digits, got {shown(fingerprint.config_sha256)}")
    if fingerprint.tensor_parallel_size < 1:
        faults.add("fingerprint.tensor_parallel_size", "must be at least 1")
    if _VERSION.fullmatch(fingerprint.protocol_version) is None:
        faults.add("fingerprint.protocol_version", f'must be "major.minor", got {shown(fingerprint.protocol_version)}')


def connectors(faults: Faults, offers: Iterable[types_pb2.ConnectorOffer]) -> None:
    """Connector offers of a registration or a beat."""
    seen: set[str] = set()
    for i, offer in enumerate(offers):
        if i >= MAX_ITEMS:
            faults.add("connectors", f"at most {MAX_ITEMS}")
            return
        if not is_name(offer.name):
            faults.add(f"connectors[{i}].name", f"must be {NAME_RULE}, got {shown(offer.name)}")
        elif offer.name in seen:
            faults.add(f"connectors[{i}].name", f"{offer.name!r} is listed twice")
        seen.add(offer.name)
        faults.short(f"connectors[{i}].address", offer.address)


def load(report: types_pb2.LoadReport) -> str:
    """What is wrong with a load report, in one line; empty if nothing."""
    largest = max(report.queue_length, report.running, report.waiting, report.inflight_transfers)
    ratio, free_bytes = report.kv_usage_ratio, report.transfer_pool_free_bytes
    if largest <= MAX_COUNT and 0 <= ratio <= 1 and free_bytes <= MAX_POOL_BYTES:  # false for NaN
        return ""
    faults = Faults()
    for field in ("queue_length", "running", "waiting", "inflight_transfers"):
        faults.count(f"load.{field}", getattr(report, field))
    if not 0 <= ratio <= 1:
        faults.add("load.kv_usage_ratio", f"must be 0 to 1, got {ratio}")
    if free_bytes > MAX_POOL_BYTES:
        faults.add("load.transfer_pool_free_bytes", f"at most {MAX_POOL_BYTES}, got {free_bytes}")
    return faults.text()


def heartbeat_claim(request: registry_pb.HeartbeatRequest) -> None:
    """Raise ``InvalidRequestError`` if a beat does not say whose it is."""
    faults = Faults()
    replica_ref(faults, "replica", request.replica, present=request.HasField("replica"), epoch_required=True)
    faults.uuid("instance_uuid", request.instance_uuid)
    if request.lease_id <= 0:
        faults.add("lease_id", "required: the lease that Register gave")
    faults.raise_if_any()
