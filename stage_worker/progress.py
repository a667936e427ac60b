"""What a beat is allowed to tell: that the engine has made progress."""

from __future__ import annotations

from collections.abc import Callable

from connectors.base import ConnectorUsage
from omni.v1 import types_pb2
from stage_worker.engine import Engine


class Progress:
    """Counts outputs; the runner of every call adds to ``outputs`` directly."""

    def __init__(self) -> None:
        self.outputs = 0


class LoadSource:
    """The load of this replica: the engine's counts, the connectors' and the outputs so far. Zero until the engine
    runs."""

    def __init__(
        self, engine: Engine, usage: Callable[[], ConnectorUsage], active_calls: Callable[[], int], progress: Progress
    ) -> None:
        self._engine = engine
        self._usage = usage
        self._active_calls = active_calls
        self._progress = progress
        self.started = False
        """Set once the engine has started: before, it is not asked."""

    def report(self) -> types_pb2.LoadReport:
        """Load now. Cheap."""
        report = types_pb2.LoadReport()
        if self.started:
            report.CopyFrom(self._engine.load())
        usage = self._usage()
        report.queue_length = max(report.queue_length, self._active_calls())
        report.transfer_pool_free_bytes = usage.free_bytes
        report.inflight_transfers = usage.handles
        report.outputs_total = self._progress.outputs
        return report
