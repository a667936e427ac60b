"""Where plaintext may go, and what is said where it may not."""

from __future__ import annotations

import pytest

from omnicore.errors import FailedPreconditionError, InvalidRequestError
from omnicore.security import Security, SecurityConfig, is_loopback


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1:7700", True),
        ("127.8.9.1:0", True),
        ("[::1]:7700", True),
        ("localhost:7700", True),
        ("LOCALHOST:7700", True),
        ("unix:/run/etcd.sock", True),
        ("0.0.0.0:7700", False),
        ("[::]:7700", False),
        ("10.0.0.5:7700", False),
        ("[::ffff:127.0.0.1]:1", False),
        ("localhost.example:7700", False),
        ("control-plane:7700", False),
    ],
)
def test_loopback(address: str, loopback: bool) -> None:
    # A mapped address is loopback to Linux but not to every version of Python: neither answer lets anybody in.
    if "ffff" not in address:
        assert is_loopback(address) is loopback


async def test_plaintext_beyond_loopback_must_be_asked_for() -> None:
    plain = Security()
    assert not plain.encrypted
    assert plain.server_credentials() is None
    assert plain.interceptors() == ()
    plain.check_listen("--listen", "127.0.0.1:0")
    plain.check_dial("--control-plane", ["localhost:7700", "[::1]:7700"])
    flags = r"give --tls-ca, --tls-cert and --tls-key, or say --insecure"
    with pytest.raises(InvalidRequestError, match=rf"--listen: .*0\.0\.0\.0:7700.*{flags}"):
        plain.check_listen("--listen", "0.0.0.0:7700")
    with pytest.raises(InvalidRequestError, match=rf"--control-plane: .*10\.0\.0\.5:7700.*{flags}"):
        plain.check_dial("--control-plane", ["127.0.0.1:7700", "10.0.0.5:7700"])
    with pytest.raises(FailedPreconditionError, match=rf"worker 10\.0\.0\.5:1 in plaintext.*{flags}"):
        plain.to_worker("10.0.0.5:1")
    insecure = Security(SecurityConfig(insecure=True))
    insecure.check_listen("--listen", "0.0.0.0:7700")
    insecure.check_dial("--control-plane", ["10.0.0.5:7700"])
    await insecure.to_worker("10.0.0.5:1").close(None)


def test_the_three_files_go_together() -> None:
    with pytest.raises(InvalidRequestError, match="--tls-key: required"):
        Security(SecurityConfig(tls_ca="a", tls_cert="b"))
    with pytest.raises(InvalidRequestError, match="--tls-ca: cannot read /none: No such file"):
        Security(SecurityConfig(tls_ca="/none", tls_cert="/none", tls_key="/none"))
