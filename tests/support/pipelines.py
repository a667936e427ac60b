"""Plans as a control plane would make them."""

from __future__ import annotations

from omni.v1 import pipeline_pb2


def speech_pipeline(name: str = "speech", *, async_chunk: bool = True) -> pipeline_pb2.Pipeline:
    """thinker (text) → talker → code2wav (audio)."""
    pipeline = pipeline_pb2.Pipeline(name=name, async_chunk=async_chunk, entrypoints={"chat": 0, "speech": 1})
    pipeline.stages.add(stage_id=0, name="thinker", engine="sim", final_output=True, final_output_type="text")
    pipeline.stages.add(stage_id=1, name="talker", engine="sim")
    pipeline.stages.add(stage_id=2, name="code2wav", engine="sim", final_output=True, final_output_type="audio")
    pipeline.stages[0].default_sampling_params.max_tokens = 64
    for source in (0, 1):
        pipeline.edges.add(
            from_stage=source, to_stage=source + 1, window_size=4, connector="wire",
            chunk_by=pipeline_pb2.CHUNK_BY_SENTENCE,
        )  # fmt: skip
    pipeline.connectors.add(name="wire", kind="shm")
    return pipeline


def text_pipeline(name: str = "text") -> pipeline_pb2.Pipeline:
    """One stage that makes text."""
    pipeline = pipeline_pb2.Pipeline(name=name, async_chunk=True, entrypoints={"chat": 0})
    pipeline.stages.add(stage_id=0, name="lm", engine="sim", final_output=True, final_output_type="text")
    return pipeline


def guided_pipeline(name: str = "guided", *, timeout_s: float = 0.0) -> pipeline_pb2.Pipeline:
    """An understanding stage whose requests have companions → a painting stage (image)."""
    pipeline = pipeline_pb2.Pipeline(name=name, async_chunk=False, entrypoints={"chat": 0, "image": 0})
    pipeline.stages.add(stage_id=0, name="understand", engine="sim", final_output=True, final_output_type="text")
    pipeline.stages.add(stage_id=1, name="paint", engine="sim", final_output=True, final_output_type="image")
    companions = pipeline.stages[0].companions
    companions.roles.extend(["cfg_text", "cfg_img"])
    if timeout_s:
        companions.timeout.FromNanoseconds(int(timeout_s * 1e9))
    pipeline.edges.add(from_stage=0, to_stage=1, window_size=-1, chunk_by=pipeline_pb2.CHUNK_BY_FINAL)
    return pipeline
