"""A gateway before real workers with simulated engines, all in this process; what the OpenAI surface is tried on."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from omni.v1 import pipeline_pb2, types_pb2
from tests.integration.gateway.conftest import Stand, running_stand
from tests.integration.stage_worker.cluster import local_worker


def plan(name: str, *stages: dict[str, Any], **entrypoints: int) -> pipeline_pb2.Pipeline:
    """A chain of simulated stages. Each has the options of ``sim``; ``final`` makes its output the client's."""
    made = pipeline_pb2.Pipeline(name=name, async_chunk=True, entrypoints=entrypoints or {"chat": 0})
    for stage_id, given in enumerate(stages):
        options = {"seconds_per_chunk": 0.05, **given}
        final = options.pop("final", True)
        stage = made.stages.add(
            stage_id=stage_id, name=f"stage-{stage_id}", engine="sim", model="none", config_sha256="0" * 64,
            tensor_parallel_size=1, final_output=final, final_output_type=options["output"] if final else "",
        )  # fmt: skip
        stage.engine_args.update({"sim": options})
        if stage_id:
            made.edges.add(
                from_stage=stage_id - 1, to_stage=stage_id, window_size=4, connector="shm",
                chunk_by=pipeline_pb2.CHUNK_BY_SENTENCE,
            )  # fmt: skip
    made.connectors.add(name="shm", kind="shm").extra.update({"put_wait_s": 60})
    return made


def text_model(**options: Any) -> pipeline_pb2.Pipeline:
    """Text of a chat, also of audio."""
    return plan("words", {"output": "text", "tokens": 12, **options}, chat=0, transcription=0)


def picture_model() -> pipeline_pb2.Pipeline:
    """A thinker, then pictures."""
    return plan("pictures", {"output": "text", "tokens": 12}, {"output": "image"}, chat=0, image=0)


def voice_model() -> pipeline_pb2.Pipeline:
    """Text, tensors, audio."""
    stages = {"output": "text", "tokens": 12}, {"output": "tensor", "final": False}, {"output": "audio"}
    return plan("voice", *stages, chat=0, speech=1)


@contextlib.asynccontextmanager
async def running_models(*plans: pipeline_pb2.Pipeline, **config: Any) -> AsyncIterator[Stand]:
    """A gateway that serves ``plans``; ``config`` is the gateway's."""
    async with running_stand(*plans, **config) as stand, contextlib.AsyncExitStack() as stack:
        for pipeline in plans:
            for stage in pipeline.stages:
                worker = await stack.enter_async_context(local_worker(pipeline, stage.stage_id))
                record = worker.describe()
                record.state = types_pb2.REPLICA_STATE_READY
                stand.cluster.control_plane.put(record)
        await stand.ready(*(pipeline.name for pipeline in plans))
        yield stand
