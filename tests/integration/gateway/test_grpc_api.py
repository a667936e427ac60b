"""InferenceService and RouterService over a real channel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator

import grpc.aio
import pytest

from omni.v1 import (
    inference_service_pb2,
    inference_service_pb2_grpc,
    prompt_pb2,
    router_service_pb2,
    router_service_pb2_grpc,
    types_pb2,
)
from omnicore import errors, rpc
from tests.integration.gateway.conftest import Stand
from tests.integration.gateway.scripts import broken, endless, hang, silent, speak, tokens
from tests.support.processes import wait_until


@pytest.fixture
async def channel(stand: Stand) -> AsyncIterator[grpc.aio.Channel]:
    async with rpc.channel(stand.addresses["grpc"]) as opened:
        yield opened


@pytest.fixture
def inference(channel: grpc.aio.Channel) -> inference_service_pb2_grpc.InferenceServiceAsyncStub:
    return inference_service_pb2_grpc.InferenceServiceStub(channel)


@pytest.fixture
def router(channel: grpc.aio.Channel) -> router_service_pb2_grpc.RouterServiceAsyncStub:
    return router_service_pb2_grpc.RouterServiceStub(channel)


def request(model: str = "text", **fields: object) -> inference_service_pb2.GenerateRequest:
    prompt = prompt_pb2.Prompt()
    prompt.chat.messages.add(role="user").parts.add(text="hello")
    asked = inference_service_pb2.GenerateRequest(model=model, prompt=prompt)
    for name, value in fields.items():
        if name == "modalities":
            asked.modalities.extend(value)  # type: ignore[arg-type]
        else:
            setattr(asked, name, value)
    return asked


async def refused(call: AsyncIterable[object]) -> errors.OmniError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return errors.from_rpc_error(caught.value)


async def test_text(
    stand: Stand,
    inference: inference_service_pb2_grpc.InferenceServiceAsyncStub,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="gateway.router")
    worker = await stand.cluster.add("text", 0, tokens(4))
    await stand.ready("text")
    responses = [response async for response in inference.Generate(request(request_id="mine"))]
    assert "".join(response.text for response in responses) == "t0 t1 t2 t3 "
    assert {response.request_id for response in responses} == {"mine"}
    assert [response.HasField("finish") for response in responses].count(True) == 1
    finish = responses[-1].finish
    assert (finish.reason, finish.prompt_tokens, finish.completion_tokens) == ("stop", 3, 4)
    assert worker.calls[0].request_id.startswith("mine.")
    timeline = await inference.GetRequest(inference_service_pb2.GetRequestRequest(request_id="mine"))
    assert timeline.status == "finished"
    assert [event.event for event in timeline.timeline] == [
        "admitted", "dispatched", "first_output", "stage_finished", "finished",
    ]  # fmt: skip
    assert timeline.timeline[1].replica == worker.ref
    assert timeline.timeline[1].detail == "power-of-two"
    (route,) = [record.__dict__["fields"] for record in caplog.records if record.getMessage() == "route"]
    assert route["request_id"].startswith("mine")
    assert (route["stage"], route["replica"], route["epoch"]) == ("text/0", 0, worker.ref.epoch)
    assert (route["policy"], route["reason"], route["candidates"]) == ("power-of-two", "power-of-two", 1)
    await stand.settled()


async def test_audio(stand: Stand, inference: inference_service_pb2_grpc.InferenceServiceAsyncStub) -> None:
    for stage_id, script in enumerate((tokens(2), silent, speak)):
        await stand.cluster.add("speech", stage_id, script)
    await stand.ready("speech")
    asked = request("speech", modalities=["text", "audio"])
    responses = [response async for response in inference.Generate(asked)]
    assert b"".join(response.media for response in responses) == b"\x01\x00" * 240 + b"\x02\x00" * 120
    assert next(r.media_info for r in responses if r.HasField("media_info")).sample_rate_hz == 24000


async def test_errors_are_typed(stand: Stand, inference: inference_service_pb2_grpc.InferenceServiceAsyncStub) -> None:
    await stand.cluster.add("text", 0, broken(errors.InternalError("fell over", reason="ENGINE_FAILED")))
    await stand.ready("text")
    unknown = await refused(inference.Generate(request("nope")))
    assert isinstance(unknown, errors.NotFoundError)
    assert unknown.reason == "MODEL_NOT_FOUND"
    modality = await refused(inference.Generate(request(modalities=["video"])))
    assert modality.violations[0].field == "modalities[0]"
    failed = await refused(inference.Generate(request()))
    assert (type(failed), failed.reason) == (errors.InternalError, "ENGINE_FAILED")
    missing = await refused(inference.Generate(inference_service_pb2.GenerateRequest(model="text")))
    assert missing.violations[0].field == "prompt"
    late = request()
    late.timeout.FromNanoseconds(-5)
    assert (await refused(inference.Generate(late))).violations[0].field == "timeout"


async def test_deadline(stand: Stand, inference: inference_service_pb2_grpc.InferenceServiceAsyncStub) -> None:
    worker = await stand.cluster.add("text", 0, hang)
    await stand.ready("text")
    asked = request()
    asked.timeout.FromMilliseconds(1000)  # time to get to the worker
    assert isinstance(await refused(inference.Generate(asked)), errors.DeadlineExceededError)
    await wait_until(lambda: len(worker.aborts) == 1, what="abort")
    await stand.settled()


async def test_cancelling_aborts(stand: Stand, inference: inference_service_pb2_grpc.InferenceServiceAsyncStub) -> None:
    worker = await stand.cluster.add("text", 0, endless)
    await stand.ready("text")
    call = inference.Generate(request())
    await call.read()
    call.cancel()
    await wait_until(lambda: len(worker.aborts) == 1, what="abort")
    await stand.settled()


async def test_abort_by_id(stand: Stand, inference: inference_service_pb2_grpc.InferenceServiceAsyncStub) -> None:
    worker = await stand.cluster.add("text", 0, hang)
    await stand.ready("text")
    running = asyncio.create_task(refused(inference.Generate(request(request_id="r1"))))
    await wait_until(lambda: bool(worker.running), what="call")
    second = await refused(inference.Generate(request(request_id="r1")))
    assert isinstance(second, errors.AlreadyExistsError)
    abort = inference_service_pb2.InferenceServiceAbortRequest(request_id="r1")
    assert (await inference.Abort(abort)).found
    assert isinstance(await running, errors.RequestCancelledError)
    await stand.settled()
    assert not (await inference.Abort(abort)).found
    assert len(worker.aborts) == 1


async def test_models(stand: Stand, inference: inference_service_pb2_grpc.InferenceServiceAsyncStub) -> None:
    await stand.cluster.add("text", 0, tokens(1))
    await stand.ready("text")
    speech, model = (await inference.ListModels(inference_service_pb2.ListModelsRequest())).models
    assert (model.id, list(model.tasks), list(model.modalities), model.ready) == ("text", ["chat"], ["text"], True)
    assert (speech.id, speech.ready) == ("speech", False), "listed, though none of its stages has a replica"


async def test_route_binds_until_release(stand: Stand, router: router_service_pb2_grpc.RouterServiceAsyncStub) -> None:
    workers = [await stand.cluster.add("text", 0, tokens(1), replica_id=n) for n in range(2)]
    await stand.ready("text")
    stage = types_pb2.StageRef(pipeline="text", stage_id=0)
    first = await router.Route(router_service_pb2.RouteRequest(request_id="a", stage=stage))
    assert first.reason == "power-of-two"
    assert first.endpoint == workers[first.replica.replica_id].endpoint
    again = await router.Route(router_service_pb2.RouteRequest(request_id="a", stage=stage))
    assert (again.replica, again.reason) == (first.replica, "bound")
    child = await router.Route(router_service_pb2.RouteRequest(request_id="b", stage=stage, affinity_from="a"))
    assert (child.replica, child.reason) == (first.replica, "affinity")
    other = await router.Route(
        router_service_pb2.RouteRequest(request_id="c", stage=stage, exclude=[first.replica.replica_id])
    )
    assert other.replica.replica_id != first.replica.replica_id
    for name, count in (("a", 1), ("a", 0), ("b", 1), ("c", 1)):
        released = await router.Release(router_service_pb2.RouterServiceReleaseRequest(request_id=name))
        assert released.released == count
    await stand.settled()


async def test_route_says_what_is_wrong(stand: Stand, router: router_service_pb2_grpc.RouterServiceAsyncStub) -> None:
    await wait_until(lambda: "text" in stand.gateway.table.pipelines, what="pipeline")
    unknown = types_pb2.StageRef(pipeline="text", stage_id=9)
    for asked, kind in (
        (router_service_pb2.RouteRequest(stage=unknown), errors.InvalidRequestError),
        (router_service_pb2.RouteRequest(request_id="a"), errors.InvalidRequestError),
        (router_service_pb2.RouteRequest(request_id="a", stage=unknown), errors.NotFoundError),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.Route(asked)
        assert isinstance(errors.from_rpc_error(caught.value), kind)
    empty = router_service_pb2.RouteRequest(request_id="a", stage=types_pb2.StageRef(pipeline="text", stage_id=0))
    empty.max_wait.FromMilliseconds(20)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.Route(empty)
    assert isinstance(errors.from_rpc_error(caught.value), errors.UnavailableError)
