"""``omnictl completion``: shell completion made from the command line itself, so that it cannot lag behind."""

from __future__ import annotations

import argparse
import dataclasses

from omnictl import candidates
from omnictl.commands.base import Commands, settings_of
from omnictl.parser import Parser


def add(commands: Commands) -> None:
    """Add ``completion``, and what its scripts call."""
    root = commands.root
    parser = commands.add(
        "completion",
        lambda args: _run(args, root),
        description="Print a completion script for a shell.",
        examples=(
            "# now, in this shell",
            "source <(omnictl completion bash)",
            "# for good",
            "omnictl completion zsh > ~/.zfunc/_omnictl",
        ),
        notes="It knows commands, flags and their values, and asks the cluster for pipelines, stages and replicas.",
        connects=False,
    )
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh"), help="bash or zsh")
    asked = commands.add("__complete", _complete, description="Print names that complete a word.", connects=False)
    asked.add_argument("kind", metavar="KIND", help="what the word is")
    asked.add_argument("words", metavar="WORD", nargs="*", help="the words before it, then itself")


async def _run(args: argparse.Namespace, root: Parser) -> int:
    print(script(args.shell, root), end="")
    return 0


async def _complete(args: argparse.Namespace) -> int:
    # Whatever goes wrong: a shell has no place for it.
    for name in await candidates.find(settings_of(args), args.kind, [word for word in args.words if word != "--"]):
        print(name)
    return 0


def script(shell: str, root: Parser) -> str:
    """The completion script of ``root`` for ``shell``, "bash" or "zsh"."""
    entries = _entries("", root)
    cases = "\n".join(
        f"    {entry.path!r}) cmds={_words(entry.commands)}; flags={_words(entry.flags)}; "
        f"values={_words(entry.with_value)}; args={_words(entry.arguments)} ;;"
        for entry in entries
    )
    choices = "\n".join(f"    {path!r}) found={_words(words)} ;;" for path, words in _choices(entries))
    body = _BASH.replace("@CASES@", cases).replace("@CHOICES@", choices)
    if shell == "zsh":
        return f"#compdef omnictl\nautoload -U +X bashcompinit && bashcompinit\n{body}"
    return body


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    path: str
    """The command, "etcd ls"; empty: omnictl itself."""
    commands: list[str]
    flags: list[str]
    with_value: list[str]
    """Flags that a value follows."""
    arguments: list[str]
    """What each argument is: "=WORD=WORD" is one of these words, "replica" and the like ask ``__complete``, "file" is
    one; "+" at the end: and so on."""
    flag_choices: dict[str, list[str]]


def _entries(path: str, parser: Parser) -> list[_Entry]:
    arguments = []
    for positional in parser.positionals():
        text = positional.completes or "=".join(["", *positional.choices]) or "file"
        arguments.append(f"{text}+" if positional.repeats else text)
    inner = parser.commands()
    entry = _Entry(path, sorted(inner), parser.flags(), parser.flags_with_value(), arguments, parser.flag_choices())
    nested = [e for name, command in inner.items() for e in _entries(f"{path} {name}".strip(), command)]
    return [entry, *nested]


def _choices(entries: list[_Entry]) -> list[tuple[str, list[str]]]:
    return [(f"{e.path} {flag}".strip(), words) for e in entries for flag, words in e.flag_choices.items()]


def _words(words: list[str]) -> str:
    return f'"{" ".join(words)}"'


_BASH = r"""# omnictl completion, for bash and zsh; "path" and "words" are special in zsh
_omnictl_command() {
  case "$1" in
@CASES@
    *) return 1 ;;
  esac
}
_omnictl_choices() {
  found=""
  case "$1" in
@CHOICES@
  esac
}
_omnictl() {
  local cur="${COMP_WORDS[COMP_CWORD]}" verb="" word found="" cmds flags values args i kind last
  local -a given=() asked=()
  COMPREPLY=()
  _omnictl_command ""
  for ((i = 1; i < COMP_CWORD; i++)); do
    word="${COMP_WORDS[i]}"
    if [[ "$word" == -* ]]; then
      if [[ " $values " == *" $word "* ]]; then
        if ((i + 1 == COMP_CWORD)); then
          _omnictl_choices "${verb:+$verb }$word"
          case "$word" in
            --context) found="$(omnictl "${asked[@]}" __complete context -- "$cur" 2>/dev/null)" ;;
            --stage) found="$(omnictl "${asked[@]}" __complete stage-of -- "${given[@]}" "$cur" 2>/dev/null)" ;;
          esac
          if [[ -n "$found" ]]; then
            COMPREPLY=($(compgen -W "$found" -- "$cur"))
          else
            COMPREPLY=($(compgen -f -- "$cur"))
          fi
          return
        fi
        case "$word" in
          --server | --gateway | --context | --tls-* | --token-file) asked+=("$word" "${COMP_WORDS[i + 1]}") ;;
        esac
        ((i++))
      fi
    elif [[ " $cmds " == *" $word "* ]]; then
      verb="${verb:+$verb }$word"
      _omnictl_command "$verb"
    else
      given+=("$word")
    fi
  done
  if [[ "$cur" == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$cur"))
    return
  fi
  if [[ -n "$cmds" ]]; then
    COMPREPLY=($(compgen -W "$cmds" -- "$cur"))
    return
  fi
  i=0 last="" kind=""
  for word in $(printf '%s' "$args"); do # zsh splits only this
    if ((i++ == ${#given[@]})); then kind="$word"; fi
    last="$word"
  done
  if [[ -z "$kind" && "$last" == *+ ]]; then kind="$last"; fi
  kind="${kind%+}"
  case "$kind" in
    "") ;;
    file) COMPREPLY=($(compgen -f -- "$cur")) ;;
    =*) COMPREPLY=($(compgen -W "${kind//=/ }" -- "$cur")) ;;
    *)
      found="$(omnictl "${asked[@]}" __complete "$kind" -- "${given[@]}" "$cur" 2>/dev/null)"
      COMPREPLY=($(compgen -W "$found" -- "$cur"))
      if [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == */ ]]; then
        compopt -o nospace 2>/dev/null
      fi
      ;;
  esac
}
complete -o filenames -F _omnictl omnictl
"""
