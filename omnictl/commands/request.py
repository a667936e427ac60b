"""``omnictl request list|get|abort``: requests, where one is or was, and its end."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

from omni.v1 import inference_service_pb2 as pb
from omnicore.errors import NotFoundError, OmniError, UnavailableError
from omnictl import connect, failures, output, rows
from omnictl.commands.base import ACTION_FORMATS, Commands, add_output_flag, settings_of
from omnictl.output import Column
from omnictl.settings import Settings

T = TypeVar("T")


def add(commands: Commands) -> None:
    """Add ``request`` and its commands."""
    group = commands.group(
        "request",
        description="Follow one request through the cluster, or end it.",
        examples=(
            "omnictl request list",
            "omnictl request get chatcmpl-8d48c15f6f5f1d28",
            "omnictl request abort chatcmpl-8d48c15f6f5f1d28",
        ),
        notes=(
            "The id is that of the answer, or what a gRPC client passed. Every gateway that --gateway\n"
            "names is asked: only the one that has or had the request knows of it."
        ),
    )
    listed = group.add(
        "list",
        _list,
        description="Show the requests that run at the gateways, companions under theirs.",
        examples=("omnictl request list", "omnictl request list --model speech --all -o json"),
    )
    listed.add_argument("--model", metavar="PIPELINE", default="", help="only those of this pipeline")
    listed.add_argument("--all", action="store_true", help="also those that ended lately")
    listed.add_argument("--no-headers", action="store_true", help="leave out the headings of a table")
    add_output_flag(listed, ("table", "json", "yaml"))
    get = group.add(
        "get",
        _get,
        description="Show the replicas that a request went to, and when.",
        examples=(
            "omnictl request get chatcmpl-8d48c15f6f5f1d28",
            "omnictl request get chatcmpl-8d48c15f6f5f1d28 -o json",
        ),
        notes="Gateways keep requests that have ended for a while only.",
    )
    get.add_argument("id", metavar="ID", help="of the request")
    get.completes["id"] = "="
    add_output_flag(get, ("table", "json", "yaml"))
    abort = group.add(
        "abort",
        _abort,
        description="End requests that run, on every replica they are at.",
        examples=("omnictl request abort chatcmpl-8d48c15f6f5f1d28",),
    )
    abort.add_argument("ids", metavar="ID", nargs="+", help="of a request")
    abort.completes["ids"] = "="
    add_output_flag(abort, ACTION_FORMATS)


async def _list(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    found: list[tuple[str, pb.RequestSummary]] = []
    silent: dict[str, int] = {}
    for address in settings.require_gateway():
        async with connect.gateway(dataclasses.replace(settings, gateway=(address,))) as gateway:
            request = pb.ListRequestsRequest(model=args.model, include_ended=args.all, page_size=1000)
            while True:
                page: pb.ListRequestsResponse = await gateway.call(gateway.inference.ListRequests, request)
                found += [(address, row) for row in page.requests]
                if page.silent_processes:
                    silent[address] = max(page.silent_processes, silent.get(address, 0))
                if not page.next_page_token:
                    break
                request.page_token = page.next_page_token
    if args.output in ("json", "yaml"):
        listed = [{"gateway": address, **output.to_dict(row)} for address, row in found]
        output.print_structured({"requests": listed}, args.output)
    elif found:
        text = output.table(_list_columns(), found)
        print(text.partition("\n")[2] if args.no_headers else text)
    else:
        print("no requests", file=sys.stderr)
    for address, count in silent.items():
        print(f"warning: incomplete: {count} process(es) of gateway {address} did not answer", file=sys.stderr)
    return 0


def _list_columns() -> list[Column[tuple[str, pb.RequestSummary]]]:
    return [
        # A companion stands under its request.
        Column("REQUEST", lambda r: ("  " if r[1].parent_id else "") + failures.one_line(r[1].request_id)),
        Column("MODEL", lambda r: r[1].model),
        Column("STATUS", lambda r: r[1].status),
        Column("REPLICAS", lambda r: ",".join(f"{ref.stage.stage_id}/{ref.replica_id}" for ref in r[1].replicas)),
        Column("GATEWAY", lambda r: r[0]),
    ]


async def _get(args: argparse.Namespace) -> int:
    request = pb.GetRequestRequest(request_id=args.id)

    async def ask(gateway: connect.Gateway) -> tuple[str, pb.GetRequestResponse] | None:
        try:
            return gateway.address, await gateway.call(gateway.inference.GetRequest, request)
        except NotFoundError:
            return None

    answer = await _first(settings_of(args), ask)
    if answer is None:
        raise _unknown(args.id)
    address, found = answer
    if args.output in ("json", "yaml"):
        output.print_structured({"gateway": address, **output.to_dict(found)}, args.output)
    else:
        print(describe(found, address))
    return 0


async def _abort(args: argparse.Namespace) -> int:
    report = output.Report(args.output)
    settings = settings_of(args)
    try:
        for request_id in args.ids:
            request = pb.InferenceServiceAbortRequest(request_id=request_id)

            async def ask(gateway: connect.Gateway, request: pb.InferenceServiceAbortRequest = request) -> bool | None:
                answer: pb.InferenceServiceAbortResponse = await gateway.call(gateway.inference.Abort, request)
                return answer.found or None

            if await _first(settings, ask) is None:
                raise _unknown(request_id)
            report.done(request_id, "aborted")
    finally:
        report.end()
    return 0


async def _first(settings: Settings, ask: Callable[[connect.Gateway], Awaitable[T | None]]) -> T | None:
    """The first answer but None that ``ask`` has of one of the gateways; None if none has. Raises ``UnavailableError``
    if that is all that could be found out."""
    failure: UnavailableError | None = None
    for address in settings.require_gateway():
        try:
            async with connect.gateway(dataclasses.replace(settings, gateway=(address,))) as gateway:
                if (answer := await ask(gateway)) is not None:
                    return answer
        except UnavailableError as error:
            failure = error
    if failure is not None:
        raise failure
    return None


def _unknown(request_id: str) -> OmniError:
    return NotFoundError(
        f"no request {request_id!r} runs at a gateway that was asked, or ended there lately",
        reason="REQUEST_NOT_FOUND",
        metadata={"hint": "name the gateway that has it with --gateway; those that ended long ago are forgotten"},
    )


def describe(found: pb.GetRequestResponse, gateway: str) -> str:
    """The timeline as a table, times counted from its first entry."""
    head = f"Request:  {failures.one_line(found.request_id)}\nStatus:   {found.status}\nGateway:  {gateway}"
    if not found.timeline:
        return head
    begun_ns = found.timeline[0].time.ToNanoseconds()
    columns: list[Column[pb.TimelineEvent]] = [
        Column("AFTER", lambda e: f"{(e.time.ToNanoseconds() - begun_ns) / 1e6:.1f} ms"),
        Column("EVENT", lambda e: failures.one_line(e.event)),
        Column("REPLICA", lambda e: rows.replica_name(e.replica) if e.HasField("replica") else ""),
        Column("DETAIL", lambda e: failures.one_line(e.detail)),
    ]
    return f"{head}\n\n{output.table(columns, found.timeline)}"
