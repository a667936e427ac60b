"""YAML text to a tree that knows where everything stands.

Built on the parser's events, not on its object constructors: nothing in the file can name a type to build, recursion
never follows the input, and the limits below hold while reading. Accepted: anchors, aliases, merge keys (``<<``),
several documents. Refused, each with its place: duplicate keys, tags, keys that are not text, aliases into themselves,
more than 1 MiB, more than ``MAX_NODES`` values once aliases are written out, more than ``MAX_DEPTH`` levels.

Plain scalars are read as YAML 1.2 does, with ``yes/no/on/off`` still booleans (users' files rely on it). Numbers with
leading zeros, dates and ``12:30`` are text: no key wants them, and guessing would hide the mistake.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any, TypeAlias

import yaml

from control_plane.deploy.faults import Argument, Faults, shorten

MAX_BYTES = 1024 * 1024
MAX_NODES = 50_000  # the largest real files have about 400
MAX_DEPTH = 64
MAX_DOCUMENTS = 16

Scalar: TypeAlias = str | int | float | bool | None

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NULLS = frozenset(("", "~", "null", "Null", "NULL"))
_BOOLEANS = {
    spelling: value
    for word, value in (("true", True), ("yes", True), ("on", True), ("false", False), ("no", False), ("off", False))
    for spelling in (word, word.capitalize(), word.upper())
}
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)\Z")
_BASED = re.compile(r"0x[0-9a-fA-F]+\Z|0o[0-7]+\Z")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9_]*)(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?\Z")
_SPECIAL = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}
_MAX_NUMBER_CHARS = 40
_PLAIN_STEP = re.compile(r"[A-Za-z0-9_-]+\Z")
_TAG = "tag:yaml.org,2002:"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A value of the file and its place. After merging, children keep the place they come from."""

    data: Scalar | dict[str, Value] | list[Value]
    line: int
    """Line of its key in a mapping, of itself elsewhere; from 1."""
    document: int = 0
    """Number of the document if there are several, else 0."""
    parent: Value | None = None
    step: str | int = ""

    @property
    def path(self) -> str:
        """``stages[1].devices``; "deploy_yaml" for the whole file."""
        steps: list[str] = []
        node: Value | None = self
        while node is not None and node.parent is not None:
            if isinstance(node.step, int):
                steps.append(f"[{node.step}]")
            elif _PLAIN_STEP.match(node.step):
                steps.append("." + shorten(node.step))
            else:
                steps.append(f"[{json.dumps(shorten(node.step), ensure_ascii=False)}]")
            node = node.parent
        return "".join(reversed(steps)).lstrip(".") or "deploy_yaml"

    @property
    def where(self) -> str:
        """ "line 12", or "document 2, line 3"."""
        return f"document {self.document}, line {self.line}" if self.document else f"line {self.line}"

    @property
    def map(self) -> dict[str, Value]:
        """Its items if it is a mapping, else none."""
        return self.data if isinstance(self.data, dict) else {}

    @property
    def items(self) -> list[Value]:
        """Its items if it is a list, else none."""
        return self.data if isinstance(self.data, list) else []

    def at(self, key: str) -> Value:
        """The item ``key``; where it is absent, the place where it would be, with null."""
        item = self.map.get(key)
        return Value(None, self.line, self.document, self, key) if item is None else item

    def replaced(self, data: dict[str, Value] | list[Value]) -> Value:
        """The same place with other content."""
        return dataclasses.replace(self, data=data)

    def plain(self) -> Any:
        """Its content without places."""
        if isinstance(self.data, dict):
            return {key: value.plain() for key, value in self.data.items()}
        if isinstance(self.data, list):
            return [value.plain() for value in self.data]
        return self.data


def type_name(value: Value) -> str:
    """What stands there, for messages: "str 'x'", "a list"."""
    data = value.data
    if isinstance(data, dict):
        return "a mapping"
    if isinstance(data, list):
        return "a list"
    if data is None:
        return "null"
    if isinstance(data, bool):
        return f"bool {str(data).lower()}"
    return f"{type(data).__name__} {shorten(repr(data), 42)}"


