"""``omnictl delete``: removes plans."""

from __future__ import annotations

import argparse

from omni.v1 import pipeline_service_pb2
from omnictl import connect
from omnictl.commands.base import Commands, settings_of


def add(commands: Commands) -> None:
    """Add ``delete``."""
    parser = commands.add(
        "delete",
        _run,
        description="Delete pipelines. Their replicas are told to drain.",
        examples=("omnictl delete pipeline speech",),
    )
    parser.add_argument("kind", metavar="KIND", choices=("pipeline", "pipelines", "pl"), help="pipeline")
    parser.add_argument("names", metavar="NAME", nargs="+", help="pipeline name")


async def _run(args: argparse.Namespace) -> int:
    async with connect.control_plane(settings_of(args)) as plane:
        for name in args.names:
            request = pipeline_service_pb2.DeletePipelineRequest(name=name, request_id=connect.request_id())
            await plane.call(plane.pipelines.DeletePipeline, request)
            print(f"pipeline {name} deleted", flush=True)
    return 0
