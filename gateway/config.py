"""The gateway's configuration."""

from __future__ import annotations

import dataclasses

from gateway.access import cors
from gateway.balancers import POLICIES
from gateway.http.fetching import check_domains
from gateway.processes.siblings import Place
from gateway.request import MOST_ANSWER_BYTES
from omnicore.config import host_port, host_ports, not_negative, option, positive, within
from omnicore.process import ProcessConfig
from omnicore.rpc import MAX_MESSAGE_BYTES
from omnicore.security import SecurityConfig
from omnicore.trace_config import DEFAULT_SHARE, TraceConfig, share


def _place(value: str) -> None:
    Place.parse(value)


@dataclasses.dataclass(frozen=True, slots=True)
class GatewayConfig(ProcessConfig, SecurityConfig, TraceConfig):
    """Serves OpenAI HTTP and gRPC, and routes every request over the stages of its pipeline."""

    control_plane: tuple[str, ...] = option(
        help="control planes to follow, host:port, comma-separated; any of them will do", check=host_ports
    )
    http: str = option("127.0.0.1:8000", help="HTTP address, host:port; port 0 takes any free one", check=host_port)
    grpc: str = option("127.0.0.1:8001", help="gRPC address, host:port; port 0 takes any free one", check=host_port)
    http_tls_cert: str = option("", help="PEM file of the certificate that makes HTTP HTTPS; goes with --http-tls-key")
    http_tls_key: str = option("", help="PEM file of its private key")
    workers: int = option(
        1,
        help="gateway processes on the same two ports; --max-inflight and --max-queued are for all of them together",
        check=within(1, 256),
    )
    replace_hung_after_s: float = option(
        15.0,
        help="with --workers: a process that answers nothing for about so long is killed and started again, seconds;"
        " 0: never, to look at one with a debugger say",
        check=not_negative,
    )
    process: str = option("", help="which of several processes this is; set by --workers", check=_place)
    api_keys: str = option(
        "", help="file of API keys, one JSON object a line ('omnictl api-key' makes them); empty: no key is asked for"
    )
    metrics_need_key: bool = option(False, help="GET /metrics needs a key with the role read as well")
    cors_origin: tuple[str, ...] = option(
        (), help="origins whose web pages may use the HTTP API, comma-separated; * for all", check=cors.origins
    )
    allow_media_domains: tuple[str, ...] = option(
        (),
        help="hosts that pictures and sounds of chats may be fetched from, comma-separated; none: only data URIs",
        check=check_domains,
    )
    balancing_policy: str = option("power-of-two", help="how a stage's replica is chosen", choices=POLICIES)
    route_wait_s: float = option(
        10.0, help="how long a request waits for a routable replica, seconds", check=not_negative
    )
    request_timeout_s: float = option(600.0, help="longest time a request may take, seconds", check=positive)
    wait_for_planned_replicas: bool = option(
        False, help="/health and /ready say 503 until every stage has had as many replicas as planned"
    )
    retry_limit: int = option(
        2,
        help="how often a request is begun again elsewhere because the same stage of it failed before any output",
        check=not_negative,
    )
    replay_limit: int = option(
        2,
        help="how often each stage of a request that is lost after output is begun again, so that the request goes on;"
        " 0: it fails",
        check=not_negative,
    )
    hung_after_s: float = option(
        3.0,
        help="a replica with calls that is silent for so long is taken for lost, seconds (ten times as long while no"
        " other of its stage is well); above the longest step of an engine; 0: never",
        check=not_negative,
    )
    max_held: int = option(4096, help="requests that may wait at each stage for a routable replica", check=not_negative)
    max_inflight: int = option(4096, help="requests that may run at once", check=positive)
    max_queued: int = option(1024, help="requests that may wait for that", check=not_negative)
    queue_timeout_s: float = option(10.0, help="longest wait for admission, seconds", check=not_negative)
    max_body_bytes: int = option(MAX_MESSAGE_BYTES, help="largest HTTP request body", check=positive)
    stream_buffer_bytes: int = option(
        8 * 1024 * 1024, help="output that may wait for one slow client before its request fails", check=positive
    )
    max_answer_bytes: int = option(
        MOST_ANSWER_BYTES, help="largest answer in one piece; whoever wants more asks for a stream", check=positive
    )
    keepalive_s: float = option(15.0, help="a silent event stream gets a comment this often, seconds", check=positive)
    drain_timeout_s: float = option(
        30.0, help="how long running requests may go on after SIGTERM, seconds", check=not_negative
    )
    kept_requests: int = option(1000, help="ended requests whose timeline is kept", check=not_negative)
    trace_sample: float = option(
        DEFAULT_SHARE,
        help="share of requests, 0 to 1, traced if there is a --trace-endpoint; who sends a traceparent decides itself",
        check=share,
    )
