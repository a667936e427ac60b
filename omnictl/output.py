"""Printing records: tables for people, protobuf JSON and YAML for programs, names for scripts."""

from __future__ import annotations

import dataclasses
import json
import sys
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message

FORMATS = ("table", "wide", "json", "yaml", "name")

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """One column: its heading, and the text of a record in it."""

    heading: str
    text: Callable[[T], str]
    wide: bool = False
    """Only in ``-o wide``."""


def to_dict(message: Message) -> dict[str, Any]:
    """Protobuf JSON: lowerCamelCase keys, 64-bit numbers as text, no field left out but unset messages."""
    return json_format.MessageToDict(message, always_print_fields_with_no_presence=True)


def print_json(value: Any, *, compact: bool = False) -> None:
    """JSON on standard output; one line if ``compact``."""
    text = json.dumps(value, ensure_ascii=False, indent=None if compact else 2)
    print(text, flush=compact)


def print_yaml(value: Any) -> None:
    """YAML on standard output."""
    import yaml  # only here: most commands print none

    yaml.safe_dump(value, sys.stdout, sort_keys=False, allow_unicode=True, default_flow_style=False)


def print_structured(value: Any, form: str) -> None:
    """``value`` as ``form``, "json" or "yaml"."""
    if form == "yaml":
        print_yaml(value)
    else:
        print_json(value)


def cells(columns: Sequence[Column[T]], record: T, *, wide: bool) -> list[str]:
    """The texts of ``record``, in the order of the columns."""
    return [column.text(record) or "-" for column in columns if wide or not column.wide]


def headings(columns: Sequence[Column[Any]], *, wide: bool) -> list[str]:
    """The headings shown."""
    return [column.heading for column in columns if wide or not column.wide]


def table(columns: Sequence[Column[T]], records: Iterable[T], *, wide: bool = False) -> str:
    """Records under headings, three spaces apart, without trailing spaces; no final newline."""
    rows = [headings(columns, wide=wide), *(cells(columns, record, wide=wide) for record in records)]
    widths = [max(width(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(line(row, widths) for row in rows)


def line(texts: Sequence[str], widths: Sequence[int]) -> str:
    """One row; a text wider than its column pushes the rest."""
    padded = [text + " " * (widths[i] - width(text)) for i, text in enumerate(texts)]
    return "   ".join(padded).rstrip()


def width(text: str) -> int:
    """Terminal columns that ``text`` takes: wide East Asian characters count two, combining ones none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def age(seconds: float) -> str:
    """A duration as kubectl writes it: 45s, 3m10s, 2h5m, 3d4h."""
    whole = max(0, int(seconds))
    minutes, s = divmod(whole, 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h}h" if h and days < 10 else f"{days}d"
    if hours:
        return f"{hours}h{m}m" if m and hours < 10 else f"{hours}h"
    if minutes:
        return f"{minutes}m{s}s" if s and minutes < 10 else f"{minutes}m"
    return f"{s}s"


def plural(count: int, noun: str) -> str:
    """ "1 replica", "2 replicas"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
