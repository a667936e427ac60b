"""Bodies of multipart/form-data: read piece by piece, every size bounded, faults named by their field.

The grammar is python-multipart's. Numbers come as text in forms; ``form_values`` makes them what JSON would have had,
so that the same code checks both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Set
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.http.exchange import Exchange
from omnicore import errors

MAX_PARTS = 64
MAX_FIELD_BYTES = 1024 * 1024
"""Of a part that is no file; longer prompts do not fit into a form."""
MAX_NAME_CHARS = 256
_MAX_HEADERS = 8
_MAX_HEADER_BYTES = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Upload:
    """A file of a form."""

    name: str
    """Of its field, without brackets."""
    filename: str
    data: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """The parts of one body. Field names end without ``[]``, which clients add to those that repeat."""

    texts: Mapping[str, list[str]]
    files: tuple[Upload, ...]

    def only_files(self, accepted: Collection[str]) -> None:
        """Refuse files in fields that take none."""
        for upload in self.files:
            if upload.name not in accepted:
                raise errors.InvalidRequestError.field(
                    upload.name, f"takes no file; files go into: {', '.join(accepted)}", reason="UNKNOWN_FIELD"
                )


class FormReader:
    """Takes a body in pieces of any size. Raises ``InvalidRequestError`` as soon as a bound is passed."""

    def __init__(self, boundary: bytes) -> None:
        self._texts: dict[str, list[str]] = {}
        self._files: list[Upload] = []
        self._parts = 0
        self._ended = False
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._disposition = b""
        self._name = ""
        self._filename: str | None = None
        self._data = bytearray()
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_part_data": self._take_data,
                    "on_part_end": self._end_part,
                    "on_header_field": self._take_header_name,
                    "on_header_value": self._take_header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_end": self._end,
                },
                max_header_count=_MAX_HEADERS,
                max_header_size=_MAX_HEADER_BYTES,
            )
        except FormParserError as error:
            raise _malformed(str(error)) from None

    def feed(self, data: bytes) -> None:
        """The next piece."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed(str(error)) from None

    def finish(self) -> Form:
        """The form, once all has been fed."""
        if not self._ended:
            raise _malformed("it ends before its last boundary")
        return Form(self._texts, tuple(self._files))

    # -- callbacks of the parser --

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise errors.InvalidRequestError.field("body", f"at most {MAX_PARTS} parts", reason="BODY_TOO_LARGE")
        self._disposition, self._name, self._filename = b"", "", None
        self._data = bytearray()

    def _take_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _take_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _end_headers(self) -> None:
        kind, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace").removesuffix("[]")
        if kind != b"form-data" or not 0 < len(name) <= MAX_NAME_CHARS:
            raise _malformed(f"part {self._parts} has no content-disposition: form-data with a name")
        self._name = name
        if b"filename" in options:
            self._filename = options[b"filename"].decode("utf-8", "replace")

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        self._data += data[start:end]
        if self._filename is None and len(self._data) > MAX_FIELD_BYTES:
            raise errors.InvalidRequestError.field(
                self._name, f"must be at most {MAX_FIELD_BYTES} bytes", reason="PROMPT_TOO_LARGE"
            )

    def _end_part(self) -> None:
        if self._filename is not None:
            self._files.append(Upload(self._name, self._filename, bytes(self._data)))
            return
        try:
            text = self._data.decode()
        except UnicodeDecodeError:
            raise errors.InvalidRequestError.field(self._name, "must be UTF-8 text") from None
        self._texts.setdefault(self._name, []).append(text)

    def _end(self) -> None:
        self._ended = True


async def read_form(exchange: Exchange, limit_bytes: int) -> Form:
    """The body of a request as a form. Raises ``InvalidRequestError`` if it is none."""
    content_type, options = parse_options_header(exchange.header(b"content-type"))
    if content_type != b"multipart/form-data":
        raise errors.InvalidRequestError.field(
            "content-type",
            f"must be multipart/form-data, got {content_type.decode('latin-1')!r}",
            reason="UNSUPPORTED_MEDIA_TYPE",
        )
    boundary = options.get(b"boundary", b"")
    if not boundary:
        raise errors.InvalidRequestError.field("content-type", "multipart/form-data needs a boundary")
    reader = FormReader(boundary)
    reader.feed(await exchange.read_body(limit_bytes))
    return reader.finish()


def form_values(
    form: Form,
    *,
    integers: Set[str] = frozenset(),
    numbers: Set[str] = frozenset(),
    booleans: Set[str] = frozenset(),
    lists: Set[str] = frozenset(),
) -> dict[str, Any]:
    """The texts of a form as JSON would have had them. An empty text counts as absent, as in HTML forms.

    Raises ``InvalidRequestError`` naming a field that is no number, or given twice where it is not among ``lists``.
    """
    values: dict[str, Any] = {}
    for name, texts in form.texts.items():
        if name in lists:
            values[name] = texts
            continue
        if len(texts) > 1:
            raise errors.InvalidRequestError.field(name, f"is given {len(texts)} times; once is enough")
        text = texts[0]
        if not text:
            continue
        if name in integers:
            values[name] = _number(name, text, int, "a whole number")
        elif name in numbers:
            values[name] = _number(name, text, float, "a number")
        elif name in booleans:
            if text.lower() not in ("true", "false"):
                raise errors.InvalidRequestError.field(name, f"must be true or false, got {text[:40]!r}")
            values[name] = text.lower() == "true"
        else:
            values[name] = text
    return values


def _number(name: str, text: str, kind: type[int] | type[float], what: str) -> int | float:
    # Python's own parsers also take "1_000" and non-Latin digits, which no other client means.
    try:
        if len(text) > 64 or not text.strip().isascii() or "_" in text:
            raise ValueError
        return kind(text)
    except ValueError:
        raise errors.InvalidRequestError.field(name, f"must be {what}, got {text[:40]!r}") from None


def _malformed(why: str) -> errors.InvalidRequestError:
    return errors.InvalidRequestError.field("body", f"not valid multipart/form-data: {why}", reason="INVALID_MULTIPART")
