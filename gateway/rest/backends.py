"""Who answers a call: the servicers of this gateway, in this process, or a control plane, over gRPC.

Both take and give messages and raise the same typed errors as over gRPC. Ending the iteration of a stream, or
cancelling the task of a call, cancels the RPC.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import Message

from gateway.rest.routes import Route, message_class
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

Metadata = tuple[tuple[str, str], ...]

# A control plane that lives accepts a connection at once; another one is asked instead of waiting for this one.
CONNECT_TIMEOUT_S = 3.0
# Of methods that only read. What hangs for longer is asked of the next one.
READ_TIMEOUT_S = 5.0

# A repeat of these with the same request_id has its effect once (AdminService, PipelineService), so a call whose answer
# was lost is repeated at the next control plane. What engines did is not recorded, so a collective call is not.
_NOT_REPEATED = frozenset({"/omni.v1.AdminService/CollectiveRpc"})


class Backend(Protocol):
    """Makes calls."""

    async def unary(self, route: Route, request: Message, metadata: Metadata) -> Message:
        """One request, one response."""
        ...

    def stream(self, route: Route, request: Message, metadata: Metadata) -> AsyncGenerator[Message, None]:
        """One request, the responses as they come. Close it."""
        ...


class LocalContext:
    """What our servicers use of a ``grpc.aio.ServicerContext``. Errors they raise, they do not abort with."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Metadata:
        """The headers that are passed on."""
        return self._metadata

    def peer(self) -> str:
        """Not known here."""
        return "rest"

    def set_code(self, code: grpc.StatusCode) -> None:
        """Called by methods that a servicer does not have, before they raise ``NotImplementedError``."""

    def set_details(self, details: str) -> None:
        """As ``set_code``."""

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        """An answer of this API has no trailers."""

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """No certificate was shown."""
        return {}


class LocalBackend:
    """The gateway's own servicers: no message is serialized, no connection made."""

    def __init__(self, servicers: Mapping[str, object]) -> None:
        """``servicers`` by full service name."""
        self._servicers = dict(servicers)

    async def unary(self, route: Route, request: Message, metadata: Metadata) -> Message:
        """See ``Backend``."""
        with _offered(route):
            response: Message = await self._method(route)(request, LocalContext(metadata))
        return response

    async def stream(self, route: Route, request: Message, metadata: Metadata) -> AsyncGenerator[Message, None]:
        """See ``Backend``."""
        with _offered(route):
            responses: AsyncGenerator[Message, None] = self._method(route)(request, LocalContext(metadata))
        async with contextlib.aclosing(responses):
            async for response in responses:
                yield response

    def _method(self, route: Route) -> Callable[..., Any]:
        servicer = self._servicers[route.method.containing_service.full_name]
        return getattr(servicer, route.method.name)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _offered(route: Route) -> Iterator[None]:
    try:
        yield
    except NotImplementedError:  # what generated base classes raise
        raise errors.UnimplementedError(f"this gateway has no {route.full_name}") from None


class ControlPlaneBackend:
    """The first control plane of the list that answers, the last one that did coming first.

    A connection lasts for one call: such calls are rare, and a certificate or address may have changed since the last.
    """

    def __init__(self, addresses: Sequence[str], connect: Callable[[str], grpc.aio.Channel], timeout_s: float) -> None:
        """``timeout_s`` bounds unary calls, all attempts together."""
        self._addresses = tuple(addresses)
        self._connect = connect
        self._timeout_s = timeout_s
        self._first = 0

    async def unary(self, route: Route, request: Message, metadata: Metadata) -> Message:
        """See ``Backend``. Raises ``UnavailableError`` with every reason if no control plane answers."""
        limit_s = min(READ_TIMEOUT_S, self._timeout_s) if route.verb == "GET" else self._timeout_s
        try:
            async with asyncio.timeout(self._timeout_s):
                async with contextlib.aclosing(self._answers(route, request, metadata, limit_s)) as answers:
                    async for answer in answers:
                        return answer
        except TimeoutError:
            raise errors.DeadlineExceededError(f"no answer from a control plane in {self._timeout_s:g} s") from None
        raise errors.InternalError(f"{route.full_name} ended without an answer")

    async def stream(self, route: Route, request: Message, metadata: Metadata) -> AsyncGenerator[Message, None]:
        """See ``Backend``. After the first message there is no other control plane."""
        async with contextlib.aclosing(self._answers(route, request, metadata, None)) as answers:
            async for answer in answers:
                yield answer

    async def _answers(
        self, route: Route, request: Message, metadata: Metadata, limit_s: float | None
    ) -> AsyncGenerator[Message, None]:
        count = len(self._addresses)
        failures: list[errors.OmniError] = []
        for turn in range(self._first, self._first + count):
            address = self._addresses[turn % count]
            channel = self._connect(address)
            answered = sent = False
            try:
                await _connected(channel, address)
                sent = True
                async for answer in _call(channel, route, request, metadata, limit_s):
                    answered, self._first = True, turn % count
                    yield answer
                self._first = turn % count
                return
            except (grpc.aio.AioRpcError, errors.UnavailableError) as error:
                failures.append(errors.from_exception(error))
                if answered or not _worth_another(failures[-1], route, sent=sent):
                    raise _taken(failures, failures[-1]) from error
                why = failures[-1].message
                _log.info("control plane did not answer", address=address, method=route.full_name, reason=why)
            finally:
                await channel.close(None)
        # One of them may have said why; that is better than that the others could not be reached.
        raise _taken(failures, _most_telling(failures))


def _most_telling(failures: list[errors.OmniError]) -> errors.OmniError:
    return next((e for e in failures if e.reason not in ("CANNOT_CONNECT", "UNAVAILABLE")), failures[-1])


def _taken(failures: list[errors.OmniError], one: errors.OmniError) -> errors.OmniError:
    """``one`` of them; the others are dropped. A frame that keeps the error that leaves it is a cycle, and the channel
    in it, closed or not, keeps its connection until the garbage collector comes by."""
    failures.clear()
    return one


def _worth_another(error: errors.OmniError, route: Route, *, sent: bool) -> bool:
    if isinstance(error, errors.UnavailableError):
        return not sent or route.full_name not in _NOT_REPEATED
    return isinstance(error, errors.DeadlineExceededError) and route.verb == "GET"


async def _connected(channel: grpc.aio.Channel, address: str) -> None:
    """Return once connected: until then no call was made anywhere. Raises ``UnavailableError``."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            state = channel.get_state(try_to_connect=True)
            while state is not grpc.ChannelConnectivity.READY:
                if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                    raise TimeoutError
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
    except TimeoutError:
        raise errors.UnavailableError(
            f"cannot connect to the control plane at {address}",
            reason="CANNOT_CONNECT",
            metadata={"address": address},
            retry_after_s=1.0,
        ) from None


async def _call(
    channel: grpc.aio.Channel, route: Route, request: Message, metadata: Metadata, limit_s: float | None
) -> AsyncIterator[Message]:
    response: Any = message_class(route.method.output_type)
    serializers = {"request_serializer": type(request).SerializeToString, "response_deserializer": response.FromString}
    if not route.method.server_streaming:
        yield await channel.unary_unary(route.full_name, **serializers)(request, timeout=limit_s, metadata=metadata)
        return
    call = channel.unary_stream(route.full_name, **serializers)(request, metadata=metadata)
    try:
        async for message in call:
            yield message
    finally:
        call.cancel()
