"""Millions of transfers under everything that goes wrong, with every byte checked and nothing left behind.

    python -m bench.soak [--small 1000000] [--large 2000x64MiB] [--connector shm] [--consumers 2] [--kills 12]

One producer and several consumers (``bench.soak_ends``) hand over small payloads, 64 to a message as in flows (1 byte
to 256 KiB, tensors of several types and texts), and large ones, at the same time. What each should hold follows from
its number, and readers compare all of it. On purpose, at random: requests are cleaned up while their chunks are read,
publishing is cancelled half way, chunks are never sent or sent when their time to live is over, readers linger. The
supervisor kills (SIGKILL) the producer and the consumers in turns until 70 % of the work is done; the rest runs without
kills, so that memory and descriptors can be seen to stay as they are.

Ends with exit code 1 and says why if any byte was wrong or read after its time, anything was refused for no reason,
the pool was not empty in the end, /dev/shm has anything new, a process did not end, or descriptors or private memory
grew. Samples are plotted (``soak.png``); private memory is RssAnon + RssFile, since consumers map the pool itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench import harness, soak_report
from bench.soak_ends import PRODUCER, Settings
from bench.soak_plan import Counters
from bench.soak_report import Sample
from bench.transfer import size_bytes
from connectors.payload import JsonValue
from omnicore import process

ROOT = Path(__file__).parents[1]
_STALL_S = 120.0
_STOP_S = 90.0
_SAMPLE_S = 0.5
_KILLING_SHARE = 0.7
_SHM = Path("/dev/shm")
_OPTIONS: dict[str, dict[str, JsonValue]] = {
    # Half of the small payloads travel in their handles, half through the connector.
    "shm": {"shm_threshold_bytes": 4096, "put_wait_s": 60},
    "grpc": {"inline_bytes": 4096, "put_wait_s": 60},
    "mooncake": {"inline_bytes": 4096, "put_wait_s": 60, "host": "127.0.0.1"},
    "nixl": {"inline_bytes": 4096, "put_wait_s": 60},
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much of everything."""

    small: int = 1_000_000
    large: int = 2_000
    large_bytes: int = 64 << 20
    connector: str = "shm"
    consumers: int = 2
    kills: int = 12
    ttl_s: float = 2.0

    @property
    def pool_bytes(self) -> int:
        """Room for fewer large payloads than are under way, so that some have to wait."""
        return 4 * self.large_bytes + (96 << 20)


@dataclasses.dataclass(slots=True)
class Outcome:
    """What a soak found."""

    complaints: list[str]
    figures: dict[str, float | int | str]
    samples: list[Sample]
    kills: list[float]
    """Seconds since the start."""


