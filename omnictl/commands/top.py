"""``omnictl top``: who works how much, as it changes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import shutil
import sys
import time
from collections.abc import Iterator

from omni.v1 import inspect_service_pb2, pipeline_pb2
from omnicore.clock import SYSTEM_CLOCK
from omnicore.errors import OmniError
from omnicore.tasks import together
from omnictl import connect, failures, load, output, refs
from omnictl.commands.base import Commands, add_output_flag, settings_of
from omnictl.parser import usage_error
from omnictl.settings import Settings, seconds

_CLEAR, _HOME, _CLEAR_LINE = "\x1b[J", "\x1b[H", "\x1b[K"
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"
# Between the two samples of --once, to have speeds.
_ONCE_S = 1.0


def add(commands: Commands) -> None:
    """Add ``top``."""
    parser = commands.add(
        "top",
        _run,
        description="Show the load, speed and heartbeats of replicas, live.",
        examples=(
            "omnictl top",
            "# one stage, the busiest first",
            "omnictl top speech/talker --sort load",
            "# once, for a pipe",
            "omnictl top --once -o json",
        ),
        notes=(
            "RUN and WAIT are requests, KV the share of the KV cache in use, OUT/S what the engine puts out a second\n"
            "(tokens, chunks of audio), BEAT the age of the last heartbeat, XFERS data on its way to other stages.\n"
            "Every control plane that --server names is asked, since each knows only the replicas that beat there.\n"
            "Ctrl-C ends it. Where standard output is no terminal, it prints once."
        ),
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="PIPELINE or PIPELINE/STAGE; all, if left out")
    parser.completes["name"] = "stage"
    parser.add_argument("--once", action="store_true", help="print once and end")
    parser.add_argument("--interval", metavar="DURATION", default="2s", help="between two looks")
    parser.add_argument(
        "--sort", metavar="ORDER", choices=tuple(load.SORTS), default="name", help=f"by {', '.join(load.SORTS)}"
    )
    add_output_flag(parser, ("table", "wide", "json", "yaml"))
    parser.add_argument("--no-headers", action="store_true", help="leave out the headings; with --once")


async def _run(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    selector = refs.parse_selector(args.name, depth=2, what="NAME")
    interval_s = seconds(args.interval, "--interval")
    once = args.once or not sys.stdout.isatty()
    if args.output in ("json", "yaml") and not once:
        raise usage_error(f"-o {args.output}: goes with --once", "omnictl top")
    cluster = _Cluster(settings, selector)
    first = await cluster.look()
    if once:
        await asyncio.sleep(_ONCE_S)
        _print_once(cluster.rows(await cluster.look(), first), args)
        return 0
    with _screen():
        await _live(cluster, first, interval_s, args)
    return 0


class _Cluster:
    """Where ``top`` gets its samples from."""

    def __init__(self, settings: Settings, selector: refs.Selector) -> None:
        self._settings = settings
        self._selector = selector
        self._plans: list[pipeline_pb2.Pipeline] = []

    async def look(self) -> load.Sample:
        """The cluster now. Raises what the first control plane that answers says; others may be away."""
        answers, (plans, table) = await together(self._pulses(), self._table())
        self._plans = plans
        return load.Sample(SYSTEM_CLOCK.monotonic(), table.replicas, load.pulses_by_key(answers), stale=table.stale)

    def rows(self, sample: load.Sample, before: load.Sample | None) -> list[load.LoadRow]:
        """The rows of ``sample``."""
        return load.load_rows(sample, before, self._plans)

    async def _table(self) -> tuple[list[pipeline_pb2.Pipeline], connect.ReplicaTable]:
        name, stage = self._selector.pipeline, self._selector.stage
        async with connect.control_plane(self._settings) as plane:
            if not name:
                return await plane.list_pipelines(), await plane.list_replicas()
            plan = await plane.get_pipeline(name)
            return [plan], await plane.list_replicas(name, refs.stage_id_of(plan, stage) if stage else None)

    async def _pulses(self) -> list[inspect_service_pb2.ListPulsesResponse]:
        addresses = self._settings.require_server()
        found = await asyncio.gather(*(self._pulses_of(address) for address in addresses))
        return [answer for answer in found if answer is not None]

    async def _pulses_of(self, address: str) -> inspect_service_pb2.ListPulsesResponse | None:
        """What one control plane hears. None if it is away: the table is there without."""
        one = dataclasses.replace(self._settings, server=(address,))
        request = inspect_service_pb2.ListPulsesRequest(pipeline=self._selector.pipeline)
        try:
            async with connect.control_plane(one) as plane:
                answer: inspect_service_pb2.ListPulsesResponse = await plane.call(plane.inspect.ListPulses, request)
                return answer
        except OmniError:
            return None


def _print_once(found: list[load.LoadRow], args: argparse.Namespace) -> None:
    output.print_records(
        load.columns(),
        sorted(found, key=load.SORTS[args.sort]),
        args.output,
        kind="replicas",
        name=lambda row: row.name,
        to_json=lambda row: row.to_json(),
        no_headers=args.no_headers,
    )


async def _live(cluster: _Cluster, first: load.Sample, interval_s: float, args: argparse.Namespace) -> None:
    before, now, trouble = first, first, ""
    begun = False
    while True:
        if begun:
            try:
                before, now, trouble = now, await cluster.look(), ""
            except OmniError as error:
                trouble = failures.one_line(error.message)
        found = sorted(cluster.rows(now, before), key=load.SORTS[args.sort])
        size = shutil.get_terminal_size()
        stale = "etcd does not answer: the last that was known" if now.stale else ""
        lines = frame(
            found, size.columns, size.lines, time.strftime("%H:%M:%S"), trouble or stale, args.output == "wide"
        )
        sys.stdout.write(_HOME + "".join(f"{line}{_CLEAR_LINE}\r\n" for line in lines[:-1]))
        sys.stdout.write(f"{lines[-1]}{_CLEAR_LINE}{_CLEAR}")
        sys.stdout.flush()
        # The second look comes soon: only then there are speeds.
        await asyncio.sleep(min(_ONCE_S, interval_s) if not begun else interval_s)
        begun = True


def frame(found: list[load.LoadRow], width: int, height: int, at: str, trouble: str, wide: bool) -> list[str]:
    """The lines of one screen of ``width`` columns and ``height`` lines. ``trouble``: why it may be out of date."""
    lines = [output.cut(f"{at}  {load.summary(found)}", width), output.cut(f"! {trouble}" if trouble else "", width)]
    table = output.table(load.columns(), found, wide=wide, gap=2).split("\n")
    room = max(height - len(lines) - 1, 1)
    shown = table[1 : 1 + room]
    if len(table) - 1 > room:
        shown = [*table[1:room], f"… {len(table) - room} more: narrow it with NAME, or --sort load"]
    head = output.cut(table[0], width)
    return [*lines, f"{_BOLD}{head}{_PLAIN}", *(output.cut(line, width) for line in shown)]


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """The terminal's other screen, without a cursor; put back whatever happens."""
    sys.stdout.write(_ENTER)
    try:
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
