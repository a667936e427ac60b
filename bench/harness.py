"""What every benchmark shares: the same habit of running, printing and storing.

``python -m bench.NAME [--quick]`` prints a table, compares with named baselines measured in the same run, and writes
``bench/results/NAME.json`` with flat keys that carry their unit, beside a plot of the same name.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"
_CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LINE_BYTES = 1 << 26  # what helpers say of 10,000 replicas in one line


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the flags every benchmark has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--quick", action="store_true", help="fewer repetitions: to see that it runs, not to quote")
    return made


def arguments(description: str) -> argparse.Namespace:
    """The flags of a benchmark that has no others."""
    return parser(description).parse_args()


def machine_line() -> str:
    """One line about where the figures come from."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    load = os.getloadavg()[0]
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores of {model}, {system}, load {load:.2f}"


def cpu_seconds(pid: int) -> float:
    """User plus system time of a process so far, in seconds (fields 14 and 15 of /proc/PID/stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS_PER_S


def busy_seconds() -> float:
    """CPU time of all processes of this machine so far (first line of /proc/stat, without idle and waiting)."""
    user, nice, system, _, _, irq, softirq, steal, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq + steal) / _CLOCK_TICKS_PER_S


def percentile(values: Sequence[float], percent: float) -> float:
    """The given percentile, by nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def summary(values: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    return statistics.median(values), percentile(values, 99)


def pin(pid: int, cores: set[int]) -> None:
    """Keep a process, all its threads, on the given cores."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


class Service:
    """A service of ours as a child process, for as long as a benchmark needs it."""

    def __init__(self, name: str, argv: Sequence[str], run_dir: Path) -> None:
        self.name = name
        self._ready_file = run_dir / f"{name}.ready.json"
        self._log_path = run_dir / f"{name}.log"
        with self._log_path.open("wb") as log:
            # From byte code, as what is installed: compiling it anew takes a start a third longer.
            env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
            self.process = subprocess.Popen(
                [*argv, "--ready-file", str(self._ready_file)], stdout=log, stderr=subprocess.STDOUT, env=env
            )

    @classmethod
    def ours(cls, name: str, service: str, run_dir: Path, *flags: str) -> Service:
        """``omniplane SERVICE FLAGS``."""
        return cls(name, [sys.executable, "-m", "omniplane", service, *flags, "--die-with-parent"], run_dir)

    async def ready(self, timeout_s: float = 60.0) -> Mapping[str, object]:
        """Its ready file, once it serves. Raises ``RuntimeError`` with its log if it ends or stays silent."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not self._ready_file.exists():
            if self.process.poll() is not None or loop.time() > deadline:
                raise RuntimeError(f"{self.name} did not start:\n{self.log_tail()}")
            await asyncio.sleep(0.02)
        content: dict[str, object] = json.loads(self._ready_file.read_text())
        return content

    @property
    def serves(self) -> bool:
        """Its ready file is there."""
        return self._ready_file.exists()

    def log_tail(self) -> str:
        """The end of what it said."""
        return self._log_path.read_text()[-3000:]

    def stop(self) -> None:
        """End it, politely and then not."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def resident_mib(pid: int) -> float:
    """Resident memory of a process, in MiB (VmRSS of /proc/PID/status)."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


Command = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


async def serve_lines(answer: Command) -> None:
    """In a helper process: answer each line of JSON on stdin with one on stdout, until stdin ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        print(json.dumps(await answer(json.loads(line))), flush=True)


class Helper:
    """The other end of ``serve_lines``: a process that a benchmark asks for things. Use as ``async with``."""

    def __init__(self, name: str, argv: Sequence[str], **popen: Any) -> None:
        """``popen``: further arguments of ``subprocess.Popen``."""
        self.name = name
        self._argv = argv
        self._popen = popen
        self._started: asyncio.subprocess.Process | None = None

    @property
    def _process(self) -> asyncio.subprocess.Process:
        assert self._started is not None, "not started"
        return self._started

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def __aenter__(self) -> Helper:
        self._started = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
            **self._popen,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 10)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def ask(self, do: str, **fields: object) -> dict[str, Any]:
        """One command, one answer. Raises ``RuntimeError`` if it has ended."""
        stdout = self._process.stdout
        assert stdout is not None, "it was asked for"
        self._stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        line = await stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {await self._process.wait()}; its errors are above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    @property
    def _stdin(self) -> asyncio.StreamWriter:
        stdin = self._process.stdin
        assert stdin is not None, "it was asked for"
        return stdin


def report(name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print one table."""
    table = Table(title=f"{name}: {title}", title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=120).print(table)


def write_table(page: Path, name: str, lines: Sequence[str]) -> None:
    """Put Markdown between the marks of ``python -m bench.NAME`` in a page of the documentation."""
    text = page.read_text()
    begin = f"<!-- table: python -m bench.{name} -->\n"
    before, rest = text.split(begin)
    _, after = rest.split("<!-- end of table -->", 1)
    page.write_text(before + begin + "\n".join(lines) + "\n<!-- end of table -->" + after)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """The lines of a table in Markdown."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    cells = [[f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    return [*lines, *(f"| {' | '.join(row)} |" for row in cells)]


def store(name: str, figures: Mapping[str, float | int | str], quick: bool, folder: Path = RESULTS) -> Path:
    """Write ``bench/results/NAME.json``; quick runs go to ``NAME.quick.json`` and are not for quoting."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}{'.quick' if quick else ''}.json"
    rounded = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in figures.items()}
    path.write_text(json.dumps({"machine": machine_line(), **rounded}, indent=2) + "\n")
    return path
