"""Connectors by class name: those of the reference, and those that a program or another package brings."""

from __future__ import annotations

import difflib
import importlib.metadata
import threading
from collections.abc import Callable
from typing import Any, ClassVar

from connectors.reference import classes
from connectors.reference.base import OmniConnectorBase
from connectors.reference.load import TransferConfigError
from connectors.reference.spec import ConnectorSpec
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

ENTRY_POINT_GROUP = "omniplane.reference_connectors"
"""Its entry points are classes, or whatever makes a connector of a config dict."""

Constructor = Callable[[dict[str, Any]], OmniConnectorBase]


class OmniConnectorFactory:
    """All names that ``ConnectorSpec.name`` may have. What a name means is never replaced by something else."""

    _registered: ClassVar[dict[str, Constructor]] = dict(classes.BY_NAME)
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def register_connector(cls, name: str, constructor: Constructor) -> None:
        """Add a name. Raises ``TransferConfigError`` for one that is taken."""
        if not name or not callable(constructor):
            raise TransferConfigError(f"a connector has a name and a constructor, got {name!r} and {constructor!r}")
        with cls._lock:
            if name in cls._registered or name in _entry_points():
                raise TransferConfigError(f"connector {name!r} is registered already", reason="DUPLICATE_CONNECTOR")
            cls._registered[name] = constructor
        _log.debug("connector registered", connector=name)

    @classmethod
    def unregister_connector(cls, name: str) -> None:
        """Take back what ``register_connector`` added; the reference's names stay."""
        with cls._lock:
            if name not in classes.BY_NAME:
                cls._registered.pop(name, None)

    @classmethod
    def create_connector(cls, spec: ConnectorSpec) -> OmniConnectorBase:
        """A connector of this class. Raises ``TransferConfigError`` for an unknown name, listing the known ones, and
        what its constructor raises."""
        connector = cls._constructor(spec.name)(dict(spec.extra))
        _log.info("connector created", connector=spec.name)
        return connector

    @classmethod
    def list_registered_connectors(cls) -> list[str]:
        """All names, without loading any."""
        return sorted({*cls._registered, *_entry_points()})

    @classmethod
    def needs_role(cls, name: str) -> bool:
        """Whether it has a sender's and a receiver's end; False for what is unknown."""
        constructor = cls._registered.get(name)
        if constructor is None and name in _entry_points():
            constructor = cls._constructor(name)
        return bool(getattr(constructor, "needs_role", False))

    @classmethod
    def _constructor(cls, name: str) -> Constructor:
        found = cls._registered.get(name)
        if found is not None:
            return found
        entry_point = _entry_points().get(name)
        if entry_point is None:
            known = cls.list_registered_connectors()
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TransferConfigError(
                f"unknown connector {name!r}, known: {', '.join(known)}{hint}", reason="UNKNOWN_CONNECTOR"
            )
        try:
            constructor: Constructor = entry_point.load()
        except ImportError as error:
            raise errors.FailedPreconditionError(
                f"connector {name!r} of {entry_point.value} cannot be imported: {error}",
                reason="LIBRARY_MISSING",
                metadata={"connector": name, "library": error.name or ""},
            ) from error
        return constructor


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    found: dict[str, importlib.metadata.EntryPoint] = {}
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        other = found.get(entry_point.name)
        if entry_point.name in classes.BY_NAME or (other is not None and other.value != entry_point.value):
            raise errors.FailedPreconditionError(
                f"connector {entry_point.name!r} is defined twice: by {entry_point.value} as well",
                reason="DUPLICATE_CONNECTOR",
            )
        found[entry_point.name] = entry_point
    return found
