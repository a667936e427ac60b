"""Short deploy files for the tests."""

from __future__ import annotations

import textwrap

import pytest

from control_plane.deploy import DeployResult, plan_pipeline
from omni.v1 import pipeline_pb2
from omnicore.errors import InvalidRequestError


def plan(text: str, *, engine: str = "", platform: str = "", name: str = "p") -> pipeline_pb2.Pipeline:
    return result(text, engine=engine, platform=platform, name=name).pipeline


def result(text: str, *, engine: str = "", platform: str = "", name: str = "p") -> DeployResult:
    return plan_pipeline(textwrap.dedent(text), name=name, engine=engine, platform=platform)


def faults(text: str, *, engine: str = "", platform: str = "", name: str = "p") -> dict[str, str]:
    """Path to description of every fault."""
    with pytest.raises(InvalidRequestError) as caught:
        result(text, engine=engine, platform=platform, name=name)
    assert caught.value.reason == "INVALID_DEPLOY"
    assert caught.value.violations
    found: dict[str, str] = {}
    for violation in caught.value.violations:
        found[violation.field] = "; ".join(filter(None, (found.get(violation.field), violation.description)))
    return found


def chain(count: int, extra: str = "", **keys: str) -> str:
    """A file of ``count`` stages, each with the keys of ``stage_N`` (flow style), and ``extra`` top-level lines."""
    lines = ["stages:"]
    for stage_id in range(count):
        own = keys.get(f"stage_{stage_id}", "")
        lines.append(f"  - {{stage_id: {stage_id}{', ' + own if own else ''}}}")
    return "\n".join((*lines, textwrap.dedent(extra)))
