"""``omniplane control-plane``: builds the parts, serves, drains.

It starts whether or not etcd answers: the port is open at once, health says NOT_SERVING and calls get UNAVAILABLE
until the registry is loaded. Afterwards etcd may go away; the last view stays in service.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

import grpc.aio

from control_plane.admin import Admin
from control_plane.config import EMBEDDED, ControlPlaneConfig
from control_plane.etcd import EtcdClient, EtcdCredentialFiles
from control_plane.etcd.endpoints import parse_endpoints
from control_plane.etcd.server import EmbeddedEtcd
from control_plane.feed import Feed
from control_plane.heartbeat import Heartbeats
from control_plane.inspect import SERVICE_NAME as INSPECT_SERVICE_NAME
from control_plane.inspect import InspectServicer, add_inspect_servicer
from control_plane.keys import Keys
from control_plane.membership import Membership
from control_plane.pipelines import Pipelines
from control_plane.records import Records
from control_plane.restart import Restarts
from control_plane.servicers import (
    SERVICE_NAMES,
    AdminServicer,
    PipelineServicer,
    RegistryServicer,
    add_servicers,
)
from control_plane.table import Table
from control_plane.watchers import PipelineFanout, ReplicaFanout
from omnicore import config as omniconfig
from omnicore import rpc
from omnicore.access import Role
from omnicore.clock import SYSTEM_CLOCK, Clock
from omnicore.config import split_host_port
from omnicore.errors import OmniError
from omnicore.log import get_logger
from omnicore.process import Shutdown, run, write_ready_file
from omnicore.security import Security
from omnicore.tokens import TokenFile

_log = get_logger(__name__)

# To size its windows gRPC pings along with data; on thousands of connections that carry a small message now and then
# this took a third of the CPU of a beat. What control planes are sent fits into the smallest window.
_SERVER_OPTIONS: Final = (("grpc.http2.bdp_probe", 0),)


class ControlPlane:
    """One control plane in this process. Use as ``async with``; several may share one etcd, and one process.

    ``address`` is where it listens. ``loaded`` waits for the first load; ``failed`` returns only by raising what ended
    the work in the background.
    """

    def __init__(
        self,
        settings: ControlPlaneConfig,
        client: EtcdClient,
        clock: Clock = SYSTEM_CLOCK,
        security: Security | None = None,
    ) -> None:
        """``security`` is made of ``settings`` by default. Raises what ``make_security`` does, and
        ``InvalidRequestError`` for token files that do not serve."""
        self._settings = settings
        self._security = security or make_security(settings)
        self._tokens = _token_files(settings)
        self.table = Table(Keys(settings.cluster))
        records = Records(client, self.table)
        self.feed = Feed(client, self.table, lease_ttl_s=settings.lease_ttl_s, clock=clock)
        self.heartbeats = Heartbeats(
            client,
            self.table,
            records,
            lease_ttl_s=settings.lease_ttl_s,
            interval_s=settings.heartbeat_interval_s,
            clock=clock,
        )
        self.replica_fanout = ReplicaFanout(self.table, clock=clock)
        self.pipeline_fanout = PipelineFanout(self.table, clock=clock)
        membership = Membership(
            client, self.table, records, lease_ttl_s=settings.lease_ttl_s, kept_ids=settings.kept_ids
        )
        self._registry = RegistryServicer(client, self.table, membership, self.heartbeats, self.replica_fanout)
        self._pipelines = PipelineServicer(self.table, Pipelines(client, self.table), self.pipeline_fanout)
        verbs = Admin(client, self.table, records)
        self._restarts = Restarts(client, self.table, verbs, clock)
        self._admin = AdminServicer(
            client, self.table, verbs, self._restarts, self.replica_fanout, self._security.to_worker
        )
        self._inspect = InspectServicer(client, self.table, self.heartbeats)
        self._server: rpc.RunningServer | None = None
        self._work: asyncio.Task[None] | None = None
        self._loaded = asyncio.Event()

    @property
    def address(self) -> str:
        """ "host:port" that it listens on."""
        if self._server is None:
            raise RuntimeError("not started")
        host = self._settings.listen.rpartition(":")[0]
        return f"{host}:{self._server.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Open the port and begin to load. Raises ``UnavailableError`` if the port cannot be had."""

        def add(server: grpc.aio.Server) -> None:
            add_servicers(server, self._registry, self._pipelines, self._admin)
            add_inspect_servicer(server, self._inspect)

        host, port = split_host_port(self._settings.listen)
        self._server = await rpc.serve(
            add,
            (*SERVICE_NAMES, INSPECT_SERVICE_NAME),
            host=host,
            port=port,
            credentials=self._security.server_credentials(),
            interceptors=self._security.interceptors(self._tokens),
            options=_SERVER_OPTIONS,
        )
        await self._server.set_serving(False)
        _log.info("Listening", address=self.address, cluster=self._settings.cluster)
        self._work = asyncio.create_task(self._run(), name="control-plane")

    async def loaded(self) -> None:
        """Wait until the registry was loaded for the first time."""
        await self._loaded.wait()

    async def failed(self) -> None:
        """Wait for the background work to end, which it does only by an error; raises that."""
        if self._work is None:
            raise RuntimeError("not started")
        await asyncio.shield(self._work)

    async def stop(self) -> None:
        """Send everyone elsewhere, finish short calls, stop. May be called twice."""
        if self._server is not None:
            self.heartbeats.close()
            self.replica_fanout.close()
            self.pipeline_fanout.close()
            self._inspect.close()
            self._restarts.close()
            await self._server.stop(self._settings.drain_s)
            self._server = None
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait({self._work})
            self._work = None

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.feed.run(), name="feed")
                tasks.create_task(self.heartbeats.run(), name="heartbeats")
                tasks.create_task(self.replica_fanout.run(), name="loads")
                tasks.create_task(self._announce(), name="announce")
        except* OmniError as group:
            # The first one is why the others were cancelled.
            raise _first(group) from group

    async def _announce(self) -> None:
        await self.table.wait_loaded()
        if self._server is not None:
            await self._server.set_serving(True)
        self._loaded.set()


