"""Variables that a deploy file sets for a stage (``env``): given to this process before anything reads them."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Final

from google.protobuf import json_format

from omni.v1 import pipeline_pb2
from omnicore.log import get_logger

_log = get_logger(__name__)

_KEY: Final = "env"


def apply(stage: pipeline_pb2.Stage, environ: MutableMapping[str, str]) -> None:
    """Put the variables of ``stage`` into ``environ``, over those that are there, and take them out of its engine
    arguments: engines and the libraries of connectors find them where they look for them. The values are not logged:
    they may be secrets."""
    if _KEY not in stage.engine_args.fields:
        return
    given: dict[str, str] = json_format.MessageToDict(stage.engine_args)[_KEY]  # text: the planner sees to that
    del stage.engine_args.fields[_KEY]
    if given:
        environ.update(given)
        _log.info("variables of the stage set", names=",".join(sorted(given)))
