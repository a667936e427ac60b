"""gRPC plumbing that every service shares: channels, servers, error mapping.

``serve`` gives a server the standard services (health, reflection, channelz) and the error interceptor, so servicers
only translate, call and raise typed errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE_NAME
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION_SERVICE_NAME

from omnicore import errors
from omnicore.config import join_host_port
from omnicore.listen import cannot_listen
from omnicore.log import get_logger

if TYPE_CHECKING:
    # The stubs make these generic; at run time they are not.
    Interceptor = grpc.aio.ServerInterceptor[Any, Any]
    ServicerContext = grpc.aio.ServicerContext[Any, Any]
else:
    Interceptor = grpc.aio.ServerInterceptor
    ServicerContext = grpc.aio.ServicerContext

_log = get_logger(__name__)

# A frame of one engine step is far below this; deploy files are at most 1 MiB; Fetch pieces are 1 MiB.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024

# Open to everyone, and of others: there is nothing of ours to map.
_UNTOUCHED = ("/grpc.health.", "/grpc.reflection.")
_CHANNELZ_NAME = "grpc.channelz.v1.Channelz"

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer that vanished without a FIN is noticed after 10 + 3 s at the latest; kills break the stream at once.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    # A peer whose kernel still acknowledges (a stopped process, a proxy) is judged by this one alone; 60 s by default.
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name the time that one attempt to connect may take: a loaded peer needs more than a round trip.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Channels to the same address must not share a connection: a session must notice its own peer's death.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
_PEER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.ping_timeout_ms", 4_000),
)
"""Of channels on which somebody waits for a peer whose silence nothing else tells of: noticed after 2 + 4 s. gRPC's own
threads answer, however long a step of the engine takes."""
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Two servers on one port would share its connections at random; a taken port must be an error.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)


def channel(
    target: str, credentials: grpc.ChannelCredentials | None = None, server_name: str = "", *, watched: bool = False
) -> grpc.aio.Channel:
    """A channel to ``target`` ("host:port") with the project's options; plaintext without ``credentials``.

    ``watched``: a peer that hangs is noticed within 6 s, not 13; for few channels, since it costs a ping every 2 s.

    The server's certificate must be for ``server_name``, or for the host of ``target`` if that is empty. Services
    connect through ``omnicore.security``, which knows when plaintext is allowed.
    """
    options = tuple((dict(CHANNEL_OPTIONS) | dict(_PEER_OPTIONS)).items()) if watched else CHANNEL_OPTIONS
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    named = (("grpc.ssl_target_name_override", server_name),) if server_name else ()
    return grpc.aio.secure_channel(target, credentials, options=(*options, *named))


class ErrorInterceptor(Interceptor):
    """Turns typed errors that a servicer raises into gRPC status with details; unknown ones into INTERNAL, logged.

    Bytes that are not the method's request message are INVALID_ARGUMENT; gRPC's own answer is UNKNOWN.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Wrap the handler of the called method."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_UNTOUCHED):
            return handler
        if handler.response_streaming:
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
            return make(
                _streaming(inner, method),
                request_deserializer=_deserializer(handler, method),
                response_serializer=handler.response_serializer,
            )
        make = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        )
        inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
        return make(
            _unary(inner, method),
            request_deserializer=_deserializer(handler, method),
            response_serializer=handler.response_serializer,
        )


def _deserializer(handler: grpc.RpcMethodHandler[Any, Any], method: str) -> Any:
    """The handler's own, its failures typed. Of a stream they are raised to its reader. A single request is parsed
    before there is anybody to raise to: the error takes its place until the wrapper raises it."""
    parse: Any = handler.request_deserializer
    if parse is None:
        return None

    def call(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            typed = errors.InvalidRequestError(f"not a request of {method}: {error}", reason="MALFORMED_MESSAGE")
            if handler.request_streaming:
                raise typed from error
            return typed

    return call


def _unary(inner: Any, method: str) -> Any:
    async def call(request: Any, context: ServicerContext) -> Any:
        try:
            if isinstance(request, errors.OmniError):
                raise request
            return await inner(request, context)
        except Exception as error:  # noqa: BLE001 -- the edge of the process: everything becomes a status
            await _abort(context, error, method)

    return call


def _streaming(inner: Any, method: str) -> Any:
    async def call(request: Any, context: ServicerContext) -> AsyncIterator[Any]:
        try:
            if isinstance(request, errors.OmniError):
                raise request
            async for response in inner(request, context):
                yield response
        except Exception as error:  # noqa: BLE001 -- the edge of the process: everything becomes a status
            await _abort(context, error, method)

    return call


async def _abort(context: ServicerContext, error: Exception, method: str) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    typed = errors.from_exception(error)
    if isinstance(typed, errors.InternalError) and typed is not error:
        _log.exception("rpc failed", method=method)
    await context.abort(typed.code, typed.message, errors.trailers(typed))


@dataclasses.dataclass(slots=True)
class RunningServer:
    """A started server and the port it really has."""

    server: grpc.aio.Server
    port: int
    health: health_aio.HealthServicer
    service_names: Sequence[str]

    async def set_serving(self, serving: bool) -> None:
        """Answer health checks with SERVING or NOT_SERVING, for the whole server and each service."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self.service_names):
            await self.health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls; give running ones ``grace_s`` seconds, then cancel them."""
        await self.health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


async def serve(
    add_servicers: Callable[[grpc.aio.Server], None],
    service_names: Sequence[str],
    *,
    host: str,
    port: int,
    credentials: grpc.ServerCredentials | None = None,
    interceptors: Sequence[Interceptor] = (),
    options: Sequence[tuple[str, int]] = (),
) -> RunningServer:
    """Start a server with the caller's servicers plus health, reflection and channelz.

    ``port`` 0 takes any free port; the result says which. ``service_names`` are full proto names, for health and
    reflection. ``options`` go before ``SERVER_OPTIONS``. Raises ``UnavailableError`` if the address cannot be bound;
    it never picks another one.
    """
    # Merged by name: of an option that is given twice, gRPC takes the first.
    merged = tuple({**dict(SERVER_OPTIONS), **dict(options)}.items())
    server = grpc.aio.server(options=merged, interceptors=(ErrorInterceptor(), *interceptors))
    add_servicers(server)
    health_servicer = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    channelz.add_channelz_servicer(server)  # type: ignore[arg-type]
    names = (*service_names, HEALTH_SERVICE_NAME, _CHANNELZ_NAME, REFLECTION_SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    address = join_host_port(host, port)
    try:
        bound = (
            server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
        )
    except RuntimeError as error:
        raise cannot_listen(host, port, None) from error
    if bound == 0:
        raise cannot_listen(host, port, None)
    await server.start()
    return RunningServer(server, bound, health_servicer, tuple(service_names))
