"""Paths to handlers. Pure: no handler is called here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

H = TypeVar("H")

_PARAMETER = re.compile(r"\{(\w+)(:path)?\}")


class Match(NamedTuple, Generic[H]):
    """What a request's path and method lead to."""

    handler: H | None
    """None: there is no such path, or it does not take the method."""
    params: dict[str, str]
    allowed: tuple[str, ...]
    """The methods that the path takes; empty: there is no such path."""


class PathTable(Generic[H]):
    """Fixed paths are found at once; templates are tried from the one with most fixed characters on.

    ``{name}`` in a template stands for a part without a slash, ``{name:path}`` for any rest, both not empty; what is
    fixed may follow it (``/v1/things/{id}:stop``). A path that takes GET takes HEAD.
    """

    def __init__(self) -> None:
        self._fixed: dict[str, dict[str, H]] = {}
        self._templates: list[tuple[int, str, re.Pattern[str], dict[str, H]]] = []

    def add(self, method: str, template: str, handler: H) -> None:
        """Raises ``ValueError`` for a template that has this method already."""
        handlers = self._of_template(template) if "{" in template else self._fixed.setdefault(template, {})
        if method in handlers:
            raise ValueError(f"{method} {template} is there twice")
        handlers[method] = handler

    def find(self, method: str, path: str) -> Match[H]:
        """The handler for a request."""
        if (handlers := self._fixed.get(path)) is not None:
            if (handler := handlers.get(method)) is not None:
                return Match(handler, {}, ())
            return _without(handlers, {}, method)
        allowed: dict[str, H] = {}
        for _, _, pattern, handlers in self._templates:
            if (found := pattern.fullmatch(path)) is not None:
                match = _without(handlers, found.groupdict(), method)
                if match.handler is not None:
                    return match
                allowed.update(handlers)
        return Match(None, {}, _methods(allowed))

    def _of_template(self, template: str) -> dict[str, H]:
        for _, known, _, handlers in self._templates:
            if known == template:
                return handlers
        pattern, end, fixed = "", 0, 0
        for parameter in _PARAMETER.finditer(template):
            literal = template[end : parameter.start()]
            pattern += re.escape(literal) + f"(?P<{parameter[1]}>{'.+' if parameter[2] else '[^/]+'})"
            end, fixed = parameter.end(), fixed + len(literal)
        pattern += re.escape(template[end:])
        fixed += len(template) - end
        entry = (fixed, template, re.compile(pattern, re.DOTALL), dict[str, H]())
        self._templates.append(entry)
        self._templates.sort(key=lambda known: -known[0])
        return entry[3]


def _without(handlers: dict[str, H], params: dict[str, str], method: str) -> Match[H]:
    handler = handlers.get("GET" if method == "HEAD" and "HEAD" not in handlers else method)
    return Match(handler, params, _methods(handlers))


def _methods(handlers: Iterable[str]) -> tuple[str, ...]:
    found = set(handlers)
    if "GET" in found:
        found.add("HEAD")
    return tuple(sorted(found))
