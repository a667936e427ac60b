"""``omnictl delete``: removes plans."""

from __future__ import annotations

import argparse
import sys

from omni.v1 import pipeline_service_pb2
from omnicore.errors import DataLossError
from omnictl import connect, output, refs
from omnictl.commands.base import ACTION_FORMATS, Commands, add_output_flag, settings_of


def add(commands: Commands) -> None:
    """Add ``delete``."""
    parser = commands.add(
        "delete",
        _run,
        description="Delete pipelines. Their replicas are told to drain.",
        examples=("omnictl delete pipeline speech", "omnictl delete pipeline trial other -o name"),
        notes="Names are looked up first: if one is unknown, none is deleted.",
    )
    parser.add_argument("kind", metavar="KIND", choices=("pipeline", "pipelines", "pl"), help="pipeline")
    parser.add_argument("names", metavar="NAME", nargs="+", help="pipeline name")
    parser.completes |= {"kind": "=pipeline", "names": "pipeline"}
    add_output_flag(parser, ACTION_FORMATS)


async def _run(args: argparse.Namespace) -> int:
    report = output.Report(args.output)
    names = list(dict.fromkeys(refs.parse_pipeline(text).pipeline for text in args.names))
    async with connect.control_plane(settings_of(args)) as plane:
        for name in names:
            await _look_up(plane, name)
        try:
            for name in names:
                request = pipeline_service_pb2.DeletePipelineRequest(name=name, request_id=connect.request_id())
                answer = await plane.call(plane.pipelines.DeletePipeline, request)
                report.done(name if args.output == "name" else f"pipeline {name}", "deleted", output.to_dict(answer))
        finally:
            report.end()
    return 0


async def _look_up(plane: connect.ControlPlane, name: str) -> None:
    """Raises ``NotFoundError``. A plan that cannot be read, spoiled by hand say, is there to be deleted."""
    try:
        await plane.get_pipeline(name)
    except DataLossError as error:
        print(f"note: {error.message}", file=sys.stderr)
