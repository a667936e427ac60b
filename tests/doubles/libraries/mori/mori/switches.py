"""What tests make the double do. The real library has nothing like it."""

from __future__ import annotations

import threading
from typing import Any

has_rdma_devices = True
"""False: as on a host without an active RDMA device."""
proceed = threading.Event()
"""Cleared: transfers stay IN_PROGRESS until it is set."""
proceed.set()
fail_next: list[tuple[Any, str]] = []
"""(StatusCode, message) of transfers to come."""
calls: list[tuple[str, Any]] = []
"""(method, argument) of what engines were asked to register and deregister, and ("drop", key) of engines that went."""
