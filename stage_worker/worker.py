"""One replica from start to end.

    plan from the control plane → server (port known) → claim as STARTING → engine starts → READY
    stop (signal): leave the registry → finish what runs, up to a limit → close
    DRAIN: say so → finish what runs, up to the operator's limit → leave the registry → close
    stop (STOP, dead engine): end what runs with an error → close

Gateways are told before calls are refused: those that were sent meanwhile are taken, so that a drain costs no request.

Whatever happens, the claim is given back and everything that was opened is closed, in the reverse order.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine

import grpc.aio

from connectors.agreement import RankAgreement
from connectors.channels import PeerChannels
from omni.v1 import pipeline_pb2, stage_service_pb2_grpc, transfer_service_pb2_grpc, types_pb2
from omni.v1 import registry_service_pb2 as registry_pb
from omnicore import protocol, rpc, trace_config
from omnicore.clock import SYSTEM_CLOCK, Clock
from omnicore.config import join_host_port, split_host_port
from omnicore.durations import to_duration
from omnicore.errors import InternalError, OmniError, UnavailableError
from omnicore.grpc_stream_server import StreamMethod, StreamServer
from omnicore.log import get_logger
from omnicore.metrics_http import MetricsServer
from omnicore.security import Security
from stage_worker import address, environment, session_stream, subscriptions
from stage_worker.assembly import make_parts
from stage_worker.config import StageWorkerConfig
from stage_worker.control_plane_client import ControlPlaneClient, fetch_plan
from stage_worker.drain import Drain
from stage_worker.engine import Engine
from stage_worker.engines import create_engine
from stage_worker.identity import Identity
from stage_worker.progress import DeathWatch, LoadSource, Vitality
from stage_worker.registrar import Registrar
from stage_worker.session_stream import SessionStream
from stage_worker.sessions import SessionSet
from stage_worker.stage_service import StageServicer
from stage_worker.subscriptions import SubscriptionSet, SubscriptionStream
from stage_worker.transfer_service import TransferServicer

_log = get_logger(__name__)

SERVICE_NAMES = ("omni.v1.StageService", "omni.v1.TransferService")
ENGINE_CLOSE_TIMEOUT_S = 20.0
"""An engine that hangs does not close; the process must end all the same."""
_SWEEP_S = 0.5
_MAX_DRAIN_LIMIT_S = 365 * 86_400.0  # longer ones are as good as none, and no message need hold them
_STOP_GRACE_S = 1.0  # for the last frames to leave


class Worker:
    """A worker whose plan is known. In order: ``listen``, ``join``, ``start_engine``, ``announce``; then ``leave`` and
    ``close``, from wherever it got to."""

    def __init__(
        self,
        config: StageWorkerConfig,
        pipeline: pipeline_pb2.Pipeline,
        stage: pipeline_pb2.Stage,
        client: ControlPlaneClient,
        *,
        security: Security | None = None,
        clock: Clock = SYSTEM_CLOCK,
        engine_factory: Callable[[pipeline_pb2.Stage, tuple[str, ...]], Engine] = create_engine,
    ) -> None:
        """Raises what ``engine_factory`` and the connectors raise for a wrong plan."""
        self._config = config
        self._clock = clock
        self._client = client
        self._security = security or Security()
        self._placement = address.placement(config.devices, config.topology_domain)
        self.stopping = asyncio.Event()
        """Set when the control plane, or the engine's death, says that this worker must end."""
        self.failure: OmniError | None = None
        """Why this worker must end, if that is an error."""
        self.identity = Identity(types_pb2.StageRef(pipeline=pipeline.name, stage_id=stage.stage_id), "")
        self._spans = trace_config.export(
            config,
            "omniplane-stage-worker",
            instance=self.identity.instance_uuid,
            attributes={"omni.pipeline": pipeline.name, "omni.stage": stage.stage_id},
        )
        self.channels = PeerChannels(clock, self._security.to_peer, lambda: self._security.version)
        self.parts = make_parts(
            config,
            pipeline,
            stage,
            engine_factory(stage, config.devices),
            identity=self.identity,
            channels=self.channels,
            dial=self._security.dial_worker,
            spans=self._spans,
            on_calls_changed=self._on_calls_changed,
            clock=clock,
        )
        self.parts.calls.refusal = UnavailableError("this replica is still loading", reason="STARTING")
        engine, connectors, progress = self.parts.engine, self.parts.connectors, self.parts.progress
        self.load = LoadSource(engine, connectors.usage, lambda: len(self.parts.calls), progress)
        self.vitality = Vitality(progress, self.load, engine.probe)
        self._death_watch = DeathWatch(engine.probe, self._engine_died)
        progress.on_suspicion = self._death_watch.suspect
        self.sessions = SessionSet(self.parts, self.load, self.vitality, clock)
        self._drain_limit = to_duration(min(config.drain_timeout_s, _MAX_DRAIN_LIMIT_S))
        self.drain = Drain(self.parts.calls, self.parts.flows, self.sessions, clock, limit_s=config.drain_timeout_s)
        self.registrar = Registrar(
            client,
            self.identity,
            describe=self._registration,
            vitality=self.vitality,
            load=self.load,
            handler=self,
            clock=clock,
            plan_wait_s=config.startup_timeout_s,
            preferred_replica_id=config.preferred_replica_id if config.preferred_replica_id >= 0 else None,
        )
        self.agreement = RankAgreement(clock)
        self.subscriptions = SubscriptionSet(self.identity, self.parts.flows)
        self.metrics_address = ""
        """Of GET /metrics, "host:port"; empty: not served."""
        self._metrics = MetricsServer(self.parts.metrics.scrape)
        self._kv_layout = ""
        self._server: rpc.RunningServer | None = None
        self._session_server = StreamServer(
            {
                session_stream.METHOD: StreamMethod(lambda stream: SessionStream(self.sessions, stream)),
                subscriptions.METHOD: StreamMethod(
                    lambda stream: SubscriptionStream(self.subscriptions, stream), subscriptions.KEEPALIVE_TIMEOUT_S
                ),
            },
            check=self._security.check_caller,
            tls=self._security.server_context,
        )
        self._tasks: list[asyncio.Task[None]] = []

    # --- start ------------------------------------------------------------------------------------------------------

    async def listen(self) -> None:
        """Bind and serve. Raises ``UnavailableError`` for an address that cannot be bound."""
        config = self._config
        host, port, advertised = address.listen_and_advertised(config.listen, config.advertise, config.control_plane)
        self._server = await rpc.serve(
            self._add_servicers,
            SERVICE_NAMES,
            host=host,
            port=port,
            credentials=self._security.server_credentials(),
            interceptors=self._security.interceptors(),
        )
        self.identity.endpoint = join_host_port(advertised, self._server.port)
        session_port = await self._session_server.start(host, config.session_port)
        self.identity.session_endpoint = join_host_port(advertised, session_port)
        _log.info(
            "listening",
            address=join_host_port(host, self._server.port),
            advertised=self.identity.endpoint,
            sessions=self.identity.session_endpoint,
        )
        self._own(self._sweep(), "sweep")
        if config.metrics:
            metrics_host, metrics_port = split_host_port(config.metrics)
            self.metrics_address = join_host_port(metrics_host, await self._metrics.start(metrics_host, metrics_port))
            _log.info("metrics", address=self.metrics_address)

    async def join(self, deadline_s: float) -> None:
        """Claim as STARTING and beat. Raises what the registry refuses with."""
        await self.registrar.register(deadline_s)
        self._own(self._beat(), "heartbeats")

    async def start_engine(self) -> None:
        """Load, then take calls. Raises what the engine raises, as a typed error."""
        limit_s = self._config.engine_start_timeout_s
        stage = self.parts.stage
        begin_s = self._clock.monotonic()
        try:
            async with asyncio.timeout(limit_s) as scope:
                info = await self.parts.engine.start()
        except OmniError:
            raise
        except TimeoutError as error:
            why = f"not within {limit_s:g} s (--engine-start-timeout-s)" if scope.expired() else str(error)
            raise UnavailableError(f"engine {stage.engine!r} did not start: {why}", reason="ENGINE_START") from error
        except Exception as error:
            _log.exception("engine failed to start", engine=stage.engine)
            raise InternalError(
                f"engine {stage.engine!r} failed to start: {type(error).__name__}: {error}", reason="ENGINE_START"
            ) from error
        self._kv_layout = info.kv_layout
        self.parts.calls.features = info.features
        self.load.started = True
        self.parts.calls.refusal = None
        details = {key.replace(" ", "_"): value for key, value in info.details.items()}
        _log.info(
            "engine started",
            engine=stage.engine,
            model=info.model,
            seconds=round(self._clock.monotonic() - begin_s, 2),
            **{f"engine_{key}": value for key, value in details.items()},
        )

    async def announce(self) -> None:
        """Be READY, and return once the registry says so. Raises what it refuses with: peers may have another KV layout
        than the one that this engine has turned out to have."""
        if self._kv_layout:
            await self.registrar.register(None)
        self.registrar.set_state(types_pb2.REPLICA_STATE_READY)
        await self.registrar.confirmed(types_pb2.REPLICA_STATE_READY)
        # A beat's state is recorded a little later; a repeated registration returns when it is.
        await self.registrar.register(None)
        if self._server is not None:
            await self._server.set_serving(True)

    # --- directives -------------------------------------------------------------------------------------------------

    def on_drain(self, detail: str) -> None:
        """The control plane asks to drain: beats go on, as DRAINING, until what runs has ended."""
        if not self.stopping.is_set():
            _log.info("told to drain", detail=detail)
            self.drain.announce()
            self.registrar.set_state(types_pb2.REPLICA_STATE_DRAINING)
            self.stopping.set()

    def on_drain_order(self, order: types_pb2.DrainOrder) -> None:
        """How an operator wants it drained; comes before ``on_drain``, and again with every later beat."""
        self.drain.take_order(order)

    def on_stop(self, detail: str) -> None:
        """The claim is over."""
        self.drain.may_finish = False
        self.refuse_calls(f"this replica was stopped: {detail}")
        self.stopping.set()

    def refuse_calls(self, why: str) -> None:
        """Take nothing new, for good, and tell the gateways."""
        self.parts.calls.refusal = UnavailableError(why, reason="DRAINING")
        self.drain.announce()

    # --- end --------------------------------------------------------------------------------------------------------

    async def leave(self, reason: str) -> None:
        """Stop taking calls and give the claim back; what runs goes on. A replica that was told to drain stays in the
        registry, as DRAINING, while it has work."""
        self.drain.announce()
        if self._server is not None:
            await self._server.set_serving(False)
        if self.registrar.state == types_pb2.REPLICA_STATE_DRAINING:
            await self.drain.finish()
        await self.registrar.deregister(reason)
        await self._cancel("heartbeats")
        await self.drain.finish()
        self.refuse_calls(f"this replica is stopping: {reason}")

    async def close(self) -> None:
        """End everything. What still runs ends with an error. May be called more than once."""
        why = self.failure or UnavailableError("this replica has stopped", reason="REPLICA_STOPPED")
        await self._cancel("heartbeats")
        await self.sessions.close(UnavailableError(why.message, reason=why.reason, metadata=why.metadata))
        for call in self.parts.calls.all():
            call.abort(UnavailableError(why.message, reason=why.reason))
            await call.ended()
        await self.parts.releaser.close()
        self.agreement.close()
        self.subscriptions.close()
        await self.parts.links.close()
        await self._metrics.close()
        await self._session_server.close()
        if self._server is not None:
            await self._server.stop(_STOP_GRACE_S)
        await self._cancel("sweep")
        self._death_watch.close()
        try:
            async with asyncio.timeout(ENGINE_CLOSE_TIMEOUT_S):
                await self.parts.engine.close()
        except TimeoutError:
            _log.error("engine does not close: left to the end of the process", waited_s=ENGINE_CLOSE_TIMEOUT_S)
        await self.parts.connectors.close()
        await self.channels.close()
        if self._spans is not None:
            await self._spans.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _add_servicers(self, server: grpc.aio.Server) -> None:
        stage = StageServicer(self.parts, self.sessions, self.load, self.describe, self._on_control)
        stage_service_pb2_grpc.add_StageServiceServicer_to_server(stage, server)
        transfer = TransferServicer(self.identity, self.parts.connectors.store, self.subscriptions, self.agreement)
        transfer_service_pb2_grpc.add_TransferServiceServicer_to_server(transfer, server)

    def describe(self) -> types_pb2.Replica:
        """This replica's record, as it sees itself."""
        registration = self._registration()
        return types_pb2.Replica(
            ref=self.identity.current,
            instance_uuid=registration.instance_uuid,
            endpoint=registration.endpoint,
            session_endpoint=registration.session_endpoint,
            state=self.registrar.state,
            load=self.load.report(),
            connectors=registration.connectors,
            placement=registration.placement,
            fingerprint=registration.fingerprint,
            engine=registration.engine,
            drain_limit=registration.drain_limit,
        )

    def _registration(self) -> registry_pb.RegisterRequest:
        stage = self.parts.stage
        return registry_pb.RegisterRequest(
            instance_uuid=self.identity.instance_uuid,
            stage=self.identity.current.stage,
            endpoint=self.identity.endpoint,
            session_endpoint=self.identity.session_endpoint,
            fingerprint=types_pb2.StageFingerprint(
                model=stage.model,
                config_sha256=stage.config_sha256,
                tensor_parallel_size=max(1, stage.tensor_parallel_size),
                kv_layout=self._kv_layout,  # empty until the engine runs, and without a KV cache
                protocol_version=protocol.VERSION,
            ),
            connectors=self.parts.connectors.offers(),
            placement=self._placement,
            engine=stage.engine,
            drain_limit=self._drain_limit,
        )

    def _on_calls_changed(self) -> None:
        self.sessions.note_change()

    async def _on_control(self, method: types_pb2.ControlMethod.ValueType) -> None:
        if self.parts.calls.draining:
            return
        if method == types_pb2.CONTROL_METHOD_SLEEP:
            self.parts.calls.refusal = UnavailableError("this replica is asleep", reason="ASLEEP")
            self.registrar.set_state(types_pb2.REPLICA_STATE_ASLEEP)
        elif method == types_pb2.CONTROL_METHOD_WAKE_UP:
            self.parts.calls.refusal = None
            self.registrar.set_state(types_pb2.REPLICA_STATE_READY)

    async def _beat(self) -> None:
        try:
            await self.registrar.run()
        except OmniError as error:
            self._engine_died(error)

    def _engine_died(self, error: OmniError) -> None:
        if self.failure is None:
            _log.error("engine died", error=error.message)
            self.failure = error
            self.on_stop(error.message)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.parts.flows.sweep()
            self.parts.flows.keeper.sweep()
            self.agreement.sweep()
            self.parts.connectors.sweep()
            await self.channels.sweep()

    def _own(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._on_task_done)
        self._tasks.append(task)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = InternalError(f"{task.get_name()} failed: {type(error).__name__}: {error}")
            _log.error("worker task failed", task=task.get_name(), error=repr(error))
            self.on_stop(self.failure.message)

    async def _cancel(self, name: str) -> None:
        for task in [task for task in self._tasks if task.get_name() == name]:
            self._tasks.remove(task)
            task.cancel()
            await asyncio.wait([task])


async def plan_worker(
    config: StageWorkerConfig, client: ControlPlaneClient, deadline_s: float, security: Security | None = None
) -> Worker:
    """A worker for what ``config`` names, once the control plane knows its plan. Sets the stage's variables in this
    process."""
    pipeline, stage = await fetch_plan(client, config.pipeline, config.stage_id, deadline_s)
    environment.apply(stage, os.environ)
    return Worker(config, pipeline, stage, client, security=security)
