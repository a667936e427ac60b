"""No test is expected to fail, or left out, without a word on why."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
# How pytest and unittest are told, and where in the call the reason may stand without its name.
POSITION = {"xfail": 1, "skipif": 1, "skip": 0}


def name_of(node: ast.expr) -> str:
    """The last part of ``pytest.mark.xfail``, ``pytest.xfail``, ``xfail``, …"""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def of_test_library(node: ast.expr) -> bool:
    """Not the ``skip`` of something else."""
    return ast.unparse(node).split(".")[0] in {"pytest", "unittest", "mark", *POSITION}


def reason_of(call: ast.Call, name: str) -> str:
    """What stands there as the reason: its source, or nothing."""
    given = [keyword.value for keyword in call.keywords if keyword.arg in ("reason", "msg")]
    # pytest.xfail("why") is a statement within a test; only as a mark does a condition come first.
    position = 0 if name == "xfail" and "mark" not in ast.unparse(call.func) else POSITION[name]
    if not given and len(call.args) > position:
        given = [call.args[position]]
    if not given or (isinstance(given[0], ast.Constant) and not str(given[0].value or "").strip()):
        return ""
    return ast.unparse(given[0])


def without_reason(source: str) -> list[int]:
    """Lines that mark a test as failing or skipped, and do not say why."""
    tree = ast.parse(source)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and of_test_library(node.func) and (name := name_of(node.func)) in POSITION:
            if not reason_of(node, name):
                found.append(node.lineno)
        elif isinstance(node, ast.Attribute | ast.Name) and id(node) not in called:
            of_pytest = isinstance(node, ast.Attribute) and name_of(node.value) == "mark"
            if name_of(node) == "expectedFailure" or (of_pytest and name_of(node) in ("xfail", "skip")):
                found.append(node.lineno)
    return sorted(found)


def test_every_mark_says_why() -> None:
    files = sorted(TESTS.rglob("*.py"))
    assert files
    found = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in without_reason(path.read_text())]
    assert not found


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("@pytest.mark.xfail\ndef test_a(): ...", [1]),
        ("@pytest.mark.xfail()\ndef test_a(): ...", [1]),
        ("@pytest.mark.xfail(strict=True)\ndef test_a(): ...", [1]),
        ("@pytest.mark.xfail(reason='')\ndef test_a(): ...", [1]),
        ("@pytest.mark.xfail(reason='because')\ndef test_a(): ...", []),
        ("@pytest.mark.xfail(LINUX, reason=WHY)\ndef test_a(): ...", []),
        ("p = pytest.param(1, marks=pytest.mark.xfail)", [1]),
        ("def test_a():\n    pytest.xfail()", [2]),
        ("def test_a():\n    pytest.xfail('because')", []),
        ("def test_a():\n    pytest.skip('because')", []),
        ("pytestmark = pytest.mark.skip", [1]),
        ("@pytest.mark.skipif(LINUX)\ndef test_a(): ...", [1]),
        ("@unittest.expectedFailure\ndef test_a(): ...", [1]),
    ],
)
def test_what_counts_as_no_reason(source: str, lines: list[int]) -> None:
    assert without_reason(source) == lines
