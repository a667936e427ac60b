"""Tables, ratios, bars and the plot of bench.gateway."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import harness

_FULL = 0.85  # of a core: a router that uses less, with clients waiting, waits for its workers itself
_NOISY_CORES = 0.2


def _cells(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, int, float, str], list[dict[str, Any]]]:
    cells: dict[tuple[str, int, float, str], list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["mode"], row["connections"], row["qps"], row["target"]), []).append(row)
    return cells


def _cell(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """One cell of all its rounds: rates and latencies are medians, CPU is of all rounds together."""
    answered = sum(row["all"] for row in rows)
    kept = {
        "per_s": statistics.median(row["per_s"] for row in rows),
        "cpu_us": sum(row["cpu_s"] for row in rows) / answered * 1e6 if answered else 0.0,
        "core_share": sum(row["cpu_s"] for row in rows) / sum(row["wall_s"] for row in rows),
        "failed": float(sum(row["refused"] + row["broken"] + row["incomplete"] + row["unanswered"] for row in rows)),
        "events_per_answer": sum(row["events"] for row in rows) / answered if answered else 0.0,
        "mib": max(row["mib"] for row in rows),
        "foreign_cores": statistics.median(row["foreign_cores"] for row in rows),
    }
    for name in ("ttft", "total", "delay"):
        for at in ("p50", "p99"):
            values = [row[f"{name}_ms_{at}"] for row in rows if f"{name}_ms_{at}" in row]
            if values:
                kept[f"{name}_ms_{at}"] = statistics.median(values)
    return kept


def key(mode: str, connections: int, qps: float, target: str) -> str:
    """The beginning of a cell's keys among the figures."""
    where = f"qps{qps:g}" if qps else f"c{connections}"
    return f"{mode}_{where}_{target.replace('-', '_')}"


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Flat figures of all cells."""
    found: dict[str, float] = {}
    for (mode, connections, qps, target), runs in _cells(rows).items():
        prefix = key(mode, connections, qps, target)
        found |= {f"{prefix}_{name}": value for name, value in _cell(runs).items()}
    found["foreign_cores_p50"] = statistics.median(row["foreign_cores"] for row in rows)
    for about in [name for name in found if name.endswith("_cpu_us") and "_ours_" in name]:
        for base in ("vllm_router", "nginx"):
            other = found.get(about.replace("_ours_", f"_{base}_"))
            if other:
                found[about.replace("_cpu_us", f"_over_{base}_cpu_ratio")] = found[about] / other
    return found


def _times(cell: dict[str, float], name: str) -> str:
    """Median and 99th percentile, ms."""
    found = [cell.get(f"{name}_ms_{at}") for at in ("p50", "p99")]
    return " / ".join("–" if value is None else f"{value:.3f}" if value < 1 else f"{value:.3g}" for value in found)


def _line(target: str, cell: dict[str, float], mode: str, connections: int) -> list[str]:
    limited = target != "direct" and mode != "paced" and connections >= 16 and cell["core_share"] < _FULL
    rate = f"{'~' if limited else ''}{cell['per_s']:,.0f}{'*' if cell['foreign_cores'] > _NOISY_CORES else ''}"
    cpu = "–" if target == "direct" else f"{cell['cpu_us']:,.0f}"
    line = [target, rate, cpu, f"{cell['core_share']:.2f}", _times(cell, "total")]
    line += [_times(cell, "ttft")] if mode != "unary" else []
    line.append(_times(cell, "delay"))
    return [*line, f"{cell['events_per_answer']:.0f}", f"{cell['mib']:.0f}", f"{cell['failed']:.0f}"]


def show(rows: Sequence[dict[str, Any]], found: dict[str, float]) -> None:
    """Print a table for every mode and number of connections, then the bars."""
    cells = _cells(rows)
    groups: dict[tuple[str, int, float], list[str]] = {}
    for mode, connections, qps, target in cells:
        groups.setdefault((mode, connections, qps), []).append(target)
    for (mode, connections, qps), names in groups.items():
        columns = ["ms: p50 / p99", "per s", "CPU µs", "core", "answer, ms"]
        columns += ["TTFT, ms"] if mode != "unary" else []
        columns += ["delay, ms", "events", "MiB", "failed"]
        lines = [_line(name, _cell(cells[mode, connections, qps, name]), mode, connections) for name in names]
        title = f"{mode}, {f'{qps:g} streams a second, open loop' if qps else f'{connections} connections'}"
        harness.report("gateway", title, columns, lines)
    print("~ workers and load are the limit; * others used more than 0.2 cores; delay: worker to client, one way")
    foreign = [row["foreign_cores"] for row in rows]
    print(f"others used {statistics.median(foreign):.2f} cores (median), at most {max(foreign):.2f}")
    if judged := bars(found):
        harness.report("gateway", "bars", ["bar", "measured", "wanted", ""], judged)


def bars(found: dict[str, float]) -> list[tuple[str, str, str, str]]:
    """Those of the bars for which there are figures: what, measured, wanted, met."""
    lines: list[tuple[str, str, str, str]] = []

    def bar(what: str, value: float | None, wanted: float, form: str = "{:.2f}", *, least: bool = False) -> None:
        if value is not None:
            met = value >= wanted if least else value < wanted
            sign = "≥" if least else "<"
            lines.append((what, form.format(value), f"{sign} {form.format(wanted)}", "met" if met else "MISSED"))

    def ratio(above: str, below: str) -> float | None:
        return found[above] / found[below] if found.get(below) and above in found else None

    for mode in ("unary", "burst", "paced"):
        bar(f"{mode} c=64: CPU / vllm-router", found.get(f"{mode}_c64_ours_over_vllm_router_cpu_ratio"), 1.0)
        bar(f"{mode} c=64: CPU / nginx (goal)", found.get(f"{mode}_c64_ours_over_nginx_cpu_ratio"), 1.3)
        bar(f"{mode}: rate at c=64 / c=16", ratio(f"{mode}_c64_ours_per_s", f"{mode}_c16_ours_per_s"), 1.0, least=True)
    bar("unary c=1: CPU / vllm-router", found.get("unary_c1_ours_over_vllm_router_cpu_ratio"), 2.0)
    bar("unary c=1: p50 / vllm-router", ratio("unary_c1_ours_total_ms_p50", "unary_c1_vllm_router_total_ms_p50"), 2.0)
    direct, ours = (found.get(f"paced_c1_{name}_ttft_ms_p50") for name in ("direct", "ours"))
    if direct is not None and ours is not None:
        bar("paced c=1: added TTFT p50, ms", ours - direct, 0.5)
    bar("burst c=1: stream p99, ms (no 40 ms stall)", found.get("burst_c1_ours_total_ms_p99"), 40.0, "{:.1f}")
    bar("two processes / one, rate", found.get("processes_2_over_1_ratio"), 1.8, least=True)
    return lines


def markdown(found: dict[str, float], names: Sequence[str], machine: str) -> list[str]:
    """The tables for docs/performance.md: CPU, rate and latency of every target, then the bars."""
    lines = [f"{machine}; others used {found['foreign_cores_p50']:.2f} cores meanwhile.", ""]

    def cell(name: str, form: str, *keys: str) -> str:
        values = [found.get(f"{name}_{key}") for key in keys]
        return " / ".join("–" if value is None else form.format(value) for value in values)

    columns = ["", "CPU µs, c=1", "c=16", "c=64", "per second, c=1", "c=16", "c=64", "p50 / p99 ms, c=1", "c=64"]
    for mode in _MODES:
        rows = []
        for name in names:
            prefixes = [key(mode, connections, 0, name) for connections in (1, 16, 64)]
            cpu = ["–" if name == "direct" else cell(prefix, "{:,.0f}", "cpu_us") for prefix in prefixes]
            rate = [cell(prefix, "{:,.0f}", "per_s") for prefix in prefixes]
            what = "ttft" if mode == "paced" else "total"
            times = [cell(prefix, "{:.3g}", f"{what}_ms_p50", f"{what}_ms_p99") for prefix in prefixes[::2]]
            rows.append([name, *cpu, *rate, *times])
        title = f"**{mode}**" + (" (times: TTFT)" if mode == "paced" else "")
        lines += [title, "", *harness.markdown(columns, rows), ""]
    return [*lines, *harness.markdown(["bar", "measured", "wanted", ""], bars(found))]


_MODES = {"unary": "unary, µs", "burst": "burst of 64 tokens, µs", "paced": "64 tokens at 10 ms, µs"}


def plot(found: dict[str, float], path: Path) -> None:
    """CPU per answer at 64 connections (or what comes nearest)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter

    figure, axes = plt.subplots(1, len(_MODES), figsize=(12, 3.4), layout="constrained")
    for axis, (mode, title) in zip(axes, _MODES.items(), strict=True):
        most = max(
            (int(name.split("_")[1][1:]) for name in found if name.startswith(f"{mode}_c") and "_cpu_us" in name),
            default=64,
        )
        bars_of = {
            name.removeprefix(f"{mode}_c{most}_").removesuffix("_cpu_us").replace("_", "-"): value
            for name, value in found.items()
            if name.startswith(f"{mode}_c{most}_") and name.endswith("_cpu_us") and "_direct_" not in name and value
        }
        if not bars_of:
            axis.set_axis_off()
            continue
        colours = ["#4472a8" if name == "ours" else "#b0b0b0" for name in bars_of]
        drawn = axis.barh(list(bars_of), list(bars_of.values()), color=colours)
        axis.bar_label(drawn, fmt="%.0f", padding=2)
        axis.set_xscale("log")
        # Only powers of ten are labelled: those between them would overlap. Right of the bars is room for their labels.
        axis.set_xlim(10 ** math.floor(math.log10(min(bars_of.values()) * 0.9)), max(bars_of.values()) * 4)
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.invert_yaxis()
        axis.set_title(f"c={most}: {title}", fontsize=9)
    figure.suptitle("CPU of the router for each answer (log scale)", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)
