"""Real etcd servers for tests: start, kill, freeze, restart; alone, as a cluster, with TLS, with users. ::

    async with etcd_server() as etcd, EtcdClient([etcd.endpoint]) as client:
        etcd.kill()
        await etcd.restart()

Servers live in a temporary directory of their own, listen on Unix sockets in it (loopback TCP with TLS), end with the
block and with the test process. ``OMNI_ETCD_BINARY`` names another program than the one that the launcher would find.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from control_plane.etcd import EtcdClient, EtcdCredentialFiles, EtcdUnavailable
from control_plane.etcd.binary import find_etcd
from omnicore import errors
from omnicore.process import dying_with_parent
from tests.support.ports import reserved_port

READY_S = 60.0


@dataclasses.dataclass(slots=True)
class EtcdNode:
    """One server. ``endpoint`` stays the same over restarts."""

    name: str
    endpoint: str
    command: list[str]
    directory: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self.process is not None, f"{self.name} was not started"
        return self.process.pid

    @property
    def running(self) -> bool:
        """True until it has ended."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Spawn, without waiting."""
        assert not self.running, f"{self.name} is running"
        if self.endpoint.startswith("unix:"):
            Path(self.endpoint.removeprefix("unix:")).unlink(missing_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        with (self.directory / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                dying_with_parent(self.command, signal.SIGKILL),
                cwd=self.directory,
                env=environment | {"ETCD_UNSUPPORTED_ARCH": os.uname().machine.replace("aarch64", "arm64")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def ready(self, credentials: EtcdCredentialFiles | None = None) -> None:
        """Wait until it answers reads that need a leader; a refusal (no user, say) is an answer, too."""
        deadline = time.monotonic() + READY_S
        async with EtcdClient([self.endpoint], credentials=credentials, timeout_s=0.5) as client:
            while True:
                try:
                    await client.get("ready?")
                    return
                except EtcdUnavailable:
                    assert self.running, f"{self.name} ended:\n{self.logs()}"
                    assert time.monotonic() < deadline, f"{self.name} was not ready in time:\n{self.logs()}"
                except errors.OmniError:
                    return

    async def restart(self, credentials: EtcdCredentialFiles | None = None) -> None:
        """Start again at the same address and wait until it answers."""
        self.start()
        await self.ready(credentials)

    def kill(self) -> None:
        """SIGKILL, and reap."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def send(self, sig: signal.Signals) -> None:
        """Send a signal, and reap if that ends it."""
        os.kill(self.pid, sig)
        if sig in (signal.SIGKILL, signal.SIGTERM):
            assert self.process is not None
            self.process.wait(READY_S)

    def freeze(self) -> None:
        """SIGSTOP: connections stay up, nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def wipe(self) -> None:
        """Delete the store of a server that is not running."""
        assert not self.running, f"{self.name} is running"
        shutil.rmtree(self.directory / f"{self.name}.data")

    def logs(self) -> str:
        """All that it wrote so far."""
        return (self.directory / f"{self.name}.log").read_text(errors="replace")

    def ctl(self, *arguments: str, user: str = "") -> str:
        """Run ``etcdctl`` against this server (plaintext only) and return what it prints."""
        binary = find_etcd(os.environ.get("OMNI_ETCD_BINARY")).with_name("etcdctl")
        program = str(binary) if binary.exists() else shutil.which("etcdctl")
        assert program, "no etcdctl beside etcd or on PATH"
        endpoint = self.endpoint.replace("unix:", "unix://")
        command = [program, "--endpoints", endpoint, *(["--user", user] if user else []), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "ETCDCTL_API": "3"}
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout


@dataclasses.dataclass(frozen=True, slots=True)
class Certificates:
    """A throw-away authority, and a server's and a client's certificate from it; all PEM files."""

    ca: Path
    server_cert: Path
    server_key: Path
    client_cert: Path
    client_key: Path

    @classmethod
    def make(cls, directory: Path) -> Certificates:
        """Make them with the ``openssl`` program."""

        def openssl(*arguments: str) -> None:
            subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True, timeout=120)

        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test-ca")
        (directory / "extensions").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        for name in ("server", "client"):
            openssl("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
            sign = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "extensions", "-days", "2"]
            openssl("x509", "-req", "-in", f"{name}.csr", *sign, "-out", f"{name}.pem")
        return cls(
            directory / "ca.pem",
            directory / "server.pem",
            directory / "server.key",
            directory / "client.pem",
            directory / "client.key",
        )

    @property
    def credentials(self) -> EtcdCredentialFiles:
        """Of a client."""
        return EtcdCredentialFiles(ca=str(self.ca), cert=str(self.client_cert), key=str(self.client_key))


@contextlib.asynccontextmanager
async def etcd_server(
    *, certificates: Certificates | None = None, flags: Sequence[str] = ()
) -> AsyncIterator[EtcdNode]:
    """One server, ready. With ``certificates`` it listens on loopback TCP and wants a client certificate.

    ``flags`` are further flags of etcd, such as ``--auth-token-ttl=2``.
    """
    fast = ["--heartbeat-interval=20", "--election-timeout=100"]
    credentials = None
    if certificates is not None:
        endpoint = f"127.0.0.1:{reserved_port()}"
        listen = f"https://{endpoint}"
        fast += [
            f"--cert-file={certificates.server_cert}",
            f"--key-file={certificates.server_key}",
            f"--trusted-ca-file={certificates.ca}",
            "--client-cert-auth",
        ]
        credentials = EtcdCredentialFiles(
            ca=str(certificates.ca), cert=str(certificates.client_cert), key=str(certificates.client_key)
        )
    with _directory() as directory:
        if certificates is None:
            endpoint, listen = f"unix:{directory}/n0:0", "unix://n0:0"
        node = _node("n0", endpoint, listen, directory, "n0=unix://peer-n0:0", [*fast, *flags])
        async with _running([node], credentials):
            yield node


@contextlib.asynccontextmanager
async def etcd_cluster(size: int = 3, *, flags: Sequence[str] = ()) -> AsyncIterator[list[EtcdNode]]:
    """Several members of one cluster, ready. Elections take about half a second, half of etcd's default."""
    flags = ["--heartbeat-interval=50", "--election-timeout=500", *flags]
    names = [f"n{number}" for number in range(size)]
    initial = ",".join(f"{name}=unix://peer-{name}:0" for name in names)
    with _directory() as directory:
        nodes = [
            _node(name, f"unix:{directory}/{name}:0", f"unix://{name}:0", directory, initial, flags) for name in names
        ]
        async with _running(nodes, None):
            yield nodes


def enable_auth(
    node: EtcdNode,
    *,
    root_password: str,
    user: str,
    password: str,
    prefix: str,
    certificates: Certificates | None = None,
) -> None:
    """Turn on users: root, and one who may read and write the keys that start with ``prefix``. ``certificates`` are
    those that ``node`` was started with."""
    tls: tuple[str, ...] = ()
    if certificates is not None:
        # Ours as a server: a client's certificate would name a user.
        names = {"cacert": certificates.ca, "cert": certificates.server_cert, "key": certificates.server_key}
        tls = tuple(f"--{name}={path}" for name, path in names.items())
    for command in (
        ("user", "add", f"root:{root_password}"),
        ("user", "grant-role", "root", "root"),
        ("role", "add", "partial"),
        ("role", "grant-permission", "--prefix", "partial", "readwrite", prefix),
        ("user", "add", f"{user}:{password}"),
        ("user", "grant-role", user, "partial"),
        ("auth", "enable"),
    ):
        node.ctl(*tls, *command)


def _node(
    name: str, endpoint: str, listen: str, directory: Path, initial_cluster: str, flags: Sequence[str]
) -> EtcdNode:
    command = [
        str(find_etcd(os.environ.get("OMNI_ETCD_BINARY"))),
        f"--name={name}",
        f"--data-dir={name}.data",
        f"--listen-client-urls={listen}",
        f"--advertise-client-urls={listen}",
        f"--listen-peer-urls=unix://peer-{name}:0",
        f"--initial-advertise-peer-urls=unix://peer-{name}:0",
        f"--initial-cluster={initial_cluster}",
        "--logger=zap",
        "--log-level=warn",
        *flags,
    ]
    return EtcdNode(name, endpoint, command, directory)


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    # Not pytest's tmp_path: a Unix socket's address is at most 107 bytes long.
    path = Path(tempfile.mkdtemp(prefix="omni-test-etcd-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.asynccontextmanager
async def _running(nodes: Sequence[EtcdNode], credentials: EtcdCredentialFiles | None) -> AsyncIterator[None]:
    try:
        for node in nodes:
            node.start()
        await asyncio.gather(*(node.ready(credentials) for node in nodes))
        yield
    finally:
        for node in nodes:
            if node.running:
                node.kill()
        for node in nodes:
            print(f"----- etcd {node.name} -----\n{node.logs()}")
