"""Options and fixtures for every test."""

from __future__ import annotations

import signal

import pytest

# A shell that runs the tests in the background has them ignore SIGINT, and children inherit that: programs that are
# tested to end at Ctrl-C would not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-surface", action="store_true", help="rewrite tests/contract/proto_surface.txt")
