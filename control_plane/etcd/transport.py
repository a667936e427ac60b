"""Calls and streams to whichever member answers: rotation, retries, deadlines and tokens.

Guarantees: a read is repeated until the time allowed is over; a write is repeated only while it is sure that no
earlier attempt was applied; a member that hangs is left after ``attempt_s`` seconds if there is another one; an
expired token is replaced. Not guaranteed: that two calls reach the same member. Reads agree with the quorum all the
same, because etcd's are linearizable by default.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from control_plane.etcd import errors as etcd_errors
from control_plane.etcd.endpoints import EtcdCredentialFiles, EtcdCredentials, parse_endpoints
from omni.etcdwire.v1 import etcdwire_pb2 as wire
from omnicore.backoff import Backoff
from omnicore.clock import Clock

Req = TypeVar("Req", bound=Message)
Res = TypeVar("Res", bound=Message)
Metadata = tuple[tuple[str, str], ...]

_OPTIONS: tuple[tuple[str, int], ...] = (
    # etcd closes connections that are pinged more often than every 5 s, or without a call in progress
    # (server/embed/config.go, grpc-keepalive-min-time), so pings go out only beside streams and calls.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),  # the former alone leaves a stopped member for 60 s
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
# A hung member is left after this time, or half the time allowed if that is less. Longer than a healthy cluster's
# election (1 s by default, plus jitter).
_ATTEMPT_S = 2.0
# How often one call may find its token expired before we give up; only absurdly short lives need more than one.
_MAX_LOGINS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Method(Generic[Req, Res]):
    """One method of etcd: its path, and the types of its messages."""

    path: str
    request: type[Req]
    response: type[Res]


AUTHENTICATE = Method("/etcdserverpb.Auth/Authenticate", wire.AuthenticateRequest, wire.AuthenticateResponse)


class StreamBrokenError(Exception):
    """A stream ended, was refused, or fell silent. ``code`` and ``details`` are the server's, if it said so."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


class Stream(Generic[Req, Res]):
    """One bidirectional call. A read that takes too long is not lost: the next ``read`` goes on with it. To cancel a
    write, or a read without a time limit, cancels the whole stream."""

    def __init__(self, call: Any, index: int, token: str | None) -> None:
        self._call = call
        self._pending: asyncio.Task[Any] | None = None
        self.index = index
        """Which member it goes to."""
        self.token = token
        """The token that it was opened with."""

    async def write(self, request: Req) -> None:
        """Send one message. Raises ``StreamBrokenError``."""
        try:
            await self._call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._broken(error) from error

    async def read(self, timeout_s: float | None = None) -> Res:
        """The next message. Raises ``TimeoutError`` after ``timeout_s`` seconds, ``StreamBrokenError`` at the end."""
        try:
            if timeout_s is None and self._pending is None:
                response = await self._call.read()
            else:
                response = await self._read_within(timeout_s)
        except asyncio.CancelledError:
            if not _cancelled():  # the call was, by ``give_up`` or with its channel
                raise StreamBrokenError(grpc.StatusCode.CANCELLED, "given up") from None
            raise
        except grpc.aio.AioRpcError as error:
            raise await self._broken(error) from error
        if response is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise await self._broken(None)
        message: Res = response
        return message

    async def _read_within(self, timeout_s: float | None) -> Any:
        # A task of its own goes on when we stop waiting for it.
        if self._pending is None:
            self._pending = asyncio.ensure_future(self._call.read())
        done, _ = await asyncio.wait({self._pending}, timeout=timeout_s)
        if not done:
            raise TimeoutError(f"no message for {timeout_s} s")
        pending, self._pending = self._pending, None
        return pending.result()

    def give_up(self) -> None:
        """End the call; readers see ``StreamBrokenError``."""
        self._call.cancel()

    async def close(self) -> None:
        """End the call and wait until nothing of it is left."""
        self._call.cancel()
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.gather(self._pending, return_exceptions=True)  # how it ended no longer matters
            self._pending = None

    async def _broken(self, error: Exception | None) -> StreamBrokenError:
        if isinstance(error, grpc.aio.AioRpcError):
            return StreamBrokenError(error.code(), error.details() or "")
        if not self._call.done():
            return StreamBrokenError(grpc.StatusCode.UNKNOWN, str(error))
        return StreamBrokenError(await self._call.code(), await self._call.details() or "")


