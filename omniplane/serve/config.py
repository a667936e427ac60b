"""Flags of ``omniplane serve``: vLLM-Omni's, ours beside them; what may stand together, and where each holds."""

from __future__ import annotations

import dataclasses
import enum
import ipaddress
import math
from collections.abc import Iterator

from omnicore.config import duration, duration_or_0, host_port, option, stage_number, within
from omnicore.errors import InvalidRequestError
from omnicore.policies import BALANCING_POLICIES
from omnicore.process import ProcessConfig
from omnicore.security import SecurityConfig
from omnicore.trace_config import DEFAULT_SHARE, TraceConfig, share

DEFAULT_POLICY = "random"
"""vLLM-Omni's. A gateway of ours that is started by itself prefers power-of-two."""
DEFAULT_HEARTBEAT_TIMEOUT_S = 30.0
"""vLLM-Omni's; Omniplane's own control plane takes 10 s. A death is noticed at once all the same."""
# Whole seconds that etcd leases may last, as the control plane accepts them.
_LEASE_S = (2, 3600)
DEFAULT_STAGE_INIT_TIMEOUT_S = 300.0
DEFAULT_INIT_TIMEOUT_S = 600.0
"""vLLM-Omni's, both."""


class Mode(enum.Enum):
    """What one invocation is."""

    PLAIN = "plain"
    """No stage id: the whole pipeline on this machine."""
    HEAD = "head"
    """A stage id: control plane, gateway, and that stage's local replicas."""
    HEADLESS = "headless"
    """A stage id and --headless: that stage's local replicas, under a head elsewhere."""


def _port(value: int) -> None:
    if not 0 <= value <= 65535:
        raise ValueError(f"must be a port, 0 to 65535 (0 takes any free one), got {value}")


# As a deploy file takes them.
_RANKS = within(1, 4096)
_REPLICAS = within(1, 4096)
_COUNT = within(1, 2**31 - 1)


def _heartbeat_timeout(value: float) -> None:
    if not math.isfinite(value) or not 0 < value <= _LEASE_S[1]:
        raise ValueError(f"must be a number of seconds above 0 and at most {_LEASE_S[1]}, got {value:g}")


def _share(value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"must be above 0 and at most 1, got {value:g}")


def _host(value: str) -> None:
    if not value or value.startswith("-") or any(c.isspace() or c in ",/" for c in value):
        raise ValueError(f"must be a host name or an IP address, got {value!r}")


def _optional_host(value: str) -> None:
    if value:
        _host(value)


def _endpoints(value: tuple[str, ...]) -> None:
    for item in value:
        if not item.startswith(("unix:", "http://", "https://")):
            host_port(item)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """Engine flags: keys of a stage in the deploy file, which they go before (docs/serve.md says of which stages)"""

    tensor_parallel_size: int | None = option(None, help="ranks of one replica", check=_RANKS, flags=("-tp",))
    pipeline_parallel_size: int | None = option(
        None, help="ranks that each hold some of the layers", check=_RANKS, flags=("-pp",)
    )
    quantization: str = option("", help="how weights are quantized, such as fp8", flags=("-q",))
    trust_remote_code: bool | None = option(None, help="run code that comes with the model")
    dtype: str = option("", help="type of weights and activations")
    kv_cache_dtype: str = option("", help="type of the KV cache")
    load_format: str = option("", help="form of the weights")
    tokenizer: str = option("", help="tokenizer, where it is not the model's own")
    max_model_len: int | None = option(None, help="tokens of prompt and output together", check=_COUNT)
    max_num_seqs: int | None = option(None, help="requests that one replica works on", check=_COUNT)
    max_num_batched_tokens: int | None = option(None, help="tokens of one step", check=_COUNT)
    gpu_memory_utilization: float | None = option(None, help="share of the device's memory", check=_share)
    enforce_eager: bool | None = option(None, help="no CUDA graphs")
    enable_prefix_caching: bool | None = option(None, help="reuse the KV of equal prompt beginnings")
    enable_chunked_prefill: bool | None = option(None, help="prefill long prompts in pieces")
    enable_expert_parallel: bool | None = option(None, help="experts spread over ranks")
    enable_sleep_mode: bool | None = option(None, help="engine can be put to sleep")
    distributed_executor_backend: str = option("", help="what starts the ranks: mp, ray, …")


