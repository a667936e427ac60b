"""Keeps this worker's claim: registers, beats while the engine makes progress, follows the control plane's directives.

A beat leaves only after the engine has produced output, or answered a probe, since the last one: an engine that hangs
goes silent although its process lives. No number of failing beats ends a worker; it goes on to the next control plane,
for ever. A claim that was lost is made again under a new epoch, while calls go on. A loading engine cannot be probed:
beats in STARTING say only that the process lives, and the engine's start has a deadline of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import grpc.aio

from omni.v1 import registry_service_pb2 as pb
from omni.v1 import registry_service_pb2_grpc as pb_grpc
from omni.v1 import types_pb2
from omnicore.backoff import Backoff
from omnicore.clock import Clock
from omnicore.errors import (
    NotFoundError,
    OmniError,
    PermissionDeniedError,
    UnauthenticatedError,
    from_exception,
    from_rpc_error,
)
from omnicore.log import get_logger
from stage_worker.control_plane_client import AWAY, ControlPlaneClient, closed_is_unavailable
from stage_worker.identity import Identity, replica_name
from stage_worker.progress import LoadSource, Vitality

_log = get_logger(__name__)

BEAT_TIMEOUT_S = 3.0
"""A control plane that does not answer a beat for so long is given up: etcd may pause for 2 s. With a short lease it is
given up sooner, so that another one can still refresh it."""
_LEAST_BEAT_TIMEOUT_S = 1.0
DEREGISTER_TIMEOUT_S = 2.0
# A token that was rotated out, or a certificate without the role, must not end a worker that serves: it asks again
# until its files, or the control plane's, are put right.
_AWAY_OR_UNTRUSTED = (*AWAY, UnauthenticatedError, PermissionDeniedError)


class DirectiveHandler(Protocol):
    """Who acts on what the control plane asks. All return at once."""

    def on_drain(self, detail: str) -> None:
        """Finish what runs, take nothing new, then leave."""
        ...

    def on_drain_order(self, order: types_pb2.DrainOrder) -> None:
        """How to drain; comes with every answer once an operator has asked for it."""
        ...

    def on_stop(self, detail: str) -> None:
        """The claim is another's, or an operator's: stop serving."""
        ...


class Registrar:
    """The claim of one worker. ``describe`` builds the registration; ``preferred_replica_id`` is the one to ask for
    first.

    ``plan_wait_s``: a control plane that does not know the pipeline may get it so much later. One that was started
    again with an empty store answers workers before whoever deploys the pipeline has come."""

    def __init__(
        self,
        client: ControlPlaneClient,
        identity: Identity,
        *,
        describe: Callable[[], pb.RegisterRequest],
        vitality: Vitality,
        load: LoadSource,
        handler: DirectiveHandler,
        clock: Clock,
        plan_wait_s: float,
        preferred_replica_id: int | None = None,
    ) -> None:
        self._client = client
        self._clock = clock
        self._plan_wait_s = plan_wait_s
        self._preferred_replica_id = preferred_replica_id
        self._identity = identity
        self._describe = describe
        self._vitality = vitality
        self._load = load
        self._handler = handler
        self._state: types_pb2.ReplicaState.ValueType = types_pb2.REPLICA_STATE_STARTING
        self._lease_id = 0
        self._interval_s = 0.25
        self._beat_timeout_s = BEAT_TIMEOUT_S
        self._kick = asyncio.Event()
        self._confirmed = asyncio.Condition()
        self._confirmed_state: types_pb2.ReplicaState.ValueType = types_pb2.REPLICA_STATE_UNSPECIFIED
        self._outputs_at_beat = -1
        self._leaving = asyncio.Event()

    @property
    def state(self) -> types_pb2.ReplicaState.ValueType:
        """As this worker sees itself."""
        return self._state

    async def register(self, deadline_s: float | None, retry: tuple[type[OmniError], ...] = AWAY) -> None:
        """Claim a replica id. Raises what the control plane refuses with, but for ``retry``, and ``UnavailableError``
        after the deadline (monotonic; None: never). ``NotFoundError`` for the pipeline comes at the deadline, too;
        without one, after ``plan_wait_s`` in which control planes answered."""
        waited_s = 0.0  # not while nobody answers: who comes back empty once more may get its plans again, too
        backoff = Backoff()
        while True:
            try:
                return await self._claim(deadline_s, retry)
            except NotFoundError as error:
                delay_s = backoff.next_delay_s()
                if deadline_s is not None:
                    over = self._clock.monotonic() + delay_s > deadline_s
                else:
                    over = waited_s + delay_s > self._plan_wait_s
                if error.reason != "PIPELINE_NOT_FOUND" or over:
                    raise
                if not waited_s:
                    _log.warning("waiting for the pipeline", control_plane=self._client.address, error=error.message)
            await self._client.next_address()
            await asyncio.sleep(delay_s)
            waited_s += delay_s

    async def _claim(self, deadline_s: float | None, retry: tuple[type[OmniError], ...]) -> None:
        async def attempt(channel: grpc.aio.Channel) -> pb.RegisterResponse:
            return await pb_grpc.RegistryServiceStub(channel).Register(self._request())

        with self._identity.claiming():
            response = await self._client.call("register", attempt, deadline_s=deadline_s, retry=retry)
            changed = response.replica != self._identity.current
            self._identity.adopt(response.replica)
        self._lease_id = response.lease_id
        self._interval_s = response.heartbeat_interval.ToNanoseconds() / 1e9 or self._interval_s
        # The last refresh may be a third of the lease's life ago; after the wait a third must be left.
        third_s = response.lease_ttl.ToNanoseconds() / 3e9 or BEAT_TIMEOUT_S
        self._beat_timeout_s = min(BEAT_TIMEOUT_S, max(_LEAST_BEAT_TIMEOUT_S, third_s))
        if changed:
            _log.info("registered", replica=replica_name(response.replica), control_plane=self._client.address)

    def set_state(self, state: types_pb2.ReplicaState.ValueType) -> None:
        """Tell the control plane with a beat at once."""
        if state != self._state:
            _log.info("state changed", state=types_pb2.ReplicaState.Name(state))
            self._state = state
            self._kick.set()

    async def confirmed(self, state: types_pb2.ReplicaState.ValueType) -> None:
        """Return once a beat with ``state`` was answered."""
        async with self._confirmed:
            await self._confirmed.wait_for(lambda: self._confirmed_state == state)

    async def run(self) -> None:
        """Beat until cancelled, or until the claim is over. Raises ``EngineDiedError``."""
        backoff = Backoff()
        while True:
            channel = self._client.channel
            try:
                if not await self._beat_on_one_stream(channel, backoff):
                    return
            except (grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError) as error:
                # gRPC says "invalid state" to who writes to a stream that has ended.
                ended = isinstance(error, asyncio.InvalidStateError)
                reason = "the stream ended" if ended else from_exception(error).message
                _log.warning("heartbeats interrupted", control_plane=self._client.address, error=reason)
            await self._client.next_address(channel)
            await asyncio.sleep(backoff.next_delay_s())

    async def deregister(self, reason: str) -> None:
        """Give the claim back, at whichever control plane answers first. Best effort: the lease ends it anyway.

        No beat follows; the stream stays open until ``run`` is cancelled, so that nobody takes this for a failure."""
        self._leaving.set()
        if not self._lease_id:
            return
        request = pb.DeregisterRequest(replica=self._identity.current, reason=reason, lease_id=self._lease_id)
        for _ in self._client.addresses:
            channel = self._client.channel
            try:
                with closed_is_unavailable():
                    await pb_grpc.RegistryServiceStub(channel).Deregister(request, timeout=DEREGISTER_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                _log.warning(
                    "not deregistered", control_plane=self._client.address, error=from_rpc_error(error).message
                )
                await self._client.next_address(channel)
            else:
                _log.info("deregistered", replica=replica_name(self._identity.current), reason=reason)
                self._lease_id = 0
                return

    async def _beat_on_one_stream(self, channel: grpc.aio.Channel, backoff: Backoff) -> bool:
        """Beat until the stream breaks, which raises. False: the claim is over."""
        call = pb_grpc.RegistryServiceStub(channel).Heartbeat(None)
        offers: list[types_pb2.ConnectorOffer] = []
        try:
            while True:
                self._outputs_at_beat = await self._vitality.shown(self._outputs_at_beat)
                if self._leaving.is_set():
                    await asyncio.get_running_loop().create_future()
                self._kick.clear()
                beat = self._beat(offers)
                async with asyncio.timeout(self._beat_timeout_s):
                    with closed_is_unavailable():
                        await call.write(beat)
                        response = await call.read()
                if not isinstance(response, pb.HeartbeatResponse):
                    raise TimeoutError("the control plane ended the stream")
                backoff.reset()
                if not await self._follow(beat, response):
                    return False
                try:
                    async with asyncio.timeout(self._interval_s):
                        await self._kick.wait()
                except TimeoutError:
                    pass  # the next beat is due
        finally:
            call.cancel()

    def _beat(self, offers: list[types_pb2.ConnectorOffer]) -> pb.HeartbeatRequest:
        beat = pb.HeartbeatRequest(
            replica=self._identity.current,
            lease_id=self._lease_id,
            instance_uuid=self._identity.instance_uuid,
            state=self._state,
            load=self._load.report(),
        )
        current = list(self._describe().connectors)
        if current != offers:
            beat.connectors.extend(current)
            offers[:] = current
        return beat

    async def _follow(self, beat: pb.HeartbeatRequest, response: pb.HeartbeatResponse) -> bool:
        if self._leaving.is_set():
            return True
        directive = response.directive
        if response.HasField("drain"):
            self._handler.on_drain_order(response.drain)
        if response.HasField("next_interval"):
            self._interval_s = max(0.01, response.next_interval.ToNanoseconds() / 1e9)
        if directive == pb.HEARTBEAT_DIRECTIVE_CONTINUE:
            if response.detail:
                _log.debug("beat answered", detail=response.detail)
        elif directive == pb.HEARTBEAT_DIRECTIVE_REREGISTER:
            return await self._register_again(response.detail)
        elif directive == pb.HEARTBEAT_DIRECTIVE_DRAIN:
            self._handler.on_drain(response.detail)
        elif directive == pb.HEARTBEAT_DIRECTIVE_STOP:
            _log.warning("told to stop", detail=response.detail)
            self._lease_id = 0
            self._handler.on_stop(response.detail)
            return False
        if beat.state != self._confirmed_state:
            async with self._confirmed:
                self._confirmed_state = beat.state
                self._confirmed.notify_all()
        return True

    async def _register_again(self, detail: str) -> bool:
        self._lease_id = 0
        if self._state == types_pb2.REPLICA_STATE_DRAINING:
            _log.info("claim lost while draining: not made again", detail=detail)
            return False
        _log.warning("registering again", detail=detail)
        try:
            await self.register(None, _AWAY_OR_UNTRUSTED)
        except NotFoundError as error:
            self._handler.on_drain(error.message)
            return False
        except OmniError as error:
            if error.reason == "DRAINED":
                self._handler.on_drain(error.message)
                return False
            _log.error("refused to register again", error=error.message)
            self._handler.on_stop(error.message)
            return False
        return True

    def _request(self) -> pb.RegisterRequest:
        request = self._describe()
        if self._identity.registered:
            request.preferred_replica_id = self._identity.current.replica_id
        elif self._preferred_replica_id is not None:
            request.preferred_replica_id = self._preferred_replica_id
        loading = self._state == types_pb2.REPLICA_STATE_STARTING
        request.state = types_pb2.REPLICA_STATE_STARTING if loading else types_pb2.REPLICA_STATE_READY
        return request
