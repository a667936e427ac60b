"""Page-locked host memory: what GPUs copy to and from at full speed, without staging."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from omnicore.log import get_logger

_log = get_logger(__name__)


def pin(memory: memoryview) -> Callable[[], None]:
    """Lock ``memory`` for CUDA; what is returned undoes it and is called before the memory goes. Without CUDA device,
    or where CUDA refuses, the memory stays as it is, and the log says so: everything works, copies to GPUs are slower.
    """
    reason = "no CUDA device"
    try:
        import torch
    except ImportError:
        torch, reason = None, "torch is not installed"
    if torch is not None and torch.cuda.is_available():
        runtime = torch.cuda.cudart()
        address = np.frombuffer(memory, np.uint8).ctypes.data
        code = int(runtime.cudaHostRegister(address, len(memory), 0))
        if code == 0:
            _log.info("pool pinned", pool_bytes=len(memory))
            return lambda: _unpin(runtime, address)
        reason = f"cudaHostRegister failed with {code}"
    _log.warning("pool is not pinned", pool_bytes=len(memory), reason=reason)
    return _nothing


def _unpin(runtime: object, address: int) -> None:
    if not sys.is_finalizing():
        runtime.cudaHostUnregister(address)  # type: ignore[attr-defined]


def _nothing() -> None:
    """Nothing was pinned."""
