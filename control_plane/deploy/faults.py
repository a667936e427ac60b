"""Everything wrong with one deploy file, collected so that one run shows all of it."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Protocol

from omnicore.errors import FieldViolation, InvalidRequestError

REASON = "INVALID_DEPLOY"

# Errors travel in HTTP/2 trailers, where peers may refuse more than 8 KiB (gRPC's default). Base64 makes a third more
# of it, and the first faults are in the message as well.
MAX_VIOLATION_BYTES = 3500
MAX_MESSAGE_FAULTS = 3
MAX_MESSAGE_BYTES = 700

# A text with more than that is not a deploy file with mistakes in it. Reading stops there: suggestions take time.
MAX_ERRORS = 200
MAX_WARNINGS = 200


class Place(Protocol):
    """Where something stands in the file."""

    @property
    def path(self) -> str:
        """YAML path: ``stages[1].devices``."""
        ...

    @property
    def where(self) -> str:
        """ "line 12", or "document 2, line 3" in a text of several documents."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """A place outside of the file: an argument of the call."""

    path: str
    where: str = ""


class Faults:
    """Collects errors and warnings; the same fault at the same place counts once."""

    def __init__(self) -> None:
        self._errors: dict[FieldViolation, None] = {}
        self._warnings: dict[str, None] = {}

    def __bool__(self) -> bool:
        return bool(self._errors)

    def error(self, at: Place, text: str) -> None:
        """Note a fault: what is wrong and what is accepted. Raises all of them when there are too many."""
        description = f"{at.where}: {text}" if at.where else text
        self._errors.setdefault(FieldViolation(at.path, description))
        if len(self._errors) >= MAX_ERRORS:
            raise self.exception()

    def warn(self, at: Place, text: str) -> None:
        """Note something worth knowing that is not an error. Too many are one."""
        where = f" ({at.where})" if at.where else ""
        self._warnings.setdefault(f"{at.path}{where}: {text}")
        if len(self._warnings) > MAX_WARNINGS:
            self.error(at, f"more than {MAX_WARNINGS} warnings, this being the last: {text}")
            raise self.exception()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings in the order they were found."""
        return tuple(self._warnings)

    def exception(self) -> InvalidRequestError:
        """All errors as one typed error; what would not fit into a trailer is counted in a last violation."""
        found = list(self._errors)
        kept: list[FieldViolation] = []
        size = 0
        for violation in found:
            size += len(violation.field.encode()) + len(violation.description.encode()) + 8
            if size > MAX_VIOLATION_BYTES and kept:
                break
            kept.append(violation)
        if len(kept) < len(found):
            more = len(found) - len(kept)
            kept.append(FieldViolation("deploy_yaml", f"and {more} more faults, shown once these are mended"))
        shown = "; ".join(f"{v.field} ({v.description})" for v in found[:MAX_MESSAGE_FAULTS])
        rest = f"; and {len(found) - MAX_MESSAGE_FAULTS} more" if len(found) > MAX_MESSAGE_FAULTS else ""
        count = f"{len(found)} fault{'s' if len(found) != 1 else ''}"
        message = shorten(f"the deploy file has {count}: {shown}{rest}", MAX_MESSAGE_BYTES)
        return InvalidRequestError(message, reason=REASON, metadata={"faults": len(found)}, violations=kept)

    def stop_if_any(self) -> None:
        """Raise if there is an error."""
        if self:
            raise self.exception()


def shorten(text: str, limit: int = 60) -> str:
    """``text``, cut to about ``limit`` characters: nothing from the file is repeated at length."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def did_you_mean(wrong: str, known: Iterable[str], *, list_known: bool = True) -> str:
    """The tail of a message about an unknown name: the nearest known one, else (if short enough) all of them."""
    names = list(dict.fromkeys(known))
    near = nearest(wrong, names)
    if near:
        return f"; did you mean {near!r}?"
    if not list_known or not names:
        return ""
    return f"; known: {shorten(', '.join(names), 240)}"


def nearest(wrong: str, known: Iterable[str]) -> str:
    """The most similar known name, or ""."""
    near = difflib.get_close_matches(shorten(wrong).lower(), list(known), n=1, cutoff=0.6)
    return near[0] if near else ""
