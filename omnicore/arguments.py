"""What all command lines of ours have in common: "-5s" is a value, and errors name the flag."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence

# argparse takes "-5" for a value and "-5s" for a flag; ours has no flag that looks like either.
_NEGATIVE = re.compile(r"-(\.?\d|inf|nan)")


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, where a value such as ``-5s`` reaches whoever checks it, and can say what is accepted instead."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type] # whatever argparse takes
        self._negative_number_matcher = _NEGATIVE


def plain(message: str) -> str:
    """A message of argparse's as ours read: the flag in front, then what it needs."""
    match = re.fullmatch(r"argument (\S+): (.*)", message, re.DOTALL)
    if match is None:
        return re.sub("^the following arguments are required: ", "required: ", message)
    name = match[1].rpartition("/")[2]
    if match[2] == "expected one argument":
        return f"{name}: needs a value (one that begins with '-' is given as {name}=VALUE)"
    return f"{name}: {match[2]}"


def unrecognized(words: Sequence[str], known: Iterable[str]) -> str:
    """What to say of ``words`` that nothing takes; ``known``: the flags that there are."""
    text = "unrecognized arguments: " + " ".join(word or "''" for word in words)
    near = difflib.get_close_matches(words[0].partition("=")[0], list(known), 1) if words[0].startswith("-") else []
    return f"{text}: did you mean {near[0]!r}?" if near else text
