"""Keeps what transformers finds out about its own files at every import.

``import transformers`` opens each of its 3,000 model files, twice, to list the names that they define: more than a
second. The outcome depends on the installed version only, so it is kept in a file. The file is marshal, as Python's own
compiled modules are, is written by this user and read by nobody else, and anything odd about it means a new scan.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import marshal
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from omnicore.log import get_logger

log = get_logger(__name__)

_MODULE = "transformers.utils.import_utils"
_FUNCTION = "create_import_structure_from_path"
_LARGE = "models"
"""The package that is worth it: 99 % of the files."""

Scan = Callable[[str | os.PathLike[str]], Any]


def keep(directory: Path) -> None:
    """From now on, an import of transformers uses and fills ``directory``. No effect once it is imported."""
    if _MODULE not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(directory))


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for the one module, and is gone once it was found."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._directory)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads the module as ever, then puts the kept scan before its own."""

    def __init__(self, loader: importlib.abc.Loader, directory: Path) -> None:
        self._loader = loader
        self._directory = directory

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        scan: Scan | None = getattr(module, _FUNCTION, None)
        if scan is not None and module.__file__ is not None:
            package = Path(module.__file__).parent.parent
            setattr(module, _FUNCTION, _kept(scan, package, self._directory))


def _kept(scan: Scan, package: Path, directory: Path) -> Scan:
    """``scan``, whose result for the large folder of ``package`` comes from ``directory`` if it is there."""
    file = directory / f"{importlib.metadata.version('transformers')}-{sys.implementation.cache_tag}.scan"
    state = f"{package}:{(package / '__init__.py').stat().st_mtime_ns}"
    large = package / _LARGE

    def kept_scan(module_path: str | os.PathLike[str]) -> Any:
        if Path(module_path) not in (large, large / "__init__.py"):
            return scan(module_path)
        found = _read(file, state)
        if found is None:
            found = scan(module_path)
            _write(file, state, found)
        return found

    return kept_scan


def _read(file: Path, state: str) -> Any:
    try:
        kept_state, found = marshal.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, EOFError, ValueError, TypeError) as error:
        log.debug("kept scan is unreadable", file=str(file), error=repr(error))
        return None
    return found if kept_state == state and isinstance(found, dict) else None


def _write(file: Path, state: str, found: Any) -> None:
    try:
        content = marshal.dumps((state, found))
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=file.parent)
        written = Path(name)
        try:
            os.close(descriptor)
            written.write_bytes(content)
            written.replace(file)
        finally:
            written.unlink(missing_ok=True)  # a disk that is full must not be filled further
    except (OSError, ValueError) as error:
        log.debug("scan is not kept", file=str(file), error=repr(error))
