from __future__ import annotations

from omni.v1 import pipeline_pb2
from stage_worker import environment
from stage_worker.stage_connectors import connector_options


def test_variables_of_a_stage_are_set_and_are_no_argument_of_its_engine() -> None:
    stage = pipeline_pb2.Stage()
    stage.engine_args.update({"env": {"UCX_TLS": "tcp", "OMP_NUM_THREADS": "2"}, "seed": 1})
    environ = {"PATH": "/bin", "UCX_TLS": "all"}
    environment.apply(stage, environ)
    assert environ == {"PATH": "/bin", "UCX_TLS": "tcp", "OMP_NUM_THREADS": "2"}
    assert set(stage.engine_args.fields) == {"seed"}
    environment.apply(stage, environ)
    assert set(stage.engine_args.fields) == {"seed"}


def test_options_of_connectors_may_name_them() -> None:
    plan = pipeline_pb2.Pipeline(name="p")
    for stage_id in (0, 1):
        plan.stages.add(stage_id=stage_id)
    plan.edges.add(from_stage=0, to_stage=1, connector="m")
    plan.connectors.add(name="m", kind="mooncake").extra.update({"host": "${POD_IP}"})
    plan.stages[0].engine_args.update({"env": {"POD_IP": "10.0.0.7"}})
    environ: dict[str, str] = {}
    environment.apply(plan.stages[0], environ)
    assert connector_options(plan, plan.stages[0], environ) == {"mooncake": {"host": "10.0.0.7"}}
