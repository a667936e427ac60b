"""Records that are followed: a row, or an object, whenever one of them reads differently."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from omnictl import output, watch


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """What is shown of one kind: records with their columns, names and JSON."""

    columns: Sequence[output.Column[Any]]
    records: Sequence[Any]
    name: Callable[[Any], str]
    to_json: Callable[[Any], Any]


class ChangePrinter:
    """Prints rows as they change, under headings printed once, in columns that only widen."""

    _QUIET = frozenset({"AGE", "LOAD", "KV"})
    """Columns whose change alone is not worth a row."""
    _ROOM = {"STATE": len("READY,CORDONED")}
    """Columns that are wider than the first rows need, since later ones will."""

    def __init__(self, form: str, *, no_headers: bool) -> None:
        self._form = form
        self._headers_due = not no_headers
        self._widths: list[int] = []
        self._shown: dict[str, tuple[str, list[str]]] = {}
        """What was printed last of each record: what decides whether to print it again, and the row."""

    def replicas(self, view: View, changes: Sequence[watch.Change]) -> None:
        """Print replicas that were added, changed or removed."""
        for change in changes:
            name = view.name(change.replica)
            gone = change.kind is watch.Kind.DELETED
            if self._form == "json":
                output.print_json({"type": change.kind.value, "replica": view.to_json(change.replica)}, compact=True)
            elif self._form == "name" and not gone:
                self._print_name(name)
            else:
                self._print_row(view, name, _with(view, self._texts(view, change.replica), "STATE", "GONE", gone))

    def rows(self, view: View) -> None:
        """Print the records of ``view`` that read differently from when they were last printed, and those gone."""
        present = {view.name(record): record for record in view.records}
        for name in [name for name in self._shown if name not in present]:
            texts = self._shown.pop(name)[1]
            if self._form == "json":
                output.print_json({"type": "DELETED", "name": name}, compact=True)
            elif self._form != "name":
                self._print_row(view, name, _with(view, texts, "READY", "GONE", True))
                del self._shown[name]
        for name, record in present.items():
            if self._form == "json":
                value, known = view.to_json(record), name in self._shown
                if self._is_new(name, str(value), []):
                    output.print_json({"type": "MODIFIED" if known else "ADDED", "record": value}, compact=True)
            elif self._form == "name":
                self._print_name(name)
            else:
                self._print_row(view, name, self._texts(view, record))

    def _texts(self, view: View, record: Any) -> list[str]:
        return output.cells(view.columns, record, wide=self._form == "wide")

    def _is_new(self, name: str, content: str, texts: list[str]) -> bool:
        known = self._shown.get(name)
        self._shown[name] = (content, texts)
        return known is None or known[0] != content

    def _print_name(self, name: str) -> None:
        if self._is_new(name, "", []):
            print(name, flush=True)

    def _print_row(self, view: View, name: str, texts: list[str]) -> None:
        heads = output.headings(view.columns, wide=self._form == "wide")
        lasting = [text for head, text in zip(heads, texts, strict=True) if head not in self._QUIET]
        if not self._is_new(name, "\0".join(lasting), texts):
            return
        if not self._widths:
            everything = [self._texts(view, record) for record in view.records]
            columns = zip(heads, texts, *everything, strict=True)
            self._widths = [max(self._ROOM.get(column[0], 0), *map(output.width, column)) for column in columns]
        if self._headers_due:
            self._headers_due = False
            print(output.line(heads, self._widths))
        self._widths = [max(w, output.width(text)) for w, text in zip(self._widths, texts, strict=True)]
        print(output.line(texts, self._widths), flush=True)


def _with(view: View, texts: list[str], heading: str, text: str, condition: bool) -> list[str]:
    """``texts`` with another text under ``heading``, if ``condition``."""
    if not condition:
        return texts
    at = [column.heading for column in view.columns].index(heading)  # shown in every format, so in the same place
    return [*texts[:at], text, *texts[at + 1 :]]
