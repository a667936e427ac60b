"""Flags of ``omniplane stage-worker``."""

from __future__ import annotations

import dataclasses

from connectors.shm import DEFAULT_POOL_BYTES
from omnicore.config import host_port_or_empty, host_ports, not_negative, option, positive, stage_number
from omnicore.process import ProcessConfig
from omnicore.security import SecurityConfig
from omnicore.trace_config import TraceConfig
from stage_worker.flows import OPEN_WAIT_S
from stage_worker.reading import CHUNK_TIMEOUT_S
from stage_worker.retention import DEFAULT_RETAIN_BYTES


def _named(value: str) -> None:
    if not value:
        raise ValueError("must not be empty")


def _id_or_none(value: int) -> None:
    if not -1 <= value < 2**32:
        raise ValueError(f"must be a replica id, or -1, got {value}")


def _port(value: int) -> None:
    if not 0 <= value < 2**16:
        raise ValueError(f"must be a port, 0 to 65535, got {value}")


@dataclasses.dataclass(frozen=True)
class StageWorkerConfig(ProcessConfig, SecurityConfig, TraceConfig):
    """One replica of one stage: loads its engine, registers, serves gateways and peer workers."""

    pipeline: str = option(help="pipeline to serve a stage of", check=_named)
    stage_id: int = option(help="stage to serve", check=stage_number)
    control_plane: tuple[str, ...] = option(help="control planes, host:port[,host:port]", check=host_ports)
    listen: str = option(
        "",
        help="host:port to serve on, port 0 takes any; empty: any port of the address that leads to the control plane",
        check=host_port_or_empty,
    )
    session_port: int = option(
        0, help="port of sessions and flows, beside --listen and reached at the same host; 0 takes any", check=_port
    )
    advertise: str = option(
        "", help="host that others reach this worker at; empty: found out", flags=("--omni-replica-address", "-ora")
    )
    registration_token_file: str = option(
        "", help="file with the token that control planes want of workers; its first line that is no comment is sent"
    )
    preferred_replica_id: int = option(
        -1, help="replica id to ask for, given if it is free; -1: the lowest free one", check=_id_or_none
    )
    devices: tuple[str, ...] = option((), help="logical device ids for the engine, such as 0,1")
    topology_domain: str = option("", help="rack, zone or any label that operators route by")
    pool_bytes: int = option(
        DEFAULT_POOL_BYTES,
        help="shared memory for data to other stages; a stage without any takes none",
        check=not_negative,
    )
    retain_bytes: int = option(
        DEFAULT_RETAIN_BYTES,
        help="most that is kept of what consumers have read, in case one is lost before its request has ended; 0: none",
        check=not_negative,
    )
    startup_timeout_s: float = option(
        300.0,
        help="give up if the control plane, or the pipeline, is not there after this; a worker that serves waits so "
        "long for the pipeline at a control plane that has lost it",
        check=positive,
    )
    engine_start_timeout_s: float = option(
        1800.0, help="give up if the engine has not started after this", check=positive, flags=("--stage-init-timeout",)
    )
    drain_timeout_s: float = option(
        30.0, help="running requests may take this long after a stop or drain", check=not_negative
    )
    chunk_timeout_s: float = option(
        CHUNK_TIMEOUT_S,
        help="longest wait for a chunk of an upstream stage, and for its bytes, unless the edge has a chunk_timeout_s",
        check=positive,
    )
    metrics: str = option(
        "", help="host:port of GET /metrics over HTTP, port 0 takes any; empty: none", check=host_port_or_empty
    )
    flow_open_timeout_s: float = option(
        OPEN_WAIT_S, help="how long a consumer waits for its request to reach this worker", check=positive
    )
