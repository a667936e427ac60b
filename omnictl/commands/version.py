"""``omnictl version``."""

from __future__ import annotations

import argparse
import importlib.metadata

from omni.v1 import admin_service_pb2
from omnicore.errors import OmniError
from omnictl import connect, failures, output
from omnictl.commands.base import Commands, add_output_flag, settings_of


def add(commands: Commands) -> None:
    """Add ``version``."""
    parser = commands.add(
        "version",
        _run,
        description="Print the versions of omnictl and of the control plane.",
        examples=("omnictl version", "omnictl version --client -o json"),
    )
    parser.add_argument("--client", action="store_true", help="only omnictl's own; needs no cluster")
    add_output_flag(parser, ("text", "json", "yaml"))


async def _run(args: argparse.Namespace) -> int:
    client = importlib.metadata.version("omniplane")
    server, trouble = None, "not asked"
    if not args.client:
        try:
            async with connect.control_plane(settings_of(args)) as plane:
                status: admin_service_pb2.GetClusterStatusResponse = await plane.call(
                    plane.admin.GetClusterStatus, admin_service_pb2.GetClusterStatusRequest()
                )
            server = status.version
        except OmniError as error:
            # The client's version is what most ask for, and needs no cluster.
            trouble = failures.one_line(error.message)
    if args.output in ("json", "yaml"):
        output.print_structured({"client": client, "server": server}, args.output)
    else:
        print(f"omnictl        {client}")
        if not args.client:
            print(f"control plane  {server or f'unknown: {trouble}'}")
    return 0
