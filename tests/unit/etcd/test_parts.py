"""The parts of the client that need no server."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import grpc.aio
import pytest

from control_plane.etcd import (
    AuthFailed,
    Compacted,
    EtcdClient,
    EtcdCredentialFiles,
    EtcdCredentials,
    LeaseLost,
    WriteOutcomeUnknown,
)
from control_plane.etcd import errors as etcd_errors
from control_plane.etcd.endpoints import parse_endpoints
from control_plane.etcd.model import prefix_end
from omnicore import errors


@pytest.mark.parametrize(
    ("prefix", "end"),
    [(b"/a/", b"/a0"), (b"a\xff", b"b"), (b"a\xff\xff", b"b"), (b"\xff", b"\0"), (b"", b"\0")],
)
def test_prefix_end(prefix: bytes, end: bytes) -> None:
    assert prefix_end(prefix) == end


@pytest.mark.parametrize(
    ("text", "target", "tls"),
    [
        ("127.0.0.1:2379", "127.0.0.1:2379", False),
        ("http://etcd-0.etcd:2379/", "etcd-0.etcd:2379", False),
        ("https://etcd-0.etcd:2379", "etcd-0.etcd:2379", True),
        ("[::1]:2379", "[::1]:2379", False),
        ("unix:/run/etcd/client:0", "unix:/run/etcd/client:0", False),
        ("unix:///run/etcd/client:0", "unix:/run/etcd/client:0", False),
    ],
)
def test_endpoints(text: str, target: str, tls: bool) -> None:
    (endpoint,) = parse_endpoints([text])
    assert (endpoint.target, endpoint.tls) == (target, tls)


@pytest.mark.parametrize(
    "text", ["", "etcd", "etcd:", ":2379", "etcd:0", "etcd:65536", "ftp://etcd:21", "unix:client:0"]
)
def test_endpoints_that_are_refused(text: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match=r"endpoints: .*accepted are"):
        parse_endpoints([text])


def test_a_string_or_nothing_is_not_a_list_of_endpoints() -> None:
    with pytest.raises(errors.InvalidRequestError, match="list"):
        EtcdClient([])
    with pytest.raises(errors.InvalidRequestError, match="list"):
        EtcdClient("etcd:2379")


def test_credentials_from_files(tmp_path: Path) -> None:
    assert EtcdCredentialFiles().current() == EtcdCredentials()
    (tmp_path / "password").write_text("top secret \n")
    files = EtcdCredentialFiles(user="omni", password_file=str(tmp_path / "password"))
    credentials = files.current()
    assert credentials.password == "top secret "
    assert not credentials.tls
    assert "secret" not in repr(credentials)
    (tmp_path / "password").write_text("another one\r\n")
    assert files.current().password == "another one"
    (tmp_path / "cert").write_text("PEM")
    with pytest.raises(errors.InvalidRequestError, match="go together"):
        EtcdCredentialFiles(cert=str(tmp_path / "cert"))
    with pytest.raises(errors.InvalidRequestError, match=r"--etcd-cert: the file holds no usable PEM certificate"):
        EtcdCredentialFiles(cert=str(tmp_path / "cert"), key=str(tmp_path / "cert"))
    with pytest.raises(errors.InvalidRequestError, match=r"--etcd-ca: cannot read .*No such file"):
        EtcdCredentialFiles(ca=str(tmp_path / "none"))
    with pytest.raises(errors.InvalidRequestError, match="needs a user"):
        EtcdCredentials(password="secret")


@pytest.mark.parametrize(
    ("details", "sure"),
    [
        ("failed to connect to all addresses; last error: UNKNOWN: unix:/x: Connection refused", True),
        ("etcdserver: no leader", True),
        ("etcdserver: too many requests", True),
        ("etcdserver: request timed out", False),
        ("etcdserver: request timed out, possibly due to previous leader failure", False),
        ("etcdserver: server stopped", False),
        ("Socket closed", False),
        ("Deadline Exceeded", False),
        ("recvmsg:Connection reset by peer", False),
    ],
)
def test_what_is_surely_not_applied(details: str, sure: bool) -> None:
    assert etcd_errors.surely_not_applied(details) == sure


def _rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, None)


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found", LeaseLost),
        (grpc.StatusCode.OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted", Compacted),
        (
            grpc.StatusCode.INVALID_ARGUMENT,
            "etcdserver: authentication failed, invalid user ID or password",
            AuthFailed,
        ),
        (grpc.StatusCode.PERMISSION_DENIED, "etcdserver: permission denied", errors.PermissionDeniedError),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "etcdserver: mvcc: database space exceeded",
            errors.ResourceExhaustedError,
        ),
        (
            grpc.StatusCode.INVALID_ARGUMENT,
            "etcdserver: duplicate key given in txn request",
            errors.InvalidRequestError,
        ),
    ],
)
def test_refusals_are_typed(code: grpc.StatusCode, details: str, kind: type[errors.OmniError]) -> None:
    assert not etcd_errors.worth_retrying(code, details)
    refused = etcd_errors.refusal(_rpc_error(code, details), lease_id=0xAB)
    assert type(refused) is kind
    if isinstance(refused, LeaseLost):
        assert refused.lease_id == 0xAB


def test_typed_errors_travel_as_status() -> None:
    assert Compacted(7).to_status().code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
    assert Compacted(7).metadata == {"compact_revision": "7"}
    assert LeaseLost(0xAB).metadata == {"lease_id": "ab"}
    assert WriteOutcomeUnknown("?").reason == "ETCD_WRITE_OUTCOME_UNKNOWN"


def test_temporary_directories_of_killed_launchers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from control_plane.etcd import workdir

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    in_use = workdir.acquire(None)
    for name in ("omniplane-etcd-old", "omniplane-etcd-new", "something-else"):
        (tmp_path / name).mkdir()
    for path in tmp_path.iterdir():
        if path.name != "omniplane-etcd-new":
            os.utime(path, (0, 0))
    again = workdir.acquire(None)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {in_use.data.name, again.data.name, "omniplane-etcd-new", "something-else"}
    in_use.release()
    again.release()
    assert {path.name for path in tmp_path.iterdir()} == {"omniplane-etcd-new", "something-else"}


def test_sockets_find_room_where_the_temporary_directory_has_a_long_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from control_plane.etcd import workdir

    long = tmp_path / ("d" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))  # as a long TMPDIR would
    directory = workdir.acquire(None)
    try:
        assert directory.data.parent == long
        assert len(str(directory.sockets / "client:0")) < 108
        assert directory.sockets.stat().st_mode & 0o777 == 0o700
    finally:
        directory.release()
    assert not directory.sockets.exists()
    assert not directory.data.exists()
