"""A small cluster, as records: what the unit tests and snapshots of omnictl show."""

from __future__ import annotations

import datetime

from google.protobuf import timestamp_pb2

from omni.v1 import pipeline_pb2, types_pb2

NOW_S = 1_800_000_000.0


def speech_pipeline() -> pipeline_pb2.Pipeline:
    plan = pipeline_pb2.Pipeline(
        name="speech",
        async_chunk=True,
        entrypoints={"chat": 0, "speech": 1},
        source_sha256="ab" * 32,
        generation=2,
        stages=[
            pipeline_pb2.Stage(
                stage_id=0,
                name="thinker",
                engine="vllm",
                model="smollm2-135m-instruct",
                num_replicas=1,
                tensor_parallel_size=1,
                final_output=True,
                final_output_type="text",
                is_comprehension=True,
                config_sha256="01" * 32,
            ),
            pipeline_pb2.Stage(
                stage_id=1,
                name="talker",
                engine="hibari-talker",
                model="hibari",
                num_replicas=2,
                devices=["0", "1"],
                tensor_parallel_size=1,
                config_sha256="02" * 32,
            ),
            pipeline_pb2.Stage(
                stage_id=2,
                name="code2wav",
                engine="hibari-vocoder",
                num_replicas=1,
                tensor_parallel_size=1,
                final_output=True,
                final_output_type="audio",
                max_num_seqs=4,
                config_sha256="03" * 32,
            ),
        ],
        edges=[
            pipeline_pb2.Edge(from_stage=0, to_stage=1, window_size=-1, chunk_by=pipeline_pb2.CHUNK_BY_SENTENCE),
            pipeline_pb2.Edge(
                from_stage=1,
                to_stage=2,
                connector="shm",
                window_size=8,
                max_inflight=4,
                chunk_by=pipeline_pb2.CHUNK_BY_STEP,
            ),
        ],
    )
    plan.stages[0].default_sampling_params.max_tokens = 128
    plan.stages[1].engine_args.update({"voice": "en"})
    return plan


def replica(
    stage_id: int,
    replica_id: int,
    *,
    epoch: int = 7,
    state: types_pb2.ReplicaState.ValueType = types_pb2.REPLICA_STATE_READY,
    suspect: bool = False,
    cordoned: bool = False,
    load: tuple[int, int] | None = (0, 0),
    age_s: float = 83,
    pipeline: str = "speech",
) -> types_pb2.Replica:
    stamp = timestamp_pb2.Timestamp()
    stamp.FromDatetime(datetime.datetime.fromtimestamp(NOW_S - age_s, datetime.UTC))
    record = types_pb2.Replica(
        ref=types_pb2.ReplicaRef(
            stage=types_pb2.StageRef(pipeline=pipeline, stage_id=stage_id), replica_id=replica_id, epoch=epoch
        ),
        instance_uuid="00000000-0000-4000-8000-000000000000",
        endpoint=f"127.0.0.1:{41000 + 10 * stage_id + replica_id}",
        state=state,
        suspect=suspect,
        cordoned=cordoned,
        connectors=[
            types_pb2.ConnectorOffer(name="shm", healthy=True),
            types_pb2.ConnectorOffer(name="grpc", address="127.0.0.1:41000", healthy=False),
        ],
        placement=types_pb2.Placement(host="node-a", boot_id="b" * 36, devices=["0"], pid=4242),
        fingerprint=types_pb2.StageFingerprint(
            model="hibari", config_sha256="02" * 32, tensor_parallel_size=1, protocol_version="1.0"
        ),
        register_time=stamp,
        engine="sim",
    )
    if load is not None:
        record.load.CopyFrom(
            types_pb2.LoadReport(
                running=load[0],
                waiting=load[1],
                queue_length=sum(load),
                kv_usage_ratio=0.125,
                transfer_pool_free_bytes=64 * 2**20,
            )
        )
    return record


def speech_replicas() -> list[types_pb2.Replica]:
    return [
        replica(0, 0, load=(3, 1)),
        replica(1, 0, epoch=9, cordoned=True),
        replica(1, 1, epoch=12, suspect=True, age_s=4000),
        replica(2, 0, epoch=15, state=types_pb2.REPLICA_STATE_STARTING, load=None, age_s=2),
    ]
