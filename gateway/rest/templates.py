"""Path templates of ``google.api.http``, and matching of paths against them. Pure.

::

    Template  = "/" Segments [ ":" LITERAL ]
    Segments  = Segment { "/" Segment }
    Segment   = "*" | "**" | LITERAL | "{" FieldPath [ "=" Segments ] "}"

``*`` is one segment, ``**`` all that is left; a variable without ``=`` is one segment. Paths are matched as they came,
and decoded afterwards, so an encoded slash stays in its segment. ``**`` keeps its slashes.
"""

from __future__ import annotations

import dataclasses
import re
import urllib.parse

from omnicore import errors

_VARIABLE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_.]*)(?:=([^{}]*))?\}")
_LITERAL = re.compile(r"[A-Za-z0-9._~!$&'()+,;@-]+")


@dataclasses.dataclass(frozen=True, slots=True)
class Template:
    """One parsed template."""

    text: str
    fields: tuple[str, ...]
    """Field paths that the path gives, in order."""
    openapi: str
    """As OpenAPI writes it: ``{name=x/*}`` is ``{name}`` there."""
    rank: tuple[int, int]
    """Templates of a higher rank are tried first: more literal segments, then fewer open ends."""
    _pattern: re.Pattern[str]

    def match(self, path: str) -> dict[str, str] | None:
        """The variables of ``path`` (percent-encoded, without query) by field path; None if it is another path.

        Raises ``InvalidRequestError`` for a variable that does not decode to UTF-8.
        """
        found = self._pattern.fullmatch(path)
        if found is None:
            return None
        return {field: decoded(value, field) for field, value in zip(self.fields, found.groups(), strict=True)}


def parse(text: str) -> Template:
    """Read a template. Raises ``ValueError`` for one that is malformed."""
    if not text.startswith("/"):
        raise ValueError(f"{text!r}: a path template begins with /")
    fields: list[str] = []
    pattern, openapi, position = "", "", 0
    for variable in _VARIABLE.finditer(text):
        pattern += _segments(text[position : variable.start()], text)
        openapi += text[position : variable.start()]
        field, inner = variable.group(1), variable.group(2)
        if field in fields:
            raise ValueError(f"{text!r}: {field} stands twice")
        fields.append(field)
        pattern += f"({_segments(inner, text) if inner else _ONE})"
        openapi += "{" + field + "}"
        position = variable.end()
    pattern += _segments(text[position:], text)
    openapi += text[position:]
    literals = sum(1 for part in re.split(r"[/:]", openapi) if part and "{" not in part and "*" not in part)
    return Template(text, tuple(fields), openapi, (literals, -text.count("**")), re.compile(pattern))


def decoded(value: str, name: str) -> str:
    """``value`` without percent-encoding. Raises ``InvalidRequestError`` if that is not UTF-8."""
    try:
        return urllib.parse.unquote(value, errors="strict")
    except UnicodeDecodeError:
        raise errors.InvalidRequestError.field(name, "must be percent-encoded UTF-8") from None


_ONE, _ALL = "[^/]+", ".+"


def _segments(text: str, template: str) -> str:
    """The regular expression of a part of a template without variables."""
    pattern = ""
    for part in re.split(r"([/:])", text):
        if part in ("/", ":", ""):
            pattern += part
        elif part == "*":
            pattern += _ONE
        elif part == "**":
            pattern += _ALL
        elif _LITERAL.fullmatch(part):
            pattern += re.escape(part)
        else:
            raise ValueError(f"{template!r}: {part!r} is no segment")
    return pattern
