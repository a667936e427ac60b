"""Who may do what with which key, by a clock that the test moves."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from gateway.access.audit import AuditLog
from gateway.access.control import ANYBODY, LOOK_EVERY_S, AccessControl, role_of_rpc
from gateway.access.cors import origins
from omnicore import api_keys, errors
from omnicore.api_keys import ApiKey, KeyRole
from omnicore.clock import ManualClock

KEY = "omni_" + "k" * 40


def _file(path: Path, *keys: ApiKey) -> str:
    path.write_text("\n".join(api_keys.line(key) for key in keys))
    return str(path)


def _refused(control: AccessControl, authorization: bytes, x_api_key: bytes = b"") -> errors.OmniError:
    with pytest.raises(errors.UnauthenticatedError) as refused:
        control.identify(authorization, x_api_key)
    assert refused.value.reason == "INVALID_API_KEY"
    assert KEY not in refused.value.message
    return refused.value


def test_headers_that_carry_a_key(tmp_path: Path) -> None:
    alice = ApiKey("alice", api_keys.hashed(KEY))
    control = AccessControl(_file(tmp_path / "keys", alice), clock=ManualClock())
    for authorization, other in ((b"Bearer %b", b""), (b"bearer  %b ", b""), (b"", b"%b"), (b"Basic abc", b"%b")):
        found = control.identify(authorization.replace(b"%b", KEY.encode()), other.replace(b"%b", KEY.encode()))
        assert found == alice
    assert "required" in _refused(control, b"").message
    assert "not known" in _refused(control, b"Bearer " + KEY[:-1].encode()).message
    assert "not known" in _refused(control, b"Bearer x", KEY.encode()).message, "the first one counts"


def test_disabled_and_expired_keys(tmp_path: Path) -> None:
    now_s = 1_000.0
    alice = ApiKey("alice", api_keys.hashed(KEY), expires_s=2_000)
    bob = ApiKey("bob", api_keys.hashed(KEY + "b"), disabled=True)
    control = AccessControl(_file(tmp_path / "keys", alice, bob), clock=ManualClock(), wall_s=lambda: now_s)
    assert control.identify(b"Bearer " + KEY.encode()).id == "alice"
    now_s = 2_000.0
    assert _refused(control, b"Bearer " + KEY.encode()).metadata["key_id"] == "alice"
    assert "disabled" in _refused(control, b"Bearer " + KEY.encode() + b"b").message


def test_a_changed_file_is_taken_and_a_broken_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock, path = ManualClock(), tmp_path / "keys"
    told: list[int] = []
    control = AccessControl(_file(path, ApiKey("alice", api_keys.hashed(KEY))), clock=clock)
    control.on_reload = lambda keys: told.append(len(keys))
    _file(path, ApiKey("bob", api_keys.hashed(KEY + "b")))
    assert control.identify(b"Bearer " + KEY.encode()).id == "alice", "looked at every so often only"
    clock.advance(LOOK_EVERY_S)
    assert control.identify(b"Bearer " + KEY.encode() + b"b").id == "bob"
    _refused(control, b"Bearer " + KEY.encode())
    path.write_text("{broken")
    clock.advance(LOOK_EVERY_S)
    assert control.identify(b"Bearer " + KEY.encode() + b"b").id == "bob"
    assert "not reloaded" in caplog.text
    path.unlink()
    control.reload()
    assert control.identify(b"Bearer " + KEY.encode() + b"b").id == "bob"
    assert told == [1]


def test_a_broken_file_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidRequestError, match="--api-keys"):
        AccessControl(str(tmp_path / "absent"))


def test_roles(tmp_path: Path) -> None:
    reader = ApiKey("reader", "0" * 64, roles=frozenset({KeyRole.READ}))
    control = AccessControl(_file(tmp_path / "keys", reader))
    control.check(reader, KeyRole.READ, "x")
    with pytest.raises(errors.PermissionDeniedError) as refused:
        control.check(reader, KeyRole.CLIENT, "POST /v1/chat/completions")
    assert (refused.value.reason, refused.value.metadata["needs"]) == ("ROLE_REQUIRED", "client")


def test_without_keys_only_this_machine_administrates() -> None:
    AccessControl(trusted=True).check(ANYBODY, KeyRole.ADMIN, "x")
    beyond = AccessControl(trusted=False)
    assert beyond.identify(b"Bearer whatever") is ANYBODY
    beyond.check(ANYBODY, KeyRole.CLIENT, "x")
    with pytest.raises(errors.PermissionDeniedError, match="--api-keys"):
        beyond.check(ANYBODY, KeyRole.ADMIN, "x")


@pytest.mark.parametrize(
    ("method", "role"),
    [
        ("/omni.v1.InferenceService/Generate", KeyRole.CLIENT),
        ("/omni.v1.InferenceService/ListModels", KeyRole.READ),
        ("/omni.v1.RouterService/Route", KeyRole.CLIENT),
        ("/omni.v1.AdminService/GetClusterStatus", KeyRole.READ),
        ("/omni.v1.AdminService/DrainReplica", KeyRole.ADMIN),
        ("/omni.v1.PipelineService/ApplyPipeline", KeyRole.ADMIN),
        ("/grpc.channelz.v1.Channelz/GetServers", KeyRole.ADMIN),
        ("/omni.v1.New/Thing", KeyRole.ADMIN),
        ("/grpc.health.v1.Health/Check", None),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", None),
    ],
)
def test_role_of_an_rpc(method: str, role: KeyRole | None) -> None:
    assert role_of_rpc(method) is role


def test_floods_of_refusals_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    audit = AuditLog(clock)
    caplog.set_level(logging.INFO)
    for _ in range(80):
        audit.refused("GET /v1/models", "", "invalid_api_key")
    assert len(caplog.records) == 50
    clock.advance(1.0)
    audit.refused("GET /v1/models", "alice", "role_required")
    fields = caplog.records[-1].__dict__["fields"]
    assert fields == {
        "method": "GET /v1/models", "key": "alice", "outcome": "refused", "reason": "role_required", "not_logged": 30
    }  # fmt: skip


@pytest.mark.parametrize("value", [("example.com",), ("*", "https://a.example"), ("https://a.example/path",)])
def test_wrong_origins(value: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="origin"):
        origins(value)
    origins(("https://a.example", "http://localhost:3000"))
