"""The wheel holds what an installed user imports, and the commands start from it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_wheel_is_complete(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("omniplane-*.whl")
    unpacked = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(unpacked)
    assert "omni/v1/registry_service_pb2_grpc.py" in names
    assert not [name for name in names if name.startswith(("tests/", "bench/", "protos/"))]

    # Imports must resolve from the wheel, not from this checkout: run elsewhere and look where modules came from.
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import omni.v1.stage_service_pb2 as pb, omniplane.cli as cli, omnicore.errors, connectors.base\n"
        "assert pb.__file__.startswith(sys.argv[1]), pb.__file__\n"
        "assert cli.__file__.startswith(sys.argv[1]), cli.__file__\n"
        "sys.exit(cli.main(['--help']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(unpacked)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "control-plane" in done.stdout
