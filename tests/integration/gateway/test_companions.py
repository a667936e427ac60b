"""Bundles of a request and its companions: whole or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from omni.v1 import inference_service_pb2 as pb
from omni.v1 import inference_service_pb2_grpc, output_pb2, prompt_pb2, stage_service_pb2, transfer_pb2
from omnicore import errors, rpc
from tests.integration.gateway.conftest import Stand, running_stand
from tests.integration.gateway.scripted import Call, Script
from tests.integration.gateway.test_grpc_api import refused
from tests.support.pipelines import guided_pipeline
from tests.support.processes import wait_until

PNG = b"picture"


def role_of(call: Call) -> str:
    return call.request.request_id.partition("__")[2]


def hand_over(call: Call) -> None:
    """End with one handle, which says who made it."""
    handle = transfer_pb2.TransferHandle(key=call.request.request_id)
    output = stage_service_pb2.StageOutput(to_stage=1, handles=[handle])
    call.send(
        stage_service_pb2.StageEvent(outputs=[output], finish=output_pb2.CallFinish(reason="stop", prompt_tokens=5))
    )


async def understand(call: Call) -> None:
    hand_over(call)


async def paint(call: Call) -> None:
    info = output_pb2.MediaInfo(mime_type="image/png")
    call.send(stage_service_pb2.StageEvent(media=PNG, media_info=info))
    call.finish()


def except_for(role: str, script: Script) -> Script:
    """All but one role hand over at once."""

    async def run(call: Call) -> None:
        await (script if role_of(call) == role else understand)(call)

    return run


async def never(call: Call) -> None:
    await asyncio.Event().wait()


async def fails(call: Call) -> None:
    call.fail(errors.InternalError("no memory"))


def asked(request_id: str) -> pb.GenerateRequest:
    prompt = prompt_pb2.Prompt(negative_prompt="fog")
    parts = prompt.chat.messages.add(role="user").parts
    parts.add(media=prompt_pb2.MediaPart(mime_type="image/png", data=b"before"))
    parts.add(text="a city")
    return pb.GenerateRequest(model="guided", modalities=["image"], prompt=prompt, request_id=request_id)


@pytest.fixture
async def stand(request: pytest.FixtureRequest) -> AsyncIterator[Stand]:
    async with running_stand(guided_pipeline(timeout_s=getattr(request, "param", 0.0)), retry_limit=2) as running:
        yield running


@pytest.fixture
async def inference(stand: Stand) -> AsyncIterator[inference_service_pb2_grpc.InferenceServiceAsyncStub]:
    async with rpc.channel(stand.addresses["grpc"]) as channel:
        yield inference_service_pb2_grpc.InferenceServiceStub(channel)


async def picture(inference: inference_service_pb2_grpc.InferenceServiceAsyncStub, request_id: str) -> bytes:
    return b"".join([response.media async for response in inference.Generate(asked(request_id))])


async def test_a_bundle_goes_to_one_replica_and_every_role_to_the_next_stage(
    stand: Stand, inference: inference_service_pb2_grpc.InferenceServiceAsyncStub
) -> None:
    workers = [await stand.cluster.add("guided", 0, understand, replica_id=n) for n in range(2)]
    painter = await stand.cluster.add("guided", 1, paint)
    await stand.ready("guided")
    for number in range(20):
        assert await picture(inference, f"r{number}") == PNG
    seen: dict[str, set[int]] = {}
    for worker in workers:
        for call in worker.calls:
            parent, _, role = call.request_id.partition("__")
            seen.setdefault(parent, set()).add(worker.ref.replica_id)
            (message,) = call.prompt.chat.messages
            told = [part.text or "picture" for part in message.parts]
            assert told == {"": ["picture", "a city"], "cfg_text": ["picture", "fog"], "cfg_img": ["a city"]}[role]
            assert not call.prompt.negative_prompt
            assert not (role and call.emit_output)
    assert len(seen) == 20
    assert all(len(replicas) == 1 for replicas in seen.values()), "companions are where their request is"
    for call in painter.calls:
        assert [item.role for item in call.inputs] == ["", "cfg_text", "cfg_img"]
        for item in call.inputs:
            assert [handle.key.partition("__")[2] for handle in item.handles.handles] == [item.role]
    await stand.settled()


async def test_the_next_stage_waits_for_the_last_role_and_people_see_who_runs(
    stand: Stand, inference: inference_service_pb2_grpc.InferenceServiceAsyncStub
) -> None:
    gate = asyncio.Event()

    async def late(call: Call) -> None:
        await gate.wait()
        hand_over(call)

    worker = await stand.cluster.add("guided", 0, except_for("cfg_img", late))
    painter = await stand.cluster.add("guided", 1, paint)
    await stand.ready("guided")
    running = asyncio.create_task(picture(inference, "mine"))
    await wait_until(lambda: len(worker.calls) == 3 and len(worker.running) == 1, what="only cfg_img still runs")
    state = stand.gateway.orchestrator.running["mine"]
    await wait_until(
        lambda: any(entry.event == "companion_finished" for entry in state.timeline), what="cfg_text has finished"
    )
    listed = (await inference.ListRequests(pb.ListRequestsRequest())).requests
    assert [(row.request_id, row.parent_id) for row in listed] == [
        ("mine", ""), ("mine__cfg_text", "mine"), ("mine__cfg_img", "mine"),
    ]  # fmt: skip
    assert all(len(row.replicas) == 1 for row in listed)
    assert painter.calls == []
    gate.set()
    assert await running == PNG
    assert state.usage.prompt_tokens == 5, "the request's own, once"
    await stand.settled()


async def test_one_that_fails_ends_all(
    stand: Stand, inference: inference_service_pb2_grpc.InferenceServiceAsyncStub
) -> None:
    async def only_text_fails(call: Call) -> None:
        await (fails if role_of(call) == "cfg_text" else never)(call)

    worker = await stand.cluster.add("guided", 0, only_text_fails)
    painter = await stand.cluster.add("guided", 1, paint)
    await stand.ready("guided")
    error = await refused(inference.Generate(asked("r")))
    assert "no memory" in error.message
    await wait_until(lambda: not worker.running, what="the others are cancelled")
    others = {call.call_id for call in worker.calls if not call.request_id.endswith("__cfg_text")}
    assert len(others) == 2
    assert others <= {*worker.aborts}
    assert painter.calls == []
    await stand.settled()


async def test_a_killed_replica_takes_the_whole_bundle_elsewhere(
    stand: Stand, inference: inference_service_pb2_grpc.InferenceServiceAsyncStub
) -> None:
    dying = await stand.cluster.add("guided", 0, except_for("cfg_img", never))
    await stand.cluster.add("guided", 1, paint)
    await stand.ready("guided")
    running = asyncio.create_task(picture(inference, "r"))
    await wait_until(lambda: len(dying.calls) == 3 and len(dying.running) == 1, what="only cfg_img still runs")
    other = await stand.cluster.add("guided", 0, understand, replica_id=1)
    await stand.ready("guided")
    await dying.kill()
    assert await running == PNG
    assert sorted(role for _, _, role in (call.request_id.partition("__") for call in other.calls)) == [
        "", "cfg_img", "cfg_text",
    ]  # fmt: skip
    await stand.settled()


@pytest.mark.parametrize("stand", [0.2], indirect=True)
async def test_a_bundle_that_takes_too_long_ends_and_says_who_was_late(
    stand: Stand, inference: inference_service_pb2_grpc.InferenceServiceAsyncStub
) -> None:
    worker = await stand.cluster.add("guided", 0, except_for("cfg_img", never))
    await stand.cluster.add("guided", 1, paint)
    await stand.ready("guided")
    error = await refused(inference.Generate(asked("r")))
    assert isinstance(error, errors.DeadlineExceededError)
    assert (error.reason, error.metadata["stage"]) == ("COMPANION_DEADLINE", "0")
    assert "cfg_img" in error.metadata["late"]
    await wait_until(lambda: not worker.running, what="all are cancelled")
    await stand.settled()


async def test_words_alone_are_answered_without_companions(
    stand: Stand, inference: inference_service_pb2_grpc.InferenceServiceAsyncStub
) -> None:
    async def answer(call: Call) -> None:
        call.text("a city")
        call.finish()

    worker = await stand.cluster.add("guided", 0, answer)
    await stand.cluster.add("guided", 1, paint)
    await stand.ready("guided")
    request = asked("r")
    request.modalities[:] = ["text"]
    request.prompt.negative_prompt = ""
    assert "".join([response.text async for response in inference.Generate(request)]) == "a city"
    assert len(worker.calls) == 1
