"""What one stage of a pipeline needs: the connectors of its edges, each with its role and address."""

from __future__ import annotations

from typing import Any

from connectors.reference import factory
from connectors.reference.base import Stage, stage_name
from connectors.reference.ports import AUTO_HOSTS, DEFAULT_PORT, Purpose, connector_port
from connectors.reference.spec import ConnectorSpec, OmniTransferConfig
from omnicore import errors

SENDER, RECEIVER, DUAL = "sender", "receiver", "dual"


def get_connectors_config_for_stage(
    transfer_config: OmniTransferConfig | None,
    stage_id: Stage,
    *,
    local_rank: int | None = None,
    replica_id: int = 0,
    purpose: Purpose = "request_forwarding",
) -> dict[str, Any]:
    """The connectors of one stage: ``from_stage_X`` as receiver, ``to_stage_X`` as sender, each ``{"spec": {"name":
    …, "extra": …}}`` with ``role``, ``from_stage`` and ``to_stage`` in ``extra``. A stage in the middle has both, with
    endpoints of their own. An empty dict without configuration.

    With ``local_rank`` the ports are computed as well (``resolve_connector_spec``). What ``extra`` says already wins.
    """
    if transfer_config is None:
        return {}
    stage = stage_name(stage_id)
    found: dict[str, Any] = {}
    for (start, end), spec in transfer_config.connectors.items():
        for mine, role, key in ((end, RECEIVER, f"from_stage_{start}"), (start, SENDER, f"to_stage_{end}")):
            if mine != stage:
                continue
            extra = {"role": role, **spec.extra, "from_stage": _number(start), "to_stage": _number(end)}
            resolved = ConnectorSpec(spec.name, extra)
            if local_rank is not None:
                resolved = resolve_connector_spec(
                    resolved, stage_id=stage, purpose=purpose, local_rank=local_rank, replica_id=replica_id
                )
            found[key] = {"spec": {"name": resolved.name, "extra": resolved.extra}}
    return found


def resolve_connector_spec(
    spec: ConnectorSpec,
    *,
    stage_id: Stage,
    role: str | None = None,
    purpose: Purpose = "request_forwarding",
    local_rank: int = 0,
    replica_id: int = 0,
) -> ConnectorSpec:
    """A copy of ``spec`` for one worker of a stage.

    Connectors that need a role get a sender's port, computed alike on both ends from stage, rank and replica: to listen
    at, or to ask. A receiver asks the host of the edge unless it is told another ``sender_host``. Raises as
    ``connector_port``.
    """
    extra = {**spec.extra, "stage_id": _number(stage_name(stage_id))}
    if role is not None:
        extra["role"] = role
    from_stage = extra.get("from_stage", extra["stage_id"])
    if not factory.OmniConnectorFactory.needs_role(spec.name) or not isinstance(from_stage, int):
        return ConnectorSpec(spec.name, extra)
    base = extra.get("zmq_port", DEFAULT_PORT)
    if isinstance(base, bool) or not isinstance(base, int):
        raise errors.InvalidRequestError.field("zmq_port", f"must be a port to count from, got {base!r}")
    port = connector_port(base, purpose=purpose, from_stage=from_stage, local_rank=local_rank, replica_id=replica_id)
    if extra.get("role", SENDER) != RECEIVER:
        extra["zmq_port"] = port
        return ConnectorSpec(spec.name, extra)
    extra.pop("zmq_port", None)
    host = str(extra.get("host", "auto"))
    if host.lower() not in AUTO_HOSTS:
        extra.setdefault("sender_host", host)
    extra.setdefault("sender_zmq_port", port)
    return ConnectorSpec(spec.name, extra)


def _number(stage: str) -> int | str:
    return int(stage) if stage.isdecimal() else stage