@dataclasses.dataclass(slots=True, eq=False)
class _Raw:
    """A node as written; aliases share it."""

    data: Any  # Scalar | list[_Raw] | list[tuple[_Raw, _Raw]] by `shape`
    shape: str  # "scalar", "list", "mapping"
    line: int
    merge: bool = False
    """It is the plain scalar ``<<``."""


class _UnreadableError(Exception):
    """The file cannot be read any further."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


def read(text: str, faults: Faults) -> list[Value]:
    """The documents of ``text``, without empty ones. Raises ``InvalidRequestError`` where it is not readable YAML."""
    whole = Argument("deploy_yaml")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        faults.error(whole, f"not valid Unicode at character {error.start}")
        raise faults.exception() from None
    if size > MAX_BYTES:
        faults.error(whole, f"too large: {size} bytes, at most {MAX_BYTES}")
        raise faults.exception()
    try:
        raw = list(_documents(text.removeprefix("\ufeff")))
        several = len(raw) > 1
        documents: list[Value] = []
        count = 0
        for number, (node, first_line) in enumerate(raw, start=1):
            offset = first_line if number > 1 else 0
            expander = _Expander(faults, number if several else 0, offset, count)
            documents.append(expander.value(node))
            count = expander.count
    except _UnreadableError as stop:
        faults.error(Argument("deploy_yaml", f"line {stop.line}"), str(stop))
        raise faults.exception() from None
    except yaml.YAMLError as error:
        mark: Any = getattr(error, "problem_mark", None)
        where = "" if mark is None else f"line {mark.line + 1}"
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
        faults.error(Argument("deploy_yaml", where), f"not valid YAML: {shorten(str(problem), 120)}")
        raise faults.exception() from None
    return documents


def _documents(text: str) -> Iterator[tuple[_Raw, int]]:
    """Root node and number of lines before each document that is not empty."""
    builder = _Builder(0)
    start: int | None = None
    documents = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.DocumentStartEvent):
            if start is None:  # an empty document before this one belongs to it: a comment, then "---"
                start = _line(event) - (0 if event.explicit else 1)
            documents += 1
            if documents > MAX_DOCUMENTS:
                raise _UnreadableError(_line(event), f"too many documents: at most {MAX_DOCUMENTS}")
            builder = _Builder(builder.count)
        elif isinstance(event, yaml.DocumentEndEvent):
            root = builder.root
            if root is not None and root.data is not None:
                yield root, start or 0
                start = None
        elif isinstance(event, yaml.NodeEvent | yaml.CollectionEndEvent):
            builder.feed(event)


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


class _Builder:
    """Events of one document to raw nodes, without recursion."""

    def __init__(self, count: int) -> None:
        self.root: _Raw | None = None
        self._open: list[tuple[_Raw, str | None, list[_Raw]]] = []
        self._anchors: dict[str, _Raw] = {}
        self.count = count

    def feed(self, event: Any) -> None:
        line = _line(event)
        if isinstance(event, yaml.CollectionEndEvent):
            node, anchor, children = self._open.pop()
            pairs = zip(children[::2], children[1::2], strict=True)
            node.data = list(pairs) if node.shape == "mapping" else children
            self._done(node, anchor)
            return
        self.count += 1
        if self.count > MAX_NODES:
            raise _UnreadableError(line, f"too many values: at most {MAX_NODES}")
        if isinstance(event, yaml.AliasEvent):
            name = str(event.anchor)
            known = self._anchors.get(name)
            if known is None:
                raise _UnreadableError(line, f"alias *{shorten(name)} has no anchor before it, or is inside of it")
            self._done(known, None)
        elif isinstance(event, yaml.ScalarEvent):
            self._done(_scalar(event, line), event.anchor)
        else:
            shape = "mapping" if isinstance(event, yaml.MappingStartEvent) else "list"
            if event.tag not in (None, "!", _TAG + ("map" if shape == "mapping" else "seq")):
                raise _UnreadableError(line, f"tag {shorten(event.tag)} is not accepted")
            if len(self._open) >= MAX_DEPTH:
                raise _UnreadableError(line, f"nested too deeply: at most {MAX_DEPTH} levels")
            self._open.append((_Raw(None, shape, line), event.anchor, []))

    def _done(self, node: _Raw, anchor: str | None) -> None:
        if anchor is not None:
            self._anchors[anchor] = node
        if self._open:
            self._open[-1][2].append(node)
        else:
            self.root = node


def _scalar(event: Any, line: int) -> _Raw:
    text: str = event.value
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _UnreadableError(line, "half of a surrogate pair is not text") from None
    tag = event.tag
    if event.implicit[0]:
        return _Raw(resolve(text), "scalar", line, merge=text == "<<")
    if event.implicit[1] or tag in ("!", _TAG + "str"):
        return _Raw(text, "scalar", line)
    wanted: type | None = {
        _TAG + "int": int,
        _TAG + "float": float,
        _TAG + "bool": bool,
        _TAG + "null": type(None),
    }.get(str(tag))
    value = resolve(text)
    if wanted is None or type(value) is not wanted:
        raise _UnreadableError(line, f"tag {shorten(str(tag))} is not accepted here")
    return _Raw(value, "scalar", line)


def resolve(text: str) -> Scalar:
    """What a plain scalar means."""
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if len(text) > _MAX_NUMBER_CHARS:
        return text
    if _INTEGER.match(text):
        return int(text.replace("_", ""))
    if _BASED.match(text):
        return int(text, 0)
    if _FLOAT.match(text):
        return float(text.replace("_", ""))
    special = _SPECIAL.get(text.lower())
    return float(special) if special else text


class _Expander:
    """Raw nodes to values: aliases written out, merge keys applied, duplicate keys reported."""

    def __init__(self, faults: Faults, document: int, line_offset: int, count: int) -> None:
        self._faults = faults
        self._document = document
        self._offset = line_offset
        self.count = count
        """Values so far, those of documents before this one included."""

    def value(
        self, raw: _Raw, parent: Value | None = None, step: str | int = "", line: int | None = None, depth: int = 0
    ) -> Value:
        line = raw.line if line is None else line
        self.count += 1
        if self.count > MAX_NODES:
            raise _UnreadableError(line, f"too many values once aliases are written out: at most {MAX_NODES}")
        if depth > MAX_DEPTH:
            raise _UnreadableError(line, f"nested too deeply: at most {MAX_DEPTH} levels")
        shown_line = max(1, line - self._offset)
        if raw.shape == "scalar":
            return Value(raw.data, shown_line, self._document, parent, step)
        if raw.shape == "list":
            items: list[Value] = []
            result = Value(items, shown_line, self._document, parent, step)
            items.extend(self.value(item, result, index, None, depth + 1) for index, item in enumerate(raw.data))
            return result
        content: dict[str, Value] = {}
        result = Value(content, shown_line, self._document, parent, step)
        merged: list[_Raw] = []
        for key, item in raw.data:
            if key.merge:
                merged.append(item)
                continue
            name = self._key(key, result)
            if name is None:
                continue
            value = self.value(item, result, name, key.line, depth + 1)
            if name in content:
                first = content[name].line
                self._faults.error(value, f"key {shorten(name)!r} is given twice, first in line {first}")
            else:
                content[name] = value
        for item in merged:
            self._merge(item, content, result, depth)
        return result

    def _key(self, key: _Raw, owner: Value) -> str | None:
        data = key.data
        if key.shape == "scalar" and isinstance(data, str) and data:
            return data
        if key.shape == "scalar" and isinstance(data, int) and not isinstance(data, bool):
            return str(data)  # token ids and the like, in engine options
        shown = shorten(repr(data)) if key.shape == "scalar" else f"a {key.shape}"
        place = dataclasses.replace(owner, line=max(1, key.line - self._offset))
        self._faults.error(place, f"keys must be text, got {shown}; put it in quotes if it is meant as text")
        return None

    def _merge(self, item: _Raw, content: dict[str, Value], owner: Value, depth: int) -> None:
        sources = item.data if item.shape == "list" else [item]
        for source in sources:
            if source.shape != "mapping":
                raise _UnreadableError(item.line, "<< takes a mapping or a list of mappings")
            given = self.value(source, owner.parent, owner.step, owner.line + self._offset, depth + 1)
            for name, value in given.map.items():
                content.setdefault(name, dataclasses.replace(value, parent=owner))
