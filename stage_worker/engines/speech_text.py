"""Written text made speakable: what a voice must not read out is removed. Pure.

Numbers, dates, units and abbreviations stay: the speech model's own normaliser reads them.
"""

from __future__ import annotations

import html
import re
import unicodedata

_FENCE = re.compile(r"^[ \t]*(?:```|~~~).*$", re.MULTILINE)
_TAG = re.compile(r"</?[A-Za-z][^<>]{0,200}>")
_IMAGE_OR_LINK = re.compile(r"!?\[([^\[\]\n]{0,300})\]\([^()\n]{0,500}\)")
_URL = re.compile(r"\b(?:https?://|www\.)([^\s<>()\[\]\"']+)", re.IGNORECASE)
_LINE_MARK = re.compile(r"^[ \t]*(?:#{1,6}[ \t]+|>[ \t]?|[-*+•][ \t]+|\|)+", re.MULTILINE)
_RULE = re.compile(r"^[ \t]*(?:[-*_=|:][ \t]*){3,}$", re.MULTILINE)
_EMPHASIS = re.compile(r"(?<![\w*])(\*{1,3}|_{1,3}|~~)(?=\S)(.{1,500}?)(?<=\S)\1(?![\w*])")
_LEFTOVER = re.compile(r"[*`#|~^\\{}<>]+")
_DIGITS = re.compile(r"\d{13,}")  # nobody says such a number as one; the model's normaliser even fails on it
_SPACES = re.compile(r"\s+")
_SPACE_BEFORE_MARK = re.compile(r" ([,.!?;:…])")
_SPOKEN = re.compile(r"\w")
# Typography that voices stumble over.
_REPLACED = str.maketrans({"‘": "'", "’": "'", "\u00a0": " ", "\u00ad": "", "–": "-", "•": " ", "→": " to "})


def speakable(text: str) -> str:
    """``text`` as one line to be read out; empty if there is nothing in it to say.

    Markdown marks, tags, code fences, emoji and control characters go; links keep their text, bare addresses their
    host ("example dot com").
    """
    text = html.unescape(text).translate(_REPLACED)
    text = _FENCE.sub(" ", text)
    text = _TAG.sub(" ", text)
    text = _IMAGE_OR_LINK.sub(r"\1", text)
    text = _URL.sub(_spoken_host, text)
    text = _RULE.sub(" ", text)
    text = _LINE_MARK.sub("", text)
    for _ in range(2):  # emphasis in emphasis
        text = _EMPHASIS.sub(r"\2", text)
    text = _LEFTOVER.sub(" ", text).replace("_", " ").replace("[", " ").replace("]", " ")
    text = "".join(character for character in text if _is_spoken(character))
    text = _DIGITS.sub(lambda match: " ".join(match[0]), text)
    text = _SPACE_BEFORE_MARK.sub(r"\1", _SPACES.sub(" ", text)).strip()
    return text if _SPOKEN.search(text) else ""


def _spoken_host(match: re.Match[str]) -> str:
    address = match[1]
    host = address.split("/", 1)[0].split("?", 1)[0]
    end = "" if "/" in address and address[-1] not in ".,!?" else address[len(address.rstrip(".,!?;:")) :]
    return host.rstrip(".,!?;:").removeprefix("www.").replace(".", " dot ") + end


def _is_spoken(character: str) -> bool:
    # So: emoji and other pictures; Cc, Cf, Cs, Co, Cn: control, format, surrogate, private and unassigned; Sk, Mn on
    # their own: modifiers such as skin tones and variation selectors (letters with accents are one character in NFC).
    return character.isspace() or unicodedata.category(character) not in _SILENT


_SILENT = frozenset({"So", "Cc", "Cf", "Cs", "Co", "Cn", "Sk"})
