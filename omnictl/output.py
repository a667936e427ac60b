"""Printing records: tables for people, protobuf JSON and YAML for programs, names for scripts."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message

from omnictl.parser import usage_error

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
    """Protobuf JSON under the names of the proto (those of deploy files and of etcd) and in its order; 64-bit numbers
    as text, no field left out but unset messages."""
    value: dict[str, Any] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _in_order(message.DESCRIPTOR, value)


def _in_order(descriptor: Any, value: dict[str, Any]) -> dict[str, Any]:
    """``value``, JSON of a ``descriptor`` message, with its keys in the order of the proto: the library's own order
    depends on which fields are set."""
    ordered: dict[str, Any] = {}
    for field in descriptor.fields:
        if field.name not in value:
            continue
        inner, kind = value[field.name], field.message_type
        if kind is not None and kind.full_name == "google.protobuf.Struct":
            inner = whole_numbers(inner)
        elif kind is not None and kind.GetOptions().map_entry:
            inner = dict(sorted(inner.items()))
        elif kind is not None:
            if isinstance(inner, dict):
                inner = _in_order(kind, inner)
            elif isinstance(inner, list):
                inner = [_in_order(kind, item) if isinstance(item, dict) else item for item in inner]
        ordered[field.name] = inner
    # Keys that are no fields: of messages with a JSON form of their own, such as google.rpc.Status details.
    return ordered | {key: inner for key, inner in value.items() if key not in ordered}


def whole_numbers(value: Any) -> Any:
    """``value`` with 2048.0 as 2048 and sorted keys, all through: a Struct knows only floating point and no order."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {key: whole_numbers(inner) for key, inner in sorted(value.items())}
    if isinstance(value, list):
        return [whole_numbers(inner) for inner in value]
    return value


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


def print_records(
    columns: Sequence[Column[T]],
    records: Sequence[T],
    form: str,
    *,
    kind: str,
    name: Callable[[T], str],
    to_json: Callable[[T], Any],
    more: dict[str, Any] | None = None,
    no_headers: bool = False,
    fitted: bool = False,
) -> None:
    """``records``, which are ``kind`` ("leases"), as ``form``, one of ``FORMATS``. ``more`` goes beside the list in
    JSON and YAML; ``fitted``: see ``fit``."""
    if form in ("json", "yaml"):
        print_structured({kind: [to_json(record) for record in records], **(more or {})}, form)
    elif form == "name":
        for record in records:
            print(name(record))
    elif not records:
        print(f"no {kind}", file=sys.stderr)
    else:
        text = table(columns, records, wide=form == "wide")
        text = text.partition("\n")[2] if no_headers else text
        print(fit(text) if fitted and form == "table" else text)


class Report:
    """What a command that changes things has done so far: lines as it goes, or one document at the end."""

    def __init__(self, form: str) -> None:
        """``form``: "text", "json", "yaml" or "name"."""
        self._form = form
        self._results: list[dict[str, Any]] = []

    def done(self, name: str, what: str, answer: dict[str, Any] | None = None) -> None:
        """``what`` was done to ``name``; ``answer`` is the server's."""
        if self._form == "text":
            print(f"{name} {what}", flush=True)
        elif self._form == "name" and name not in (result["name"] for result in self._results):
            print(name, flush=True)
        self._results.append({"name": name, "done": what, **(answer or {})})

    def end(self) -> None:
        """Print the document, if that is the form."""
        if self._form in ("json", "yaml"):
            print_structured({"results": self._results}, self._form)


def cells(columns: Sequence[Column[T]], record: T, *, wide: bool) -> list[str]:
    """The texts of ``record``, in the order of the columns."""
    return [column.text(record) or "-" for column in columns if wide or not column.wide]


def headings(columns: Sequence[Column[Any]], *, wide: bool) -> list[str]:
    """The headings shown."""
    return [column.heading for column in columns if wide or not column.wide]


def table(columns: Sequence[Column[T]], records: Iterable[T], *, wide: bool = False, gap: int = 3) -> str:
    """Records under headings, ``gap`` spaces apart, without trailing spaces; no final newline."""
    rows = [headings(columns, wide=wide), *(cells(columns, record, wide=wide) for record in records)]
    widths = [max(width(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(line(row, widths, gap) for row in rows)


def line(texts: Sequence[str], widths: Sequence[int], gap: int = 3) -> str:
    """One row; a text wider than its column pushes the rest."""
    padded = [text + " " * (widths[i] - width(text)) for i, text in enumerate(texts)]
    return (" " * gap).join(padded).rstrip()


def fit(text: str) -> str:
    """``text`` with its lines cut to the terminal's width, if it goes to one. For tables whose last column is a gist
    of what other formats have whole."""
    if not sys.stdout.isatty():
        return text
    columns = shutil.get_terminal_size().columns
    return "\n".join(cut(line, columns) for line in text.split("\n"))


def width(text: str) -> int:
    """Terminal columns that ``text`` takes: wide East Asian characters count two, combining ones none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def whole_number(text: str, flag: str, command: str, *, low: int = 1, high: int = 2**63 - 1) -> int:
    """``text`` as a whole number. Raises ``InvalidRequestError`` naming ``flag`` and the ``command`` whose help tells
    more."""
    # Python itself refuses to read thousands of digits.
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 100 else -1
    if not low <= number <= high:
        told = high < 2**63 - 1 or (text.isdecimal() and len(text) >= 19)  # who comes near the limit is told it
        wanted = f"from {low} to {high}" if told else f"of {low} or more"
        raise usage_error(f"{flag}: must be a whole number {wanted}, got {cut(text, 60)!r}", command)
    return number


def cut(text: str, columns: int) -> str:
    """``text`` in at most ``columns`` of a terminal, with "…" where something is left out."""
    if width(text) <= columns:
        return text
    left = columns - 1
    for length, character in enumerate(text):
        left -= width(character)
        if left < 0:
            return f"{text[:length]}…"
    return f"{text}…"


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
