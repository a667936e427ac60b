"""Engines by name: built in, from other packages, or missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

from omni.v1 import pipeline_pb2
from omnicore.errors import UnavailableError
from stage_worker.engines import create_engine, known_engines
from stage_worker.models import catalog


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution with two engines, of which one lacks its library."""
    (tmp_path / "acme_engine.py").write_text("def create(stage, devices):\n    return (stage.engine, tuple(devices))\n")
    (tmp_path / "acme_broken.py").write_text("import acme_library_that_is_not_there\n")
    info = tmp_path / "acme_engines-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-engines\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[omniplane.engines]\nacme = acme_engine:create\nacme-broken = acme_broken:create\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("plugin")
def test_engines_of_other_packages() -> None:
    assert {"acme", "acme-broken", "sim"} <= set(known_engines())
    made: object = create_engine(pipeline_pb2.Stage(engine="acme"), ("0", "1"))
    assert made == ("acme", ("0", "1"))


@pytest.mark.usefixtures("plugin")
def test_a_missing_library_is_named_with_its_remedy() -> None:
    told = r"acme_library_that_is_not_there.*install what acme-engines needs; .*start the pipeline with --engine sim"
    with pytest.raises(UnavailableError, match=told):
        create_engine(pipeline_pb2.Stage(engine="acme-broken"), ())


@pytest.mark.parametrize(
    ("engine", "library"),
    [("vllm", "vLLM"), ("hibari-acoustic", "hibari-tts"), ("hibari-vocoder", "hibari-tts")],
)
def test_where_a_library_is_missing_simulated_engines_are_offered(
    engine: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=f"{library} is not installed: .*start the pipeline with --engine sim"):
        create_engine(pipeline_pb2.Stage(engine=engine), ())


def test_where_a_packaged_model_is_missing_simulated_engines_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"needs the package .*start the pipeline with --engine sim"):
        catalog.resolve(next(iter(catalog.MODELS)))
