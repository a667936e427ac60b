"""Environment variables that options name: ``${NAME}``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from omnicore.errors import InvalidRequestError

_BRACED: Final = re.compile(r"\$\{(\w+)\}")
_BRACED_OR_BARE: Final = re.compile(r"\$\{(\w+)\}|\$([A-Za-z_]\w*)")


def expand(text: str, environ: Mapping[str, str], field: str, *, bare: bool = False) -> str:
    """``text`` with the variables of ``environ`` put in; with ``bare`` also those that are written ``$NAME``. Raises
    ``InvalidRequestError`` (UNSET_VARIABLE) naming ``field`` for one that is not set."""

    def value(match: re.Match[str]) -> str:
        name = next(filter(None, match.groups()))
        if (found := environ.get(name)) is None:
            raise InvalidRequestError.field(
                field, f"{text!r} names the environment variable {name}, which is not set", reason="UNSET_VARIABLE"
            )
        return found

    return (_BRACED_OR_BARE if bare else _BRACED).sub(value, text)
