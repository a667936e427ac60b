"""Every etcd key of the control plane: made here, parsed here, nowhere else.

::

    /omni/v1/meta                                                   schema version, shared by all clusters; which store
    /omni/v1/meta.restored.{cluster}                                which former store was put back into this one
    /omni/v1/{cluster}/pipelines/{pipeline}                         Pipeline
    /omni/v1/{cluster}/replicas/{pipeline}/{stage_id}/{replica_id}  Replica, under the replica's lease
    /omni/v1/{cluster}/instances/{instance_uuid}                    ReplicaRef of the claim, under the same lease
    /omni/v1/{cluster}/admin/cordons/{instance_uuid}                why an operator took it out of routing
    /omni/v1/{cluster}/admin/evictions/{instance_uuid}              why it may not come back, under a lease of its own
    /omni/v1/{cluster}/admin/drains/{instance_uuid}                 why it leaves for good, under a lease of its own
    /omni/v1/{cluster}/admin/policies/{pipeline}/{stage_id}         balancing policy of a stage
    /omni/v1/{cluster}/admin/restarts/{pipeline}/{stage_id}         who restarts a stage, under a lease that this keeps
    /omni/v1/{cluster}/admin/requests/{sha256 of the request id}    what a verb answered, under a lease of its own

The ``instances`` key makes Register idempotent: it is written in the transaction that claims the id, so one instance
never holds two, whichever control planes its retries reach. Ids are plain decimal numbers: readable, so the order of
keys is not the order of replicas.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from typing import Final, NamedTuple, TypeAlias

ROOT: Final = "/omni/v1/"
META_KEY: Final = ROOT + "meta"
# Beside, not inside, the keys of clusters: a cluster's own begin with its name and a slash.
_RESTORED: Final = ROOT + "meta.restored."
MAX_NAME_LENGTH: Final = 128
MAX_ID: Final = 2**32 - 1  # uint32 in the protos

NAME_RULE: Final = f"1 to {MAX_NAME_LENGTH} letters, digits, '.', '_' or '-', beginning with a letter or digit"
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_LENGTH - 1}}}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)


class StageKey(NamedTuple):
    """A stage of a pipeline."""

    pipeline: str
    stage_id: int

    def __str__(self) -> str:
        return f"{self.pipeline}/{self.stage_id}"


class ReplicaKey(NamedTuple):
    """A replica id of a stage; orders by pipeline, stage and id."""

    pipeline: str
    stage_id: int
    replica_id: int

    @property
    def stage(self) -> StageKey:
        """The stage it belongs to."""
        return StageKey(self.pipeline, self.stage_id)

    def __str__(self) -> str:
        return f"{self.pipeline}/{self.stage_id}/{self.replica_id}"


class PipelineKey(NamedTuple):
    """A stored plan."""

    name: str


class InstanceKey(NamedTuple):
    """The claim index entry of an instance."""

    instance_uuid: str


class CordonKey(NamedTuple):
    """An operator's wish that an instance gets no new work."""

    instance_uuid: str


class EvictionKey(NamedTuple):
    """An operator's wish that an instance stays away."""

    instance_uuid: str


class DrainKey(NamedTuple):
    """An operator's wish that an instance leaves and does not come back."""

    instance_uuid: str


class PolicyKey(NamedTuple):
    """An operator's wish how gateways choose among the replicas of a stage."""

    stage: StageKey


class RestartKey(NamedTuple):
    """A stage that is being restarted."""

    stage: StageKey


class AnswerKey(NamedTuple):
    """The answer to an operator's request; the digest is that of its id."""

    digest: str


ParsedKey: TypeAlias = (
    ReplicaKey | PipelineKey | InstanceKey | CordonKey | EvictionKey | DrainKey | PolicyKey | RestartKey | AnswerKey
)


def is_name(text: str) -> bool:
    """True for a valid cluster or pipeline name (``NAME_RULE``)."""
    return _NAME.fullmatch(text) is not None


def is_uuid(text: str) -> bool:
    """True for a UUID in its canonical form: 36 characters, lower-case hex and dashes."""
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False


