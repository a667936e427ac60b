"""Options of the two hibari engines, and what both need of the package."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Collection
from typing import Any

from google.protobuf import json_format

from omni.v1 import pipeline_pb2
from omnicore.errors import InvalidRequestError, UnavailableError
from stage_worker.engine import WITHOUT_LIBRARIES

SUPPORTED_VERSIONS = ((0, 2), (0, 3))
"""From the first, below the second."""

SPECTRUM_TENSORS = ("lh", "theta", "ln", "lr", "phi")
"""Outputs of the acoustic model, float32 [601 frequency bins, frames]; with ``f0`` (Hz, [frames]) they are a chunk."""


def require_hibari() -> str:
    """The installed version. Raises ``UnavailableError`` if hibari-tts or onnxruntime is missing or unsupported."""
    for package, distribution in (("hibari", "hibari-tts"), ("onnxruntime", "onnxruntime")):
        if importlib.util.find_spec(package) is None:
            raise UnavailableError(
                f"{distribution} is not installed: run scripts/setup --engine real, or pip install {distribution}; "
                f"{WITHOUT_LIBRARIES}",
                reason="ENGINE_NOT_INSTALLED",
                metadata={"missing": distribution},
            )
    version = importlib.metadata.version("hibari-tts")
    low, high = SUPPORTED_VERSIONS
    numbers = version.split(".")[:2]
    if not all(part.isdigit() for part in numbers) or not low <= tuple(map(int, numbers)) < high:
        raise UnavailableError(
            f"hibari-tts {version} is installed; this engine works with {low[0]}.{low[1]}.*", reason="ENGINE_VERSION"
        )
    return version


def stage_options(stage: pipeline_pb2.Stage, known: Collection[str]) -> dict[str, Any]:
    """``engine_args`` of a stage. Raises ``InvalidRequestError`` for a key that is not ``known``."""
    options: dict[str, Any] = json_format.MessageToDict(stage.engine_args)
    options.pop("sim", None)
    for key in options:
        if key not in known:
            accepted = f"known: {', '.join(sorted(known))}" if known else "this engine has no arguments"
            raise InvalidRequestError.field(f"engine_args.{key}", f"unknown; {accepted}")
    return options
