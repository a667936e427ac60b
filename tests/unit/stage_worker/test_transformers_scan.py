"""The kept scan, with a package that looks like transformers where it matters, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCANNER = """
    import os

    def create_import_structure_from_path(module_path):
        with open(os.environ["SCANS"], "a") as scans:
            print(module_path, file=scans)
        return {frozenset(): {"llama.modeling_llama": {"LlamaModel"}}, "llama": {frozenset({"torch"}): {"m": {"X"}}}}
"""
PACKAGE = """
    from pathlib import Path
    from .utils.import_utils import create_import_structure_from_path
    models = Path(__file__).parent / "models"
    first = create_import_structure_from_path(models)
    first.clear()  # as callers do: what is kept must not suffer
    second = create_import_structure_from_path(str(models / "__init__.py"))
    other = create_import_structure_from_path(models / "llama")
"""
RUN = """
    import sys
    from pathlib import Path
    from stage_worker.engines import transformers_scan
    transformers_scan.keep(Path(sys.argv[1]))
    import transformers
    assert transformers.second == transformers.other, transformers.second
    assert transformers.other["llama"] == {frozenset({"torch"}): {"m": {"X"}}}
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the package, installed in version 9.0."""
    site = tmp_path / "site"
    for name, content in {
        "transformers/__init__.py": PACKAGE,
        "transformers/utils/__init__.py": "",
        "transformers/utils/import_utils.py": SCANNER,
        "transformers/models/llama/modeling_llama.py": "",
        "transformers-9.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: transformers\nVersion: 9.0\n",
    }.items():
        file = site / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(content))
    return site


def scans(site: Path, directory: Path) -> list[str]:
    """Import the package in a new process; returns the folders that were read."""
    log = site / "scans"
    log.write_text("")
    environment = {**os.environ, "PYTHONPATH": str(site), "SCANS": str(log)}
    command = [sys.executable, "-c", textwrap.dedent(RUN), str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr
    return [Path(line).name for line in log.read_text().splitlines()]


def test_the_second_import_reads_what_the_first_has_kept(site: Path, tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "transformers"
    assert scans(site, kept) == ["models", "llama"]
    assert scans(site, kept) == ["llama"]
    (file,) = kept.iterdir()
    assert file.stat().st_mode & 0o077 == 0

    # Another installation of the same version, and a damaged file, are read anew.
    os.utime(site / "transformers" / "__init__.py", (1, 1))
    assert scans(site, kept) == ["models", "llama"]
    file.write_bytes(file.read_bytes()[:20])
    assert scans(site, kept) == ["models", "llama"]
    file.write_bytes(b"not marshal")
    assert scans(site, kept) == ["models", "llama"]
    assert scans(site, kept) == ["llama"]


def test_a_cache_that_cannot_be_written_changes_nothing(site: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert scans(site, tmp_path / "file" / "transformers") == ["models", "__init__.py", "llama"]
