"""What the keys of etcd are about, for people. Pure: keys and values in, text out.

The layout is that of ``control_plane/keys.py``: ``/omni/v1/{cluster}/KIND/NAME…``, with JSON as values. A key that is
not known, from a newer control plane say, is shown by its path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from omni.v1 import inspect_service_pb2
from omnictl import output
from omnictl.failures import one_line
from omnictl.output import Column

_ROOT = "/omni/v1/"
_RESTORED = "meta.restored."
_OPAQUE = re.compile(r"[0-9a-f]{64}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def kind_and_name(key: str) -> tuple[str, str]:
    """ "replica", "speech/1/0" of ``/omni/v1/default/replicas/speech/1/0``."""
    parts = key.removeprefix(_ROOT).split("/")
    if parts == ["meta"]:
        return "meta", "schema"
    if len(parts) == 1 and parts[0].startswith(_RESTORED):
        return "meta", parts[0].removeprefix("meta.")
    kind, name = (parts[1], parts[2:]) if len(parts) > 1 else (parts[0], [])
    if kind == "admin" and name:
        kind, name = name[0], name[1:]
    singular = f"{kind[:-3]}y" if kind.endswith("ies") else kind.removesuffix("s")
    return singular, "/".join(name)


def decode(value: bytes) -> Any:
    """The JSON in ``value``; text that is none, or a note about bytes that are no text."""
    try:
        return json.loads(value)
    except ValueError:
        pass
    try:
        return value.decode()
    except UnicodeDecodeError:
        return f"({len(value)} bytes that are no text)"


def summary(kind: str, value: bytes) -> str:
    """The gist of a value, one line."""
    found = decode(value)
    if not isinstance(found, dict):
        return one_line(str(found))[:100] if value else ""
    describe = _SUMMARIES.get(kind, _any)
    try:
        return one_line(describe(found))
    except (KeyError, TypeError, AttributeError):
        return one_line(_any(found))  # edited by hand


def _replica(value: dict[str, Any]) -> str:
    words = [str(value.get("state", "")).removeprefix("REPLICA_STATE_") or "-"]
    words += [word.upper() for word in ("suspect", "cordoned") if value.get(word)]
    return f"{','.join(words)} at {value.get('endpoint', '-')}, {value.get('engine', '-')}, {_host(value)}"


def _host(value: dict[str, Any]) -> str:
    place = value.get("placement", {})
    return f"{place.get('host', '-')} pid {place.get('pid', '-')}"


def _pipeline(value: dict[str, Any]) -> str:
    stages = [f"{stage.get('name', '?')}×{stage.get('num_replicas', 0)}" for stage in value.get("stages", [])]
    return f"generation {value.get('generation', '-')}: {', '.join(stages)}"


def _instance(value: dict[str, Any]) -> str:
    stage = value["stage"]
    return f"holds {stage['pipeline']}/{stage.get('stage_id', 0)}/{value.get('replica_id', 0)}"


def _request(value: dict[str, Any]) -> str:
    return f"{value['verb']} {value['request_id']}"


def _any(value: dict[str, Any]) -> str:
    shown = {key: inner for key, inner in value.items() if inner not in ("", None)}
    parts = [f"{key}={inner if isinstance(inner, str) else json.dumps(inner)}" for key, inner in shown.items()]
    text = ", ".join(parts)
    return text if len(text) <= 100 else f"{text[:99]}…"


_SUMMARIES: dict[str, Callable[[dict[str, Any]], str]] = {
    "replica": _replica,
    "pipeline": _pipeline,
    "instance": _instance,
    "request": _request,
}


def short(name: str) -> str:
    """``name`` on one line; a hash or a UUID, which nobody reads, by its first digits."""
    return one_line(f"{name[:8]}…" if _OPAQUE.fullmatch(name) else name)


def lease_text(lease_id: int) -> str:
    """As etcdctl writes it: 16 hexadecimal digits."""
    return f"{lease_id & (2**64 - 1):016x}"


def key_columns() -> list[Column[inspect_service_pb2.StoreKey]]:
    """Columns of ``etcd ls``."""

    return [
        Column("KIND", lambda k: one_line(kind_and_name(k.key)[0])),
        Column("NAME", lambda k: short(kind_and_name(k.key)[1])),
        Column("REVISION", lambda k: str(k.mod_revision)),
        Column("SUMMARY", lambda k: summary(kind_and_name(k.key)[0], k.value)),
        Column("LEASE", lambda k: lease_text(k.lease_id) if k.lease_id else "", wide=True),
        Column("CREATED", lambda k: str(k.create_revision), wide=True),
        Column("CHANGES", lambda k: str(k.version), wide=True),
        Column("KEY", lambda k: one_line(k.key), wide=True),
    ]


def lease_columns() -> list[Column[inspect_service_pb2.StoreLease]]:
    """Columns of ``etcd leases``."""

    def holds(lease: inspect_service_pb2.StoreLease) -> str:
        words = [f"{kind} {short(name)}" for kind, name in map(kind_and_name, lease.keys)]
        # The index entry of an instance says the same as its claim.
        words = [word for word in words if not word.startswith("instance ")] or words
        if lease.other_keys:
            words.append(f"{output.plural(lease.other_keys, 'key')} of others")
        return one_line(", ".join(words)) or "nothing"

    return [
        Column("LEASE", lambda lease: lease_text(lease.lease_id)),
        Column("LEFT", lambda lease: output.age(lease.ttl.seconds)),
        Column("TTL", lambda lease: output.age(lease.granted_ttl.seconds)),
        Column("HOLDS", holds),
        Column("KEYS", lambda lease: one_line(" ".join(lease.keys)), wide=True),
    ]


def member_columns() -> list[Column[inspect_service_pb2.StoreMember]]:
    """Columns of ``etcd status``."""
    return [
        Column("MEMBER", lambda m: f"{m.member_id:x}"),
        Column("NAME", lambda m: one_line(m.name)),
        Column("LEADER", lambda m: "yes" if m.leader else "no"),
        Column("ANSWERED", lambda m: "yes" if m.answered else "no"),
        Column("CLIENT URLS", lambda m: one_line(",".join(m.client_urls))),
    ]


def to_json(key: inspect_service_pb2.StoreKey, *, values: bool = True) -> dict[str, Any]:
    """Stable JSON: the key with its decoded value."""
    shown: dict[str, Any] = {"key": key.key}
    if values:
        shown["value"] = decode(key.value)
    return shown | {
        "create_revision": str(key.create_revision),
        "mod_revision": str(key.mod_revision),
        "version": str(key.version),
        "lease": lease_text(key.lease_id) if key.lease_id else "",
    }
