"""What ``omnictl top`` shows: replicas with their load, speed and beats. Pure: records and times in, text out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from omni.v1 import inspect_service_pb2, pipeline_pb2, types_pb2
from omnicore.durations import to_seconds
from omnictl import output, rows
from omnictl.output import Column
from omnictl.watch import Key, key_of


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """The cluster at one moment."""

    at_s: float
    """Monotonic."""
    replicas: Sequence[types_pb2.Replica]
    pulses: Mapping[Key, inspect_service_pb2.ReplicaPulse]
    """What the control planes that answered hear, by replica."""
    stale: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class LoadRow:
    """One replica at the moment of a sample."""

    replica: types_pb2.Replica
    plan: pipeline_pb2.Pipeline
    """Of its pipeline; empty if that is gone."""
    load: types_pb2.LoadReport | None
    """None before the first report, and where it beats at a control plane that was not asked."""
    beat_age_s: float | None
    """None where it beats at a control plane that was not asked."""
    outputs_per_s: float | None
    """None without an earlier sample of the same claim to compare with."""

    @property
    def name(self) -> str:
        """ "PIPELINE/STAGE_ID/REPLICA_ID"."""
        return rows.replica_name(self.replica.ref)

    @property
    def stage_name(self) -> str:
        """As the plan has it; empty if it has no such stage."""
        return next((s.name for s in self.plan.stages if s.stage_id == self.replica.ref.stage.stage_id), "")

    @property
    def routable(self) -> bool:
        """Gateways send requests there."""
        return rows.is_routable(self.replica, self.plan)

    def to_json(self) -> dict[str, Any]:
        """Stable JSON; what is not known is null."""
        return {
            "ref": output.to_dict(self.replica.ref),
            "stage_name": self.stage_name,
            "state": rows.state_text(self.replica),
            "routable": self.routable,
            "load": output.to_dict(self.load) if self.load is not None else None,
            "beat_age_s": round(self.beat_age_s, 3) if self.beat_age_s is not None else None,
            "outputs_per_s": round(self.outputs_per_s, 2) if self.outputs_per_s is not None else None,
        }


def pulses_by_key(
    answers: Iterable[inspect_service_pb2.ListPulsesResponse],
) -> dict[Key, inspect_service_pb2.ReplicaPulse]:
    """The pulses of several control planes; of a replica that two have heard, the one that heard it last."""
    found: dict[Key, inspect_service_pb2.ReplicaPulse] = {}
    for answer in answers:
        for pulse in answer.pulses:
            known = found.get(key_of(pulse.replica))
            if known is None or to_seconds(pulse.beat_age) < to_seconds(known.beat_age):
                found[key_of(pulse.replica)] = pulse
    return found


def load_rows(sample: Sample, before: Sample | None, plans: Iterable[pipeline_pb2.Pipeline]) -> list[LoadRow]:
    """A row for each replica of ``sample``, in its order; ``before``: an earlier one, for the speeds."""
    plan_of = {plan.name: plan for plan in plans}
    counted = {key_of(r.ref): _load(r, before.pulses) for r in before.replicas} if before is not None else {}
    epochs = {key_of(r.ref): r.ref.epoch for r in before.replicas} if before is not None else {}
    found = []
    for replica in sample.replicas:
        key = key_of(replica.ref)
        pulse = sample.pulses.get(key)
        if pulse is not None and pulse.replica.epoch != replica.ref.epoch:
            pulse = None
        load = _load(replica, sample.pulses)
        earlier = counted.get(key) if epochs.get(key) == replica.ref.epoch else None
        speed = None
        if load is not None and earlier is not None and before is not None and sample.at_s > before.at_s:
            made = load.outputs_total - earlier.outputs_total
            speed = made / (sample.at_s - before.at_s) if made >= 0 else None
        found.append(
            LoadRow(
                replica=replica,
                plan=plan_of.get(replica.ref.stage.pipeline, pipeline_pb2.Pipeline()),
                load=load,
                beat_age_s=to_seconds(pulse.beat_age) if pulse is not None else None,
                outputs_per_s=speed,
            )
        )
    return found


SORTS = {
    "name": lambda row: (),
    "load": lambda row: -(row.load.running + row.load.waiting if row.load is not None else -1),
    "kv": lambda row: -(row.load.kv_usage_ratio if row.load is not None else -1),
    "speed": lambda row: -(row.outputs_per_s or -1),
    "beat": lambda row: -(row.beat_age_s or -1),
}
"""Orders of the rows, by the name that ``--sort`` takes; equal ones stay in the order of their names."""


def columns() -> list[Column[LoadRow]]:
    """Columns of ``top``."""

    def of_load(text: str) -> Any:
        return lambda row: "-" if row.load is None else text.format(row.load)

    return [
        Column("REPLICA", lambda r: r.name),
        Column("STAGE", lambda r: r.stage_name),
        Column("STATE", lambda r: rows.state_text(r.replica)),
        Column("RUN", of_load("{0.running}")),
        Column("WAIT", of_load("{0.waiting}")),
        Column("KV", of_load("{0.kv_usage_ratio:.0%}")),
        Column("OUT/S", lambda r: "-" if r.outputs_per_s is None else f"{r.outputs_per_s:.1f}"),
        Column("BEAT", lambda r: "-" if r.beat_age_s is None else beat_text(r.beat_age_s)),
        Column("XFERS", of_load("{0.inflight_transfers}")),
        Column("QUEUE", of_load("{0.queue_length}"), wide=True),
        Column("POOL FREE", lambda r: "-" if r.load is None else _mib(r.load.transfer_pool_free_bytes), wide=True),
        Column("ENDPOINT", lambda r: r.replica.endpoint, wide=True),
        Column("HOST", lambda r: r.replica.placement.host, wide=True),
    ]


def beat_text(age_s: float) -> str:
    """ "0.2s", "14s", "3m10s"."""
    return f"{age_s:.1f}s" if age_s < 10 else output.age(age_s)


def summary(found: Sequence[LoadRow]) -> str:
    """ "4 replicas, 3 routable · 7 running, 2 waiting · 130.5 outputs/s"."""
    routable = sum(row.routable for row in found)
    loads = [row.load for row in found if row.load is not None]
    parts = [
        f"{output.plural(len(found), 'replica')}, {routable} routable",
        f"{sum(load.running for load in loads)} running, {sum(load.waiting for load in loads)} waiting",
    ]
    speeds = [row.outputs_per_s for row in found if row.outputs_per_s is not None]
    if speeds:
        parts.append(f"{sum(speeds):.1f} outputs/s")
    return " · ".join(parts)


def _load(
    replica: types_pb2.Replica, pulses: Mapping[Key, inspect_service_pb2.ReplicaPulse]
) -> types_pb2.LoadReport | None:
    """The newest that is known: the control plane at which it beats knows it, whichever has made the table."""
    pulse = pulses.get(key_of(replica.ref))
    if pulse is not None and pulse.replica.epoch == replica.ref.epoch and pulse.HasField("load"):
        return pulse.load
    return replica.load if replica.HasField("load") else None


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MiB"
