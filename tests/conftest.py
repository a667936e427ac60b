"""Options and fixtures for every test."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-surface", action="store_true", help="rewrite tests/contract/proto_surface.txt")