ENGINE_FLAGS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(EngineFlags))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig(EngineFlags, ProcessConfig, SecurityConfig, TraceConfig):
    """Serve a multi-stage pipeline with the command line of vLLM-Omni.
    Without --stage-id: the whole pipeline on this machine. With it: a head, which runs the control plane, the gateway
    and that stage's replicas; with --headless as well: only that stage's replicas, under a head elsewhere.
    """

    model: str = option("", help="MODEL: model of stages whose deploy file names none; also the first argument")
    omni: bool = option(False, help="taken for compatibility: every pipeline is served this way")
    headless: bool = option(False, help="no control plane, no gateway: only replicas, which join the head's")
    stage_id: int | None = option(None, help="stage whose replicas this process runs", check=stage_number)
    omni_dp_size_local: int = option(
        1, help="replicas of --stage-id that this process runs; each process has its own number", check=_REPLICAS
    )
    omni_lb_policy: str = option(
        DEFAULT_POLICY, help="how a stage's replica is chosen; on heads", choices=BALANCING_POLICIES
    )
    omni_heartbeat_timeout: float = option(
        DEFAULT_HEARTBEAT_TIMEOUT_S,
        help="seconds without a beat after which a replica is removed; on heads. Rounded up to whole seconds from 2",
        check=_heartbeat_timeout,
    )
    omni_replica_address: str = option(
        "",
        help="address of this host that replicas listen on and announce; with --headless only. Empty: the one that "
        "leads to the head",
        check=_optional_host,
        flags=("-ora",),
    )
    omni_master_address: str = option(
        "", help="host of the head's control plane", check=_optional_host, flags=("-oma",)
    )
    omni_master_port: int | None = option(None, help="port of the head's control plane", check=_port, flags=("-omp",))
    replica_id: int | None = option(None, help="deprecated and ignored: the control plane assigns replica ids")
    deploy_config: str = option("", help="deploy file (YAML); heads send it to their control plane, headless do not")
    stage_configs_path: str = option("", help="deprecated: the older name of --deploy-config")
    stage_overrides: str = option(
        "", help='keys of stages as JSON, such as {"0": {"max_num_seqs": 8}}; also as --stage-0-max-num-seqs 8'
    )
    async_chunk: bool | None = option(None, help="chunks flow from stage to stage while a request runs")
    stage_init_timeout: float = option(
        DEFAULT_STAGE_INIT_TIMEOUT_S,
        help="seconds that a replica may take to load, and heads wait for the planned replicas of other stages",
        check=duration,
    )
    init_timeout: float = option(
        DEFAULT_INIT_TIMEOUT_S, help="seconds until everything that this process starts must serve", check=duration
    )
    host: str = option("127.0.0.1", help="host of the HTTP API", check=_host)
    port: int = option(8000, help="port of the HTTP API; 0 takes any free one", check=_port)
    log_stats: bool = option(False, help="taken for compatibility: figures are always at /metrics")
    engine: str = option("", help="run every stage on this engine, such as sim, instead of its own (ours)")
    pipeline: str = option("", help="name of the pipeline; headless: which of the head's to serve (ours)")
    platform: str = option("", help="merge this section of the file's platforms: cuda, npu, … (ours)")
    grpc_port: int = option(0, help="port of the gateway's gRPC side, at --host; 0 takes any free one", check=_port)
    etcd: tuple[str, ...] = option((), help="use this etcd instead of a private one (ours)", check=_endpoints)
    data_dir: str = option("", help="keep the private etcd's data there, over restarts (ours)")
    gateway_workers: int = option(1, help="gateway processes on the same ports (ours)", check=within(1, 256))
    api_keys: str = option("", help="file of the API keys that callers of the gateway need one of (ours)")
    ssl_certfile: str = option("", help="PEM file of the certificate that makes the HTTP API HTTPS")
    ssl_keyfile: str = option("", help="PEM file of its private key")
    registration_token_file: str = option(
        "", help="file of the tokens, one a line, of which replicas send the first and the head wants one (ours)"
    )
    admin_token_file: str = option(
        "", help="heads: file of the tokens, one a line, that make a caller an administrator (ours)"
    )
    trace_sample: float = option(
        DEFAULT_SHARE, help="share of requests, 0 to 1, traced if there is a --trace-endpoint (ours)", check=share
    )
    cluster: str = option("default", help="name of the cluster in etcd's keys (ours)")
    startup_timeout: float = option(
        300.0, help="headless: seconds to wait for the head and its pipeline (ours)", check=duration
    )
    drain_timeout: float = option(
        30.0, help="seconds that running requests may take after SIGTERM (ours)", check=duration_or_0
    )

    @property
    def mode(self) -> Mode:
        """What this invocation is."""
        if self.stage_id is None:
            return Mode.PLAIN
        return Mode.HEADLESS if self.headless else Mode.HEAD

    @property
    def deploy_file(self) -> str:
        """The deploy file, by whichever name it was given."""
        return self.deploy_config or self.stage_configs_path

    @property
    def lease_ttl_s(self) -> int:
        """--omni-heartbeat-timeout as the control plane takes it."""
        return max(_LEASE_S[0], math.ceil(self.omni_heartbeat_timeout))

    def check(self) -> None:
        """Raise ``InvalidRequestError``, naming the flag, where flags do not go together."""
        self._check_stage_flags()
        if self.deploy_config and self.stage_configs_path and self.deploy_config != self.stage_configs_path:
            raise _wrong("--stage-configs-path", "--deploy-config names another file; give one of the two")
        if self.mode is not Mode.HEADLESS and not self.deploy_file:
            raise _wrong("--deploy-config", "required: the deploy file of the pipeline")
        if self.mode is Mode.HEADLESS and self.omni_master_port == 0:
            raise _wrong("--omni-master-port", "must be the head's port, got 0")
        if self.mode is Mode.HEADLESS and _is_wildcard(self.omni_master_address):
            raise _wrong("--omni-master-address", f"{self.omni_master_address} is no address to connect to")
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            missing = "--ssl-keyfile" if self.ssl_certfile else "--ssl-certfile"
            raise _wrong(missing, "required: --ssl-certfile and --ssl-keyfile go together")
        if _is_wildcard(self.omni_replica_address):
            raise _wrong("--omni-replica-address", f"{self.omni_replica_address} is no address that others can reach")

    def _check_stage_flags(self) -> None:
        if self.stage_id is None:
            if self.headless:
                raise _wrong("--headless", "needs --stage-id: which stage to run replicas of")
            if self.omni_dp_size_local != 1:
                raise _wrong(
                    "--omni-dp-size-local", f"{self.omni_dp_size_local} needs --stage-id: which stage to run so many of"
                )
        else:
            for flag, given in (
                ("--omni-master-address", bool(self.omni_master_address)),
                ("--omni-master-port", self.omni_master_port is not None),
            ):
                if not given:
                    raise _wrong(flag, "required with --stage-id: where the head's control plane is")
        if self.omni_replica_address and not self.headless:
            raise _wrong("--omni-replica-address", "needs --headless: a head's replicas are where the head is")

    def notes(self) -> Iterator[tuple[bool, str]]:
        """What its user should know of flags without the effect they may expect: (worth a warning, text)."""
        if self.replica_id is not None:
            yield True, f"--replica-id {self.replica_id} is deprecated and ignored: the control plane assigns ids"
        if self.stage_configs_path:
            yield True, "--stage-configs-path is deprecated: use --deploy-config"
        if self.log_stats:
            yield False, "--log-stats has nothing to switch on: figures are always at /metrics"
        if self.mode is Mode.HEADLESS:
            ignored = [flag for flag, given in self._head_flags() if given]
            if ignored:
                yield False, f"ignored on headless, as the head's decide: {', '.join(ignored)}"
        else:
            wanted_s, got_s = self.omni_heartbeat_timeout, self.lease_ttl_s
            if wanted_s != got_s:
                yield wanted_s < got_s - 1, f"--omni-heartbeat-timeout {wanted_s:g} is taken as {got_s} s"
        if self.mode is Mode.PLAIN and (self.omni_master_address or self.omni_master_port is not None):
            yield True, "--omni-master-address and --omni-master-port have no effect without --stage-id"

    def _head_flags(self) -> Iterator[tuple[str, bool]]:
        yield "--omni-lb-policy", self.omni_lb_policy != DEFAULT_POLICY
        yield "--omni-heartbeat-timeout", self.omni_heartbeat_timeout != DEFAULT_HEARTBEAT_TIMEOUT_S
        yield "--deploy-config", bool(self.deploy_file)
        yield "--host, --port", (self.host, self.port) != ("127.0.0.1", 8000)
        yield "--gateway-workers", self.gateway_workers != 1
        yield "--api-keys", bool(self.api_keys)
        yield "--trace-sample", self.trace_sample != DEFAULT_SHARE
        yield "--async-chunk", self.async_chunk is not None
        yield "--etcd", bool(self.etcd)


def _wrong(flag: str, text: str) -> InvalidRequestError:
    return InvalidRequestError(f"{flag}: {text}", reason="USAGE")


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False
