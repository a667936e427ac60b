from __future__ import annotations

import pytest

from control_plane.app import main


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--etcd", "embedded,127.0.0.1:1"], "--etcd"),
        (["--etcd", ","], "--etcd"),
        (["--lease-ttl-s", "0"], "--lease-ttl-s"),
        (["--omni-heartbeat-timeout", "x"], "--lease-ttl-s"),
        (["--cluster", "a/b"], "--cluster"),
        (["--listen", "nowhere"], "--listen"),
        (["--heartbeat-interval-s", "0"], "--heartbeat-interval-s"),
        (["--lease-ttl", "3"], "--lease-ttl"),
        (["--keep-replica-ids", "0=2"], "--keep-replica-ids"),
    ],
)
def test_wrong_flags_name_themselves(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_values_must_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--lease-ttl-s", "2", "--heartbeat-interval-s", "1"]) == 2
    assert "must be at most 0.333333" in capsys.readouterr().err


def test_a_certificate_that_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--listen", "127.0.0.1:0", "--etcd", "127.0.0.1:1", "--etcd-ca", "/no/such/file"]) == 2
    assert "/no/such/file" in capsys.readouterr().err


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for flag in ("--listen", "--etcd", "--cluster", "--lease-ttl-s", "--omni-heartbeat-timeout", "--ready-file"):
        assert flag in shown
