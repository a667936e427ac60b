"""A channel whose calls carry a token.

gRPC's own call credentials refuse plaintext, also on loopback, and its interceptors put a layer around every message of
a stream. This one only adds to the metadata with which a call begins, and reads the token anew each time.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from omnicore.tokens import TokenFile, bearer


class TokenChannel(grpc.aio.Channel):
    """``channel`` with ``token`` on every call."""

    def __init__(self, channel: grpc.aio.Channel, token: TokenFile) -> None:
        self._channel = channel
        self._token = token

    async def __aenter__(self) -> TokenChannel:
        await self._channel.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._channel.__aexit__(kind, error, trace)

    async def close(self, grace: float | None = None) -> None:
        """See ``grpc.aio.Channel``."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """See ``grpc.aio.Channel``."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See ``grpc.aio.Channel``."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See ``grpc.aio.Channel``."""
        await self._channel.channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """A method whose calls carry the token."""
        return self._with_token(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """A method whose calls carry the token."""
        return self._with_token(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """A method whose calls carry the token."""
        return self._with_token(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """A method whose calls carry the token."""
        return self._with_token(self._channel.stream_stream(*args, **kwargs))

    def _with_token(self, method: Any) -> Any:
        def call(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            return method(*args, metadata=(*(metadata or ()), *bearer(self._token.first())), **kwargs)

        return call
