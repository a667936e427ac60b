"""Configuration: precedence, conversion, and errors that name the flag or variable."""

from __future__ import annotations

import dataclasses
import json

import pytest

from omnicore import config


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sample component."""

    peers: tuple[str, ...] = config.option(help="peers", check=config.host_ports)
    ttl_s: float = config.option(10.0, help="seconds", check=config.positive)
    count: int = config.option(1, help="how many")
    loud: bool = config.option(False, help="be loud")
    policy: str = config.option("a", help="policy", choices=("a", "b"))
    limit: int | None = config.option(None, help="limit")


def parse(*argv: str, **environ: str) -> Sample:
    return config.parse(Sample, argv, program="sample", component="sample", environ=environ)


def test_defaults_environment_flags_in_that_order() -> None:
    assert parse("--peers", "a:1,b:2") == Sample(peers=("a:1", "b:2"))
    assert parse("--peers", "a:1", OMNI_SAMPLE_TTL_S="3").ttl_s == 3.0
    assert parse("--peers", "a:1", "--ttl-s", "4", OMNI_SAMPLE_TTL_S="3").ttl_s == 4.0
    assert parse(OMNI_SAMPLE_PEERS="h:7", OMNI_SAMPLE_LOUD="yes", OMNI_SAMPLE_LIMIT="5") == Sample(
        peers=("h:7",), loud=True, limit=5
    )
    assert parse("--peers", "a:1", "--no-loud", OMNI_SAMPLE_LOUD="1").loud is False


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        ((), {}, "--peers: required"),
        (("--peers", "nope"), {}, "--peers: must be host:port, got 'nope'"),
        (("--peers", "a:70000"), {}, "--peers: must be host:port"),
        (("--peers", ","), {}, "--peers: needs at least one"),
        (("--peers", "a:1", "--ttl-s", "nan"), {}, "--ttl-s: must be a number above 0"),
        (("--peers", "a:1", "--ttl-s", "-1"), {}, "--ttl-s: must be a number above 0"),
        (("--peers", "a:1", "--count", "1.5"), {}, "--count: must be a whole number"),
        (("--peers", "a:1", "--policy", "c"), {}, "--policy: must be one of a, b"),
        (("--peers", "a:1", "--count", "1_000"), {}, "--count: must be a whole number, got '1_000'"),
        (
            ("--peers", "a:1", "--count", "9" * 400),
            {},
            "--count: must be a whole number of at most 9223372036854775",
        ),
        (("--peers", "a:1", "--count", "9" * 9000), {}, "--count: must be a whole number, got '9999"),
        (("--peers", "a:1", "--ttl-s", "-5s"), {}, "--ttl-s: must be a number, got '-5s'"),
        (("--peers", "a:1", "--ttl-s", "-inf"), {}, "--ttl-s: must be a number above 0, got -inf"),
        (("--peers", "a:1", "--ttl-s"), {}, "--ttl-s: needs a value"),
        (("--peers", "a:\u0661"), {}, "--peers: must be host:port"),
        (("--peers", "a:1", "--limti", "1"), {}, "unrecognized arguments: --limti 1: did you mean '--limit'?"),
        (("--peers", "a:1"), {"OMNI_SAMPLE_LOUD": "maybe"}, "OMNI_SAMPLE_LOUD: must be true or false"),
        (("--peers", "a:1", "--typo", "1"), {}, "unrecognized arguments: --typo"),
    ],
)
def test_wrong_input_exits_2_and_names_its_source(
    argv: tuple[str, ...], environ: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse(*argv, **environ)
    assert exit_info.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")
    assert line.endswith("; see 'sample --help'")


def test_print_config_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse("--peers", "a:1", "--print-config")
    assert exit_info.value.code == 0
    assert json.loads(capsys.readouterr().out)["peers"] == ["a:1"]


def test_help_shows_default_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    out = " ".join(capsys.readouterr().out.split())
    assert "seconds (default: 10.0) [OMNI_SAMPLE_TTL_S]" in out


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Flags of several components"""

    colour: str = config.option("red", help="a colour")


@dataclasses.dataclass(frozen=True, slots=True)
class Inheriting(Shared):
    """A component with shared flags."""

    peer: str = config.option(help="a peer", check=config.host_port)


def test_inherited_flags_stand_under_their_own_title(capsys: pytest.CaptureFixture[str]) -> None:
    def parse_it(*argv: str) -> Inheriting:
        return config.parse(
            Inheriting, argv, program="sample", component="sample", environ={"OMNI_SAMPLE_COLOUR": "blue"}
        )

    assert parse_it("--peer", "a:1") == Inheriting("a:1", colour="blue")
    with pytest.raises(SystemExit):
        parse_it("--help")
    text = capsys.readouterr().out
    assert text.rindex("--peer") < text.index("Flags of several components:") < text.rindex("--colour")


@pytest.mark.parametrize("good", ["a:1", "10.0.0.1:0", "[::1]:7700", "[fe80::1%eth0]:1", "my_host-1.example:65535"])
def test_an_address(good: str) -> None:
    config.host_port(good)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ("::1:7700", "in brackets"), ("http://127.0.0.1:7700", "host:port"), ("a b:70", "host:port"),
        ("a:65536", "host:port"), ("a", "host:port"), (":1", "host:port"), ("[::1:7", "in brackets"),
        ("[x]:1", "host:port"),
    ],
)  # fmt: skip
def test_what_is_no_address(bad: str, told: str) -> None:
    """``::1:7700`` would be loopback to one reader and another host to the next."""
    with pytest.raises(ValueError, match=told):
        config.host_port(bad)
