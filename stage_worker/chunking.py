"""How streamed text is cut into the chunks of an edge. Pure.

A cutter is fed the text as it comes and returns the pieces that are complete. Joined, the pieces are the text, except
that whitespace after the last piece is dropped. A sentence cutter prefers to join rather than to split: a wrong join
costs a little latency, a wrong split is heard.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from omni.v1 import pipeline_pb2
from omnicore.errors import InvalidRequestError

MIN_CHARS = 10
"""A sentence shorter than this waits for the next one: speech of single words has no melody."""
MAX_CHARS = 300
"""Text without any end of sentence is cut here, at a comma or a space: about 20 s of speech."""

# A run of terminators with the quotes and brackets that close after it, or a line break.
_END = re.compile(r"(?P<cjk>[。！？｡]+)[\"'”’»)\]」』）】]*|(?P<latin>[.!?…]+)[\"'”’»)\]*_]*|\n")
_LAST_WORD = re.compile(r"[^\s(\[\"'“‘«]+$")
# "1." or "a)" alone on its line is the number of a list item, not a sentence.
_LIST_NUMBER = re.compile(r"(?:^|\n)\s*[(*_]*\d{1,3}$")
_INITIALS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]$")  # "J", "U.S", "e.g"
_CLAUSE_END = re.compile(r"[,;:，；：、]\s|[，；：、—]")
# Words that a full stop does not end a sentence after, whatever follows.
_ABBREVIATIONS = frozenset(
    re.findall(
        r"\w+",
        "mr mrs ms mx dr prof sr jr st gen col capt lt sgt cmdr adm rev hon pres gov sen rep mt ft vs no nos fig figs "
        "eq vol pp ed eds approx dept est cf al bzw ca ggf vgl nr art mme mlle bsp",
    )
)
# Initials after which a sentence often does end, so that a capital letter decides.
_ENDING_INITIALS = frozenset({"a.m", "p.m", "u.k", "u.s.a", "b.c", "a.d"})
_NOTHING: Sequence[str] = ()


class TextCutter(Protocol):
    """Cuts one stream of text."""

    def feed(self, text: str) -> Sequence[str]:
        """Add ``text``; returns the pieces that are complete now."""
        ...

    def flush(self) -> Sequence[str]:
        """The text has ended; returns what is left, as at most one piece more."""
        ...


class StepCutter:
    """One piece per engine step."""

    def feed(self, text: str) -> Sequence[str]:
        """The text itself."""
        return (text,) if text else _NOTHING

    def flush(self) -> Sequence[str]:
        """Nothing: every piece has left."""
        return _NOTHING


class FinalCutter:
    """One piece, at the end."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def feed(self, text: str) -> Sequence[str]:
        """Nothing yet."""
        self._parts.append(text)
        return _NOTHING

    def flush(self) -> Sequence[str]:
        """The whole text, if there was any."""
        text, self._parts = "".join(self._parts), []
        return (text,) if text else _NOTHING


class SentenceCutter:
    """One piece per sentence of at least ``min_chars`` and at most ``max_chars`` characters.

    A sentence ends at ``. ! ? …`` before whitespace, unless a lower-case letter follows or the word before the full
    stop is an abbreviation, an initial or the number of a list item; at ``。！？``; and at the end of a line. Closing
    quotes and brackets belong to the sentence. The end is known when the next character is: a piece leaves with the
    first token of the next sentence.
    """

    def __init__(self, min_chars: int = MIN_CHARS, max_chars: int = MAX_CHARS) -> None:
        if not 0 < min_chars <= max_chars:
            raise ValueError(f"need 0 < min_chars <= max_chars, got {min_chars} and {max_chars}")
        self._min_chars = min_chars
        self._max_chars = max_chars
        self._buffer = ""
        self._scan = 0  # everything before was looked at and ends no sentence

    def feed(self, text: str) -> Sequence[str]:
        """Add ``text``; returns the sentences that are complete now."""
        pieces: list[str] = []
        # By slices: every search and copy below is over the buffer, and a long text is one call.
        for start in range(0, len(text), self._max_chars):
            self._buffer += text[start : start + self._max_chars]
            while (end := self._next_end()) is not None:
                pieces.append(self._buffer[:end])
                self._buffer = self._buffer[end:]
                self._scan = 0
        return pieces or _NOTHING

    def flush(self) -> Sequence[str]:
        """What is left, unless it is only whitespace."""
        text, self._buffer, self._scan = self._buffer, "", 0
        return (text,) if text.strip() else _NOTHING

    def _next_end(self) -> int | None:
        for match in _END.finditer(self._buffer, self._scan):
            end = self._sentence_end(match)
            if end is None:
                self._scan = match.start()  # decided by what comes next
                return self._forced_end()
            if end > self._max_chars:
                return self._forced_end()
            if end and len(self._buffer[:end].strip()) >= self._min_chars:
                return end
            self._scan = match.end()
        return self._forced_end()

    def _sentence_end(self, match: re.Match[str]) -> int | None:
        """Where the sentence that ``match`` may end does end; 0: it does not; None: not known yet."""
        buffer, end = self._buffer, match.end()
        if match[0] == "\n":
            return end
        if end == len(buffer):
            return None
        if match["cjk"]:
            return end
        if not buffer[end].isspace():
            return 0
        start = end
        while end < len(buffer) and buffer[end].isspace():
            end += 1
            if buffer[end - 1] == "\n":
                return end
        if end == len(buffer):
            return None
        if buffer[end].islower():
            return 0
        if match["latin"] == "." and start == match.start() + 1 and self._is_abbreviated(match.start()):
            return 0
        return end

    def _is_abbreviated(self, stop: int) -> bool:
        before = self._buffer[:stop]
        if _LIST_NUMBER.search(before):
            return True
        found = _LAST_WORD.search(before)
        if found is None:
            return False
        word = found[0].lower()
        if word in _ENDING_INITIALS or found[0] == "I":
            return False
        return word in _ABBREVIATIONS or _INITIALS.match(found[0]) is not None

    def _forced_end(self) -> int | None:
        """Where to cut text that has become too long."""
        if len(self._buffer) <= self._max_chars:
            return None
        window = self._buffer[: self._max_chars]
        ends = [match.end() for match in _CLAUSE_END.finditer(window, self._min_chars)]
        if ends and ends[-1] >= self._max_chars // 3:
            return ends[-1]
        space = max((i for i, c in enumerate(window) if c.isspace()), default=-1)
        return space + 1 if space >= self._min_chars else self._max_chars


def text_cutter(chunk_by: pipeline_pb2.ChunkBy.ValueType) -> TextCutter:
    """The cutter that a plan asks for. Raises ``InvalidRequestError`` for CHUNK_BY_UNSPECIFIED and unknown values."""
    if chunk_by == pipeline_pb2.CHUNK_BY_STEP:
        return StepCutter()
    if chunk_by == pipeline_pb2.CHUNK_BY_SENTENCE:
        return SentenceCutter()
    if chunk_by == pipeline_pb2.CHUNK_BY_FINAL:
        return FinalCutter()
    raise InvalidRequestError.field("chunk_by", f"must be STEP, SENTENCE or FINAL, got {chunk_by}")


def split_sentences(text: str) -> list[str]:
    """All sentences of a complete text."""
    cutter = SentenceCutter()
    return [*cutter.feed(text), *cutter.flush()]
