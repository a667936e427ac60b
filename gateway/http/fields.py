"""Reads a JSON object field by field, so that every error names the path and what is accepted. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Set
from typing import Any

from omnicore import errors

_TOLD_CHARS = 100
"""Of a name that nobody knows, so much is told."""
_NAMES: dict[type, str] = {
    str: "a string",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


class Fields:
    """One JSON object. ``path`` is where it stands in the body ("" for the body itself).

    null counts as absent, as in OpenAI's API. Only what is there is looked at: bodies are small, the list of what they
    might have is long.
    """

    __slots__ = ("_values", "path")

    def __init__(self, value: object, path: str = "") -> None:
        self.path = path
        if not isinstance(value, dict):
            raise errors.InvalidRequestError.field(path or "body", f"must be an object, got {kind(value)}")
        self._values: dict[str, Any] = value

    def at(self, name: str) -> str:
        """The path of a field of this object."""
        return f"{self.path}.{name}" if self.path else name

    def raw(self, name: str) -> Any:
        """The value as it is, None if absent."""
        return self._values.get(name)

    def present(self, names: Set[str]) -> list[str]:
        """Those of ``names`` that the object has, in its order: of several errors the same one is told every time."""
        return [name for name in self._values if name in names]

    def string(self, name: str, default: str | None = None, *, required: bool = False) -> str | None:
        """A string."""
        value: str | None = self._typed(name, str, default, required=required)
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value: bool | None = self._typed(name, bool, default)
        return bool(value)

    def integer(self, name: str) -> int | None:
        """A whole number that fits 64 bits, None if absent."""
        value: int | None = self._typed(name, int, None)
        if value is not None and not -(2**63) <= value < 2**63:
            raise errors.InvalidRequestError.field(self.at(name), f"out of range: {value}")
        return value

    def number(self, name: str) -> float | None:
        """A number, None if absent."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise errors.InvalidRequestError.field(self.at(name), f"must be a number, got {kind(value)}")
        return float(value)

    def object(self, name: str) -> Fields | None:
        """An object, None if absent."""
        value = self.raw(name)
        return None if value is None else Fields(value, self.at(name))

    def array(self, name: str, *, required: bool = False, most: int | None = None) -> list[Any] | None:
        """A list of at most ``most`` items, None if absent."""
        value: list[Any] | None = self._typed(name, list, None, required=required)
        if most is not None and value is not None and len(value) > most:
            raise errors.InvalidRequestError.field(self.at(name), f"at most {most}, got {len(value)}")
        return value

    def strings(self, name: str, *, most: int | None = None) -> list[str] | None:
        """A list of at most ``most`` strings, None if absent."""
        values = self.array(name, most=most)
        for index, value in enumerate(values or ()):
            if not isinstance(value, str):
                raise errors.InvalidRequestError.field(
                    f"{self.at(name)}[{index}]", f"must be a string, got {kind(value)}"
                )
        return values

    def choice(self, name: str, accepted: Collection[str], default: str) -> str:
        """One of a few strings."""
        value = self.string(name) or default
        if value not in accepted:
            raise errors.InvalidRequestError.field(
                self.at(name), f"must be one of: {', '.join(accepted)}; got {value!r}"
            )
        return value

    def refuse(self, neutral: Mapping[str, tuple[Any, ...]], why: str) -> None:
        """Refuse fields that would change the output in a way not offered, unless they have a value that asks for
        nothing (``neutral``: name → such values)."""
        for name in self.present(neutral.keys()):
            value = self._values[name]
            if value is not None and not any(value == v and type(value) is type(v) for v in neutral[name]):
                raise errors.InvalidRequestError.field(self.at(name), why, reason="UNSUPPORTED_FIELD")

    def finish(self, known: Set[str]) -> None:
        """Refuse fields that are not among ``known``, the first of them with the nearest name that is."""
        for name in self._values:
            if name in known:
                continue
            name = name[:_TOLD_CHARS]  # a body may be one name of many megabytes
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise errors.InvalidRequestError.field(self.at(name), f"unknown field{hint}", reason="UNKNOWN_FIELD")

    def _typed(self, name: str, wanted: type, default: Any, *, required: bool = False) -> Any:
        value = self.raw(name)
        if value is None:
            if required:
                raise errors.InvalidRequestError.field(self.at(name), f"required; must be {_NAMES[wanted]}")
            return default
        if type(value) is not wanted:
            raise errors.InvalidRequestError.field(self.at(name), f"must be {_NAMES[wanted]}, got {kind(value)}")
        return value


def kind(value: object) -> str:
    """The JSON type of a value, for messages."""
    return _NAMES.get(type(value), type(value).__name__)
