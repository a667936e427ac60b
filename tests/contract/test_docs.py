"""Documentation that names code names code that exists."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
NAME = re.compile(r"`([a-z_]+/[a-z_0-9/]+\.py)(?::([A-Za-z_.]+))?`")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@functools.cache
def definitions(path: Path) -> set[str]:
    """Functions, classes and methods of a module, dotted."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(f"{node.name}.{item.name}")
    return found


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_code_that_a_page_names_exists(page: Path) -> None:
    for file, name in NAME.findall(page.read_text()):
        path = ROOT / file
        assert path.is_file(), f"{page.name}: {file}"
        if name:
            assert name in definitions(path), f"{page.name}: {file}:{name}"


def test_life_of_a_request_crosses_every_plane() -> None:
    named = {file.split("/")[0] for file, _ in NAME.findall((ROOT / "docs" / "life-of-a-request.md").read_text())}
    assert named >= {"control_plane", "gateway", "stage_worker", "connectors", "omnictl"}


@pytest.mark.parametrize("page", [*DOCS, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_known_failure_has_tests_that_exist() -> None:
    text = (ROOT / "docs" / "known-failures.md").read_text()
    rows = re.findall(r"^\| (\d+) \| [^|]* \| [^|]* \| ([^|]*) \|$", text, re.MULTILINE)
    numbers = [int(number) for number, _ in rows]
    assert numbers == sorted(set(numbers))
    assert len(numbers) >= 21
    named: set[str] = set()
    for number, evidence in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", evidence)
        assert tests, f"known failure {number} has no test"
        for file, name in tests:
            assert (ROOT / file).is_file(), f"{number}: {file}"
            assert name in definitions(ROOT / file), f"{number}: {file}::{name}"
            if name.startswith("test_bug_"):
                assert name.startswith(f"test_bug_{number}_"), f"{name} stands in the row of {number}"
                named.add(name)
    written = {name for path in (ROOT / "tests" / "bugs").glob("test_*.py") for name in definitions(path)}
    assert named == {name for name in written if name.startswith("test_bug_")}


def test_feature_status_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "feature-status.md").read_text()
    rows = re.findall(r"^\| ([A-Z]-\d\d(?:\.\.\d\d)?) \| [^|]* \| ([^|]*) \| ([^|]*) \|$", text, re.MULTILINE)
    ids = [row[0] for row in rows]
    assert len(ids) == len(set(ids))
    assert len(ids) >= 441, "every id of the feature list has a row"
    for row, state, evidence in rows:
        state = state.strip()
        assert state in {"works", "partial", "not yet", "n/a"}, f"{row}: {state!r}"
        tests = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", evidence)
        assert tests or state != "works", f"{row} works, but names no test"
        assert evidence.strip() or state == "works", f"{row}: {state} without a reason"
        for file, name in tests:
            assert (ROOT / file).is_file(), f"{row}: {file}"
            if name:
                assert name in definitions(ROOT / file), f"{row}: {file}::{name}"
