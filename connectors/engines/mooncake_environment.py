"""What Mooncake reads from the environment, once per process, when it is first used.

Its arguments do not decide how bytes move (``initialize`` takes any protocol and succeeds); these variables do. And
whether an error means that a transfer is over depends on them: the transport must give up on a transfer that stands
still before the caller's wait ends, else bytes arrive in memory that was given to somebody else.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import threading
from pathlib import Path
from typing import Final

from omnicore import errors

PROTOCOLS: Final = ("tcp", "rdma", "nvlink")
_TCP: Final = {
    "MC_FORCE_TCP": "1",  # an engine with an RDMA device takes RDMA, whatever it is asked for
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",  # the transport ends a transfer that stands still ...
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",  # ... and one whose acknowledgement does not come ...
    "MC_TRANSFER_TIMEOUT": "60",  # ... well before the call would return and leave it running
}
_LEVEL: Final = {"MC_LOG_LEVEL": "ERROR"}  # glog's own variables have no effect on the wheel
_NVLINK: Final = {"MC_FORCE_MNNVL": "1"}
_UNACKNOWLEDGED: Final = ("MC_TCP_PROTO", "1")
_MARGIN_S: Final = 1.0
_INFINIBAND: Final = Path("/sys/class/infiniband")
DISTRIBUTIONS: Final = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
)
"""All own the package ``mooncake``; the first one has no CUDA in it."""

_lock = threading.Lock()
_prepared: list[str] = []


def prepare(protocol: str) -> float:
    """Set the environment for ``protocol``; to be called before anything of Mooncake is imported. Returns how long a
    failed call may have taken for its error to mean that the transfer is over; 0: never. Values that are set already
    are left. Raises ``InvalidRequestError`` for a protocol that there is not, and ``FailedPreconditionError`` for
    another one than this process uses already and for values that would let transfers go on after an error."""
    if protocol not in PROTOCOLS:
        raise errors.InvalidRequestError.field(
            "connectors.mooncake.extra.protocol", f"must be one of {', '.join(PROTOCOLS)}, got {protocol!r}"
        )
    with _lock:
        if _prepared and _prepared[0] != protocol:
            raise errors.FailedPreconditionError(
                f"Mooncake moves bytes by {_prepared[0]} in this process already, and cannot by {protocol} as well",
                reason="PROTOCOL_FIXED",
                metadata={"protocol": protocol, "in_use": _prepared[0]},
            )
        early = not _prepared and any(
            name.split(".")[0] == "mooncake" and found for name, found in list(sys.modules.items())
        )
        wanted = {**_LEVEL, **(_TCP if protocol == "tcp" else _NVLINK if protocol == "nvlink" else {})}
        if early and any(name not in os.environ for name in wanted if name not in _LEVEL):
            raise errors.FailedPreconditionError(
                "Mooncake was imported before its environment was set: import it only through this connector",
                reason="IMPORTED_TOO_EARLY",
                metadata={"library": "mooncake"},
            )
        for name, value in wanted.items():
            os.environ.setdefault(name, value)
        over_s = _seconds_until_over() if protocol == "tcp" else 0.0
        if not _prepared:
            _prepared.append(protocol)
        return over_s


def check_devices(protocol: str, device_name: str) -> None:
    """Raises ``FailedPreconditionError`` if this host or the installed wheel does not have what ``protocol`` needs, and
    ``InvalidRequestError`` for devices without RDMA."""
    if protocol == "nvlink" and library()[0] == DISTRIBUTIONS[0]:
        raise errors.FailedPreconditionError(
            f"protocol nvlink needs Mooncake with CUDA ({DISTRIBUTIONS[1]}); installed is {DISTRIBUTIONS[0]}",
            reason="LIBRARY_UNSUITED",
            metadata={"library": DISTRIBUTIONS[0]},
        )
    if protocol != "rdma":
        if device_name:
            raise errors.InvalidRequestError.field(
                "connectors.mooncake.extra.device_name", f"is for protocol rdma, this is {protocol}"
            )
        return
    here = sorted(path.name for path in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []
    missing = [name for name in filter(None, map(str.strip, device_name.split(","))) if name not in here]
    if missing or not here:
        what = f"RDMA device {', '.join(missing)} is" if missing else "RDMA devices are"
        raise errors.FailedPreconditionError(
            f"{what} not on this host; it has: {', '.join(here) or 'none'}",
            reason="DEVICE_MISSING",
            metadata={"device": ",".join(missing), "devices": ",".join(here)},
        )


def library() -> tuple[str, str]:
    """Name and version of the installed distribution. ``ImportError`` if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ModuleNotFoundError("Mooncake is not installed: pip install 'omniplane[mooncake]'", name="mooncake")


def _seconds_until_over() -> float:
    if os.environ.get(_UNACKNOWLEDGED[0]) == _UNACKNOWLEDGED[1]:
        raise errors.FailedPreconditionError(
            f"{_UNACKNOWLEDGED[0]}={_UNACKNOWLEDGED[1]} reports transfers as done that are not",
            reason="UNSAFE_ENVIRONMENT",
        )
    waits: dict[str, float] = {}
    for name in list(_TCP)[1:]:
        try:
            waits[name] = float(os.environ[name])
        except ValueError:
            raise errors.FailedPreconditionError(
                f"{name} must be seconds, it is {os.environ[name]!r}", reason="UNSAFE_ENVIRONMENT"
            ) from None
    limit_s = max(5.0, waits.pop("MC_TRANSFER_TIMEOUT"))  # the library takes no less
    for name, value in waits.items():
        if not 0 < value < limit_s - _MARGIN_S:
            raise errors.FailedPreconditionError(
                f"{name} ({value:g} s) must be at least {_MARGIN_S:g} s below MC_TRANSFER_TIMEOUT ({limit_s:g} s): "
                f"transfers would go on after their error",
                reason="UNSAFE_ENVIRONMENT",
                metadata={"variable": name},
            )
    return limit_s - _MARGIN_S / 2
