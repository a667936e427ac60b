"""The committed stubs are exactly what scripts/gen makes of the protos, and run on protobuf 6 and 7."""

from __future__ import annotations

import filecmp
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "protos" / "gen"


def test_generation_is_reproducible(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "gen", tmp_path], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    made = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    committed = {
        path.relative_to(GENERATED)
        for path in GENERATED.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert made == committed
    different = [str(path) for path in made if not filecmp.cmp(tmp_path / path, GENERATED / path, shallow=False)]
    assert not different, "run scripts/gen and commit the result"


def test_generated_code_accepts_protobuf_6_and_7() -> None:
    # A runtime of one major version newer than the generator is allowed, so the generator must be a 6.
    versions = {
        match.groups()
        for path in GENERATED.rglob("*_pb2.py")
        if (match := re.search(r"Protobuf Python Version: (\d+)\.(\d+)", path.read_text()))
    }
    assert {major for major, _ in versions} == {"6"}
