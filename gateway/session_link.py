"""The stream of a session: dialled, greeted, and held until it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio

from omni.v1 import stage_service_pb2, types_pb2
from omnicore import errors
from omnicore.durations import to_duration
from omnicore.grpc_stream import Dial, GrpcStream, open_stream
from omnicore.log import get_logger

_log = get_logger(__name__)

BEAT_S = 0.5
"""What replicas are asked for."""
_KEEPALIVE_TIMEOUT_S = 30.0
"""A worker answers pings in its event loop, which a step of an engine may keep; while calls are open, beats tell sooner
of one that is gone."""
_METHOD = "/omni.v1.StageService/Session"
# The codes with which a replica says: you mean another instance, or something that I am not.
_REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED)


class SessionLink:
    """To the replica of ``record``: ``hold`` it, again and again."""

    def __init__(
        self, record: types_pb2.Replica, gateway_id: str, dial: Callable[[str], Dial], welcome_s: float, *, beats: bool
    ) -> None:
        """``dial`` tells how to reach an address; a welcome must come within ``welcome_s``; ``beats``: ask for them."""
        self.stream: GrpcStream | None = None
        """While there is one."""
        self.address = record.session_endpoint or record.endpoint
        """Where it is, or is sought next."""
        self.hung = False
        """It ended because the replica said nothing."""
        self._record = record
        self._dial = dial
        self._welcome_s = welcome_s
        self._until_welcome: asyncio.Timeout | None = None
        self._reached = False
        hello = stage_service_pb2.SessionHello(gateway_id=gateway_id, replica=record.ref)
        if beats:
            hello.beat_interval.CopyFrom(to_duration(BEAT_S))
        self._greeting = stage_service_pb2.SessionRequest(hello=hello).SerializeToString()

    async def hold(self, on_message: Callable[[bytes], None]) -> tuple[str, bool]:
        """Open it, and return when it has ended: why, and whether the replica does not want it."""
        self.hung = False
        try:
            await self._hold(on_message)
        except errors.OmniError as error:  # this address may not be dialled
            return error.message, True
        except grpc.aio.AioRpcError as error:
            if error.code() in _REFUSALS:
                return errors.from_rpc_error(error).message, True
            self._try_the_other()
            return errors.from_rpc_error(error).message, False
        except TimeoutError:
            self.hung = True
            self._try_the_other()
            return f"no welcome within {self._welcome_s:g} s", False
        except Exception as error:  # noqa: BLE001 -- whatever it is, it must cost this session only
            _log.exception("session failed", address=self.address)
            return f"internal error ({type(error).__name__})", False
        return "the stream ended", False

    def welcomed(self) -> None:
        """The replica has answered the hello."""
        self._reached = True
        if self._until_welcome is not None:
            self._until_welcome.reschedule(None)

    def give_up(self) -> None:
        """It hangs: end the stream."""
        self.hung = True
        if self.stream is not None:
            self.stream.cancel()

    async def _hold(self, on_message: Callable[[bytes], None]) -> None:
        dial = self._dial(self.address)
        try:
            async with asyncio.timeout(self._welcome_s) as self._until_welcome:
                async with open_stream(
                    dial, _METHOD, on_message, keepalive_timeout_s=_KEEPALIVE_TIMEOUT_S
                ) as self.stream:
                    self.stream.write(self._greeting)
                    await self.stream.ended()
        finally:
            self.stream = None

    def _try_the_other(self) -> None:
        """A firewall may let only one of its ports through. The one that has answered once is not given up."""
        record = self._record
        if record.session_endpoint and not self._reached:
            self.address = record.endpoint if self.address == record.session_endpoint else record.session_endpoint
