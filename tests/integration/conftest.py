"""What all integration tests share: time enough to start processes on a machine that others use as well."""

from __future__ import annotations

import pytest

GUARD_S = 240.0
"""Ends what hangs; no measurement. On an idle machine the slowest test takes a tenth of it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """No test of this folder ends for being slow before ``GUARD_S``."""
    for item in items:
        if not item.nodeid.startswith("tests/integration/"):
            continue
        own = item.get_closest_marker("timeout")
        if own is None or own.args[0] < GUARD_S:
            item.add_marker(pytest.mark.timeout(GUARD_S), append=False)