def _first(group: BaseExceptionGroup[OmniError]) -> OmniError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, OmniError):
        raise TypeError(f"not one of ours: {error!r}")
    return error


def make_security(settings: ControlPlaneConfig) -> Security:
    """Raises ``InvalidRequestError`` for certificates that do not serve, and for plaintext beyond loopback, to serve or
    towards etcd."""
    security = Security(settings, serves=Role.CONTROL_PLANE)
    security.check_listen("--listen", settings.listen)
    if not settings.etcd_ca and not settings.etcd_cert and settings.etcd != (EMBEDDED,):
        plain = [endpoint.target for endpoint in parse_endpoints(settings.etcd) if not endpoint.tls]
        remedy = "give --etcd-ca (and --etcd-cert with --etcd-key), or https://host:port, or say --insecure"
        security.check_plaintext("--etcd", plain, remedy)
    return security


def _token_files(settings: ControlPlaneConfig) -> dict[Role, TokenFile]:
    named = {
        Role.WORKER: ("--registration-token-file", settings.registration_token_file),
        Role.ADMIN: ("--admin-token-file", settings.admin_token_file),
    }
    return {role: TokenFile(flag, path) for role, (flag, path) in named.items() if path}


def main(argv: Sequence[str]) -> int:
    """Run until a signal: 0. Wrong flags: 2. If it cannot go on (port taken, store of another schema): that error's
    exit code."""
    program = "omniplane control-plane"
    settings = omniconfig.parse(ControlPlaneConfig, argv, program=program, component="control_plane")
    try:
        settings.check()
    except ValueError as error:
        return omniconfig.wrong_use(program, str(error))
    settings.begin("control-plane")
    return run(_serve(settings))


async def _serve(settings: ControlPlaneConfig) -> int:
    shutdown = Shutdown()
    shutdown.install()
    security = make_security(settings)
    credentials = EtcdCredentialFiles(
        ca=settings.etcd_ca,
        cert=settings.etcd_cert,
        key=settings.etcd_key,
        user=settings.etcd_user,
        password_file=settings.etcd_password_file,
    )
    async with contextlib.AsyncExitStack() as stack:
        etcd: EmbeddedEtcd | None = None
        endpoints: Sequence[str] = settings.etcd
        if settings.etcd == (EMBEDDED,):
            etcd = await stack.enter_async_context(
                EmbeddedEtcd(data_dir=settings.etcd_data_dir or None, client_listen=settings.etcd_client_listen)
            )
            endpoints = etcd.endpoints
        client = await stack.enter_async_context(
            EtcdClient(endpoints, credentials=credentials, timeout_s=settings.etcd_timeout_s)
        )
        control_plane = await stack.enter_async_context(ControlPlane(settings, client, security=security))
        ends = [shutdown.wait(), control_plane.failed(), *([_ended(etcd)] if etcd is not None else [])]
        waits: set[asyncio.Task[None]] = {asyncio.create_task(end) for end in ends}
        ready = asyncio.create_task(control_plane.loaded())
        # Entered last, so left first: none of them may take our own teardown for a failure.
        stack.push_async_callback(_cancel, {*waits, ready})
        done, _ = await asyncio.wait({*waits, ready}, return_when=asyncio.FIRST_COMPLETED)
        if done == {ready}:
            content = {"address": control_plane.address, "cluster": settings.cluster, "etcd": list(endpoints)}
            write_ready_file(settings.ready_file, content)
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # raises what ended us, unless it was the signal
        _log.info("stopping")
    return 0


async def _ended(etcd: EmbeddedEtcd) -> None:
    code = await etcd.wait()
    _log.error("etcd ended", code=code, log=etcd.log_tail())
    raise OmniError(f"the embedded etcd ended with code {code}; its log ends with: {etcd.log_tail()}")


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
