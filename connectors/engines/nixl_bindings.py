"""NIXL's bindings: loading them, and what they raise."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import threading
from typing import Any, Final

from omnicore import errors, process

LIBRARY: Final = "nixl"
"""Name of the pip distribution, and of its logger."""
_load_lock = threading.Lock()


def load_bindings() -> Any:
    """NIXL's bindings, without what importing them does to the logs of a process. ``ImportError`` if they are missing;
    ``FailedPreconditionError`` for a version that has others."""
    with _load_lock:
        # Read when the native parts are loaded. Their errors reach us as exceptions; beside our log, and on standard
        # output where UCX writes, they are noise.
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
        os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
        raise_exceptions = logging.raiseExceptions
        bindings: Any = importlib.import_module("nixl._bindings")
        logging.raiseExceptions = raise_exceptions
        own = logging.getLogger(LIBRARY)
        for handler in own.handlers[:]:
            own.removeHandler(handler)  # it writes to standard output
        own.propagate = True
        process.skip_native_finalizers()
    missing = [name for name in ("nixlAgentConfig", "NIXL_THREAD_SYNC_STRICT") if not hasattr(bindings, name)]
    if missing or not hasattr(bindings.nixlAgentConfig(), "pthrDelay"):
        raise errors.FailedPreconditionError(
            f"nixl {importlib.metadata.version(LIBRARY)} is not one that this version works with: use 1.5",
            reason="LIBRARY_UNSUITED",
            metadata={"library": LIBRARY},
        )
    return bindings


def library_errors(bindings: Any) -> tuple[type[Exception], ...]:
    """All exceptions that NIXL raises; they have no base class of their own."""
    names = [name for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")]
    return tuple(getattr(bindings, name) for name in names)
