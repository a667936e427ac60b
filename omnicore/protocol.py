"""The version of ``protos/omni/v1`` that this code speaks: workers announce it, control planes check it."""

from __future__ import annotations

from typing import Final

MAJOR: Final = 1
"""Grows when an old peer cannot work with a new one; another major version is refused at registration."""
MINOR: Final = 0
"""Grows with what may be used where both ends have it."""
VERSION: Final = f"{MAJOR}.{MINOR}"
"""As in ``StageFingerprint.protocol_version``."""
