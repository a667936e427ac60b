"""Connections to control planes and gateways: the first address that answers, typed errors, deadlines, credentials."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import ssl
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio

from omni.v1 import (
    admin_service_pb2_grpc,
    inference_service_pb2_grpc,
    inspect_service_pb2_grpc,
    pipeline_pb2,
    pipeline_service_pb2,
    pipeline_service_pb2_grpc,
    registry_service_pb2,
    registry_service_pb2_grpc,
    types_pb2,
)
from omnicore import errors
from omnicore.access import Role
from omnicore.config import split_host_port
from omnicore.security import Security, SecurityConfig
from omnicore.token_channel import TokenChannel
from omnicore.tokens import TokenFile
from omnictl.settings import Settings

if TYPE_CHECKING:
    from omni.v1.admin_service_pb2_grpc import AdminServiceAsyncStub
    from omni.v1.inference_service_pb2_grpc import InferenceServiceAsyncStub
    from omni.v1.inspect_service_pb2_grpc import InspectServiceAsyncStub
    from omni.v1.pipeline_service_pb2_grpc import PipelineServiceAsyncStub
    from omni.v1.registry_service_pb2_grpc import RegistryServiceAsyncStub

_PAGE_SIZE = 500
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The preface and SETTINGS without content: RFC 9113, 3.4."""
_HTTP2_FRAME_HEAD = 9
_HTTP2_FRAME_TYPE = 3
_HTTP2_SETTINGS = 4


