"""Fixtures of the tests with real models."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import pytest

# What runs side by side shares the cores. Threads that wait for each other in small steps, as those of a CPU engine do,
# are slower than one alone when there are more of them than cores.
side_by_side = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if side_by_side > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // side_by_side)))


@pytest.fixture(scope="session")
def require_packages() -> Callable[..., None]:
    """Skip the test, saying why, unless all packages are installed; with OMNIPLANE_REQUIRE_E2E=1 fail it instead."""

    def require(*packages: str) -> None:
        missing = [name for name in packages if importlib.util.find_spec(name) is None]
        if not missing:
            return
        reason = f"not installed: {', '.join(missing)} (scripts/setup --engine real installs them)"
        if os.environ.get("OMNIPLANE_REQUIRE_E2E") == "1":
            pytest.fail(f"OMNIPLANE_REQUIRE_E2E=1, but {reason}")
        pytest.skip(reason)

    return require
