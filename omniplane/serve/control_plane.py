"""The control plane that a launcher runs, with an etcd behind it."""

from __future__ import annotations

from pathlib import Path

from omnicore.config import join_host_port
from omnicore.log import get_logger
from omnicore.supervise.supervisor import Supervisor
from omniplane.serve import specs
from omniplane.serve.config import Mode, ServeConfig

_log = get_logger(__name__)


class ControlPlaneRuntime:
    """Owns the control plane process and, unless one was given, its private etcd. ``start`` and ``stop`` may be called
    any number of times.

    A head's listens where --omni-master-address and --omni-master-port say, for headless processes to find it; a plain
    launcher's only on a loopback port of its own.
    """

    def __init__(self, config: ServeConfig, supervisor: Supervisor) -> None:
        self._config = config
        self._supervisor = supervisor
        self.etcd: tuple[str, ...] = config.etcd
        """Endpoints of the etcd behind it."""
        self.address = ""
        """ "host:port" to dial; empty before the start."""

    @property
    def listen(self) -> str:
        """ "host:port" that it is asked to listen on."""
        if self._config.mode is Mode.HEAD and self._config.omni_master_port is not None:
            return join_host_port(self._config.omni_master_address, self._config.omni_master_port)
        return "127.0.0.1:0"

    async def start(self) -> None:
        """Start what does not run yet; returns once it serves."""
        if self.address:
            return
        if not self.etcd:
            ready = await self._supervisor.launch(specs.etcd(self._config, self._etcd_data_dir()))
            self.etcd = tuple(ready["endpoints"])
        ready = await self._supervisor.launch(specs.control_plane(self._config, self.listen, self.etcd))
        # The words that scripts written for vLLM-Omni wait for before they start headless processes.
        _log.info(f"Listening on tcp://{ready['address']}", cluster=self._config.cluster)
        self.address = specs.reachable(ready["address"])

    def _etcd_data_dir(self) -> Path:
        kept = self._config.data_dir
        return (Path(kept).expanduser().absolute() if kept else self._supervisor.run_dir) / "etcd"

    async def stop(self) -> None:
        """Stop both, the control plane first."""
        await self._supervisor.stop([[specs.CONTROL_PLANE], [specs.ETCD]])
        self.address = ""
        self.etcd = self._config.etcd
