"""Fixtures of the tests with real models."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import pytest


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
