"""``python -m tests.fault.table``: run every case of this folder and write what was measured into ``docs/faults.md``.

``--from DIR`` takes the records of a run that was made before with ``OMNI_FAULT_RECORD_DIR=DIR``.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tests.fault.record import RECORD_DIR

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
BEGIN, END = "<!-- table: python -m tests.fault.table -->", "<!-- end of table -->"
COMPONENTS = ("worker", "control plane", "gateway", "etcd", "launcher")


class Row(NamedTuple):
    """One line of the table."""

    component: str
    fault: str
    load: str
    outcome: str
    seconds: str


def read(directory: Path) -> list[Row]:
    """All records of a run, in the order of the table."""
    rows: dict[tuple[str, str, str], Row] = {}  # of cases that ran again, the last
    for file in sorted(directory.glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
        for line in file.read_text().splitlines():
            noted: dict[str, Any] = json.loads(line)
            times = [f"{name} {value:.2f}" for name, value in noted["seconds"].items()]
            row = Row(noted["component"], noted["fault"], noted["load"], noted["outcome"], ", ".join(times))
            rows[row.component, row.fault, row.load] = row
    return sorted(rows.values(), key=lambda row: (COMPONENTS.index(row.component), row.fault, row.load))


def render(rows: list[Row]) -> str:
    """The tables, one per component."""
    found: dict[str, list[Row]] = collections.defaultdict(list)
    for row in rows:
        found[row.component].append(row)
    day = datetime.datetime.now(datetime.UTC).date()
    lines = [
        f"Measured on {day} with {os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}."
    ]
    for component in COMPONENTS:
        lines += ["", f"### {component[0].upper()}{component[1:]}", ""]
        lines += ["| fault | load | what clients see | seconds |", "|---|---|---|---|"]
        lines += [f"| {row.fault} | {row.load} | {row.outcome} | {row.seconds or '–'} |" for row in found[component]]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Run, or read, then write the page. The exit code is pytest's: nothing is written if a case failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fault.table", description=__doc__)
    parser.add_argument("--from", dest="directory", type=Path, help="records of an earlier run")
    directory: Path | None = parser.parse_args(argv).directory
    with tempfile.TemporaryDirectory() as temporary:
        if directory is None:
            directory = Path(temporary)
            command = [sys.executable, "-m", "pytest", "-q", "tests/fault"]
            environment = os.environ | {RECORD_DIR: str(directory)}
            code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
            if code:
                return code
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{render(read(directory))}\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