class ControlPlane:
    """One connected control plane."""

    def __init__(self, channel: grpc.aio.Channel, address: str, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self.registry: RegistryServiceAsyncStub = registry_service_pb2_grpc.RegistryServiceStub(channel)
        self.pipelines: PipelineServiceAsyncStub = pipeline_service_pb2_grpc.PipelineServiceStub(channel)
        self.admin: AdminServiceAsyncStub = admin_service_pb2_grpc.AdminServiceStub(channel)
        self.inspect: InspectServiceAsyncStub = inspect_service_pb2_grpc.InspectServiceStub(channel)

    async def call(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        """One unary call under the command's time limit, or another one. Raises the typed error behind a failed one."""
        return await _call(method, request, timeout_s or self.timeout_s, f"control plane at {self.address}")

    async def list_pipelines(self) -> list[pipeline_pb2.Pipeline]:
        """Every plan, ordered by name."""
        found: list[pipeline_pb2.Pipeline] = []
        token = ""
        while True:
            page: pipeline_service_pb2.ListPipelinesResponse = await self.call(
                self.pipelines.ListPipelines,
                pipeline_service_pb2.ListPipelinesRequest(page_size=_PAGE_SIZE, page_token=token),
            )
            found += page.pipelines
            token = page.next_page_token
            if not token:
                return found

    async def get_pipeline(self, name: str) -> pipeline_pb2.Pipeline:
        """One plan. Raises ``NotFoundError``."""
        response = await self.call(self.pipelines.GetPipeline, pipeline_service_pb2.GetPipelineRequest(name=name))
        return cast("pipeline_service_pb2.GetPipelineResponse", response).pipeline

    async def list_replicas(self, pipeline: str = "", stage_id: int | None = None) -> ReplicaTable:
        """Every replica, or those of one pipeline or stage, ordered by pipeline, stage and id."""
        table = ReplicaTable([], 0, False)
        token = ""
        while True:
            request = registry_service_pb2.ListReplicasRequest(
                pipeline=pipeline, page_size=_PAGE_SIZE, page_token=token
            )
            if stage_id is not None:
                request.stage_id = stage_id
            page: registry_service_pb2.ListReplicasResponse = await self.call(self.registry.ListReplicas, request)
            table = ReplicaTable([*table.replicas, *page.replicas], page.revision, table.stale or page.stale)
            token = page.next_page_token
            if not token:
                return table


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaTable:
    """Replicas as a control plane knew them at ``revision``."""

    replicas: list[types_pb2.Replica]
    revision: int
    stale: bool
    """etcd could not be reached: this is the last that was known."""


class Gateway:
    """One connected gateway."""

    def __init__(self, channel: grpc.aio.Channel, address: str, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self.inference: InferenceServiceAsyncStub = inference_service_pb2_grpc.InferenceServiceStub(channel)

    async def call(self, method: Any, request: Any) -> Any:
        """One unary call under the command's time limit. Raises the typed error behind a failed one."""
        return await _call(method, request, self.timeout_s, f"gateway at {self.address}")


@contextlib.asynccontextmanager
async def control_plane(settings: Settings) -> AsyncIterator[ControlPlane]:
    """The first control plane that answers. Raises ``UnavailableError`` if none does."""
    async with _first(settings, settings.require_server(), Role.CONTROL_PLANE) as (channel, address):
        yield ControlPlane(channel, address, settings.timeout_s)


@contextlib.asynccontextmanager
async def gateway(settings: Settings) -> AsyncIterator[Gateway]:
    """The first gateway that answers. Raises ``UnavailableError`` if none does."""
    async with _first(settings, settings.require_gateway(), Role.GATEWAY) as (channel, address):
        yield Gateway(channel, address, settings.timeout_s)


def request_id() -> str:
    """A fresh id for one mutating call, by which the services' logs name it."""
    return f"omnictl-{uuid.uuid4()}"


def reachable_error(error: grpc.aio.AioRpcError, where: str) -> errors.OmniError:
    """The typed error behind ``error``; that of a server that went away says ``where`` instead of gRPC's own words."""
    typed = errors.from_rpc_error(error)
    # Servers of ours always name a reason; an UNAVAILABLE without one was made by gRPC itself.
    if isinstance(typed, errors.UnavailableError) and typed.reason == errors.UnavailableError.default_reason:
        return errors.UnavailableError(
            f"lost the {where}: {_cause(typed.message)}", reason="CONNECTION_LOST", metadata={"where": where}
        )
    if isinstance(typed, errors.DeadlineExceededError) and typed.message.lower().startswith("deadline exceeded"):
        return errors.DeadlineExceededError(f"no answer from the {where} in time", metadata={"where": where})
    if isinstance(typed, errors.UnimplementedError) and "method not found" in typed.message.lower():
        return errors.UnimplementedError(f"the {where} does not know this call", metadata={"where": where})
    return typed


async def _call(method: Any, request: Any, timeout_s: float, where: str) -> Any:
    try:
        return await method(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise reachable_error(error, where) from error


@contextlib.asynccontextmanager
async def _first(
    settings: Settings, addresses: Sequence[str], role: Role
) -> AsyncIterator[tuple[grpc.aio.Channel, str]]:
    what = role.replace("-", " ")
    flag = "--gateway" if role is Role.GATEWAY else "--server"
    security = Security(settings.security, token_file=settings.token_file)
    security.check_dial(flag, addresses)
    failures: list[str] = []
    for address in addresses:
        channel = security.channel(address, role)
        if role is Role.GATEWAY and settings.api_key_file:
            channel = TokenChannel(channel, TokenFile("--api-key-file", settings.api_key_file))
        try:
            if (failure := await _connect(channel, address, settings, role)) is None:
                yield channel, address
                return
            failures.append(f"{address} ({failure})")
        finally:
            await channel.close(None)
    raise errors.UnavailableError(
        f"cannot reach the {what} at {', '.join(failures)}",
        reason="CANNOT_CONNECT",
        metadata={"what": what, "addresses": ",".join(addresses)},
    )


async def _connect(channel: grpc.aio.Channel, address: str, settings: Settings, role: Role) -> str | None:
    """None once connected, or why not. A refused connection is known at once: there is no point in waiting then."""
    try:
        async with asyncio.timeout(settings.timeout_s):
            state = channel.get_state(try_to_connect=True)
            while state is not grpc.ChannelConnectivity.READY:
                if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                    return await _why_not(address, settings, role)
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
    except TimeoutError:
        return f"no answer in {settings.timeout_s:g} s"
    return None


async def _why_not(address: str, settings: Settings, role: Role) -> str:
    """What a plain connection meets, since a channel does not tell: first TCP, then TLS if it is on."""
    host, port = split_host_port(address)
    name = f"{role}.{settings.security.tls_domain}"
    secure = bool(settings.security.tls_ca)
    try:
        context = _tls_context(settings.security) if secure else None
        reader, writer = await asyncio.open_connection(
            host, port, ssl=context, server_hostname=name if secure else None
        )
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not accepted as that of {name}: {error.verify_message or error.reason}"
    except ssl.SSLError as error:
        return f"no TLS: {(error.reason or str(error)).lower().replace('_', ' ')}"
    except OSError as error:
        # A name with several addresses fails with all reasons in one text.
        known = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        return (known or str(error)).lower() or "connection lost"
    try:
        serves = not secure and await _speaks_http2(reader, writer)
    finally:
        writer.close()
    if serves:
        return (
            "the connection broke before it answered, and now it does: it, or a process of it, started anew; try again"
        )
    if secure:
        return "it ended the connection: does it know the authority of our certificate?"
    return "it does not speak gRPC in plaintext: is that an HTTP port, or does it want --tls-ca, --tls-cert, --tls-key?"


async def _speaks_http2(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Whether a greeting is answered by one, as every server of gRPC does. Who says nothing is waited for."""
    writer.write(_HTTP2_GREETING)
    try:
        return (await reader.readexactly(_HTTP2_FRAME_HEAD))[_HTTP2_FRAME_TYPE] == _HTTP2_SETTINGS
    except (asyncio.IncompleteReadError, OSError):
        return False


def _tls_context(security: SecurityConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=security.tls_ca)
    context.load_cert_chain(security.tls_cert, security.tls_key)
    return context


def _cause(message: str) -> str:
    """The last cause in gRPC's own text: "… last error: UNAVAILABLE: ipv4:127.0.0.1:1: Connection refused (111)"."""
    tail = message.rsplit("last error:", 1)[-1].strip()
    return tail.removeprefix("UNAVAILABLE:").strip() or "connection closed"
