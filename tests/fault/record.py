"""What a case has measured, for ``docs/faults.md``."""

from __future__ import annotations

import json
import os
from pathlib import Path

RECORD_DIR = "OMNI_FAULT_RECORD_DIR"
"""Directory for one file of JSON lines per test process; unset: nothing is kept."""


def record(component: str, fault: str, load: str, outcome: str, **seconds: float) -> None:
    """Note one row of the table: what broke and how, under what load, what clients saw, and how long things took.

    ``seconds`` are named by what they are the time to: ``unrouted=0.02``.
    """
    print(f"{component} | {fault} | {load} | {outcome} | {seconds}")
    directory = os.environ.get(RECORD_DIR)
    if directory:
        row = {"component": component, "fault": fault, "load": load, "outcome": outcome, "seconds": seconds}
        with (Path(directory) / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
