"""The two fields of every body that say which session a request belongs to, and what if its replica is gone. Pure."""

from __future__ import annotations

from gateway import validation
from gateway.http.fields import Fields
from omnicore import errors

SESSION_FIELDS = frozenset(("session_id", "session_policy"))
_STRICT = {"strict": True, "rebind": False}


def read_session(fields: Fields) -> tuple[str, bool | None]:
    """The id ("" without one), and whether a session whose replica is gone is refused (None: as the pipeline says)."""
    session_id = fields.string("session_id", "") or ""
    validation.check_id("session_id", session_id)
    policy = fields.string("session_policy")
    if policy is None:
        return session_id, None
    if policy not in _STRICT:
        raise errors.InvalidRequestError.field(
            "session_policy", f"must be one of: {', '.join(_STRICT)}; got {policy!r}"
        )
    if not session_id:
        raise errors.InvalidRequestError.field("session_policy", "only with session_id")
    return session_id, _STRICT[policy]
