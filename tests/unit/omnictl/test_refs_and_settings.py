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


def test_flags_win_over_environment_over_context(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "context.json"
    context.save(path, context.Context(server="c:1", gateway="c:2", gateway_http="http://c:3", pid=os.getpid()))
    assert _resolve(path, []).server == ("c:1",)
    assert _resolve(path, []).gateway_http == "http://c:3"
    assert _resolve(path, [], OMNICTL_SERVER="e:1, e:2").server == ("e:1", "e:2")
    assert _resolve(path, ["--server", "f:1"], OMNICTL_SERVER="e:1").server == ("f:1",)
    # Part of another cluster: its HTTP side is not the context's.
    assert _resolve(path, ["--gateway", "f:2"]).gateway_http == ""


def test_a_context_whose_owner_is_gone_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "context.json"
    gone = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(gone, 0)
    context.save(path, context.Context(server="c:1", pid=gone))
    found = _resolve(path, [])
    assert found.server == ()
    with pytest.raises(UnavailableError, match="has ended") as caught:
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


def test_release_restores_the_context_of_a_cluster_that_still_runs(tmp_path: Path) -> None:
    path = tmp_path / "context.json"
    first = context.Context(server="a:1", pid=os.getppid())
    second = context.Context(server="a:2", pid=os.getpid())
    context.save(path, first)
    previous = context.save(path, second)
    context.release(path, second, previous)
    assert context.load(path) == first
    context.release(path, second, None)  # not ours any more: left alone
    assert context.load(path) == first
    context.release(path, first, None)
    assert context.load(path) is None


def test_where_the_context_lies() -> None:
    assert context.context_path({"OMNICTL_CONTEXT": "/x/c.json"}) == Path("/x/c.json")
    assert context.context_path({"XDG_CONFIG_HOME": "/x"}) == Path("/x/omnictl/context.json")
    assert context.context_path({"HOME": "/home/a"}) == Path("/home/a/.config/omnictl/context.json")
