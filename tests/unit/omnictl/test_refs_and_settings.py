from __future__ import annotations

import os
from pathlib import Path

import pytest

from omnicore.errors import InvalidRequestError, NotFoundError, UnavailableError
from omnictl import context, refs, settings
from omnictl.commands import build_parser
from tests.unit.omnictl.records import speech_pipeline


@pytest.mark.parametrize(
    ("text", "depth", "expected"),
    [
        (None, 3, refs.Selector()),
        ("speech", 1, refs.Selector("speech")),
        ("speech/1", 3, refs.Selector("speech", "1")),
        ("speech/talker/0", 3, refs.Selector("speech", "talker", 0)),
    ],
)
def test_selectors(text: str | None, depth: int, expected: refs.Selector) -> None:
    assert refs.parse_selector(text, depth=depth, what="NAME") == expected
    assert str(expected) == (text or "")


@pytest.mark.parametrize("text", ["a/b", "/", "a/", "a//0"])
def test_selectors_that_are_not(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="NAME: must be PIPELINE, got"):
        refs.parse_selector(text, depth=1, what="NAME")


@pytest.mark.parametrize("text", ["speech", "speech/1", "speech/1/x", "speech/1/-1", "speech/1/0/0", "a/b/4294967296"])
def test_replica_names_that_are_not(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{text}"):
        refs.parse_replica(text)


def test_stages_go_by_id_and_by_name() -> None:
    assert refs.stage_id_of(speech_pipeline(), "1") == refs.stage_id_of(speech_pipeline(), "talker") == 1
    with pytest.raises(NotFoundError, match=r"it has 0 \(thinker\), 1 \(talker\), 2 \(code2wav\)"):
        refs.stage_id_of(speech_pipeline(), "talkr")


@pytest.mark.parametrize(("text", "seconds"), [("30", 30), ("500ms", 0.5), ("1.5s", 1.5), ("2m", 120), ("1h", 3600)])
def test_durations(text: str, seconds: float) -> None:
    assert settings.seconds(text, "--timeout") == seconds


@pytest.mark.parametrize("text", ["", "x", "0", "-1s", "inf", "nan", "1d", "s"])
def test_durations_that_are_not(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="--timeout: must be a duration above 0"):
        settings.seconds(text, "--timeout")


def _resolve(path: Path, argv: list[str], **environ: str) -> settings.Settings:
    return settings.resolve(build_parser().parse_args([*argv, "status"]), {"OMNICTL_CONTEXT": str(path)} | environ)


def _gone() -> int:
    """The id of a process that has ended."""
    gone = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(gone, 0)
    return gone


def test_flags_win_over_environment_over_context(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "context.json"
    context.save(path, context.Context(server="c:1", gateway="c:2", gateway_http="http://c:3", pid=os.getpid()))
    assert _resolve(path, []).server == ("c:1",)
    assert _resolve(path, []).gateway_http == "http://c:3"
    assert _resolve(path, [], OMNICTL_SERVER="e:1, e:2").server == ("e:1", "e:2")
    assert _resolve(path, ["--server", "f:1"], OMNICTL_SERVER="e:1").server == ("f:1",)
    # Part of another cluster: its HTTP side is not the context's.
    assert _resolve(path, ["--gateway", "f:2"]).gateway_http == ""


def test_a_context_by_name(tmp_path: Path) -> None:
    path = tmp_path / "context.json"
    prod = context.Context(server="p:1", gateway_http="http://p:3", token_file="/t", insecure=True)
    context.store(path, context.Contexts("dev", {"dev": context.Context(server="d:1"), "prod": prod}))
    assert _resolve(path, []).server == ("d:1",)
    chosen = _resolve(path, ["--context", "prod"])
    assert (chosen.server, chosen.gateway_http, chosen.token_file) == (("p:1",), "http://p:3", "/t")
    assert chosen.security.insecure
    assert _resolve(path, [], OMNICTL_CONTEXT_NAME="prod").context_name == "prod"
    # The flag before the variable.
    assert _resolve(path, ["--context", "dev"], OMNICTL_CONTEXT_NAME="prod").server == ("d:1",)
    with pytest.raises(NotFoundError, match=r"no context 'nope' in .*; it has: dev, prod"):
        _resolve(path, ["--context", "nope"])


def test_credentials_from_flags_variables_and_context(tmp_path: Path) -> None:
    path = tmp_path / "context.json"
    stored = context.Context(server="c:1", tls_ca="ca", tls_cert="cert", tls_key="key", tls_domain="d", token_file="t")
    context.store(path, context.Contexts("c", {"c": stored}))
    found = _resolve(path, [])
    assert (found.security.tls_ca, found.security.tls_cert, found.security.tls_key) == ("ca", "cert", "key")
    assert (found.security.tls_domain, found.token_file) == ("d", "t")
    # Parts of two identities never go together.
    other = _resolve(path, ["--tls-ca", "x"], OMNICTL_TLS_CERT="y", OMNICTL_TOKEN_FILE="u")
    assert (other.security.tls_ca, other.security.tls_cert, other.security.tls_key) == ("x", "y", "")
    assert other.token_file == "u"
    assert not other.security.insecure
    assert _resolve(path, ["--insecure"]).security.insecure
    assert _resolve(tmp_path / "none", []).security.tls_domain == "omniplane.internal"


def test_a_context_whose_owner_is_gone_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "context.json"
    context.save(path, context.Context(server="c:1", pid=_gone()))
    found = _resolve(path, [])
    assert found.server == ()
    with pytest.raises(UnavailableError, match=r"context 'local' of .* has ended") as caught:
        found.require_server()
    assert "omnictl up FILE" in caught.value.metadata["hint"]


def test_no_address_says_how_to_give_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no gateway address") as caught:
        _resolve(tmp_path / "none.json", []).require_gateway()
    assert "OMNICTL_GATEWAY" in caught.value.metadata["hint"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        ('{"sever": "a:1"}', "unknown key 'sever'"),
        ('{"server": 3}', "server must be a str"),
        ('{"pid": true}', "pid must be a int"),
        ('{"insecure": 1}', "insecure must be a bool"),
        ('{"contexts": []}', "contexts must be a JSON object of objects"),
        ('{"contexts": {"a": 1}}', "contexts must be a JSON object of objects"),
        ('{"contexts": {"a b": {}}}', "a name must be 1 to 64 letters"),
        ('{"contexts": {"a": {"sever": ""}}}', "contexts.a: unknown key 'sever'"),
        ('{"contexts": {}, "server": ""}', "unknown key 'server'; known: current, contexts"),
        ('{"current": 1}', "current must be a str"),
    ],
)
def test_a_context_that_cannot_be_understood_is_an_error_with_its_path(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "context.json"
    path.write_text(content)
    with pytest.raises(InvalidRequestError, match=message) as caught:
        _resolve(path, [])
    assert str(path) in caught.value.message
    # With both addresses given it does not matter.
    assert _resolve(path, ["--server", "a:1", "--gateway", "a:2"]).server == ("a:1",)


def test_a_file_with_one_context_and_nothing_else_is_read(tmp_path: Path) -> None:
    path = tmp_path / "context.json"
    path.write_text('{"server": "a:1", "gateway": "a:2"}')
    assert _resolve(path, []).server == ("a:1",)
    assert _resolve(path, []).context_name == "default"


def test_clusters_of_one_machine_lend_each_other_the_current_context(tmp_path: Path) -> None:
    path = tmp_path / "context.json"
    prod = context.Context(server="p:1")
    context.store(path, context.Contexts("prod", {"prod": prod}))
    first = context.Context(server="a:1", pid=os.getppid())
    second = context.Context(server="a:2", pid=os.getpid())
    by_first = context.save(path, first)
    by_second = context.save(path, second)
    assert context.load(path) == context.Contexts("local-2", {"prod": prod, "local": first, "local-2": second})
    context.release(path, second, by_second)
    assert context.load(path) == context.Contexts("local", {"prod": prod, "local": first})
    context.release(path, second, by_second)  # not there any more: nothing changes
    assert context.load(path).current == "local"
    context.release(path, first, by_first)
    assert context.load(path) == context.Contexts("prod", {"prod": prod})


def test_what_the_user_chose_meanwhile_stays_and_an_empty_file_goes(tmp_path: Path) -> None:
    path = tmp_path / "context.json"
    mine = context.Context(server="a:1", pid=os.getpid())
    saved = context.save(path, mine)
    prod = context.Context(server="p:1")
    context.store(path, context.Contexts("prod", {"local": mine, "prod": prod}))
    context.release(path, mine, saved)
    assert context.load(path) == context.Contexts("prod", {"prod": prod})
    context.store(path, context.Contexts())
    assert not path.exists()
    context.release(path, mine, context.save(path, mine))
    assert not path.exists()


def test_contexts_of_clusters_that_have_ended_are_cleared_away(tmp_path: Path) -> None:
    path = tmp_path / "context.json"
    context.save(path, context.Context(server="a:1", pid=_gone()))
    mine = context.Context(server="a:2", pid=os.getpid())
    context.save(path, mine)
    assert context.load(path) == context.Contexts("local", {"local": mine})


def test_where_the_context_lies() -> None:
    assert context.context_path({"OMNICTL_CONTEXT": "/x/c.json"}) == Path("/x/c.json")
    assert context.context_path({"XDG_CONFIG_HOME": "/x"}) == Path("/x/omnictl/context.json")
    assert context.context_path({"HOME": "/home/a"}) == Path("/home/a/.config/omnictl/context.json")


def test_durations_that_no_message_can_hold_are_refused() -> None:
    assert settings.seconds("8760h", "--deadline") == 8760 * 3600
    with pytest.raises(InvalidRequestError, match="--deadline: must be at most 8760h"):
        settings.seconds("99999999999999999999h", "--deadline")
