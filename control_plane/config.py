"""Flags of ``omniplane control-plane``."""

from __future__ import annotations

import dataclasses

from control_plane.keys import Keys
from control_plane.liveness import BASE_INTERVAL_S, MISSED_BEATS
from omnicore.config import host_port, host_port_or_empty, option, positive
from omnicore.process import ProcessConfig
from omnicore.security import SecurityConfig

EMBEDDED = "embedded"


def _cluster(value: str) -> None:
    Keys(value)


def _endpoints(value: tuple[str, ...]) -> None:
    if not value:
        raise ValueError(f"needs at least one endpoint, or {EMBEDDED!r}")
    if EMBEDDED in value and len(value) > 1:
        raise ValueError(f"{EMBEDDED!r} stands alone: it is a private etcd")


def _kept(value: tuple[str, ...]) -> None:
    for item in value:
        stage, separator, count = item.partition(":")
        if not separator or not stage.isdecimal() or not count.isdecimal():
            raise ValueError(f"must be STAGE:COUNT, got {item!r}")


def _ttl(value: int) -> None:
    if not 2 <= value <= 3600:
        raise ValueError(f"must be 2 to 3600 seconds, got {value}")


@dataclasses.dataclass(frozen=True, slots=True)
class ControlPlaneConfig(ProcessConfig, SecurityConfig):
    """Run a control plane: registration, liveness, pipelines and admin verbs, over etcd.

    Any number of them may run over one etcd; gateways and workers take a list of their addresses.
    """

    listen: str = option("127.0.0.1:7700", help="host:port for gRPC; port 0 takes a free one", check=host_port)
    etcd: tuple[str, ...] = option(
        (EMBEDDED,),
        help="etcd members, separated by commas: host:port, https://host:port or unix:/path; "
        f"{EMBEDDED!r} starts a private one for this machine",
        check=_endpoints,
    )
    cluster: str = option("default", help="name of the cluster: the third part of every etcd key", check=_cluster)
    lease_ttl_s: int = option(
        10,
        help="whole seconds without a beat after which a replica is removed; more in a fleet of hundreds",
        check=_ttl,
        flags=("--omni-heartbeat-timeout",),
    )
    heartbeat_interval_s: float = option(
        BASE_INTERVAL_S,
        help=f"seconds between the beats of a replica in a small fleet; {MISSED_BEATS} missed ones make it suspect",
        check=positive,
    )
    keep_replica_ids: tuple[str, ...] = option(
        (),
        help="STAGE:COUNT, separated by commas: of that stage, so many ids from 0 on go only to workers that ask for "
        "an id (omniplane serve has its own replicas do so)",
        check=_kept,
    )
    etcd_timeout_s: float = option(5.0, help="seconds that one call to etcd may take", check=positive)
    registration_token_file: str = option(
        "", help="file of the tokens, one a line, of which workers must send one; empty: no token is needed"
    )
    admin_token_file: str = option(
        "", help="file of the tokens, one a line, that make a caller an administrator; empty: no token does"
    )
    etcd_ca: str = option("", help="PEM file of the authority that signed etcd's certificate")
    etcd_cert: str = option("", help="PEM file of our certificate for etcd")
    etcd_key: str = option("", help="PEM file of its key")
    etcd_user: str = option("", help="etcd user")
    etcd_password_file: str = option("", help="file with that user's password")
    etcd_data_dir: str = option(
        "", help="directory that keeps the embedded etcd's store over restarts; empty: a temporary one"
    )
    etcd_client_listen: str = option(
        "", help="loopback host:port of the embedded etcd, for etcdctl; empty: none", check=host_port_or_empty
    )
    drain_s: float = option(1.0, help="seconds that running calls get at shutdown", check=positive)

    @property
    def kept_ids(self) -> dict[int, int]:
        """``keep_replica_ids`` by stage."""
        pairs = (item.split(":") for item in self.keep_replica_ids)
        return {int(stage): int(count) for stage, count in pairs}

    def check(self) -> None:
        """Raise ``ValueError`` where values do not go together."""
        longest = self.lease_ttl_s / (2 * MISSED_BEATS)
        if self.heartbeat_interval_s > longest:
            raise ValueError(
                f"--heartbeat-interval-s: must be at most {longest:g} with --lease-ttl-s {self.lease_ttl_s}, "
                f"or leases end between beats, got {self.heartbeat_interval_s:g}"
            )
