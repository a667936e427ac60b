"""Tables, bars and the plot of ``bench.transfer``."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.transfer_paths import Contender

_LARGE = 16 << 20
"""From here on the bytes are what takes the time, not the messages."""


@dataclasses.dataclass(slots=True)
class Cell:
    """One path at one size: seconds, the median of each round."""

    size: int
    put: list[float] = dataclasses.field(default_factory=list)
    handed: list[float] = dataclasses.field(default_factory=list)
    read: list[float] = dataclasses.field(default_factory=list)

    def add(self, put: float, handed: float, read: float) -> None:
        """One round."""
        self.put.append(put)
        self.handed.append(handed)
        self.read.append(read)

    @property
    def mad(self) -> float:
        """Median absolute deviation of ``handed`` between rounds, in parts of its median."""
        middle = statistics.median(self.handed)
        return statistics.median(abs(value - middle) for value in self.handed) / middle

    def gb_per_s(self, best: bool) -> float:
        """Bandwidth until the data is handed over."""
        return self.size / (min(self.handed) if best else statistics.median(self.handed)) / 1e9


Figures = dict[tuple[str, str], Cell]
"""By key of the path and label of the size."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """A ratio of times, baseline over ours, that we hold ourselves to at some sizes."""

    name: str
    ours: str
    baseline: str
    at_least: float | None
    """None: reported, no bar."""
    sizes: tuple[str, ...] | None = None
    """None: all from 16 MiB on."""


BARS = (
    Bar("shm copied / memcpy", "shm", "memcpy", 0.9),
    Bar("shm copied / peer's SharedMemoryConnector", "shm", "peer_shm", 20.0, ("64MB",)),
    Bar("shm in place / peer's SharedMemoryConnector", "shm_in_place", "peer_shm", None),
    Bar("shm into / memcpy", "shm_into", "memcpy", None),
    Bar("mooncake in place / engine alone", "mooncake_in_place", "raw_mooncake", 0.95),
    Bar("mooncake copied / engine alone", "mooncake", "raw_mooncake", None),
    Bar("mooncake into / engine alone", "mooncake_into", "raw_mooncake", None),
    Bar("mooncake copied / peer's MooncakeTransferEngineConnector", "mooncake", "peer_mooncake", None),
    Bar("nixl in place / process_vm_readv", "nixl_in_place", "cma", None),
    Bar("nixl in place / engine of Mooncake alone", "nixl_in_place", "raw_mooncake", None),
    Bar("grpc / TCP", "grpc", "tcp", None),
)


def ratios(bar: Bar, label: str, figures: Figures) -> tuple[float, float] | None:
    """How many times as fast ours was: best round against best round, and the median of the rounds."""
    ours, baseline = figures.get((bar.ours, label)), figures.get((bar.baseline, label))
    if ours is None or baseline is None:
        return None
    each = [theirs / mine for mine, theirs in zip(ours.handed, baseline.handed, strict=False)]
    return min(baseline.handed) / min(ours.handed), statistics.median(each)


def applies(bar: Bar, label: str, figures: Figures) -> bool:
    """The bar is asked for at this size."""
    if bar.at_least is None:
        return False
    if bar.sizes is not None:
        return label in bar.sizes
    return figures[bar.ours, label].size >= _LARGE


def print_tables(present: Sequence[Contender], labels: Sequence[str], figures: Figures) -> None:
    """Latency, bandwidth and bars."""
    titles = {
        "handed": "until the consumer has views: best round / median round ± MAD",
        "read": "until it has read every byte: best round / median round",
        "put": "of which until put had returned: best round / median round",
    }
    for column, title in titles.items():
        rows = []
        for contender in present:
            cells = [figures.get((contender.key, label)) for label in labels]
            rows.append((contender.label, *(_times(cell, column) for cell in cells)))
        _table(title, ["path", *labels], rows)
    rows = [
        (contender.label, *(_speeds(figures.get((contender.key, label))) for label in labels)) for contender in present
    ]
    _table("GB/s until handed over: best round / median round", ["path", *labels], rows)
    rows = []
    for bar in BARS:
        found = {label: ratios(bar, label, figures) for label in labels}
        if any(found.values()):
            rows.append((_title(bar), *(_judged(bar, label, found[label], figures) for label in labels)))
    _table("times as fast as the baseline: best / median of rounds; ✓ ✗ where a bar is held to", ["", *labels], rows)


def flat(present: Sequence[Contender], labels: Sequence[str], figures: Figures) -> dict[str, float | int | str]:
    """All figures, with keys that carry their unit."""
    result: dict[str, float | int | str] = {}
    for contender in present:
        for label in labels:
            cell = figures.get((contender.key, label))
            if cell is None:
                continue
            name = f"{contender.key}_{label}"
            for column in ("handed", "read", "put"):
                values = getattr(cell, column)
                result[f"{name}_{column}_us_best"] = min(values) * 1e6
                result[f"{name}_{column}_us_p50"] = statistics.median(values) * 1e6
            result[f"{name}_handed_mad_percent"] = cell.mad * 100
            result[f"{name}_gb_per_s_best"] = cell.gb_per_s(True)
            result[f"{name}_gb_per_s_p50"] = cell.gb_per_s(False)
    for bar in BARS:
        for label in labels:
            if (found := ratios(bar, label, figures)) is not None:
                result[f"ratio_{bar.ours}_to_{bar.baseline}_{label}_best"] = found[0]
                result[f"ratio_{bar.ours}_to_{bar.baseline}_{label}_p50"] = found[1]
    return result


def _title(bar: Bar) -> str:
    return bar.name if bar.at_least is None else f"{bar.name} (bar: {bar.at_least:g})"


def _judged(bar: Bar, label: str, found: tuple[float, float] | None, figures: Figures) -> str:
    if found is None:
        return "-"
    text = f"{found[0]:.3g} / {found[1]:.3g}"
    if bar.at_least is None or not applies(bar, label, figures):
        return text
    return f"{text} {'✓' if found[1] >= bar.at_least else '✗'}"


def _times(cell: Cell | None, column: str) -> str:
    if cell is None:
        return "-"
    values = getattr(cell, column)
    text = f"{_time(min(values))} / {_time(statistics.median(values))}"
    return f"{text} ±{cell.mad:.0%}" if column == "handed" else text


def _speeds(cell: Cell | None) -> str:
    return "-" if cell is None else f"{cell.gb_per_s(True):.3g} / {cell.gb_per_s(False):.3g}"


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=240).print(table)


_COLORS = {"baseline": ("#707070", "#9a9a9a", "#b8860b", "#404040"), "peer": ("#c00000", "#ff7f7f")}


def plot(present: Sequence[Contender], labels: Sequence[str], figures: Figures, path: Path) -> None:
    """Latency and bandwidth over size, both axes logarithmic; medians of rounds, with their span."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(15, 7.2), layout="constrained")
    ours = iter(plt.get_cmap("tab20").colors)  # type: ignore[attr-defined]
    others = {family: iter(colors) for family, colors in _COLORS.items()}
    for contender in present:
        cells = [figures[contender.key, label] for label in labels if (contender.key, label) in figures]
        sizes = [cell.size for cell in cells]
        color = next(others.get(contender.family, ours), "#000000")
        style = {"baseline": "--", "peer": "-."}.get(contender.family, "-")
        look = {"color": color, "linestyle": style, "marker": "o", "markersize": 4, "label": contender.label}
        left.plot(sizes, [statistics.median(cell.handed) * 1e6 for cell in cells], **look)
        low, high = [min(cell.handed) * 1e6 for cell in cells], [max(cell.handed) * 1e6 for cell in cells]
        left.fill_between(sizes, low, high, color=color, alpha=0.12, linewidth=0)
        right.plot(sizes, [cell.gb_per_s(False) for cell in cells], **look)
    left.set_ylabel("µs until the consumer has views of the bytes")
    right.set_ylabel("GB/s")
    left.set_title("Latency, one way (median of rounds; shaded: best to worst)")
    right.set_title("Bandwidth")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks([figures[key].size for key in figures if key[0] == present[0].key])
        axes.set_xticklabels(list(labels), rotation=30)
        axes.minorticks_off()
        axes.grid(alpha=0.3, which="both")
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(path, dpi=100)
    plt.close(figure)
