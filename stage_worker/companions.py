"""What engines of guided stages call the data of a request's companions. Pure.

Names are those of the reference: of role ``cfg_text`` the tensors are ``cfg_text_past_key_values`` and what was said
about them ``cfg_text_kv_metadata``.
"""

from __future__ import annotations

from collections.abc import Iterable


def tensors_key(role: str) -> str:
    """Of a companion's tensors."""
    return f"{role}_past_key_values"


def metadata_key(role: str) -> str:
    """Of their metadata."""
    return f"{role}_kv_metadata"


def applied_keys(roles: Iterable[str]) -> list[str]:
    """Both, of every role in order."""
    return [key for role in roles for key in (tensors_key(role), metadata_key(role))]
