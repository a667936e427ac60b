"""``omnictl etcd ls|get|watch|leases|status``: the truth behind the tables, through a control plane."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import Any

import grpc.aio

from omni.v1 import inspect_service_pb2 as pb
from omnictl import connect, output, storekeys
from omnictl.commands.base import Commands, add_output_flag, settings_of
from omnictl.parser import Parser, usage_error
from omnictl.streams import responses

_PAGE_SIZE = 500
_RELATIVE = "Keys without a leading '/' are below /omni/v1/{cluster}/."


def add(commands: Commands) -> None:
    """Add ``etcd`` and its commands."""
    group = commands.group(
        "etcd",
        description="Look into etcd, through a control plane: keys, changes, leases.",
        examples=(
            "omnictl etcd ls",
            "omnictl etcd get pipelines/speech",
            "omnictl etcd watch replicas/",
            "omnictl etcd leases",
        ),
        notes=(
            "Nothing is changed, and no access to etcd is needed. With access, etcdctl shows the same:\n"
            "'etcdctl get --prefix /omni/v1/', 'etcdctl watch --prefix /omni/v1/', 'etcdctl lease list'."
        ),
    )
    _add_keys(group)
    leases = group.add(
        "leases",
        _leases,
        description="List leases: what goes when nobody renews them, and when.",
        examples=("omnictl etcd leases", "omnictl etcd leases -o wide"),
    )
    add_output_flag(leases)
    leases.add_argument("--no-headers", action="store_true", help="leave out the headings of a table")
    status = group.add(
        "status",
        _status,
        description="Show etcd's members, leader, version and size.",
        examples=("omnictl etcd status",),
    )
    add_output_flag(status, ("text", "json", "yaml"))


def _add_keys(group: Commands) -> None:
    """The commands about keys."""
    ls = group.add(
        "ls",
        _ls,
        description="List keys, with the gist of their values.",
        examples=("omnictl etcd ls", "omnictl etcd ls replicas/speech/", "omnictl etcd ls -o name"),
        notes=f"{_RELATIVE} JSON and YAML have the whole values; name prints the keys.",
    )
    _add_prefix(ls)
    add_output_flag(ls)
    ls.add_argument("--no-headers", action="store_true", help="leave out the headings of a table")
    get = group.add(
        "get",
        _get,
        description="Print the value of a key, or of all keys below a prefix.",
        examples=(
            "omnictl etcd get replicas/speech/1/0",
            "# several, with their revisions and leases",
            "omnictl etcd get admin/ --prefix -o json",
        ),
        notes=f"{_RELATIVE} The table form prints the value alone, decoded, as YAML.",
    )
    get.add_argument("key", metavar="KEY", help="the key, or the prefix")
    get.completes["key"] = "key"
    get.add_argument("--prefix", action="store_true", help="every key that begins with KEY")
    add_output_flag(get, ("table", "json", "yaml", "name"))
    watch = group.add(
        "watch",
        _watch,
        description="Print every change of keys, until interrupted.",
        examples=(
            "omnictl etcd watch",
            "omnictl etcd watch replicas/speech/",
            "omnictl etcd watch --revision 120 -o json",
        ),
        notes=f"{_RELATIVE} It follows over restarts of control planes and of etcd, resuming where it was.",
    )
    _add_prefix(watch)
    watch.add_argument("--revision", metavar="N", help="begin with the changes after this revision")
    add_output_flag(watch, ("table", "json", "name"))


def _add_prefix(parser: Parser) -> None:
    parser.add_argument(
        "prefix",
        metavar="PREFIX",
        nargs="?",
        default="",
        help="only keys that begin so; all, if left out",
    )
    parser.completes["prefix"] = "key"


async def _ls(args: argparse.Namespace) -> int:
    async with connect.control_plane(settings_of(args)) as plane:
        keys, revision = await list_keys(plane, args.prefix, keys_only=args.output == "name")
    output.print_records(
        storekeys.key_columns(),
        keys,
        args.output,
        kind="keys",
        name=lambda key: key.key,
        to_json=storekeys.to_json,
        more={"revision": str(revision)},
        no_headers=args.no_headers,
        fitted=True,
    )
    return 0


async def list_keys(
    plane: connect.ControlPlane, prefix: str, *, keys_only: bool = False
) -> tuple[list[pb.StoreKey], int]:
    """All keys below ``prefix``, and the revision they are of."""
    keys: list[pb.StoreKey] = []
    request = pb.ListKeysRequest(prefix=prefix, keys_only=keys_only, page_size=_PAGE_SIZE)
    while True:
        page: pb.ListKeysResponse = await plane.call(plane.inspect.ListKeys, request)
        keys += page.keys
        request.page_token = page.next_page_token
        if not page.next_page_token:
            return keys, page.revision


async def _get(args: argparse.Namespace) -> int:
    if not args.key and not args.prefix:
        raise usage_error("KEY: must not be empty; 'omnictl etcd ls' lists all keys", "omnictl etcd get")
    async with connect.control_plane(settings_of(args)) as plane:
        if args.prefix:
            keys, _ = await list_keys(plane, args.key)
        else:
            response: pb.GetKeyResponse = await plane.call(plane.inspect.GetKey, pb.GetKeyRequest(key=args.key))
            keys = [response.key]
    if args.output == "name":
        for key in keys:
            print(key.key)
    elif args.output in ("json", "yaml"):
        shown = [storekeys.to_json(key) for key in keys]
        output.print_structured({"keys": shown} if args.prefix else shown[0], args.output)
    elif not keys:
        print("no keys", file=sys.stderr)
    else:
        for i, key in enumerate(keys):
            if args.prefix:
                print(*(["---"] if i else []), f"# {key.key}", sep="\n")
            output.print_yaml(storekeys.decode(key.value))
    return 0


async def _watch(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    seen = output.whole_number(args.revision, "--revision", "omnictl etcd watch") if args.revision is not None else 0

    def begin(plane: connect.ControlPlane) -> grpc.aio.UnaryStreamCall[Any, pb.WatchKeysResponse]:
        call: grpc.aio.UnaryStreamCall[Any, pb.WatchKeysResponse] = plane.inspect.WatchKeys(
            pb.WatchKeysRequest(prefix=args.prefix, resume_revision=seen)
        )
        return call

    stream = responses(settings, begin, note=lambda text: print(text, file=sys.stderr))
    async with contextlib.aclosing(stream):
        async for response in stream:
            for event in response.events:
                _print_event(event, args.output)
            seen = response.revision
    return 0


def _print_event(event: pb.KeyEvent, form: str) -> None:
    word = pb.KeyEventType.Name(event.type).removeprefix("KEY_EVENT_TYPE_")
    key, deleted = event.key, event.type == pb.KEY_EVENT_TYPE_DELETE
    if form == "json":
        output.print_json({"type": word, **storekeys.to_json(key, values=not deleted)}, compact=True)
    elif form == "name":
        print(key.key, flush=True)
    else:
        print(output.fit(event_line(word, key, time.strftime("%H:%M:%S"))), flush=True)


def event_line(word: str, key: pb.StoreKey, at: str) -> str:
    """One change as text. ``at`` is the time that it was seen."""
    kind, name = storekeys.kind_and_name(key.key)
    gist = storekeys.summary(kind, key.value)
    return f"{at}  {key.mod_revision:>6}  {word:<6}  {kind} {storekeys.short(name)}{f'  {gist}' if gist else ''}"


async def _leases(args: argparse.Namespace) -> int:
    leases: list[pb.StoreLease] = []
    request = pb.ListLeasesRequest()
    async with connect.control_plane(settings_of(args)) as plane:
        while True:
            page: pb.ListLeasesResponse = await plane.call(plane.inspect.ListLeases, request)
            leases += page.leases
            request.page_token = page.next_page_token
            if not page.next_page_token:
                break
    leases.sort(key=lambda lease: (list(lease.keys), lease.lease_id))
    output.print_records(
        storekeys.lease_columns(),
        leases,
        args.output,
        kind="leases",
        name=lambda lease: storekeys.lease_text(lease.lease_id),
        fitted=True,
        to_json=lambda lease: output.to_dict(lease) | {"lease_id": storekeys.lease_text(lease.lease_id)},
        no_headers=args.no_headers,
    )
    return 0


async def _status(args: argparse.Namespace) -> int:
    async with connect.control_plane(settings_of(args)) as plane:
        status: pb.GetStoreStatusResponse = await plane.call(plane.inspect.GetStoreStatus, pb.GetStoreStatusRequest())
    if args.output in ("json", "yaml"):
        output.print_structured(output.to_dict(status), args.output)
        return 0
    print(f"Version:   {status.version}")
    print(f"Revision:  {status.revision}")
    print(f"Database:  {status.db_size_bytes / 2**20:.1f} MiB")
    print(f"\n{output.table(storekeys.member_columns(), status.members)}")
    return 0
