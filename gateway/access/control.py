"""Decides who a caller is and whether it may do what it wants.

Without a file of keys everybody is ``ANYBODY``, who may send requests and look; administrative calls it may make only
where nobody but this machine can be the caller (``trusted``).
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Mapping

from gateway.access.audit import AuditLog
from omnicore import access, api_keys, errors
from omnicore.access import Role
from omnicore.api_keys import ApiKey, KeyRole, KeyTable, Priority
from omnicore.clock import SYSTEM_CLOCK, Clock
from omnicore.log import get_logger
from omnicore.reloaded import Reloaded

_log = get_logger(__name__)

FLAG = "--api-keys"
# Looking at the file costs as much as finding a key, so it is looked at this often at most.
LOOK_EVERY_S = 0.5
_SCHEME = b"bearer "

ANYBODY = ApiKey(id="", sha256="", priority=Priority.HIGH)
"""Who calls a gateway without keys: bound by no limits of its own."""
MEMBER = ApiKey(id="", sha256="", roles=frozenset({KeyRole.ADMIN}), priority=Priority.HIGH)
"""Who has proved by its certificate that it belongs to the cluster; the table of ``omnicore.access`` is its bound."""
CALLER: contextvars.ContextVar[ApiKey] = contextvars.ContextVar("caller", default=ANYBODY)
"""Whose key the call at hand came with: set for the methods of servicers."""

# Of RPCs that clients may make, those that only look.
_READING = frozenset(
    {
        "omni.v1.InferenceService/ListModels",
        "omni.v1.InferenceService/GetRequest",
        "omni.v1.InferenceService/ListRequests",
        "omni.v1.PipelineService/GetPipeline",
        "omni.v1.PipelineService/ListPipelines",
    }
)


def role_of_rpc(method: str) -> KeyRole | None:
    """The role that a key needs for an RPC ("/package.Service/Method"); None: it is open. For gRPC and for REST."""
    name = method.removeprefix("/")
    if name.startswith(("grpc.health.", "grpc.reflection.")):
        return None
    roles = access.allowed(name)
    if name in _READING or roles == access.EVERYONE:
        return KeyRole.READ
    return KeyRole.CLIENT if Role.CLIENT in roles else KeyRole.ADMIN


class AccessControl:
    """One for all adapters of a gateway. Used from one event loop."""

    def __init__(
        self,
        path: str = "",
        *,
        trusted: bool = True,
        clock: Clock = SYSTEM_CLOCK,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """``path`` of the file of keys; empty: none are asked for. ``trusted``: without keys, callers may administrate.
        Raises ``InvalidRequestError`` for a file that cannot be used."""
        self.audit = AuditLog(clock)
        self.on_reload: Callable[[KeyTable], None] | None = None
        """Called with the new keys once they are in force."""
        self._trusted = trusted
        self._clock = clock
        self._wall_s = wall_s
        self._file = Reloaded("API keys", {FLAG: path}, _parse) if path else None
        self._keys = self._file.get() if self._file is not None else KeyTable({})
        self._look_s = clock.monotonic() + LOOK_EVERY_S
        self._may: dict[frozenset[KeyRole], frozenset[str]] = {}  # what those who hold these roles may do

    @property
    def wants_keys(self) -> bool:
        """Callers need a key."""
        return self._file is not None

    def keys(self) -> KeyTable:
        """The keys in force."""
        if self._file is not None and self._clock.monotonic() >= self._look_s:
            self.reload()
        return self._keys

    def reload(self) -> None:
        """Look at the file now. One that cannot be used is logged, and the former keys stay."""
        if self._file is None:
            return
        self._look_s = self._clock.monotonic() + LOOK_EVERY_S
        before, self._keys = self._keys, self._file.get()
        if self._keys is not before:
            _log.info("API keys in force", keys=len(self._keys))
            if self.on_reload is not None:
                self.on_reload(self._keys)

    def identify(self, authorization: bytes, x_api_key: bytes = b"") -> ApiKey:
        """Whose key the headers hold. Raises ``UnauthenticatedError`` if it is none that is in force."""
        if self._file is None:
            return ANYBODY
        sent = authorization[len(_SCHEME) :].strip() if authorization[: len(_SCHEME)].lower() == _SCHEME else x_api_key
        if not sent:
            raise _unauthenticated("an API key is required: 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
        key = self.keys().find(sent)
        if key is None:
            raise _unauthenticated("this API key is not known here")
        if key.disabled:
            raise _unauthenticated("this API key is disabled", key.id)
        if key.expires_s is not None and self._wall_s() >= key.expires_s:
            raise _unauthenticated("this API key has expired", key.id)
        return key

    def lasting_client(self, authorization: bytes) -> ApiKey | None:
        """Whose key it is, if it is one that may ask models, and will for as long as ``keys`` is the same table."""
        try:
            key = self.identify(authorization)
        except errors.UnauthenticatedError:
            return None
        return key if key.expires_s is None and self.may(key, KeyRole.CLIENT) else None

    def may(self, key: ApiKey, role: KeyRole) -> bool:
        """Whether ``check`` has nothing against it. Cheap: who has the same roles may do the same."""
        if key is ANYBODY:
            return role is not KeyRole.ADMIN or self._trusted
        known = self._may.get(key.roles)
        if known is None:
            known = self._may[key.roles] = frozenset(asked.value for asked in KeyRole if key.may(asked))
        return role.value in known

    def check(self, key: ApiKey, role: KeyRole, what: str) -> None:
        """Raise ``PermissionDeniedError`` unless ``key`` may do ``what``, which needs ``role``."""
        if key is ANYBODY:
            if role is KeyRole.ADMIN and not self._trusted:
                raise errors.PermissionDeniedError(
                    f"{what}: administrators prove who they are here; start the gateway with {FLAG}",
                    reason="ROLE_REQUIRED",
                    metadata={"method": what, "needs": role.value},
                )
            return
        if not key.may(role):
            held = ", ".join(sorted(key.roles))
            raise errors.PermissionDeniedError(
                f"{what}: needs the role {role}; the key {key.id!r} has {held}",
                reason="ROLE_REQUIRED",
                metadata={"method": what, "needs": role.value, "roles": held, "key_id": key.id},
            )


def _unauthenticated(message: str, key_id: str = "") -> errors.UnauthenticatedError:
    metadata = {"key_id": key_id} if key_id else None
    return errors.UnauthenticatedError(message, reason="INVALID_API_KEY", metadata=metadata)


def _parse(contents: Mapping[str, bytes]) -> KeyTable:
    ((flag, content),) = contents.items()
    return api_keys.parse(flag, content)
