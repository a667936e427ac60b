"""Real object stores for tests: Mooncake's master and Yuanrong's worker, from their wheels."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from connectors.options import MooncakeStoreOptions, YuanrongOptions
from connectors.stores import factories
from omnicore.process import dying_with_parent
from tests.support.ports import reserved_port

START_S = 60.0
MIB = 1 << 20


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        if os.environ.get("OMNIPLANE_REQUIRE_E2E"):
            pytest.fail(f"{name} is not installed: requirements/transfer.txt")
        pytest.skip(f"{name} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


class Daemon:
    """A store's process, which can be killed, frozen and started again at the same address."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="omni-store-"))
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def serves(self) -> bool:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def start(self) -> None:
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                dying_with_parent(self.command(), signal.SIGKILL),
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                env=self.environment(),
            )
        deadline = time.monotonic() + START_S
        while not self.serves():
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{self.command()[0]} does not serve:\n{(self.directory / 'log').read_text()[-4000:]}")
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


class MooncakeMaster(Daemon):
    """``mooncake_master``. Clients that die are missed after ``client_ttl_s``."""

    def __init__(self, client_ttl_s: int = 10, lease_ttl_ms: int = 10_000) -> None:
        self._program = _package("mooncake") / "mooncake_master"
        super().__init__()
        self._port, self._metrics_port = reserved_port(), reserved_port()
        self._client_ttl_s = client_ttl_s
        self.lease_ttl_ms = lease_ttl_ms
        self.address = f"127.0.0.1:{self._port}"

    def command(self) -> list[str]:
        return [
            str(self._program),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self._port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={self._metrics_port}",
            f"--client_ttl={self._client_ttl_s}",
            f"--default_kv_lease_ttl={self.lease_ttl_ms}",
        ]

    def serves(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), 1).close()
        except OSError:
            return False
        return True

    def extra(self, **others: Any) -> dict[str, Any]:
        """Options of the connector for this store."""
        mine = {"master": self.address, "metadata_server": "P2PHANDSHAKE", "segment": 64 * MIB, "localbuf": 16 * MIB}
        return {**mine, "timeout_s": 30.0, **others}


class YuanrongWorker(Daemon):
    """The datasystem's worker with a metastore of its own: a cluster of one, without etcd."""

    def __init__(self, shared_memory_mib: int = 256) -> None:
        self._home = _package("yr") / "datasystem"
        super().__init__()
        self.port, self._metastore_port = reserved_port(), reserved_port()
        self._shared_memory_mib = shared_memory_mib
        self._ready = self.directory / "ready"
        os.environ.setdefault(
            "DATASYSTEM_CLIENT_LOG_DIR", str(self.directory)
        )  # or clients log below the home directory

    def environment(self) -> dict[str, str]:
        return {**os.environ, "LD_LIBRARY_PATH": str(self._home / "lib")}

    def command(self) -> list[str]:
        few = ("oc", "sc", "master_sc", "rpc")  # threads: it serves one test at a time
        return [
            str(self._home / "datasystem_worker"),
            f"--worker_address=127.0.0.1:{self.port}",
            f"--metastore_address=127.0.0.1:{self._metastore_port}",
            "--start_metastore_service=true",
            f"--shared_memory_size_mb={self._shared_memory_mib}",
            "--oc_shm_threshold_percentage=100",
            "--sc_shm_threshold_percentage=100",
            "--ipc_through_shared_memory=true",
            "--enable_curve_zmq=false",
            "--log_monitor=false",
            f"--unix_domain_socket_dir={self.directory}/uds",
            f"--rocksdb_store_dir={self.directory}/rocksdb",
            f"--log_dir={self.directory}/logs",
            f"--ready_check_path={self._ready}",
            f"--health_check_path={self.directory}/healthy",
            *(f"--{name}_thread_num=4" for name in few),
        ]

    def start(self) -> None:
        self._ready.unlink(missing_ok=True)
        super().start()

    def serves(self) -> bool:
        return self._ready.exists()

    def extra(self, **others: Any) -> dict[str, Any]:
        """Options of the connector for this store."""
        return {"port": self.port, "get_sub_timeout_ms": 0, "timeout_s": 30.0, **others}


# For the package that imports them: both poll, and the tests after it have better uses for the processor.
@pytest.fixture(scope="package")
def mooncake_master() -> Iterator[MooncakeMaster]:
    """A master that stays, and a client that every connector of this process with ``extra()`` shares: a client of its
    own would cost each a second to leave."""
    master = MooncakeMaster()
    master.start()
    client = factories.mooncake_client(MooncakeStoreOptions(**master.extra()))
    yield master
    client.close()
    master.close()


@pytest.fixture(scope="package")
def yuanrong_worker() -> Iterator[YuanrongWorker]:
    """A worker that stays, and a shared client: it takes some seconds to start."""
    worker = YuanrongWorker()
    worker.start()
    client = factories.yuanrong_client(YuanrongOptions(**worker.extra()))
    yield worker
    client.close()
    worker.close()
