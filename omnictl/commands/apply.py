"""``omnictl apply``: puts a deploy file into force."""

from __future__ import annotations

import argparse
import sys

from omni.v1 import pipeline_service_pb2
from omnicore.errors import InvalidRequestError
from omnictl import connect, failures, output
from omnictl.commands.base import (
    ACTION_FORMATS,
    Commands,
    add_deploy_flags,
    add_output_flag,
    file_label,
    read_deploy_file,
    settings_of,
)


def add(commands: Commands) -> None:
    """Add ``apply``."""
    parser = commands.add(
        "apply",
        _run,
        description="Check a deploy file and put it into force.",
        examples=(
            "omnictl apply -f examples/speech.yaml",
            "# under another name, on the sim engine, from a pipe",
            "cat speech.yaml | omnictl apply -f - --name trial --engine sim",
        ),
        notes="Every fault of the file is printed as FILE: PATH: MESSAGE, one per line; the exit code is then 2.",
    )
    parser.add_argument("-f", "--file", metavar="FILE", required=True, help='deploy file (YAML); "-" reads stdin')
    add_deploy_flags(parser)
    add_output_flag(parser, ACTION_FORMATS)


async def _run(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    request = request_of(args, args.file)
    async with connect.control_plane(settings) as plane:
        response = await apply(plane, request, file_label(args.file))
    if response is None:
        return InvalidRequestError.row.exit_code
    plan = response.pipeline
    if args.output in ("json", "yaml"):
        output.print_structured(output.to_dict(plan), args.output)
    elif args.output == "name":
        print(plan.name)
    else:
        verb = "unchanged" if not response.changed else "created" if plan.generation <= 1 else "configured"
        print(f"pipeline {plan.name} {verb} (generation {plan.generation})")
    return 0


def request_of(
    args: argparse.Namespace, file: str, *, validate_only: bool = False
) -> pipeline_service_pb2.ApplyPipelineRequest:
    """The call that ``add_deploy_flags``' flags and ``file`` describe. Raises ``InvalidRequestError``."""
    return pipeline_service_pb2.ApplyPipelineRequest(
        request_id=connect.request_id(),
        deploy_yaml=read_deploy_file(file),
        name=args.name,
        engine=args.engine,
        platform=args.platform,
        validate_only=validate_only,
    )


async def apply(
    plane: connect.ControlPlane, request: pipeline_service_pb2.ApplyPipelineRequest, label: str
) -> pipeline_service_pb2.ApplyPipelineResponse | None:
    """Send ``request``. Prints warnings, and the faults of a wrong file, one a line; returns None for such a file."""
    try:
        response: pipeline_service_pb2.ApplyPipelineResponse = await plane.call(plane.pipelines.ApplyPipeline, request)
    except InvalidRequestError as error:
        for line in failures.violations_of(error, label):
            print(line, file=sys.stderr)
        return None
    for warning in response.warnings:
        print(f"warning: {label}: {failures.one_line(warning)}", file=sys.stderr)
    return response