class Soak:
    """The supervisor: starts, kills, samples, judges."""

    def __init__(self, plan: Plan, run_dir: Path) -> None:
        self.plan = plan
        self.counters = Counters(plan.consumers + 1)
        self.processes: dict[int, asyncio.subprocess.Process] = {}
        self.samples: list[Sample] = []
        self.kills: list[float] = []
        self.complaints: list[str] = []
        self._run_dir = run_dir
        self._begun_s = time.monotonic()

    @property
    def progress(self) -> float:
        """0 to 1: by the kind of transfer that has more of its work before it."""
        shares = [
            self.counters.sum(name) / wanted
            for name, wanted in (("small", self.plan.small), ("large", self.plan.large))
            if wanted
        ]
        return min(shares)

    async def run(self) -> Outcome:
        """All of it."""
        before = _shared_memory_files()
        for row in range(self.plan.consumers + 1):
            await self._start(row)
        sampler = asyncio.create_task(self._sample())
        try:
            await self._kill_now_and_then()
            await self._finish()
        finally:
            sampler.cancel()
            await self._end_all()
        if left := _shared_memory_files() - before:
            self.complaints.append(f"/dev/shm has new files: {', '.join(sorted(left))}")
        self._judge_counters()
        self.complaints += soak_report.growth(self.samples, max(self.kills, default=0.0))
        return Outcome(self.complaints, self._figures(), self.samples, self.kills)

    async def _start(self, row: int) -> None:
        plan = self.plan
        self.counters.add(row, "incarnation")
        options = dict(_OPTIONS[plan.connector])
        if plan.connector not in ("shm", "grpc"):  # consumers receive into as much as the producer publishes into
            options |= {"pool_bytes": plan.pool_bytes, "receive_pool_bytes": plan.pool_bytes}
        settings = Settings(
            row=row,
            consumers=plan.consumers,
            counters_fd=self.counters.fd,
            socket_path=str(self._run_dir / "soak.sock"),
            connector=plan.connector,
            options=options,
            pool_bytes=plan.pool_bytes if plan.connector == "shm" else 0,
            small=plan.small,
            large=plan.large,
            large_bytes=plan.large_bytes,
            ttl_s=plan.ttl_s,
            windows=(8 if plan.small else 0, 6 if plan.large else 0),
        )
        role = "produce" if row == PRODUCER else "consume"
        command = [sys.executable, "-m", "bench.soak_ends", role, json.dumps(dataclasses.asdict(settings))]
        with (self._run_dir / "soak.log").open("ab") as log:
            self.processes[row] = await asyncio.create_subprocess_exec(
                *process.dying_with_parent(command, signal.SIGKILL),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[self.counters.fd],
                cwd=ROOT,
            )

    async def _kill_now_and_then(self) -> None:
        """Each process in turn, whenever as much more of the work is done."""
        for number in range(self.plan.kills):
            await self._reach((number + 1) / (self.plan.kills + 1) * _KILLING_SHARE)
            row = number % (self.plan.consumers + 1)
            victim = self.processes[row]
            if victim.returncode is not None:
                return  # of itself: ``_finish`` says so
            victim.kill()
            await victim.wait()
            self.kills.append(time.monotonic() - self._begun_s)
            await self._start(row)

    async def _reach(self, share: float) -> None:
        """Return when so much is done. Raises ``RuntimeError`` if nothing moves any more, or somebody has ended."""
        latest, moved_s = -1, time.monotonic()
        while self.progress < share:
            done = self.counters.sum("reads")
            if done != latest:
                latest, moved_s = done, time.monotonic()
            if time.monotonic() - moved_s > _STALL_S:
                raise RuntimeError(f"nothing was read for {_STALL_S:g} s")
            for row, child in self.processes.items():
                if child.returncode is not None and not (row == PRODUCER and child.returncode == 0):
                    raise RuntimeError(f"process {row} ended by itself with {child.returncode}")
            await asyncio.sleep(0.02)

    async def _finish(self) -> None:
        await self._reach(1.0)
        for row in sorted(self.processes):  # the producer first: consumers acknowledge until it is empty
            if row != PRODUCER:
                self.counters.set(row, "stopped", 1)
            try:
                code = await asyncio.wait_for(self.processes[row].wait(), _STOP_S)
            except TimeoutError:
                self.complaints.append(f"process {row} did not end within {_STOP_S:g} s")
                continue
            if code != 0:
                self.complaints.append(f"process {row} ended with {code}")

    async def _end_all(self) -> None:
        for child in self.processes.values():
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()

    async def _sample(self) -> None:
        while True:
            at_s = time.monotonic() - self._begun_s
            for row, child in self.processes.items():
                if child.returncode is None:
                    with contextlib.suppress(OSError, KeyError):  # it has just ended
                        self.samples.append(soak_report.sample(at_s, row, child.pid, self.counters))
            await asyncio.sleep(_SAMPLE_S)

    def _judge_counters(self) -> None:
        if failures := self.counters.sum("failures"):
            self.complaints.append(f"{failures} transfers went wrong; the log says which")
        for name in ("handles", "claims", "draining", "outstanding"):
            if value := self.counters.get(PRODUCER, name):
                self.complaints.append(f"the producer still holds {value} {name}")

    def _figures(self) -> dict[str, float | int | str]:
        names = (
            *("small", "large", "reads", "bytes", "published", "aborted", "cancelled", "expired"),
            *("refused_aborted", "refused_late", "refused_dead", "lost_consumers", "reconnects", "failures"),
        )
        seconds = time.monotonic() - self._begun_s
        return {
            "connector": self.plan.connector,
            "large_bytes": self.plan.large_bytes,
            "seconds": seconds,
            "kills": len(self.kills),
            **{name: self.counters.sum(name) for name in names},
            "gb_per_s": self.counters.sum("bytes") / seconds / 1e9,
        }


def _shared_memory_files() -> set[str]:
    return {path.name for path in _SHM.iterdir()} if _SHM.is_dir() else set()


async def soak(plan: Plan) -> Outcome:
    """Run one. Raises ``RuntimeError`` with the children's log if it cannot go on."""
    with tempfile.TemporaryDirectory(prefix="omniplane-soak-") as folder:
        try:
            outcome = await Soak(plan, Path(folder)).run()
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{_log_end(Path(folder))}") from error
        if outcome.complaints:
            outcome.complaints.append(f"log:\n{_log_end(Path(folder))}")
        return outcome


def _log_end(folder: Path) -> str:
    log = folder / "soak.log"
    return log.read_text(errors="replace")[-4000:] if log.exists() else ""


async def main(arguments: argparse.Namespace) -> int:
    """Run, print, store, plot."""
    count, _, size = arguments.large.partition("x")
    plan = Plan(
        small=arguments.small,
        large=int(count),
        large_bytes=size_bytes(size or "64MiB"),
        connector=arguments.connector,
        consumers=arguments.consumers,
        kills=arguments.kills,
    )
    if arguments.quick:
        plan = dataclasses.replace(plan, small=20_000, large=40, kills=4)
    print(harness.machine_line())
    outcome = await soak(plan)
    rows = [(name.replace("_", " "), value) for name, value in outcome.figures.items()]
    harness.report("soak", f"{plan.connector}, {plan.consumers} consumers", ["", "count"], rows)
    name = "soak" if plan.connector == "shm" else f"soak_{plan.connector}"
    folder = Path(arguments.out) if arguments.out else harness.RESULTS
    path = harness.store(name, outcome.figures, arguments.quick, folder)
    soak_report.plot(outcome.samples, outcome.kills, path.with_suffix(".png"))
    print(f"wrote {path} and its plot")
    for complaint in outcome.complaints:
        print(f"FAILED: {complaint}")
    return 1 if outcome.complaints else 0


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = harness.parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--small", type=int, default=Plan.small, help="small transfers to verify")
    parser.add_argument("--large", default="2000x64MiB", help="large ones, as COUNTxSIZE")
    parser.add_argument("--connector", default=Plan.connector, choices=sorted(_OPTIONS), help="kind of connector")
    parser.add_argument("--consumers", type=int, default=Plan.consumers)
    parser.add_argument("--kills", type=int, default=Plan.kills, help="SIGKILLs, over all processes in turn")
    parser.add_argument("--out", default="", help="folder for results; default bench/results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(arguments())))
