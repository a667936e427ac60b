"""The services that a launcher starts, as commands for its supervisor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omnicore.access import Role
from omnicore.config import join_host_port, split_host_port
from omnicore.errors import FailedPreconditionError
from omnicore.supervise.supervisor import Spec
from omniplane.serve.access import security_flags
from omniplane.serve.config import ServeConfig

ETCD, CONTROL_PLANE, GATEWAY = "etcd", "control-plane", "gateway"

# Generous: they bound a start that hangs, and a machine may be busy with other things.
SERVICE_READY_S = 60.0
# After its requests, a service still closes what it has, and a worker leaves the registry.
_AFTER_DRAIN_S = 10.0
_SHORT_GRACE_S = 5.0


def etcd(config: ServeConfig, data_dir: Path) -> Spec:
    """A private etcd."""

    def tcp(ready: dict[str, Any]) -> str:
        found = [endpoint for endpoint in ready["endpoints"] if not endpoint.startswith("unix:")]
        if not found:
            raise FailedPreconditionError("etcd offers no TCP endpoint", reason="NO_TCP_ENDPOINT")
        return str(found[0])

    return Spec(
        name=ETCD,
        arguments=("etcd", "--data-dir", str(data_dir), "--client-listen", "127.0.0.1:0", *_logging(config)),
        ready_timeout_s=SERVICE_READY_S,
        stop_grace_s=_SHORT_GRACE_S,
        pin=lambda ready: ("--client-listen", tcp(ready)),
        describe=tcp,
    )


def control_plane(config: ServeConfig, listen: str, endpoints: tuple[str, ...]) -> Spec:
    """A control plane at ``listen``, over the etcd at ``endpoints``."""
    return Spec(
        name=CONTROL_PLANE,
        arguments=(
            *("control-plane", "--listen", listen),
            *("--etcd", ",".join(endpoints)),
            *("--cluster", config.cluster),
            *("--lease-ttl-s", str(config.lease_ttl_s)),
            # Replicas from elsewhere get the ids above those of a head's own, even if they come first.
            *(
                ("--keep-replica-ids", f"{config.stage_id}:{config.omni_dp_size_local}")
                if config.stage_id is not None
                else ()
            ),
            *_file("--registration-token-file", config.registration_token_file),
            *_file("--admin-token-file", config.admin_token_file),
            *security_flags(config, Role.CONTROL_PLANE),
            *_logging(config),
        ),
        ready_timeout_s=SERVICE_READY_S,
        stop_grace_s=_SHORT_GRACE_S,
        pin=lambda ready: ("--listen", pinned(listen, ready["address"])),
        describe=lambda ready: str(ready["address"]),
    )


def gateway(config: ServeConfig, control_plane_address: str) -> Spec:
    """A gateway that is not healthy before the pipeline is complete. Once it was, a gateway that replaces it serves
    with whatever there is."""
    http = join_host_port(config.host, config.port)
    grpc = join_host_port(config.host, config.grpc_port)
    return Spec(
        name=GATEWAY,
        arguments=(
            *("gateway", "--http", http),
            *("--grpc", grpc),
            *("--control-plane", control_plane_address),
            *("--balancing-policy", config.omni_lb_policy),
            *("--drain-timeout-s", f"{config.drain_timeout:g}"),
            "--wait-for-planned-replicas",
            *("--workers", str(config.gateway_workers)),
            *_file("--api-keys", config.api_keys),
            *_file("--http-tls-cert", config.ssl_certfile),
            *_file("--http-tls-key", config.ssl_keyfile),
            *_tracing(config),
            *("--trace-sample", str(config.trace_sample)),
            *security_flags(config, Role.GATEWAY),
            *_logging(config),
        ),
        ready_timeout_s=SERVICE_READY_S,
        stop_grace_s=config.drain_timeout + _AFTER_DRAIN_S,
        pin=lambda ready: (
            *("--http", pinned(http, ready["http"])),
            *("--grpc", pinned(grpc, ready["grpc"])),
            "--no-wait-for-planned-replicas",
        ),
        describe=lambda ready: str(ready["http"]),
    )


def worker(
    config: ServeConfig,
    name: str,
    *,
    pipeline: str,
    stage_id: int,
    control_plane_address: str,
    devices: tuple[str, ...] = (),
    replica_id: int | None = None,
    environ: Callable[[], Mapping[str, str]] = dict,
) -> Spec:
    """One replica. ``replica_id`` is the id to ask for; a process that replaces another asks for its id."""
    listen = config.omni_replica_address
    return Spec(
        name=name,
        arguments=(
            *("stage-worker", "--pipeline", pipeline),
            *("--stage-id", str(stage_id)),
            *("--control-plane", control_plane_address),
            *(("--listen", join_host_port(listen, 0)) if listen else ()),
            *(("--devices", ",".join(devices)) if devices else ()),
            *(("--preferred-replica-id", str(replica_id)) if replica_id is not None else ()),
            *("--startup-timeout-s", f"{config.startup_timeout:g}"),
            *("--engine-start-timeout-s", f"{config.stage_init_timeout:g}"),
            *("--drain-timeout-s", f"{config.drain_timeout:g}"),
            *_file("--registration-token-file", config.registration_token_file),
            *security_flags(config, Role.WORKER),
            *_tracing(config),
            *_logging(config),
        ),
        # Its own limits come first, and say better what took too long.
        ready_timeout_s=config.startup_timeout + config.stage_init_timeout + SERVICE_READY_S,
        stop_grace_s=config.drain_timeout + _AFTER_DRAIN_S,
        pin=lambda ready: ("--preferred-replica-id", str(ready["replica_id"])),
        describe=lambda ready: f"{pipeline}/{stage_id}/{ready['replica_id']} at {ready['address']}",
        may_leave=True,
        environ=environ,
    )


def pinned(listen: str, address: str) -> str:
    """The host that was asked for, with the port that was got."""
    return f"{listen.rpartition(':')[0]}:{split_host_port(address)[1]}"


def reachable(address: str) -> str:
    """``address`` as this machine dials it: a wildcard is every interface, so also loopback."""
    host, port = split_host_port(address)
    return join_host_port("127.0.0.1", port) if host in ("0.0.0.0", "::", "") else address


def _file(flag: str, path: str) -> tuple[str, ...]:
    return (flag, path) if path else ()


def _tracing(config: ServeConfig) -> tuple[str, ...]:
    return ("--trace-endpoint", config.trace_endpoint) if config.trace_endpoint else ()


def _logging(config: ServeConfig) -> tuple[str, ...]:
    return ("--log-level", config.log_level, *(("--log-json",) if config.log_json else ()))
