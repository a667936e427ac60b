"""Random ids, drawn from the system for many at a time."""

from __future__ import annotations

import os


class _Drawn:
    """What was drawn ahead."""

    hex = ""
    used = 0


def random_id() -> str:
    """32 hex digits that nobody else has."""
    begin = _Drawn.used
    if begin >= len(_Drawn.hex):
        _Drawn.hex, begin = os.urandom(4096).hex(), 0
    _Drawn.used = begin + 32
    return _Drawn.hex[begin : begin + 32]


def forget() -> None:
    """Draw anew: what was drawn ahead is another process's."""
    _Drawn.hex, _Drawn.used = "", 0


os.register_at_fork(after_in_child=forget)  # two processes never draw the same
