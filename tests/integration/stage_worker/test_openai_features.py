"""What clients of the OpenAI surface may ask of an engine beyond its answer: probabilities, tokens, manners."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest

from omni.v1 import prompt_pb2, sampling_pb2
from omni.v1 import stage_service_pb2 as pb
from omni.v1 import stage_service_pb2_grpc as pb_grpc
from omnicore import rpc
from omnicore.errors import from_rpc_error
from tests.integration.stage_worker.cluster import call, local_worker, pipeline


async def run(stub: Any, **fields: Any) -> list[pb.StageEvent]:
    request = pb.ExecuteRequest(call=call("r", "hello", **fields))
    return [event async for frame in stub.Execute(request) for event in frame.events]


async def test_probabilities_and_tokens_come_over_the_wire_and_what_an_engine_lacks_is_refused_by_name() -> None:
    async with local_worker(pipeline({"tokens": 4}), 0) as worker:
        channel = rpc.channel(worker.identity.endpoint)
        stub = pb_grpc.StageServiceStub(channel)
        events = [e for e in await run(stub, sampling=sampling_pb2.SamplingParams(logprobs=2)) if e.token_ids]
        assert len(events) == 4
        for event in events:
            (entry,) = event.logprobs
            assert entry.token.token_id == event.token_ids[0]
            assert len(entry.top) == 2
            assert entry.token.logprob <= 0
        assert not any(event.logprobs for event in await run(stub))

        text = prompt_pb2.Prompt(text="Hello there, river.")
        tokens = await stub.Tokenize(pb.TokenizeRequest(prompt=text, with_texts=True))
        assert len(tokens.token_ids) == len(tokens.texts) > 5
        assert not (await stub.Tokenize(pb.TokenizeRequest(prompt=text))).texts
        assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids))).text == text.text

        wanted = sampling_pb2.SamplingParams(structured_output=sampling_pb2.StructuredOutput(json_object=True))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await run(stub, sampling=wanted)
        error = from_rpc_error(caught.value)
        assert error.reason == "UNSUPPORTED_FIELD"
        assert error.violations[0].field == "sampling.structured_output"

        # An engine that says nothing of its features has none.
        worker.parts.calls.features = frozenset()
        spoken = prompt_pb2.SpeechOptions(instructions="whisper")
        for fields, path in (
            ({"sampling": sampling_pb2.SamplingParams(logprobs=0)}, "sampling.logprobs"),
            ({"prompt": prompt_pb2.Prompt(text="x", bot_task="think")}, "prompt.bot_task"),
            ({"prompt": prompt_pb2.Prompt(text="x", negative_prompt="y")}, "prompt.negative_prompt"),
            ({"prompt": prompt_pb2.Prompt(text="x", language="de")}, "prompt.language"),
            ({"speech": spoken}, "speech.instructions"),
        ):
            request = pb.StageCall(request_id="r", prompt=text, emit_output=True)
            request.MergeFrom(pb.StageCall(**fields))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Execute(pb.ExecuteRequest(call=request)).read()
            assert from_rpc_error(caught.value).violations[0].field == path
        await channel.close(None)
