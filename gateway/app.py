"""The gateway process: startup, serve, drain."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from collections.abc import Sequence

import grpc.aio

from gateway.access.calls import KeyInterceptor
from gateway.access.control import AccessControl
from gateway.access.cors import Cors
from gateway.access.http import HttpAccess
from gateway.accounts import Accounts
from gateway.admission import Admission
from gateway.config import GatewayConfig
from gateway.control_plane_watch import ControlPlaneWatch
from gateway.execution_parts import Limits
from gateway.grpc_api import SERVICE_NAMES, InferenceServicer, RouterServicer
from gateway.http.application import GatewayApp
from gateway.http.fetching import MediaFetcher
from gateway.http.server import HttpServer
from gateway.http.service import HttpLimits, HttpService
from gateway.http.tls import https_context
from gateway.metrics import GatewayMetrics
from gateway.orchestrator import Orchestrator
from gateway.processes.shared_use import SharedUse
from gateway.processes.siblings import Place, Siblings
from gateway.processes.supervisor import serve_together
from gateway.replica_table import ReplicaTable
from gateway.rest.api import RestApi, RestLimits
from gateway.rest.backends import ControlPlaneBackend, LocalBackend
from gateway.rest.routes import SERVICES, RestRoutes
from gateway.router import Router
from gateway.routes import RouteTable
from gateway.startup import StartupGate
from gateway.traces import Tracing
from omni.v1 import inference_service_pb2_grpc, router_service_pb2_grpc
from omnicore import config as configuration
from omnicore import rpc
from omnicore.access import Role
from omnicore.log import get_logger
from omnicore.process import Shutdown, run, write_ready_file
from omnicore.security import Security, is_loopback
from omnicore.trace_config import export
from omnicore.tracing import Sampler

_log = get_logger(__name__)

# What a StageCall carries besides its prompt is far below this.
_CALL_OVERHEAD_BYTES = 64 * 1024
# A hundred times Python's own first threshold: a collection per some thousands of requests, a few ms each.
_GC_THRESHOLDS = (70_000, 10, 10)

# How long a gateway does not listen because it does not know what there is. A control plane that starts beside it is
# there within a few seconds; without one, /health must answer before an orchestrator's probes give it up (Kubernetes'
# default: 30 s).
_FIRST_SNAPSHOT_S = 10.0


class Gateway:
    """All parts of one gateway, wired: ``start``, then ``drain`` and ``close``."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises ``InvalidRequestError`` for certificates that do not serve, and for plaintext beyond loopback."""
        self.config = config
        self._security = Security(config, serves=Role.GATEWAY)
        self._security.check_listen("--grpc", config.grpc)
        self._security.check_dial("--control-plane", config.control_plane)
        self.access = AccessControl(config.api_keys, trusted=is_loopback(config.http))
        self._https = https_context(config.http_tls_cert, config.http_tls_key)
        if self._https is None and not is_loopback(config.http):
            _log.warning("HTTP without TLS beyond loopback: what clients send can be read on the way", http=config.http)
        self.siblings = Siblings(Place.parse(config.process))
        self.gateway_id = f"{socket.gethostname()}-{os.getpid()}"
        self.table = ReplicaTable()
        self.router = Router(
            self.table,
            policy=config.balancing_policy,
            gateway_id=self.gateway_id,
            max_wait_s=config.route_wait_s,
            hung_after_s=config.hung_after_s,
            max_held=config.max_held,
            connect=self._security.to_worker,
            dial=self._security.dial_worker,
        )
        self.metrics = GatewayMetrics()
        self._spans = export(config, "omniplane-gateway", instance=self.gateway_id)
        self._use = SharedUse(self.siblings.place) if not self.siblings.place.alone else None
        accounts = Accounts(elsewhere=self._use.of) if self._use is not None else Accounts()
        admission = Admission(config.max_inflight, config.max_queued, config.queue_timeout_s, accounts=accounts)
        self.access.on_reload = admission.keys_changed
        self.orchestrator = Orchestrator(
            self.router,
            admission,
            limits=Limits(config.retry_limit, config.replay_limit),
            buffer_limit_bytes=config.stream_buffer_bytes,
            answer_limit_bytes=config.max_answer_bytes,
            kept_requests=config.kept_requests,
            on_end=self.metrics.request_ended,
            tracing=Tracing(Sampler(config.trace_sample), self._spans) if self._spans is not None else None,
        )
        self.watch = ControlPlaneWatch(config.control_plane, self.table, connect=self._security.to_control_plane)
        self.metrics.watch(self.router, self.orchestrator, self.watch)
        if self._spans is not None:
            self.metrics.watch_spans(self._spans.counts)
        self.routes = RouteTable(self.router)
        self._max_prompt_bytes = rpc.MAX_MESSAGE_BYTES - _CALL_OVERHEAD_BYTES
        self._inference = InferenceServicer(
            self.orchestrator,
            self.router,
            request_timeout_s=config.request_timeout_s,
            max_prompt_bytes=self._max_prompt_bytes,
            siblings=self.siblings,
        )
        self._routing = RouterServicer(self.router, self.routes, self.siblings)
        self._rest: RestApi | None = None
        self._http: HttpServer | None = None
        self._drain_until_s = 0.0
        self._grpc: rpc.RunningServer | None = None

    async def start(self) -> dict[str, str]:
        """``prepare``, ``follow`` and ``listen``."""
        self.prepare()
        await self.follow()
        return await self.listen()

    def prepare(self) -> None:
        """Take the HTTP port. Raises ``UnavailableError`` if that cannot be had."""
        limits = HttpLimits(
            max_body_bytes=self.config.max_body_bytes,
            max_prompt_bytes=self._max_prompt_bytes,
            request_timeout_s=self.config.request_timeout_s,
            keepalive_s=self.config.keepalive_s,
        )
        startup = StartupGate(self.router, wait=self.config.wait_for_planned_replicas)
        access = HttpAccess(
            self.access,
            Cors(self.config.cors_origin) if self.config.cors_origin else None,
            metrics_need_key=self.config.metrics_need_key,
        )
        media = MediaFetcher(self.config.allow_media_domains)
        service = HttpService(
            self.orchestrator, self.router, self.metrics, limits, startup, access, self.siblings, media
        )
        app = GatewayApp(service)
        self._rest = self._rest_api(access)
        self._rest.add_to(app.paths)
        host, port = configuration.split_host_port(self.config.http)
        shared = not self.siblings.place.alone
        self._http = HttpServer(app, host, port, tls=self._https, reuse_port=shared, answer_now=app.answer_now)

    async def follow(self, shutdown: Shutdown | None = None) -> None:
        """Follow the control plane, and wait until it has told what there is: who asks before is told by a refused
        connection to try again or elsewhere, not that there is no such model.

        Without a control plane that ends after 10 s, so that /health answers; but not where another process of this
        gateway serves what this one does not know. It ends when ``shutdown`` is asked for.
        """
        self.watch.start()
        ends = [asyncio.create_task(self.watch.heard())]
        if shutdown is not None:
            ends.append(asyncio.create_task(shutdown.wait()))
        try:
            while True:
                done, _ = await asyncio.wait(ends, timeout=_FIRST_SNAPSHOT_S, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    return
                addresses = ",".join(self.config.control_plane)
                _log.warning("no control plane has told what there is", control_plane=addresses)
                if not await self._served_by_others():
                    return
        finally:
            for end in ends:
                end.cancel()

    async def _served_by_others(self) -> bool:
        answers = await self.siblings.ask("ready")
        return any(answer["pipelines"] for answer in answers.given.values())

    async def listen(self) -> dict[str, str]:
        """Serve; returns the addresses. Raises ``UnavailableError`` for a taken port."""
        assert self._http is not None, "prepare comes first"
        shared = not self.siblings.place.alone
        await self.siblings.start()
        grpc_host, grpc_port = configuration.split_host_port(self.config.grpc)
        self._grpc = await rpc.serve(
            self._add_servicers,
            SERVICE_NAMES,
            host=grpc_host,
            port=grpc_port,
            credentials=self._security.server_credentials(),
            interceptors=self._interceptors(),
            options=(("grpc.so_reuseport", int(shared)),),
        )
        await self._http.start()
        await self._grpc.set_serving(True)
        return {
            "http": configuration.join_host_port(configuration.split_host_port(self.config.http)[0], self._http.port),
            "grpc": configuration.join_host_port(grpc_host, self._grpc.port),
        }

    async def drain(self) -> None:
        """Say not ready, admit nothing new, let running requests end, up to the drain timeout."""
        if self._http is not None:
            self._http.draining = True
        if self._grpc is not None:
            await self._grpc.set_serving(False)
        if self._rest is not None:
            self._rest.stop()
        self._drain_until_s = asyncio.get_running_loop().time() + self.config.drain_timeout_s
        done = await self.orchestrator.drain(self.config.drain_timeout_s)
        _log.info("drained" if done else "drain timeout: the requests still running have failed")

    async def close(self) -> None:
        """Close servers, requests, sessions and watches, in this order. Clients that have not taken all of their
        answers get what is left of the drain timeout."""
        left_s = max(0.0, self._drain_until_s - asyncio.get_running_loop().time())
        taken = self._inference.taken(left_s)
        if self._http is not None:
            await asyncio.gather(self._http.close(sending_s=left_s), taken)
        else:
            await taken
        if self._grpc is not None:
            await self._grpc.stop(grace_s=1.0)
        await self.siblings.close()
        await self.orchestrator.close()
        await self.watch.close()
        self.routes.close()
        await self.router.close()
        if self._use is not None:
            self._use.close()
            self._use = None
        if self._spans is not None:
            await self._spans.close()

    def _interceptors(self) -> tuple[rpc.Interceptor, ...]:
        domain = self.config.tls_domain if self._security.encrypted else ""
        own = (KeyInterceptor(self.access, tls_domain=domain),) if self.access.wants_keys else ()
        return (*self._security.interceptors(), *own)

    def _add_servicers(self, server: grpc.aio.Server) -> None:
        inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(self._inference, server)
        router_service_pb2_grpc.add_RouterServiceServicer_to_server(self._routing, server)

    def _rest_api(self, access: HttpAccess) -> RestApi:
        config = self.config
        return RestApi(
            RestRoutes(SERVICES),
            local=LocalBackend({SERVICE_NAMES[0]: self._inference, SERVICE_NAMES[1]: self._routing}),
            control_plane=ControlPlaneBackend(
                config.control_plane, self._security.to_control_plane, config.request_timeout_s
            ),
            admit=access.call,
            limits=RestLimits(config.max_body_bytes, config.keepalive_s),
        )


async def serve(config: GatewayConfig) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code."""
    shutdown = Shutdown()
    shutdown.install()
    gateway = Gateway(config)
    if gateway.access.wants_keys:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, gateway.access.reload)
    try:
        gateway.prepare()
        await gateway.follow(shutdown)
        if shutdown.requested:
            return 0
        addresses = await gateway.listen()
        # What exists now lives as long as the process: no collection needs to look at it again, and requests make
        # few cycles, so collections may be rare.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        write_ready_file(config.ready_file, addresses)
        _log.info("gateway serving", **addresses, gateway_id=gateway.gateway_id)
        await shutdown.wait()
        await gateway.drain()
    finally:
        await gateway.close()
    _log.info("gateway stopped")
    return 0


def main(argv: Sequence[str]) -> int:
    """``omniplane gateway``."""
    config = configuration.parse(GatewayConfig, argv, program="omniplane gateway", component="gateway")
    config.begin("gateway")
    return run(serve_together(config) if config.workers > 1 else serve(config))
