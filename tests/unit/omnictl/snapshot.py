"""Text that should only change on purpose: set OMNICTL_UPDATE_SNAPSHOTS=1 to accept what it is now."""

from __future__ import annotations

import os
from pathlib import Path

_DIRECTORY = Path(__file__).parent / "snapshots"


def check(name: str, text: str) -> None:
    path = _DIRECTORY / f"{name}.txt"
    if os.environ.get("OMNICTL_UPDATE_SNAPSHOTS"):
        path.write_text(text)
    assert path.exists(), f"no snapshot {path.name}: run again with OMNICTL_UPDATE_SNAPSHOTS=1 and look at it"
    assert text == path.read_text()
