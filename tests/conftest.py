"""Options and fixtures for every test."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# A machine that stands still for a moment finds no fault, and what a test tries is the same in every run; OMNI_FUZZ=1
# tries something else each time.
settings.register_profile(
    "omniplane",
    deadline=None,
    derandomize=not int(os.environ.get("OMNI_FUZZ", "0")),
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("omniplane")

# A shell that runs the tests in the background has them ignore SIGINT, and children inherit that: programs that are
# tested to end at Ctrl-C would not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-surface", action="store_true", help="rewrite tests/contract/proto_surface.txt")


@pytest.fixture(autouse=True)
def _no_log_outlives_its_stream() -> Iterator[None]:
    """A ``main`` that is called in this process logs to what is standard error then, which pytest closes."""
    root = logging.getLogger()
    before, level = set(root.handlers), root.level
    yield
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler and handler not in before:
            root.removeHandler(handler)
    root.setLevel(level)