def _cancelled() -> bool:
    """True if somebody has asked the running task to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Transport:
    """Channels to all members, one of which is current. Used from one event loop; ``close`` it."""

    def __init__(
        self,
        endpoints: Sequence[str],
        credentials: EtcdCredentials | EtcdCredentialFiles | None,
        timeout_s: float,
        clock: Clock,
    ) -> None:
        self._files = credentials if isinstance(credentials, EtcdCredentialFiles) else None
        self._credentials = credentials.current() if isinstance(credentials, EtcdCredentialFiles) else credentials
        self._targets = parse_endpoints(endpoints)
        self._channels = self._connect()
        self._former: list[grpc.aio.Channel] = []
        self._stubs: dict[tuple[int, str], Any] = {}
        self._current = random.randrange(len(self._channels))  # so that many clients spread over the members
        self._token: str | None = None
        self._login = asyncio.Lock()
        self.timeout_s = timeout_s
        self.clock = clock
        self.closed = False
        self.history_base = 0
        """See ``EtcdClient.history_base``."""

    def _connect(self) -> list[grpc.aio.Channel]:
        credentials = self._credentials or EtcdCredentials()
        channels = []
        for endpoint in self._targets:
            if endpoint.tls or credentials.tls:
                secure = credentials.channel_credentials()
                channels.append(grpc.aio.secure_channel(endpoint.target, secure, options=_OPTIONS))
            else:
                channels.append(grpc.aio.insecure_channel(endpoint.target, options=_OPTIONS))
        return channels

    async def _renew(self) -> None:
        """Take up credentials that have changed, on new channels. Streams that are open stay on the former ones until
        the next change, when those are closed and the streams begin again."""
        if self._files is None or (current := self._files.current()) is self._credentials:
            return
        self._credentials = current
        closing, self._former, self._channels = self._former, self._channels, self._connect()
        self._stubs.clear()
        for channel in closing:
            await channel.close(None)

    @property
    def target(self) -> str:
        """The address of the member that calls go to now."""
        return self._targets[self._current].target

    async def close(self) -> None:
        """Close all channels; calls in progress fail."""
        self.closed = True
        for channel in (*self._channels, *self._former):
            await channel.close(None)

    async def call(
        self, method: Method[Req, Res], request: Req, *, repeatable: bool, lease_id: int = 0, login: bool = True
    ) -> Res:
        """One answer to ``request``.

        ``repeatable``: sending it twice does no harm. Raises ``EtcdUnavailable``; ``WriteOutcomeUnknown`` if it is
        not repeatable and may have been applied; any other refusal as its typed error.
        """
        self._check_open()
        deadline = self.clock.monotonic() + self.timeout_s
        backoff = Backoff(0.02, 0.5)
        logins = 0
        while True:
            await self._renew()
            index = self._current
            # Outside the try: a failure to log in is not a failure of the request, which was not sent yet.
            token = await self._get_token() if login else None
            left_s = max(deadline - self.clock.monotonic(), 0.001)
            try:
                answer: Res = await self._stub(index, method)(
                    request, timeout=self._attempt_s(left_s), metadata=_metadata(token)
                )
                return answer
            except grpc.aio.AioRpcError as error:
                code, details = error.code(), error.details() or ""
                if token is not None and etcd_errors.is_stale_token(details) and logins < _MAX_LOGINS:
                    logins += 1
                    self.discard_token(token)
                    continue
                if not etcd_errors.worth_retrying(code, details):
                    raise etcd_errors.refusal(error, lease_id) from error
                self.rotate(index)
                if not repeatable and not etcd_errors.surely_not_applied(details):
                    raise etcd_errors.WriteOutcomeUnknown(
                        f"etcd may or may not have applied {method.path}: {code.name}: {details}",
                        metadata={"method": method.path, "endpoint": self._targets[index].target},
                    ) from error
                delay_s = backoff.next_delay_s()
                if self.clock.monotonic() + delay_s >= deadline:
                    raise self._unavailable(method.path, f"{code.name}: {details}") from error
            await asyncio.sleep(delay_s)

    async def open_stream(self, method: Method[Req, Res]) -> Stream[Req, Res]:
        """A stream to the current member. The server ends it when that member loses the quorum's leader.

        Raises what logging in raises; a member that cannot be reached is seen by the first read.
        """
        self._check_open()
        await self._renew()
        token = await self._get_token()
        index = self._current
        open_call: Any = self._channels[index].stream_stream(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        return Stream(open_call(metadata=_metadata(token)), index, token)

    def rotate(self, seen: int) -> None:
        """Go on with the next member, unless somebody else already left the one ``seen`` failing."""
        if self._current == seen:
            self._current = (seen + 1) % len(self._channels)

    def discard_token(self, token: str | None) -> None:
        """Log in again before the next call, unless ``token`` was replaced meanwhile."""
        if self._token == token:
            self._token = None

    def _check_open(self) -> None:
        if self.closed:
            raise etcd_errors.EtcdUnavailable("the etcd client was closed", reason="ETCD_CLIENT_CLOSED")

    async def _get_token(self) -> str | None:
        if self._credentials is None or not self._credentials.user:
            return None
        if self._token is None:
            async with self._login:
                if self._token is None:
                    self._token = await self._authenticate()
        return self._token

    async def _authenticate(self) -> str:
        mine = self._credentials or EtcdCredentials()
        request = wire.AuthenticateRequest(name=mine.user, password=mine.password)
        return (await self.call(AUTHENTICATE, request, repeatable=True, login=False)).token

    def _attempt_s(self, left_s: float) -> float:
        if len(self._channels) == 1:
            return left_s
        return min(left_s, _ATTEMPT_S, self.timeout_s / 2)

    def _stub(self, index: int, method: Method[Any, Any]) -> Any:
        stub = self._stubs.get((index, method.path))
        if stub is None:
            stub = self._stubs[index, method.path] = self._channels[index].unary_unary(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
        return stub

    def _unavailable(self, what: str, why: str) -> etcd_errors.EtcdUnavailable:
        targets = ", ".join(endpoint.target for endpoint in self._targets)
        return etcd_errors.EtcdUnavailable(
            f"no etcd member answered {what} within {self.timeout_s:g} s ({targets}): {why}",
            metadata={"endpoints": targets},
        )


def _metadata(token: str | None) -> Metadata:
    # With "hasleader" a member that has lost the leader refuses at once instead of letting the caller wait.
    if token is None:
        return (("hasleader", "true"),)
    return (("hasleader", "true"), ("token", token))
