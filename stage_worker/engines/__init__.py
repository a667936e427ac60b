"""Engines by name. Built-in ones are imported when asked for; others come from the entry-point group
``omniplane.engines``, each entry an ``EngineFactory``.

Enters here: one module per engine. Must not: gRPC, gateways, connectors beyond ``Payload``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Sequence
from typing import cast

from omni.v1 import pipeline_pb2
from omnicore.errors import InvalidRequestError, UnavailableError
from stage_worker.engine import WITHOUT_LIBRARIES, Engine, EngineFactory

ENTRY_POINT_GROUP = "omniplane.engines"

# Name → module with ``create(stage, devices)``, and the extra of this distribution that brings its libraries.
_BUILT_IN: dict[str, tuple[str, str]] = {
    "sim": ("stage_worker.engines.sim", ""),
    "vllm": ("stage_worker.engines.vllm_engine", "vllm"),
    "hibari-acoustic": ("stage_worker.engines.hibari_acoustic", "speech"),
    "hibari-vocoder": ("stage_worker.engines.hibari_vocoder", "speech"),
}

# Names that plans have for models which no engine here runs yet: see docs/feature-status.md.
_NOT_SHIPPED = {
    "vllm-omni": "it runs vLLM-Omni's own models, diffusion stages among them.",
    "transformers-omni": "it runs omni models by Transformers.",
    "diffusers": "it runs diffusion models.",
}


def create_engine(stage: pipeline_pb2.Stage, devices: Sequence[str]) -> Engine:
    """The engine of a stage, not started. Raises ``InvalidRequestError`` for an unknown engine or wrong engine
    arguments and ``UnavailableError`` where its libraries are not installed."""
    return _factory(stage.engine)(stage, devices)


def known_engines() -> list[str]:
    """Names that ``create_engine`` accepts, sorted."""
    plugins = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return sorted({*_BUILT_IN, *(plugin.name for plugin in plugins)})


def _factory(name: str) -> EngineFactory:
    if name in _BUILT_IN:
        module, extra = _BUILT_IN[name]
        try:
            return cast("EngineFactory", importlib.import_module(module).create)
        except ImportError as error:
            raise _missing(name, f"pip install 'omniplane[{extra}]'" if extra else "", error) from error
    for plugin in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            return cast("EngineFactory", plugin.load())
        except ImportError as error:
            package = plugin.dist.name if plugin.dist is not None else plugin.value
            raise _missing(name, f"install what {package} needs", error) from error
    if name in _NOT_SHIPPED:
        raise UnavailableError(
            f"engine {name!r} is not part of Omniplane: {_NOT_SHIPPED[name]} A package may bring it (entry points"
            f" {ENTRY_POINT_GROUP!r}); {WITHOUT_LIBRARIES}",
            reason="ENGINE_NOT_INSTALLED",
            metadata={"engine": name},
        )
    raise InvalidRequestError.field("engine", f"unknown engine {name!r}; known: {', '.join(known_engines())}")


def _missing(name: str, remedy: str, error: ImportError) -> UnavailableError:
    return UnavailableError(
        "; ".join(filter(None, (f"engine {name!r} cannot be loaded: {error}", remedy, WITHOUT_LIBRARIES))),
        reason="ENGINE_NOT_INSTALLED",
        metadata={"engine": name, "missing": error.name or ""},
    )
