"""What ``bench.soak`` sees of its processes while they run, and the plot of it."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.soak_plan import Counters

_MIB = 1 << 20
_SETTLED = 0.25
"""Of the time after the last kill: how much does not count, since processes begin small."""
_FEWEST_SAMPLES = 24
_GROWTH_MIB, _GROWTH_SHARE = 8.0, 0.03
_MORE_DESCRIPTORS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment."""

    at_s: float
    row: int
    private_mib: float
    """RssAnon + RssFile."""
    shared_mib: float
    """RssShmem: of the pools that are mapped."""
    descriptors: int
    handles: int
    free_mib: float
    reads: int
    """Of all consumers, so far."""


def sample(at_s: float, row: int, pid: int, counters: Counters) -> Sample:
    """Look at a process. Raises ``OSError`` or ``KeyError`` if it has ended."""
    status = Path(f"/proc/{pid}/status").read_text()
    kib = {
        line.split(":")[0]: int(line.split()[1])
        for line in status.splitlines()
        if line.startswith(("RssA", "RssF", "RssS"))
    }
    return Sample(
        at_s,
        row,
        (kib["RssAnon"] + kib["RssFile"]) / 1024,
        kib["RssShmem"] / 1024,
        len(os.listdir(f"/proc/{pid}/fd")),  # noqa: PTH208  # only their number matters
        counters.get(0, "handles"),
        counters.get(0, "free_bytes") / _MIB,
        counters.sum("reads"),
    )


def growth(samples: Sequence[Sample], since_s: float) -> list[str]:
    """Who grew after ``since_s``, the last kill: the last quarter of the settled time against its first. Nobody is
    judged by fewer than two dozen samples."""
    complaints = []
    for row in sorted({each.row for each in samples}):
        after = [each for each in samples if each.row == row and each.at_s > since_s]
        settled = after[int(len(after) * _SETTLED) :]
        if len(settled) < _FEWEST_SAMPLES:
            continue
        quarter = len(settled) // 4
        first, last = settled[:quarter], settled[-quarter:]
        was, became = (statistics.median(each.private_mib for each in part) for part in (first, last))
        if became - was > max(_GROWTH_MIB, was * _GROWTH_SHARE):
            complaints.append(f"process {row} grew from {was:.1f} to {became:.1f} MiB of private memory")
        had, has = (statistics.median(each.descriptors for each in part) for part in (first, last))
        if has > had + _MORE_DESCRIPTORS:
            complaints.append(f"process {row} went from {had:.0f} to {has:.0f} descriptors")
    return complaints


def plot(samples: Sequence[Sample], kills: Sequence[float], path: Path) -> None:
    """Memory, descriptors, the pool and progress over time; kills as vertical lines."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, ((private, shared), (descriptors, pool)) = plt.subplots(2, 2, figsize=(13, 8), layout="constrained")
    for row in sorted({each.row for each in samples}):
        mine = [each for each in samples if each.row == row]
        times = [each.at_s for each in mine]
        look: dict[str, Any] = {"label": "producer" if row == 0 else f"consumer {row}", "linewidth": 1.2}
        private.plot(times, [each.private_mib for each in mine], **look)
        shared.plot(times, [each.shared_mib for each in mine], **look)
        descriptors.plot(times, [each.descriptors for each in mine], **look)
    producer = [each for each in samples if each.row == 0]
    times = [each.at_s for each in producer]
    pool.plot(times, [each.free_mib for each in producer], label="free in the pool, MiB", linewidth=1.0)
    pool.plot(times, [each.handles for each in producer], label="handles", linewidth=1.0)
    reads = pool.twinx()
    reads.plot(times, [each.reads for each in producer], color="#808080", linestyle="--", label="reads")
    reads.set_ylabel("verified reads (dashed)")
    for axes, title in (
        (private, "private memory, MiB"),
        (shared, "mapped shared memory, MiB"),
        (descriptors, "descriptors"),
        (pool, "the pool"),
    ):
        for at_s in kills:
            axes.axvline(at_s, color="#d62728", alpha=0.25, linewidth=0.8)
        axes.set_title(title)
        axes.set_xlabel("seconds (red: SIGKILL)")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", loc="best")
    figure.savefig(path, dpi=90)
    plt.close(figure)
