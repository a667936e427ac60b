"""What ``config`` of a connector may say: the reference's options by their names, and ours.

Text may name environment variables (``${NAME}``); one that is not set is an error. Numbers may come as text. An option
that nobody knows is an error if it looks like one that is known; else it is kept in ``config`` for models, which read
options of their own there.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from typing import Any

from connectors.payload import JsonValue
from omnicore import errors
from omnicore.log import get_logger
from omnicore.variables import expand

_log = get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One option."""

    default: Any
    """Whose type (int, float, bool, str, list) is the option's; None: text or a number, unset."""
    core: str = ""
    """Name of the option of the connector's kind that it becomes; "": it is the facade's own."""
    low: float = 0
    high: float = 2.0**63
    choices: tuple[str, ...] = ()
    auto: bool = False
    """The text "auto" stands for 0."""


COMMON: Mapping[str, Option] = {
    "role": Option("", choices=("", "sender", "receiver", "dual", "both", "auto")),
    "stage_id": Option(-1, low=-1),
    "from_stage": Option(None),
    "to_stage": Option(None),
    "local_rank": Option(0, high=4096),
    "consumers": Option(1, low=1, high=2.0**32 - 1),
    "secret": Option(""),
    "get_timeout_s": Option(30.0),
    "query_timeout_s": Option(5.0),
    "buffer_ttl_seconds": Option(300.0),
    "put_wait_s": Option(10.0, core="put_wait_s"),
    "checksum": Option(False, core="checksum"),
}
"""Of every class."""


def read_config(
    name: str, config: Mapping[str, Any], options: Mapping[str, Option]
) -> tuple[dict[str, Any], dict[str, JsonValue]]:
    """The values of all ``options`` for the class ``name``, and those that go to its kind, under the kind's names, if
    they were given. Raises ``InvalidRequestError`` naming the option."""
    if not isinstance(config, Mapping):
        raise errors.InvalidRequestError.field(name, f"config must be a dict, got {type(config).__name__}")
    values: dict[str, Any] = {key: option.default for key, option in options.items()}
    core: dict[str, JsonValue] = {}
    unknown: list[str] = []
    for key, given in config.items():
        option = options.get(key)
        if option is None:
            _check_unknown(name, key, options)
            unknown.append(key)
            continue
        if given is None:
            continue  # as if it were not there
        values[key] = _converted(f"{name}.{key}", expand_env_value(given, f"{name}.{key}"), option)
        if option.core:
            core[option.core] = values[key]
    if unknown:
        _log.info("options that the connector does not read", connector=name, options=",".join(unknown))
    return values, core


def expand_env_value(value: Any, field: str = "value") -> Any:
    """Text with its environment variables put in; other values as they are. Raises ``InvalidRequestError`` for one that
    is not set."""
    return expand(value, os.environ, field, bare=True) if isinstance(value, str) else value


def _check_unknown(name: str, key: object, options: Mapping[str, Option]) -> None:
    if not isinstance(key, str):
        raise errors.InvalidRequestError.field(name, f"options have text names, got {key!r}")
    near = difflib.get_close_matches(key, options, n=1, cutoff=0.8)
    if near:
        raise errors.InvalidRequestError.field(
            f"{name}.{key}", f"no such option, did you mean {near[0]!r}?", reason="UNKNOWN_OPTION"
        )


def _converted(path: str, value: Any, option: Option) -> Any:
    kind = type(option.default)
    if option.default is None:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise errors.InvalidRequestError.field(path, f"must be text or a number, got {value!r}")
        return value
    if kind is bool:
        if not isinstance(value, bool):
            raise errors.InvalidRequestError.field(path, f"must be true or false, got {value!r}")
        return value
    if kind is str:
        if not isinstance(value, str) or (option.choices and value not in option.choices):
            wanted = f"one of {', '.join(filter(None, option.choices))}" if option.choices else "text"
            raise errors.InvalidRequestError.field(path, f"must be {wanted}, got {value!r}")
        return value
    if kind is list:
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise errors.InvalidRequestError.field(path, f"must be a list of text, got {value!r}")
        return list(value)
    return _number(path, value, option, kind)


def _number(path: str, value: Any, option: Option, kind: type) -> Any:
    wanted = "a whole number" if kind is int else "a number"
    if option.auto and value == "auto":
        return kind(0)
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
    except ValueError:
        number = None
    if number is None or number != number or (kind is int and not number.is_integer()):
        raise errors.InvalidRequestError.field(path, f"must be {wanted}, got {value!r}")
    if not option.low <= number <= option.high:
        raise errors.InvalidRequestError.field(path, f"must be {option.low:g} to {option.high:g}, got {number:g}")
    return kind(number)
