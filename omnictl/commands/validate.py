"""``omnictl validate``: checks deploy files without putting them into force."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from omni.v1 import pipeline_pb2
from omnicore.errors import InvalidRequestError
from omnicore.supervise.supervisor import Spec, Supervisor
from omnictl import connect, output
from omnictl.commands.apply import apply, request_of
from omnictl.commands.base import ACTION_FORMATS, Commands, add_deploy_flags, add_output_flag, file_label, settings_of
from omnictl.local.cluster import CONTROL_PLANE, connected
from omnictl.settings import Settings


def add(commands: Commands) -> None:
    """Add ``validate``."""
    parser = commands.add(
        "validate",
        _run,
        description="Check deploy files; nothing is stored.",
        examples=("omnictl validate examples/speech.yaml", "omnictl validate examples/*.yaml"),
        notes=(
            "Every fault is printed as FILE: PATH: MESSAGE, one per line; the exit code is then 2. Without a cluster\n"
            "to ask, a private control plane is started for the moment."
        ),
    )
    parser.add_argument("files", metavar="FILE", nargs="+", help='deploy file (YAML); "-" reads standard input')
    add_deploy_flags(parser)
    add_output_flag(parser, ACTION_FORMATS)


async def _run(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    requests = [(file, request_of(args, file, validate_only=True)) for file in args.files]
    faulty = False
    async with _plane(settings) as plane:
        for i, (file, request) in enumerate(requests):
            response = await apply(plane, request, file_label(file))
            if response is None:
                faulty = True
            elif args.output == "name":
                print(response.pipeline.name, flush=True)
            elif args.output == "text":
                print(f"{file_label(file)}: ok ({_summary(response.pipeline)})", flush=True)
            else:
                if i and args.output == "yaml":
                    print("---")
                output.print_structured(output.to_dict(response.pipeline), args.output)
    return InvalidRequestError.row.exit_code if faulty else 0


def _summary(plan: pipeline_pb2.Pipeline) -> str:
    return ", ".join(
        [f"pipeline {plan.name}", output.plural(len(plan.stages), "stage"), output.plural(len(plan.edges), "edge")]
    )


@contextlib.asynccontextmanager
async def _plane(settings: Settings) -> AsyncIterator[connect.ControlPlane]:
    """The cluster's control plane, or one of our own if no cluster is known."""
    if settings.server:
        async with connect.control_plane(settings) as plane:
            yield plane
        return
    run_dir = Path(tempfile.mkdtemp(prefix="omnictl-"))
    supervisor = Supervisor(run_dir, lambda member, text: None)
    try:
        spec = Spec(
            name=CONTROL_PLANE,
            arguments=("control-plane", "--listen", "127.0.0.1:0", "--etcd", "embedded"),
            ready_timeout_s=60.0,
            stop_grace_s=5.0,
        )
        address = str((await supervisor.launch(spec))["address"])
        async with connected(address) as channel:
            yield connect.ControlPlane(channel, address, settings.timeout_s)
    finally:
        await supervisor.stop([[CONTROL_PLANE]])
        shutil.rmtree(run_dir, ignore_errors=True)
