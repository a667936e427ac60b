"""Where converted models lie, and how several workers that start at once make each only once.

An entry is a directory that appears whole or not at all: it is built beside its place under an exclusive ``flock`` and
renamed. A lock dies with its process, so a crash leaves at most a temporary directory, which the next builder removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from omnicore.errors import UnavailableError
from omnicore.log import get_logger

log = get_logger(__name__)

LOCK_WAIT_S = 300.0
"""Give up waiting for another process that builds the same entry. Conversions take seconds."""
_POLL_S = 0.05


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """``$OMNI_CACHE_DIR``, else ``$XDG_CACHE_HOME/omniplane``, else ``~/.cache/omniplane``."""
    if own := environ.get("OMNI_CACHE_DIR"):
        return Path(own).expanduser()
    if xdg := environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "omniplane"
    return Path.home() / ".cache" / "omniplane"


def get_or_build(root: Path, name: str, build: Callable[[Path], None], *, wait_s: float = LOCK_WAIT_S) -> Path:
    """The directory ``root/name``; if it is not there, ``build`` fills it. Blocking.

    Of any number of callers on this machine one builds and the others wait. Raises ``UnavailableError`` if another
    builder does not finish within ``wait_s`` or the directory cannot be written; what ``build`` raises goes through.
    """
    entry = root / name
    if entry.is_dir():
        return entry
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{name}.lock", name, wait_s):
            if not entry.is_dir():  # another builder may have been quicker
                _build(root, entry, build)
    except OSError as error:
        raise UnavailableError(
            f"cannot write the model cache {root}: {error.strerror or error}; set OMNI_CACHE_DIR to a writable place",
            reason="MODEL_CACHE_UNWRITABLE",
            metadata={"path": root},
        ) from error
    return entry


def _build(root: Path, entry: Path, build: Callable[[Path], None]) -> None:
    prefix = f".{entry.name}.tmp-"
    for orphan in root.glob(f"{prefix}*"):  # under the lock: nobody else is building
        shutil.rmtree(orphan, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    try:
        build(temporary)
        temporary.chmod(0o755)
        temporary.rename(entry)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextlib.contextmanager
def _locked(path: Path, name: str, wait_s: float) -> Iterator[None]:
    deadline = time.monotonic() + wait_s
    waiting = False
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UnavailableError(
                        f"another process has held {path} for {wait_s:g} s", reason="MODEL_CACHE_BUSY"
                    ) from None
                if not waiting:
                    waiting = True
                    log.info("waiting for another process to convert the model", model=name)
                time.sleep(_POLL_S)
        yield  # closing the file gives the lock up
