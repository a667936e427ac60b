from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from omnicore.errors import InvalidRequestError
from omnictl.cli import main
from omnictl.commands import build_parser
from omnictl.commands.completion import script
from omnictl.parser import HelpRequested, Parser
from tests.unit.omnictl import snapshot


def _paths(parser: Parser, prefix: str = "") -> dict[str, Parser]:
    """Every command, also those of groups, by its words."""
    found: dict[str, Parser] = {}
    for name, command in parser.commands().items():
        found[f"{prefix}{name}"] = command
        found |= _paths(command, f"{prefix}{name} ")
    return found


COMMANDS = sorted(_paths(build_parser()))


def test_root_help() -> None:
    snapshot.check("help", build_parser().format_help())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command: str) -> None:
    with pytest.raises(HelpRequested) as asked:
        build_parser().parse_args([*command.split(), "--help"])
    snapshot.check(f"help_{command.replace(' ', '_')}", asked.value.text)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples_that_parse(command: str) -> None:
    text = _paths(build_parser())[command].format_help()
    examples = [line.strip() for line in text.splitlines() if line.strip().startswith("omnictl ")]
    assert len(examples) >= 2  # the usage line and one example at least
    for example in examples[1:]:
        args = build_parser().parse_args(shlex.split(re.split(r"[|<>]", example)[0])[1:])
        assert hasattr(args, "run"), example


def test_examples_are_explained_within_a_small_terminal() -> None:
    texts = [p.format_help() for p in _paths(build_parser()).values()]
    assert max(len(line) for text in texts for line in text.splitlines() if line.startswith("  # ")) <= 80


def test_no_line_of_help_is_too_wide() -> None:
    texts = [build_parser().format_help(), *(p.format_help() for p in _paths(build_parser()).values())]
    assert max(len(line) for text in texts for line in text.splitlines()) <= 110


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["gett"], "unknown command 'gett': did you mean 'get'?"),
        (["frobnicate"], "unknown command 'frobnicate': one of: "),
        (["get", "replica", "-o", "jsn"], "--output: 'jsn' is not accepted: did you mean 'json'?"),
        (["get", "repliicas"], "KIND: 'repliicas' is not accepted: did you mean 'replicas'?"),
        (["get"], "KIND"),
        (["get", "replicas", "--wat"], "unrecognized arguments: --wat: did you mean '--watch'?"),
        (["down", "", "x"], "unrecognized arguments: '' x"),
        (["drain", "a/b/0", "--reason"], "--reason: needs a value (one that begins with '-' is given as --reason="),
        (["get", "replicas", "-o"], "--output: needs a value"),
        (["apply"], "required: -f/--file"),
    ],
)
def test_wrong_command_lines_say_what_is_accepted(argv: list[str], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(message)) as caught:
        build_parser().parse_all(argv)
    assert caught.value.reason == "USAGE"
    assert caught.value.metadata["command"].split()[1:] == [word for word in argv[:1] if word in COMMANDS]


# The address is of TEST-NET: nobody is there, and who asked it would end with another code than 2.
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["drain", "a/b/0", "--deadline", "-5s"], "--deadline: must be a duration above 0 such as"),
        (["drain", "a/b/0", "--deadline", ""], "--deadline: must be a duration above 0 such as"),
        (["drain", "a/b/0", "--deadline", "9" * 40], "--deadline: must be at most 8760h"),
        (["drain", "a/b/0", "--wait", "--wait-timeout", "-.5m"], "--wait-timeout: must be a duration above 0"),
        (["drain", "a/b/0", "--wait-timeout", "5s"], "--wait-timeout: goes with --wait"),
        (["drain", "a/b/0", "--epoch", "9" * 30], "--epoch: must be a whole number from 1 to 18446744073709551615"),
        (["evict", "a/b/0", "a/b/1", "--epoch", "7"], "--epoch: goes with one REPLICA only"),
        (["restart", "a/b", "--ready-timeout", "-1s"], "--ready-timeout: must be a duration above 0"),
        (["restart", "a/b", "--max-unavailable", "0"], "--max-unavailable: must be a whole number from 1 to 10000"),
        (["sleep", "a", "--stage", "0", "--all-stages"], "--stage and --all-stages: give one of the two"),
        (["sleep", "a", "--stage", ","], "--stage STAGE or --all-stages: one of the two is needed"),
        (["sleep", "a", "--stage", "0", "--replica-timeout", "-3s"], "--replica-timeout: must be a duration above 0"),
        (["sleep", "a", "--stage", "0", "--level", "9"], "--level: must be 1 or 2, got '9'"),
        (["describe", "replica", "a"], "REPLICA: must be PIPELINE/STAGE/REPLICA"),
        (["describe", "stage", "a"], "STAGE: must be PIPELINE/STAGE"),
        (["describe", "pipeline", ""], "NAME: must be the name of a pipeline, got ''"),
        (["delete", "pipeline", "fine", ""], "NAME: must be the name of a pipeline, got ''"),
        (["etcd", "get", ""], "KEY: must not be empty"),
        (["etcd", "watch", "--revision", ""], "--revision: must be a whole number of 1 or more, got ''"),
        (["etcd", "watch", "--revision", "9" * 19], "--revision: must be a whole number from 1 to 9223372036854775807"),
        (["top", "--once", "--interval", "-2s"], "--interval: must be a duration above 0"),
        (["status", "--timeout", "-2s"], "--timeout: must be a duration above 0"),
        (["status", "--server", "b:\u0661"], "--server: must be host:port"),
        (["context", "set", "a", "--insecure", "--no-insecure"], "--insecure and --no-insecure: give one of the two"),
    ],
)
def test_wrong_values_are_refused_before_anybody_is_asked(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OMNICTL_CONTEXT", str(tmp_path / "context.json"))
    assert main(["--insecure", "--server", "192.0.2.1:9", *argv]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"error: {message}")
    assert lines[1].startswith(f"hint: see 'omnictl {argv[0]}")
    assert len(lines) == 2
    assert not (tmp_path / "context.json").exists()


def test_a_wrong_command_line_is_an_error_line_a_hint_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["get", "pods"]) == 2
    assert capsys.readouterr().err.splitlines()[1] == "hint: see 'omnictl get --help'"


def test_global_flags_work_on_both_sides_of_the_command() -> None:
    parser = build_parser()
    assert parser.parse_args(["--server", "a:1", "status"]).server == "a:1"
    assert parser.parse_args(["status", "--server", "a:1"]).server == "a:1"
    assert parser.parse_args(["status"]).server is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("omnictl g", ["get"]),
        ("omnictl get pi", ["pipelines"]),
        ("omnictl get replicas --wa", ["--watch"]),
        ("omnictl get replicas -o j", ["json"]),
        ("omnictl -x get replicas -o j", ["json"]),
        ("omnictl --timeout 3s etcd l", ["ls", "leases"]),
        ("omnictl etcd ls --no", ["--no-headers"]),
        ("omnictl policy set speech/talker ro", ["round-robin"]),
        ("omnictl profile sto", ["stop"]),
        ("omnictl __", []),
    ],
)
def test_bash_completion_completes(line: str, expected: list[str]) -> None:
    words = line.split()
    program = (
        f"{script('bash', build_parser())}\nCOMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _omnictl\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert sorted(done.stdout.split()) == sorted(expected)
