"""Component configuration: one frozen dataclass each, filled from defaults < environment < flags.

A component declares a dataclass whose fields carry their help through ``option``; ``parse`` turns it into flags
(``lease_ttl_s`` → ``--lease-ttl-s``), reads ``OMNI_<COMPONENT>_<FIELD>`` variables, and returns the object. After that
the object is the only truth. Every command gets ``--print-config``. Wrong values end the process with exit code 2 and
a message that names the flag or variable.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import orjson

from omnicore import arguments

T = TypeVar("T")
Check = Callable[[Any], None]

_LARGEST = 2**63 - 1
# A name, an IPv4 address, or an IPv6 address in brackets, maybe with its zone.
_HOST = re.compile(r"[\w.-]+|\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]")
"""Of whole numbers: what every format that they may be written in can hold."""
LONGEST_S = 365 * 86_400
"""Of durations, for flags that say so: a year, far below what timers and messages hold."""


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    check: Check | None = None,
    flags: Sequence[str] = (),
    choices: Sequence[str] = (),
) -> Any:
    """A dataclass field that is also a flag.

    ``help`` says what it is, with its unit. ``check`` raises ``ValueError`` for values that are not accepted.
    ``flags`` are further spellings. A field without default is required. Flags that several components have are fields
    of a ``kw_only`` dataclass that their own ones inherit from.
    """
    metadata = {"help": help, "check": check, "flags": tuple(flags), "choices": tuple(choices)}
    if isinstance(default, list | dict | set):
        raise TypeError("option: give a tuple, defaults are shared")
    return dataclasses.field(default=default, metadata=metadata)


def positive(value: float) -> None:
    """Accept numbers above 0."""
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"must be a number above 0, got {value:g}")


def not_negative(value: float) -> None:
    """Accept 0 and above."""
    if not value >= 0:
        raise ValueError(f"must be 0 or more, got {value:g}")


def duration(value: float) -> None:
    """Accept seconds above 0, up to ``LONGEST_S``."""
    if not 0 < value <= LONGEST_S:
        raise ValueError(f"must be a number of seconds above 0 and at most {LONGEST_S}, got {value:g}")


def duration_or_0(value: float) -> None:
    """Accept seconds from 0 up to ``LONGEST_S``."""
    if not 0 <= value <= LONGEST_S:
        raise ValueError(f"must be a number of seconds from 0 to {LONGEST_S}, got {value:g}")


def within(low: int, high: int, what: str = "a whole number") -> Check:
    """Accept ``what``, ``low`` to ``high``."""

    def check(value: int) -> None:
        if not low <= value <= high:
            raise ValueError(f"must be {what} from {low} to {high}, got {value}")

    return check


stage_number = within(0, 65535, "a stage id")
"""Accept what a deploy file accepts."""


def host_port(value: str) -> None:
    """Accept "host:port" with a port of 0 to 65535; 0 takes any free port."""
    host, separator, port = value.rpartition(":")
    if not separator or not host or not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise ValueError(f"must be host:port, got {value!r}")
    if not _HOST.fullmatch(host):
        hint = " (an IPv6 address in brackets: [::1]:7700)" if ":" in host and "/" not in host else ""
        raise ValueError(f"must be host:port{hint}, got {value!r}")


def host_port_or_empty(value: str) -> None:
    """Accept what ``host_port`` does, and ""."""
    if value:
        host_port(value)


def host_ports(value: Sequence[str]) -> None:
    """Accept a list of at least one "host:port"."""
    if not value:
        raise ValueError("needs at least one host:port")
    for item in value:
        host_port(item)


def split_host_port(value: str) -> tuple[str, int]:
    """ "host:port" in its two parts; IPv6 hosts without brackets."""
    host, _, port = value.rpartition(":")
    return host.strip("[]"), int(port)


def join_host_port(host: str, port: int) -> str:
    """ "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def parse(
    cls: type[T],
    argv: Sequence[str],
    *,
    program: str,
    component: str,
    environ: Mapping[str, str] = os.environ,
    usage: str = "",
    epilog: str = "",
) -> T:
    """Fill ``cls`` from ``environ`` and ``argv``. Exits: code 2 for wrong input, 0 for --help and --print-config.
    ``usage``: what help writes between program and flags."""
    parser = _Parser(
        prog=program,
        usage=" ".join(word for word in (program, usage, "[flags]") if word),
        description=" ".join((cls.__doc__ or "").strip().split("\n\n")[0].split()),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    hints = typing.get_type_hints(cls)
    fields = [field for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    _add_flags(parser, cls, fields, hints, component)
    parser.add_argument(
        "--print-config", action="store_true", help="print the effective configuration as JSON and exit"
    )
    known, rest = parser.parse_known_args(list(argv))
    if rest:
        parser.error(arguments.unrecognized(rest, parser._option_string_actions))
    given = vars(known)

    values: dict[str, Any] = {}
    for field in fields:
        source = f"--{field.name.replace('_', '-')}"
        raw = given[field.name]
        if raw is None and (text := environ.get(_variable(component, field.name))) is not None:
            source, raw = _variable(component, field.name), text
        if raw is None:
            if field.default is dataclasses.MISSING:
                parser.error(f"{source}: required (or {_variable(component, field.name)})")
            continue
        try:
            values[field.name] = _convert(raw, hints[field.name])
            choices = field.metadata["choices"]
            if choices and values[field.name] not in choices:
                raise ValueError(f"must be one of {', '.join(choices)}, got {raw!r}")
            if (check := field.metadata["check"]) is not None:
                check(values[field.name])
        except ValueError as error:
            parser.error(f"{source}: {error}")
    config = cls(**values)
    if given["print_config"]:
        print(orjson.dumps(config, option=orjson.OPT_INDENT_2).decode())
        raise SystemExit(0)
    return config


def wrong_use(program: str, text: str) -> int:
    """Say on standard error what is wrong with a command line of ``program``; returns its exit code, 2. One line: who
    starts services shows the last one of their logs."""
    print(f"error: {text}; see '{program} --help'", file=sys.stderr)
    return 2


class _Parser(arguments.ArgumentParser):
    """Ends the process with one line of error and one that says where help is."""

    def error(self, message: str) -> NoReturn:
        raise SystemExit(wrong_use(self.prog, arguments.plain(message)))


def _variable(component: str, name: str) -> str:
    return f"OMNI_{component}_{name}".upper().replace("-", "_")


def _add_flags(
    parser: argparse.ArgumentParser,
    cls: type[Any],
    fields: Sequence[dataclasses.Field[Any]],
    hints: Mapping[str, Any],
    component: str,
) -> None:
    """The component's own flags first, then those of each dataclass that it inherits from, under its docstring."""
    owners = {field.name: cls for field in fields}
    for base in reversed(cls.__mro__):
        owners |= {name: base for name in inspect.get_annotations(base) if name in owners}
    groups: dict[type[Any], argparse.ArgumentParser | argparse._ArgumentGroup] = {cls: parser}
    for field in sorted(fields, key=lambda field: owners[field.name] is not cls):
        owner = owners[field.name]
        if owner not in groups:
            groups[owner] = parser.add_argument_group((owner.__doc__ or owner.__name__).strip().split("\n")[0])
        _add_flag(groups[owner], field, hints[field.name], component)


def _add_flag(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    field: dataclasses.Field[Any],
    hint: Any,
    component: str,
) -> None:
    meta = field.metadata
    text = meta["help"]
    if field.default not in (dataclasses.MISSING, None, "", ()):
        shown = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        text += f" (default: {shown})"
    text += f" [{_variable(component, field.name)}]"
    names = [f"--{field.name.replace('_', '-')}", *meta["flags"]]
    kwargs: dict[str, Any] = {"dest": field.name, "default": None, "help": text.replace("%", "%%")}
    hint = _arm(hint)
    if hint is bool:
        parser.add_argument(*names, action=argparse.BooleanOptionalAction, **kwargs)
    else:
        metavar = "{" + ",".join(meta["choices"]) + "}" if meta["choices"] else _metavar(hint)
        parser.add_argument(*names, metavar=metavar, **kwargs)


def _arm(hint: Any) -> Any:
    """``X | None`` is ``X``: None is the default of what was not given."""
    if isinstance(hint, types.UnionType):
        return next(arm for arm in typing.get_args(hint) if arm is not type(None))
    return hint


def _metavar(hint: Any) -> str:
    return {int: "N", float: "X"}.get(hint, "TEXT")


def _convert(raw: Any, hint: Any) -> Any:
    hint = _arm(hint)
    if hint is bool:
        if isinstance(raw, bool):
            return raw
        if raw.lower() in ("1", "true", "yes", "on"):
            return True
        if raw.lower() in ("0", "false", "no", "off"):
            return False
        raise ValueError(f"must be true or false, got {raw!r}")
    if hint is int or hint is float:
        what = "a whole number" if hint is int else "a number"
        shown = raw if len(raw) <= 40 else f"{raw[:40]}…"
        try:
            if "_" in raw:  # Python's own way of writing numbers
                raise ValueError
            number = hint(raw)
        except ValueError:
            raise ValueError(f"must be {what}, got {shown!r}") from None
        if hint is int and abs(number) > _LARGEST:
            raise ValueError(f"must be {what} of at most {_LARGEST}, got {shown}")
        return number
    if typing.get_origin(hint) is tuple:
        return tuple(part.strip() for part in raw.split(",") if part.strip())
    return raw
