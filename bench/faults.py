"""What clients see when workers die or hang, the control plane is away, or everything restarts: ours and the peers.

    python -m bench.faults [--peers DIR] [--only ours,vllm-router] [--cases F1,F4] [--quick]

Two workers, all processes real; every router with its defaults.

* **F1** 50 requests a second, SIGKILL of one worker after 5 s, started again 15 s later: 750 requests without it.
* **F2** 20 requests a second, SIGSTOP of one worker after 5 s, for 45 s: 900 requests; clients give up after 10 s.
* **F3** 16 streams of 64 tokens, 20 ms apart; SIGKILL of one worker after 0.6 s.

Ours alone, since no peer has stages, or a control plane, or restarts that it steers:

* **F4** 16 chats in text and audio through thinker, two talkers, two code2wavs, tokens as in F3; when half of the audio
  has come, one talker or code2wav is killed, or hung. Every text and every byte of audio is compared with an
  undisturbed run. The rows "busy" have tokens twice as fast, which takes nearly all of two cores.
* **F5** the control plane is killed for 30 s under 20 requests a second, then a worker is killed and started again.
* **F6** ``omnictl restart`` of every replica of the speech pipeline under streams of text and audio, with two of every
  stage; then with one thinker, for which requests wait while it starts.

What is measured replaces the same rows of earlier runs in ``bench/results/faults.json`` and ``docs/faults.md``, so the
table may be made in parts. After every case of ours all gauges of requests, calls, bindings and handles must be zero.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import fcntl
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from bench import faults_speech, harness
from bench.faults_load import Client, Outcome, count_errors, difference
from bench.faults_ours import TEXT, Cluster, Routes, until
from bench.faults_peers import PEERS, PeerCluster, expected_stream
from bench.gateway_processes import compiled

CASES = ("F1", "F2", "F3", "F4", "F5", "F6")
KNOWN = ("ours", *PEERS)
STREAMS = 16
STREAM_TTFT_MS, STREAM_ITL_MS = 20, 20
KILL_STREAMS_AFTER_S = 0.6
READMIT_S = 60.0
"""Longest that a restarted worker is waited for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Seconds and rates of the cases."""

    before_s: float = 5.0
    killed_s: float = 15.0
    killed_per_s: float = 50.0
    hung_s: float = 45.0
    hung_per_s: float = 20.0
    after_s: float = 10.0
    """The load of F1 goes on for so long after the restart."""
    away_s: float = 30.0


QUICK = Plan(before_s=1.0, killed_s=2.0, after_s=2.0, hung_s=5.0, away_s=3.0)


def _slower_ms(outcomes: Sequence[Outcome], before: Sequence[Outcome]) -> float:
    """How much the slowest good answer took over the median from before the fault."""
    good = [outcome.took_s for outcome in outcomes if not outcome.error]
    normal_s = statistics.median([outcome.took_s for outcome in before] or [0.0])
    return (max(good, default=0.0) - normal_s) * 1e3


def _result(outcomes: Sequence[Outcome], **figures: Any) -> dict[str, Any]:
    return {"requests": len(outcomes), "failed": sum(bool(o.error) for o in outcomes), **figures} | {
        "errors": ", ".join(f"{count} × {kind}" for kind, count in count_errors(outcomes).items())
    }


# --- ours ---------------------------------------------------------------------------------------------------------


async def our_kill(run_dir: Path, plan: Plan) -> dict[str, Any]:
    """F1."""
    async with Cluster(run_dir, TEXT) as cluster, Client(cluster.port, TEXT) as client, Routes(cluster, 0) as routes:
        victim = cluster.of_stage(0)[1]
        begin_s = time.monotonic()
        load = asyncio.create_task(client.steady(plan.killed_per_s, plan.before_s + plan.killed_s + plan.after_s))
        await asyncio.sleep(plan.before_s)
        kill_s, old = time.monotonic(), victim.replica
        cluster.kill(victim)
        await asyncio.sleep(plan.killed_s)
        restart_s = time.monotonic()
        cluster.start(victim)
        await cluster.ready(victim)
        ready_s = time.monotonic()
        came_back = await until(lambda: victim.replica in routes.first_s, READMIT_S)
        back_s = routes.first_s.get(victim.replica, float("inf")) - ready_s if came_back else float("inf")
        await load
        unpicked_s = max(0.0, routes.last_s.get(old, 0.0) - kill_s)
        after = client.between(kill_s, restart_s)
        result = _result(
            client.between(kill_s, float("inf")),
            slower_ms=_slower_ms(after, client.between(begin_s, kill_s - plan.before_s / 10)),
            unpicked_s=unpicked_s,
            readmitted_s=max(0.0, back_s),
        )
        return result | {"leftovers": await cluster.leftovers()}


async def our_hang(run_dir: Path, plan: Plan) -> dict[str, Any]:
    """F2."""
    async with Cluster(run_dir, TEXT) as cluster, Client(cluster.port, TEXT) as client, Routes(cluster, 0) as routes:
        victim = cluster.of_stage(0)[1]
        begin_s = time.monotonic()
        load = asyncio.create_task(client.steady(plan.hung_per_s, plan.before_s + plan.hung_s))
        await asyncio.sleep(plan.before_s)
        stop_s = time.monotonic()
        cluster.freeze(victim)
        await load
        after = client.between(stop_s, float("inf"))
        slower_ms = _slower_ms(after, client.between(begin_s, stop_s))
        unpicked_s = max(0.0, routes.last_s.get(victim.replica, 0.0) - stop_s)
        cluster.thaw(victim)
        return _result(after, slower_ms=slower_ms, unpicked_s=unpicked_s) | {"leftovers": await cluster.leftovers()}


async def our_streams(run_dir: Path, plan: Plan) -> dict[str, Any]:
    """F3."""
    async with (
        Cluster(run_dir, TEXT, ttft_ms=STREAM_TTFT_MS, itl_ms=STREAM_ITL_MS) as cluster,
        Client(cluster.port, TEXT, timeout_s=60) as client,
    ):
        questions = [f"Question {number}, please." for number in range(STREAMS)]
        undisturbed = await asyncio.gather(*(client.ask(question, stream=True) for question in questions))
        normal_s = statistics.median(outcome.took_s for outcome in undisturbed)
        running = asyncio.gather(*(client.ask(question, stream=True) for question in questions))
        await asyncio.sleep(KILL_STREAMS_AFTER_S)
        cluster.kill(cluster.of_stage(0)[1])
        found = await running
        pairs = list(zip(found, undisturbed, strict=True))
        exact = sum(not got.error and got.text == wanted.text and not wanted.error for got, wanted in pairs)
        for got, wanted in pairs:
            if not got.error and got.text != wanted.text:
                got.error = difference(got.text, wanted.text)
        slower_ms = (max(outcome.took_s for outcome in found) - normal_s) * 1e3
        return _result(found, exact=exact, slower_ms=slower_ms) | {"leftovers": await cluster.leftovers()}


async def our_control_plane(run_dir: Path, plan: Plan) -> dict[str, Any]:
    """F5."""
    async with Cluster(run_dir, TEXT) as cluster, Client(cluster.port, TEXT) as client, Routes(cluster, 0) as routes:
        load = asyncio.create_task(client.steady(plan.hung_per_s, 2 * plan.before_s + plan.away_s + 5))
        begin_s = time.monotonic()
        await asyncio.sleep(plan.before_s)
        kill_s = time.monotonic()
        cluster.kill(cluster.control_plane)
        await asyncio.sleep(plan.away_s)
        cluster.start(cluster.control_plane)
        await cluster.control_plane.running.ready()
        victim = cluster.of_stage(0)[1]
        cluster.kill(victim)  # who comes now must be found, although everybody was alone for so long
        cluster.start(victim)
        await cluster.ready(victim)
        ready_s = time.monotonic()
        came_back = await until(lambda: victim.replica in routes.first_s, READMIT_S)
        back_s = routes.first_s[victim.replica] - ready_s if came_back else float("inf")
        await load
        after = client.between(kill_s, float("inf"))
        slower_ms = _slower_ms(after, client.between(begin_s, kill_s))
        result = _result(after, slower_ms=slower_ms, readmitted_s=max(0.0, back_s))
        return result | {"leftovers": await cluster.leftovers()}


# --- peers --------------------------------------------------------------------------------------------------------


class Peers:
    """F1 to F3 for one router."""

    def __init__(self, name: str, peers: Path, mock: Path) -> None:
        self._peer = PEERS[name]
        self._peers, self._mock = peers, mock

    def _cluster(self, run_dir: Path, **delays: float) -> PeerCluster:
        return PeerCluster(self._peer, self._peers, run_dir, self._mock, **delays)

    async def kill(self, run_dir: Path, plan: Plan) -> dict[str, Any]:
        """F1."""
        async with self._cluster(run_dir) as cluster, Client(cluster.port, "mock") as client:
            begin_s = time.monotonic()
            seen: list[float] = []

            def back() -> bool:
                if not seen:
                    late = [o for o in client.outcomes if o.begun_s > restart_s and cluster.came_from_restarted(o.text)]
                    seen.extend(o.begun_s for o in late)
                return bool(seen)

            restart_s = float("inf")
            longest_s = plan.before_s + plan.killed_s + (5 if self._peer.own_workers else READMIT_S)
            load = asyncio.create_task(client.steady(plan.killed_per_s, longest_s, back))
            await asyncio.sleep(plan.before_s)
            kill_s = time.monotonic()
            cluster.kill()
            await asyncio.sleep(plan.killed_s)
            restart_s = time.monotonic()
            cluster.restart()
            await load
            result = _result(
                client.between(kill_s, restart_s),
                slower_ms=_slower_ms(
                    client.between(kill_s, restart_s), client.between(begin_s, kill_s - plan.before_s / 10)
                ),
            )
            if not self._peer.own_workers:
                result["readmitted_s"] = min(seen) - restart_s if seen else float("inf")
            return result

    async def hang(self, run_dir: Path, plan: Plan) -> dict[str, Any]:
        """F2."""
        async with self._cluster(run_dir) as cluster, Client(cluster.port, "mock") as client:
            begin_s = time.monotonic()
            load = asyncio.create_task(client.steady(plan.hung_per_s, plan.before_s + plan.hung_s))
            await asyncio.sleep(plan.before_s)
            stop_s = time.monotonic()
            cluster.freeze()
            await load
            after = client.between(stop_s, float("inf"))
            lost = [outcome.begun_s - stop_s for outcome in after if outcome.error]
            slower_ms = _slower_ms(after, client.between(begin_s, stop_s))
            return _result(after, slower_ms=slower_ms, unpicked_s=max(lost, default=0.0))

    async def streams(self, run_dir: Path, plan: Plan) -> dict[str, Any]:
        """F3."""
        delays = {"ttft_ms": STREAM_TTFT_MS, "itl_ms": STREAM_ITL_MS}
        async with self._cluster(run_dir, **delays) as cluster, Client(cluster.port, "mock", timeout_s=20) as client:
            normal = await client.ask(stream=True)
            if not self._peer.own_workers and normal.text != expected_stream():
                raise RuntimeError(f"an undisturbed stream said {normal.text!r}")
            running = asyncio.gather(*(client.ask(stream=True) for _ in range(STREAMS)))
            await asyncio.sleep(KILL_STREAMS_AFTER_S)
            cluster.kill()
            found = await running
            for outcome in found:
                if not outcome.error and outcome.text != normal.text:
                    outcome.error = difference(outcome.text, normal.text)
            exact = sum(not outcome.error for outcome in found)
            slower_ms = (max(outcome.took_s for outcome in found) - normal.took_s) * 1e3
            return _result(found, exact=exact, slower_ms=slower_ms)


# --- all of it ----------------------------------------------------------------------------------------------------


async def measure(names: Sequence[str], cases: Sequence[str], plan: Plan, peers: Path) -> list[dict[str, Any]]:
    """One row for every case of every router, and for every part of F4 and F6."""
    rows: list[dict[str, Any]] = []

    def keep(case: str, name: str, result: dict[str, Any]) -> None:
        rows.append({"case": case, "router": name, **result})
        print(f"{case} {name}: {result}", flush=True)

    with tempfile.TemporaryDirectory(prefix="omniplane-faults-") as folder:
        base = Path(folder)
        mock = compiled("gateway_mock", base)
        for name in names:
            if name == "ours":
                steps = {"F1": our_kill, "F2": our_hang, "F3": our_streams, "F5": our_control_plane}
            elif mock is not None:
                peer = Peers(name, peers, mock)
                steps = {"F1": peer.kill, "F2": peer.hang, "F3": peer.streams}
            for case in cases:
                run_dir = base / f"{case}-{name}"
                if case in steps:
                    keep(case, name, await steps[case](run_dir, plan))
                elif name == "ours" and case == "F4":
                    for part, result in (await faults_speech.lost_downstream(run_dir)).items():
                        keep(f"F4 {part}", name, result)
                elif name == "ours" and case == "F6":
                    for part, result in (await faults_speech.rolling_restarts(run_dir)).items():
                        keep(part, name, result)
    return rows


_COLUMNS = ("case", "router", "requests", "failed", "exact", "slower, ms", "unpicked, s", "readmitted, s", "left over")
_FIELDS = ("requests", "failed", "exact", "slower_ms", "unpicked_s", "readmitted_s", "leftovers")
_PARTS = ("F1", "F2", "F3", *(f"F4 {part}" for part in faults_speech.PARTS), "F5", *faults_speech.RESTARTS)
Figures = dict[str, float | int | str]


def _prefix(case: str, router: str) -> str:
    return f"{case}_{router}".replace(", ", "_").replace(" ", "_").replace("-", "_")


def _figures(rows: Sequence[dict[str, Any]]) -> Figures:
    """Flat figures of rows."""
    found: Figures = {}
    for row in rows:
        for name, value in row.items():
            if name == "leftovers":
                value = len(value)
            if name not in ("case", "router"):
                found[f"{_prefix(row['case'], row['router'])}_{name}"] = "never" if value == float("inf") else value
    return found


def _written(field: str, value: float | int | str) -> object:
    if not isinstance(value, float):
        return value
    return f"{value:.0f}" if field.endswith("_ms") else f"{value:.2f}"


def _lines(found: Figures) -> list[list[object]]:
    """The table of flat figures."""
    lines: list[list[object]] = []
    for case in _PARTS:
        for router in KNOWN:
            values = [found.get(f"{_prefix(case, router)}_{name}", "–") for name in _FIELDS]
            if values[0] != "–":
                lines.append([case, router, *map(_written, _FIELDS, values)])
    return lines


def _kept(quick: bool) -> Figures:
    """Figures of earlier runs of other parts, on this machine."""
    path = harness.RESULTS / f"faults{'.quick' if quick else ''}.json"
    if not path.exists():
        return {}
    found: Figures = json.loads(path.read_text())
    found.pop("machine")
    return found


def _keep(rows: Sequence[dict[str, Any]], quick: bool) -> None:
    """Put what was measured in the place of what was measured before, and write the table."""
    harness.RESULTS.mkdir(exist_ok=True)
    folder = os.open(harness.RESULTS, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # parts may be measured side by side
        _merge(rows, quick)
    finally:
        os.close(folder)


def _merge(rows: Sequence[dict[str, Any]], quick: bool) -> None:
    found = _kept(quick)
    for row in rows:
        prefix = f"{_prefix(row['case'], row['router'])}_"
        found = {name: value for name, value in found.items() if not name.startswith(prefix)}
    found |= _figures(rows)
    print(f"wrote {harness.store('faults', found, quick)}")
    if not quick:
        lines = [f"{harness.machine_line()}.", "", *harness.markdown(_COLUMNS, _lines(found))]
        harness.write_table(harness.DOCS / "faults.md", "faults", lines)


async def main(arguments: argparse.Namespace) -> int:
    """Measure, print, store."""
    wanted = [name for name in arguments.only.split(",") if name] or list(KNOWN)
    if unknown := set(wanted) - set(KNOWN):
        raise SystemExit(f"--only: unknown {sorted(unknown)}; known: {', '.join(KNOWN)}")
    peers = arguments.peers.resolve()
    names = []
    for name in wanted:
        if why := PEERS[name].missing(peers) if name in PEERS else "":
            print(f"skipped: {name}: {why}")
        else:
            names.append(name)
    rows = await measure(names, arguments.cases.split(","), QUICK if arguments.quick else Plan(), peers)
    print(harness.machine_line())
    harness.report("faults", "what clients saw", _COLUMNS, _lines(_figures(rows)))
    for row in rows:
        if row["errors"] or row.get("leftovers"):
            print(f"{row['case']} {row['router']}: {row['errors']} {row.get('leftovers') or ''}")
    _keep(rows, arguments.quick)
    ours = [row for row in rows if row["router"] == "ours"]
    return 1 if any(row["failed"] or row.get("leftovers") for row in ours) else 0


def _arguments() -> argparse.Namespace:
    parser = harness.parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="directory of scripts/bench-peers")
    parser.add_argument("--only", default="", help="routers, comma-separated: ours and the peers")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    arguments: argparse.Namespace = parser.parse_args()
    return arguments


if __name__ == "__main__":
    raise SystemExit(uvloop.run(main(_arguments())))
