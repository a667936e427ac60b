"""What every service answers to messages that are no messages, and to names without end."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from omni.v1 import router_service_pb2, router_service_pb2_grpc, stage_service_pb2, stage_service_pb2_grpc
from omnicore import errors, rpc

GARBAGE = b"\xff\xff\xff\xff"


def _same(data: bytes) -> bytes:
    return data


class _Router(router_service_pb2_grpc.RouterServiceServicer):
    async def Route(  # noqa: N802 -- the proto's name
        self, request: router_service_pb2.RouteRequest, context: rpc.ServicerContext
    ) -> router_service_pb2.RouteResponse:
        raise errors.NotFoundError(
            f"no request {request.request_id!r}",
            metadata={"request": request.request_id},
            violations=[errors.FieldViolation(request.request_id, request.request_id)],
        )


class _Stage(stage_service_pb2_grpc.StageServiceServicer):
    async def Execute(  # noqa: N802
        self, request: stage_service_pb2.ExecuteRequest, context: rpc.ServicerContext
    ) -> AsyncIterator[stage_service_pb2.ExecuteResponse]:
        yield stage_service_pb2.ExecuteResponse()

    async def Session(  # noqa: N802
        self, request_iterator: AsyncIterator[stage_service_pb2.SessionRequest], context: rpc.ServicerContext
    ) -> AsyncIterator[stage_service_pb2.SessionResponse]:
        async for _ in request_iterator:
            yield stage_service_pb2.SessionResponse()


@contextlib.asynccontextmanager
async def service() -> AsyncIterator[grpc.aio.Channel]:
    def add(server: grpc.aio.Server) -> None:
        router_service_pb2_grpc.add_RouterServiceServicer_to_server(_Router(), server)  # type: ignore[abstract]
        stage_service_pb2_grpc.add_StageServiceServicer_to_server(_Stage(), server)  # type: ignore[abstract]

    running = await rpc.serve(add, (), host="127.0.0.1", port=0)
    # Not our own channel: a peer with gRPC's own limits must be able to read the answer.
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        yield channel
    await running.stop(0)


async def test_bytes_that_are_no_message_are_an_invalid_argument() -> None:
    async with service() as channel:
        for method in ("/omni.v1.RouterService/Route", "/omni.v1.RouterService/Release"):
            with pytest.raises(grpc.aio.AioRpcError) as unary:
                await channel.unary_unary(method, _same, _same)(GARBAGE)
            assert unary.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert errors.from_rpc_error(unary.value).reason == "MALFORMED_MESSAGE"
            assert method in (unary.value.details() or "")
        with pytest.raises(grpc.aio.AioRpcError) as streamed:
            await anext(aiter(channel.unary_stream("/omni.v1.StageService/Execute", _same, _same)(GARBAGE)))
        assert streamed.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        session = channel.stream_stream("/omni.v1.StageService/Session", _same, _same)(None)
        await session.write(stage_service_pb2.SessionRequest().SerializeToString())
        assert await session.read() == b""
        await session.write(GARBAGE)
        with pytest.raises(grpc.aio.AioRpcError) as both:
            await session.read()
        assert both.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert errors.from_rpc_error(both.value).reason == "MALFORMED_MESSAGE"


@pytest.mark.parametrize("name", ["x" * 100_000, "ü" * 100_000, "😀" * 100_000, "\x00" * 100_000])
async def test_an_error_with_a_name_without_end_arrives(name: str) -> None:
    async with service() as channel:
        stub = router_service_pb2_grpc.RouterServiceStub(channel)
        for _ in range(5):  # above the soft limit a peer refuses at random
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Route(router_service_pb2.RouteRequest(request_id=name))
            assert caught.value.code() == grpc.StatusCode.NOT_FOUND, caught.value.details()
            error = errors.from_rpc_error(caught.value)
            assert error.message.startswith("no request '")
            assert error.message.endswith("…")
