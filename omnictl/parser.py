"""Command-line parsing with help that reads the same on every Python version, and errors instead of exits."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from omnicore import arguments
from omnicore.errors import InvalidRequestError

_MIN_WIDTH, _MAX_WIDTH = 60, 100
_INDENT = 30  # column where the help of a flag starts


class HelpRequested(Exception):  # noqa: N818 -- not an error: it ends parsing with a text to print
    """The user asked for help: ``text`` is what to print."""

    def __init__(self, text: str) -> None:
        super().__init__("help requested")
        self.text = text


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Commands that are listed together in the root help."""

    title: str
    commands: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Positional:
    """An argument of a command, as shell completion sees it."""

    dest: str
    choices: tuple[str, ...]
    """The values that it accepts, if they are a fixed set."""
    completes: str
    """What to complete it with rather than with ``choices``: "replica", "context", …, or "=WORD=WORD"."""
    repeats: bool
    """More of the same kind may follow."""


class Parser(arguments.ArgumentParser):
    """An ``ArgumentParser`` whose help looks like kubectl's and whose errors are ``InvalidRequestError``.

    ``description`` says what the command does, ``examples`` are alternating comment and command lines.
    """

    def __init__(
        self,
        *args: Any,
        examples: Sequence[str] = (),
        groups: Sequence[Group] = (),
        notes: str = "",
        global_flags: str = "",
        **kwargs: Any,
    ) -> None:
        """``global_flags``: a line for the help of a command that does not list them itself."""
        kwargs.update(add_help=False, allow_abbrev=False)
        super().__init__(*args, **kwargs)
        self._examples = examples
        self._groups = groups
        self._notes = notes
        self._global_flags = global_flags
        self.completes: dict[str, str] = {}
        """What the shell may complete an argument with, by its ``dest``: "replica", "stage", … (see ``candidates``), or
        "=WORD=WORD"; without an entry its choices, or else files."""
        self.add_argument("-h", "--help", action=_Help, nargs=0, help=argparse.SUPPRESS, default=argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        """Raise ``InvalidRequestError`` that names the command whose help explains more."""
        raise usage_error(arguments.plain(message), self.prog)

    def parse_all(self, argv: Sequence[str]) -> argparse.Namespace:
        """The arguments of the command that ``argv`` names. Raises ``InvalidRequestError`` also for words that no
        command takes, and ``HelpRequested``."""
        args, rest = self.parse_known_args(list(argv))
        if rest:
            command = self
            for name in getattr(args, "command", "").split():
                command = command.commands()[name]
            raise usage_error(arguments.unrecognized(rest, command.flags()), command.prog)
        return args

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices if not str(choice).startswith("__")]
        what = "command" if isinstance(action, argparse._SubParsersAction) else _name(action)
        near = difflib.get_close_matches(str(value), known)
        hint = f"did you mean {max(near, key=len)!r}?" if near else f"one of: {', '.join(known)}"
        raise usage_error(
            f"unknown {what} {value!r}: {hint}" if what == "command" else f"{what}: {value!r} is not accepted: {hint}",
            self.prog,
        )

    def format_help(self) -> str:
        """What the command does, how it is called, examples, flags."""
        blocks = [self.description or "", f"Usage:\n  {self._usage()}"]
        if self._groups:
            blocks += [f"{group.title}:\n" + "\n".join(self._command_rows(group)) for group in self._groups]
        elif known := self.commands():
            blocks.append("Commands:\n" + "\n".join(self._command_rows(Group("", tuple(known)))))
        positionals = [a for a in self._positionals_only() if a.help]
        if positionals:
            blocks.append("Arguments:\n" + "\n".join(_row(_name(a), a.help or "") for a in positionals))
        if self._examples:
            blocks.append("Examples:\n" + "\n".join(f"  {line}".rstrip() for line in self._examples))
        for group in self._action_groups[2:]:
            flags = [a for a in group._group_actions if a.help != argparse.SUPPRESS]
            if flags:
                blocks.append(f"{group.title}:\n" + "\n".join(_row(_flag(a), _help(a)) for a in flags))
        own = [a for a in self._optionals._group_actions if a.help != argparse.SUPPRESS]
        if own:
            blocks.insert(
                -1 if len(self._action_groups) > 2 else len(blocks),
                "Flags:\n" + "\n".join(_row(_flag(a), _help(a)) for a in own),
            )
        if self._notes:
            blocks.append(_filled(self._notes))
        if self.commands():
            blocks.append(f'Use "{self.prog} COMMAND --help" for the flags and examples of a command.')
        if self._global_flags:
            blocks.append(_filled(self._global_flags))
        return "\n\n".join(block for block in blocks if block) + "\n"

    def commands(self) -> dict[str, Parser]:
        """The subcommands by name; empty for a command without."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return {str(name): parser for name, parser in action.choices.items() if not name.startswith("__")}
        return {}

    def flags(self) -> list[str]:
        """Every long flag of this command that people are told of, and --help."""
        shown = [a for a in self._actions if a.help is not argparse.SUPPRESS or isinstance(a, _Help)]
        return sorted({o for a in shown for o in a.option_strings if o.startswith("--")})

    def flag_choices(self) -> dict[str, list[str]]:
        """Values that flags accept, of those that accept a fixed set; each spelling of a flag by itself."""
        return {
            option: [str(choice) for choice in action.choices]
            for action in self._actions
            if action.choices is not None and not isinstance(action, argparse._SubParsersAction)
            for option in action.option_strings
        }

    def flags_with_value(self) -> list[str]:
        """Every spelling of the flags that a value follows."""
        return sorted(o for a in self._actions if a.nargs != 0 for o in a.option_strings)

    def positionals(self) -> list[Positional]:
        """The arguments, in order."""
        return [
            Positional(
                dest=action.dest,
                choices=tuple(str(choice) for choice in action.choices or ()),
                completes=self.completes.get(action.dest, ""),
                repeats=action.nargs in ("+", "*"),
            )
            for action in self._positionals_only()
        ]

    def _positionals_only(self) -> list[argparse.Action]:
        return [a for a in self._actions if not a.option_strings and not isinstance(a, argparse._SubParsersAction)]

    def _usage(self) -> str:
        if self.commands():
            return f"{self.prog} COMMAND [flags]"
        words = []
        for action in self._positionals_only():
            name = _name(action)
            words.append({"?": f"[{name}]", "*": f"[{name}...]", "+": f"{name}..."}.get(str(action.nargs or ""), name))
        required = [_flag(a, short=True) for a in self._optionals._group_actions if a.required]
        return " ".join([self.prog, *words, *required, "[flags]"])

    def _command_rows(self, group: Group) -> list[str]:
        known = self.commands()
        return [
            _row(name, (known[name].description or "").split(". ")[0].split("\n")[0].rstrip("."))
            for name in group.commands
        ]


def usage_error(message: str, command: str = "") -> InvalidRequestError:
    """The error for a command line that is wrong; ``command``: whose help explains it, if not the running one's."""
    return InvalidRequestError(message, reason="USAGE", metadata={"command": command})


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise HelpRequested(parser.format_help())


