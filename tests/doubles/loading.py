"""Doubles of whole libraries, found where pip would have put the real ones."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

LIBRARIES = Path(__file__).parent / "libraries"
PACKAGES = {"mori": "mori", "yuanrong": "yr"}
"""Directory of the double → what is imported."""


@contextlib.contextmanager
def installed(double: str) -> Iterator[None]:
    """Imports find the double, inside the context; the real library, if there is one, is as it was afterwards."""
    package = PACKAGES[double]

    def loaded() -> list[str]:
        return [name for name in sys.modules if name == package or name.startswith(f"{package}.")]

    kept = {name: sys.modules.pop(name) for name in loaded()}
    sys.path.insert(0, str(LIBRARIES / double))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(LIBRARIES / double))
        for name in loaded():
            del sys.modules[name]
        sys.modules.update(kept)
        importlib.invalidate_caches()
