"""Types of values a key may have: each checks a value, says what it accepts, and returns it as Python data."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from control_plane.deploy.document import Value, type_name
from control_plane.deploy.faults import Faults, did_you_mean, shorten

# Options travel as google.protobuf.Struct, whose numbers are doubles: larger integers would change on the way.
MAX_EXACT_INT: Final = 2**53
INT32_MAX: Final = 2**31 - 1
UINT32_MAX: Final = 2**32 - 1
INT64_MAX: Final = 2**63 - 1


class _Invalid:
    """The value was wrong and has been reported."""

    def __repr__(self) -> str:
        return "INVALID"


INVALID: Final = _Invalid()


class Kind(Protocol):
    """A type of value."""

    @property
    def accepts(self) -> str:
        """What is accepted, as the end of "expected …"."""
        ...

    def check(self, value: Value, faults: Faults) -> Any:
        """The value as Python data, or ``INVALID`` after reporting why not."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """One key of a schema table."""

    kind: Kind
    meaning: str
    default: str = ""
    """For the reference page; empty: unset, the reader of the key decides."""


Schema = Mapping[str, Key]


def _reject(value: Value, faults: Faults, accepts: str, hint: str = "") -> Any:
    faults.error(value, f"expected {accepts}, got {type_name(value)}{hint}")
    return INVALID


@dataclasses.dataclass(frozen=True, slots=True)
class Bool:
    """true or false, not their spelling in quotes."""

    accepts: str = "true or false"

    def check(self, value: Value, faults: Faults) -> Any:
        """See ``Kind``."""
        if isinstance(value.data, bool):
            return value.data
        quoted = isinstance(value.data, str) and value.data.lower() in ("true", "false", "yes", "no", "on", "off")
        return _reject(value, faults, self.accepts, "; write it without quotes" if quoted else "")


@dataclasses.dataclass(frozen=True, slots=True)
class Int:
    """An integer of ``low`` to ``high``, or one of ``also``."""

    low: int | None = None
    high: int = MAX_EXACT_INT
    also: tuple[int, ...] = ()

    @property
    def accepts(self) -> str:
        """See ``Kind``."""
        also = "".join(f"{value} or " for value in self.also)
        if self.low is None:
            return f"{also}an integer"
        if self.high >= INT32_MAX:
            return f"{also}an integer of at least {self.low}"
        return f"{also}an integer from {self.low} to {self.high}"

    def check(self, value: Value, faults: Faults) -> Any:
        """See ``Kind``."""
        data = value.data
        if isinstance(data, bool) or not isinstance(data, int):
            quoted = isinstance(data, str) and re.fullmatch(r"[-+]?\d+", data[:40]) is not None
            return _reject(value, faults, self.accepts, "; write it without quotes" if quoted else "")
        low = -self.high if self.low is None else self.low
        if data in self.also or low <= data <= self.high:
            return data
        limit = f" (at most {self.high})" if data > self.high >= INT32_MAX else ""
        faults.error(value, f"expected {self.accepts}{limit}, got {shorten(str(data), 42)}")
        return INVALID


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """A finite number; integers are fine. Bounds are included unless ``above`` says that ``low`` is not."""

    low: float | None = None
    high: float | None = None
    above: bool = False

    @property
    def accepts(self) -> str:
        """See ``Kind``."""
        if self.low is None:
            return "a number"
        low = f"above {self.low:g}" if self.above else f"of at least {self.low:g}"
        return f"a number {low}" + ("" if self.high is None else f" and at most {self.high:g}")

    def check(self, value: Value, faults: Faults) -> Any:
        """See ``Kind``."""
        data = value.data
        if isinstance(data, bool) or not isinstance(data, int | float):
            return _reject(value, faults, self.accepts)
        good = math.isfinite(data) and abs(data) <= 1e300
        if good and self.low is not None:
            good = data > self.low if self.above else data >= self.low
        if good and self.high is not None:
            good = data <= self.high
        if good:
            return data
        faults.error(value, f"expected {self.accepts}, got {shorten(str(data), 42)}")
        return INVALID


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """Text that is not empty (unless ``empty``), and matches ``pattern`` as a whole."""

    accepts: str = "text"
    pattern: str = ""
    empty: bool = False
    max_chars: int = 4096

    def check(self, value: Value, faults: Faults) -> Any:
        """See ``Kind``."""
        data = value.data
        if not isinstance(data, str):
            number = isinstance(data, int | float)
            return _reject(value, faults, self.accepts, "; put it in quotes" if number else "")
        if not data and not self.empty:
            faults.error(value, f"expected {self.accepts}, got empty text")
            return INVALID
        if len(data) > self.max_chars:
            faults.error(value, f"expected {self.accepts} of at most {self.max_chars} characters, got {len(data)}")
            return INVALID
        if self.pattern and data and re.fullmatch(self.pattern, data) is None:
            return _reject(value, faults, self.accepts)
        return data


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    @property
    def accepts(self) -> str:
        """See ``Kind``."""
        return "one of " + ", ".join(self.words)

    def check(self, value: Value, faults: Faults) -> Any:
        """See ``Kind``."""
        if isinstance(value.data, str) and value.data in self.words:
            return value.data
        hint = did_you_mean(value.data, self.words) if isinstance(value.data, str) else ""
        return _reject(value, faults, self.accepts, hint if "did you mean" in hint else "")


@dataclasses.dataclass(frozen=True, slots=True)
class Anything:
    """Any value that a ``google.protobuf.Struct`` can carry; its structure is kept exactly."""

    accepts: str = "any value"

    def check(self, value: Value, faults: Faults) -> Any:
        """See ``Kind``."""
        data = value.data
        if isinstance(data, dict):
            checked = {key: self.check(item, faults) for key, item in data.items()}
            return INVALID if INVALID in checked.values() else checked
        if isinstance(data, list):
            items = [self.check(item, faults) for item in data]
            return INVALID if INVALID in items else items
        if isinstance(data, int) and abs(data) > MAX_EXACT_INT:
            return _reject(value, faults, "an integer within ±2^53, which is carried exactly", "; put it in quotes")
        if isinstance(data, float) and not math.isfinite(data):
            return _reject(value, faults, "a finite number")
        return data


@dataclasses.dataclass(frozen=True, slots=True)
class FreeMap:
    """A mapping whose keys belong to the engine."""

    accepts: str = "a mapping"

    def check(self, value: Value, faults: Faults) -> Any:
        """See ``Kind``."""
        if not isinstance(value.data, dict):
            return _reject(value, faults, self.accepts)
        return Anything().check(value, faults)


@dataclasses.dataclass(frozen=True, slots=True)
class Environment:
    """Variable names and values; numbers become text, as in any environment."""

    accepts: str = "a mapping of variable names to text"

    def check(self, value: Value, faults: Faults) -> Any:
        """See ``Kind``."""
        if not isinstance(value.data, dict):
            return _reject(value, faults, self.accepts)
        result: dict[str, str] = {}
        for name, item in value.data.items():
            if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
                faults.error(item, "expected a variable name: letters, digits and '_', not a digit first")
            elif isinstance(item.data, bool) or not isinstance(item.data, str | int | float):
                _reject(item, faults, "text", "; put it in quotes" if isinstance(item.data, bool) else "")
            elif "\0" in str(item.data):
                faults.error(item, "a variable cannot hold a NUL character")
            else:
                result[name] = str(item.data)
        return result


@dataclasses.dataclass(frozen=True, slots=True)
class ListOf:
    """A list of one kind of item."""

    item: Kind
    least: int = 0

    @property
    def accepts(self) -> str:
        """See ``Kind``."""
        return f"a list, each item {self.item.accepts}"

    def check(self, value: Value, faults: Faults) -> Any:
        """See ``Kind``."""
        if not isinstance(value.data, list):
            return _reject(value, faults, self.accepts)
        if len(value.data) < self.least:
            faults.error(value, f"expected at least {self.least} item(s), got {len(value.data)}")
            return INVALID
        items = [self.item.check(item, faults) for item in value.data]
        return INVALID if INVALID in items else items


@dataclasses.dataclass(frozen=True, slots=True)
class Either:
    """One of several kinds."""

    kinds: tuple[Kind, ...]

    @property
    def accepts(self) -> str:
        """See ``Kind``."""
        return ", or ".join(kind.accepts for kind in self.kinds)

    def check(self, value: Value, faults: Faults) -> Any:
        """See ``Kind``."""
        for kind in self.kinds:
            result = kind.check(value, trial := Faults())
            if result is not INVALID and not trial:
                return result
        return _reject(value, faults, self.accepts)


@dataclasses.dataclass(frozen=True, slots=True)
class Map:
    """A mapping with known keys only. ``required`` must be there."""

    keys: Schema
    required: tuple[str, ...] = ()
    accepts: str = "a mapping"

    def check(self, value: Value, faults: Faults) -> Any:
        """See ``Kind``. Wrong keys are reported and left out: the rest is still checked against each other."""
        if not isinstance(value.data, dict):
            return _reject(value, faults, self.accepts)
        return check_keys(value, self.keys, faults, required=self.required)


def check_keys(
    value: Value,
    keys: Schema,
    faults: Faults,
    *,
    required: tuple[str, ...] = (),
    unknown: Callable[[str, Value], bool] | None = None,
) -> dict[str, Any]:
    """The good items of a mapping, checked. ``null`` means that the key is not set.

    Unknown keys are faults with the nearest known name, unless ``unknown`` handles them (and returns True).
    """
    result: dict[str, Any] = {}
    for name, item in value.map.items():
        key = keys.get(name)
        if key is None:
            if unknown is None or not unknown(name, item):
                faults.error(
                    item, f"unknown key {shorten(name)!r}{did_you_mean(name, keys, list_known=len(keys) < 20)}"
                )
        elif item.data is not None:
            checked = key.kind.check(item, faults)
            if checked is not INVALID:
                result[name] = checked
    for name in required:
        if name not in value.map or value.map[name].data is None:
            faults.error(value.at(name), f"required: {keys[name].kind.accepts}")
    return result
