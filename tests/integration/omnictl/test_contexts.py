"""The context file as its users meet it: no cluster is needed."""

from __future__ import annotations

import json

import pytest

from tests.integration.omnictl.cli import Cli


def test_a_context_is_made_used_changed_and_deleted(cli: Cli) -> None:
    assert cli.ok("context", "list") == ""
    token = cli.directory / "token"
    token.write_text("a-token-of-an-administrator-0123456789\n")
    made = cli.ok("context", "set", "prod", "--server", "10.0.0.1:7700, 10.0.0.2:7700", "--token-file", str(token))
    assert made == "prod created, now the current context\n"
    assert cli.known() == {
        "server": "10.0.0.1:7700,10.0.0.2:7700",
        "gateway": "",
        "gateway_http": "",
        "token_file": str(token),
    }
    assert cli.ok("context", "set", "dev", "--server", "127.0.0.1:1", "--gateway", "127.0.0.1:2") == "dev created\n"
    table = [line.split() for line in cli.ok("context", "list").splitlines()]
    assert table[1:] == [
        ["dev", "127.0.0.1:1", "127.0.0.1:2", "plaintext", "-"],
        ["*", "prod", "10.0.0.1:7700,10.0.0.2:7700", "-", "plaintext,token", "-"],
    ]
    # Commands take it from there.
    assert "10.0.0.1:7700 is beyond it" in cli.run("get", "replicas").err
    assert "127.0.0.1:1 (connection refused)" in cli.run("get", "replicas", "--context", "dev").err
    assert cli.ok("context", "use", "dev") == "context dev is the current one\n"
    assert "127.0.0.1:1 (connection refused)" in cli.run("get", "replicas").err
    assert cli.ok("context", "set", "prod", "--token-file", "", "--insecure") == "prod changed\n"
    assert cli.ok("context", "set", "prod", "--insecure") == "prod unchanged\n"
    assert json.loads(cli.ok("context", "show", "prod", "-o", "json")) == {
        "name": "prod",
        "server": "10.0.0.1:7700,10.0.0.2:7700",
        "insecure": True,
    }
    assert cli.ok("context", "set", "prod", "--no-insecure", "--use").startswith("prod changed, now the current")
    assert cli.ok("context", "delete", "dev", "prod") == "dev deleted\nprod deleted\n"
    assert not cli.context.exists()


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["use", "nope"], 4, "no context 'nope'; there are: none"),
        (["show"], 5, "no context is current"),
        (["set", "a b", "--server", "a:1"], 2, "NAME: must be 1 to 64 letters"),
        (["set", "a"], 2, "--server or --gateway"),
        (["set", "a", "--server", "a"], 2, "--server: must be host:port, got 'a'"),
        (["set", "a", "--server", "a:1", "--tls-ca", "x"], 2, "--tls-ca, --tls-cert and --tls-key go together"),
        (["set", "a", "--server", "a:1", "--gateway-http", "a:1"], 2, "--gateway-http: must be http://host:port"),
        (["delete", "nope"], 4, "no context 'nope'"),
    ],
)
def test_errors_change_nothing(cli: Cli, argv: list[str], code: int, message: str) -> None:
    done = cli.run("context", *argv)
    assert (done.code, done.out) == (code, "")
    assert message in done.err
    assert not cli.context.exists()


def test_a_group_without_a_command_prints_its_help(cli: Cli) -> None:
    for group in ("context", "etcd", "policy"):
        done = cli.run(group)
        assert done.code == 2
        assert f"omnictl {group} COMMAND [flags]" in done.out


def test_a_context_file_that_cannot_be_written_is_named(cli: Cli) -> None:
    cli.environ["OMNICTL_CONTEXT"] = "/proc/nowhere/context.json"
    done = cli.run("context", "set", "a", "--server", "a:1")
    assert done.code == 5
    assert "cannot write the context file /proc/nowhere/context.json" in done.err