def _name(action: argparse.Action) -> str:
    if action.option_strings:
        return action.option_strings[-1]
    return str(action.metavar or action.dest.upper())


def _flag(action: argparse.Action, *, short: bool = False) -> str:
    names = action.option_strings[:1] if short else action.option_strings
    text = ", ".join(names)
    if len(action.option_strings) == 1 and not short:
        text = text if not text.startswith("--") else f"    {text}"
    if action.nargs == 0:
        return text
    return f"{text} {action.metavar or action.dest.upper()}"


def _help(action: argparse.Action) -> str:
    text = (action.help or "").replace("%%", "%")
    if action.default not in (None, argparse.SUPPRESS, False, "", []) and "default" not in text:
        text += f" (default {action.default})"
    return text


def _width() -> int:
    """Columns that help takes: those of the terminal, if it goes to one."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else _MAX_WIDTH
    return max(_MIN_WIDTH, min(columns, _MAX_WIDTH))


def _filled(text: str) -> str:
    """``text`` with its paragraphs broken anew. Flags and commands in quotes stay whole where they fit."""
    return "\n\n".join(textwrap.fill(part, _width(), break_on_hyphens=False) for part in text.split("\n\n"))


def _row(left: str, text: str) -> str:
    lines = textwrap.wrap(text, _width() - _INDENT - 2) or [""]
    first = f"  {left:<{_INDENT - 2}}"
    if len(left) > _INDENT - 4:
        return "\n".join([f"  {left}", *(" " * _INDENT + line for line in lines)])
    return "\n".join([(first + lines[0]).rstrip(), *(" " * _INDENT + line for line in lines[1:])])
