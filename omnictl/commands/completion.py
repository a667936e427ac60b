"""``omnictl completion``: shell completion made from the command line itself, so that it cannot lag behind."""

from __future__ import annotations

import argparse

from omnictl.commands.base import Commands
from omnictl.parser import Parser


def add(commands: Commands) -> None:
    """Add ``completion``."""
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
        connects=False,
    )
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh"), help="bash or zsh")


async def _run(args: argparse.Namespace, root: Parser) -> int:
    print(script(args.shell, root), end="")
    return 0


def script(shell: str, root: Parser) -> str:
    """The completion script of ``root`` for ``shell``, "bash" or "zsh"."""
    commands = root.commands()
    cases = []
    for name, parser in commands.items():
        words = [*parser.flags(), *sorted({f for f in root.flags() if f not in parser.flags()})]
        first = " ".join(parser.positional_choices())
        cases.append(f'    {name}) flags="{" ".join(sorted(set(words)))}"; first="{first}" ;;')
    body = _BASH.replace("@COMMANDS@", " ".join(commands)).replace("@CASES@", "\n".join(cases))
    if shell == "zsh":
        return f"#compdef omnictl\nautoload -U +X bashcompinit && bashcompinit\n{body}"
    return body


_BASH = r"""# omnictl completion
_omnictl() {
  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" flags="" first="" command="" i
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "${COMP_WORDS[i]}" in
      --server|--gateway|--timeout) ((i++)) ;;
      -*) ;;
      *) command="${COMP_WORDS[i]}"; break ;;
    esac
  done
  if [[ -z "$command" ]]; then
    COMPREPLY=($(compgen -W "@COMMANDS@ --server --gateway --timeout --help" -- "$cur"))
    return
  fi
  case "$command" in
@CASES@
  esac
  if [[ "$cur" == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$cur"))
  elif [[ "$prev" == "$command" && -n "$first" ]]; then
    COMPREPLY=($(compgen -W "$first" -- "$cur"))
  else
    COMPREPLY=($(compgen -f -- "$cur"))
  fi
}
complete -o filenames -F _omnictl omnictl
"""