class Keys:
    """The keys of one cluster. Raises ``ValueError`` for a cluster name that is not one."""

    def __init__(self, cluster: str) -> None:
        if not is_name(cluster):
            raise ValueError(f"cluster: must be {NAME_RULE}, got {cluster[:80]!r}")
        self.cluster = cluster
        self.root = f"{ROOT}{cluster}/"
        self.restored = _RESTORED + cluster
        self.pipelines = f"{self.root}pipelines/"
        self.replicas = f"{self.root}replicas/"
        self.instances = f"{self.root}instances/"
        self.cordons = f"{self.root}admin/cordons/"
        self.evictions = f"{self.root}admin/evictions/"
        self.drains = f"{self.root}admin/drains/"
        self.policies = f"{self.root}admin/policies/"
        self.restarts = f"{self.root}admin/restarts/"
        self.answers = f"{self.root}admin/requests/"

    def pipeline(self, name: str) -> str:
        """Where the plan of a pipeline is."""
        return self.pipelines + _checked_name(name)

    def replica(self, key: ReplicaKey) -> str:
        """Where the record of a replica is."""
        return f"{self.replicas}{_checked_name(key.pipeline)}/{_checked_id(key.stage_id)}/{_checked_id(key.replica_id)}"

    def instance(self, instance_uuid: str) -> str:
        """Where the claim of an instance is named."""
        return self.instances + _checked_uuid(instance_uuid)

    def cordon(self, instance_uuid: str) -> str:
        """Where the cordon of an instance is."""
        return self.cordons + _checked_uuid(instance_uuid)

    def eviction(self, instance_uuid: str) -> str:
        """Where the eviction of an instance is."""
        return self.evictions + _checked_uuid(instance_uuid)

    def drain(self, instance_uuid: str) -> str:
        """Where the drain of an instance is."""
        return self.drains + _checked_uuid(instance_uuid)

    def policy(self, stage: StageKey) -> str:
        """Where the balancing policy of a stage is."""
        return f"{self.policies}{_checked_name(stage.pipeline)}/{_checked_id(stage.stage_id)}"

    def policies_of(self, pipeline: str) -> str:
        """The prefix of the balancing policies of all stages of a pipeline."""
        return f"{self.policies}{_checked_name(pipeline)}/"

    def restart(self, stage: StageKey) -> str:
        """Where it is said that a stage is being restarted."""
        return f"{self.restarts}{_checked_name(stage.pipeline)}/{_checked_id(stage.stage_id)}"

    def answer(self, request_id: str) -> str:
        """Where the answer to a request is; its id may be any text."""
        return self.answers + hashlib.sha256(request_id.encode()).hexdigest()

    def parse(self, key: str) -> ParsedKey | None:
        """What a key of this cluster is about; ``None`` for any key that this module did not make."""
        if not key.startswith(self.root):
            return None
        match key[len(self.root) :].split("/"):
            case ["replicas", pipeline, stage_id, replica_id] if is_name(pipeline):
                stage, replica = _parsed_id(stage_id), _parsed_id(replica_id)
                if stage is None or replica is None:
                    return None
                return ReplicaKey(pipeline, stage, replica)
            case ["pipelines", name] if is_name(name):
                return PipelineKey(name)
            case ["instances", instance_uuid] if is_uuid(instance_uuid):
                return InstanceKey(instance_uuid)
            case ["admin", "cordons", instance_uuid] if is_uuid(instance_uuid):
                return CordonKey(instance_uuid)
            case ["admin", "evictions", instance_uuid] if is_uuid(instance_uuid):
                return EvictionKey(instance_uuid)
            case ["admin", "drains", instance_uuid] if is_uuid(instance_uuid):
                return DrainKey(instance_uuid)
            case ["admin", "policies" | "restarts" as what, pipeline, stage_id] if is_name(pipeline):
                stage = _parsed_id(stage_id)
                if stage is None:
                    return None
                return (PolicyKey if what == "policies" else RestartKey)(StageKey(pipeline, stage))
            case ["admin", "requests", digest] if _DIGEST.fullmatch(digest):
                return AnswerKey(digest)
        return None


def _checked_name(name: str) -> str:
    if not is_name(name):
        raise ValueError(f"name: must be {NAME_RULE}, got {name[:80]!r}")
    return name


def _checked_id(number: int) -> int:
    if not 0 <= number <= MAX_ID:
        raise ValueError(f"id: must be 0 to {MAX_ID}, got {number}")
    return number


def _checked_uuid(text: str) -> str:
    if not is_uuid(text):
        raise ValueError(f"instance_uuid: must be a lower-case UUID, got {text[:80]!r}")
    return text


def _parsed_id(text: str) -> int | None:
    if _NUMBER.fullmatch(text) is None or (number := int(text)) > MAX_ID:
        return None
    return number
