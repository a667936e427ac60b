"""What a beat is allowed to tell: that the engine has made progress."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from connectors.base import ConnectorUsage
from omni.v1 import types_pb2
from omnicore.errors import UnavailableError, from_exception
from stage_worker.engine import ENGINE_DEAD, Engine

_POLL_S = 0.05  # while a probe is out: output counts as well


class EngineDiedError(UnavailableError):
    """The engine said that it will never make progress again."""

    default_reason = ENGINE_DEAD


class DeathWatch:
    """Asks the engine as soon as a call says that it is dead, and not with the next beat: what comes meanwhile would
    fail, too."""

    def __init__(self, probe: Callable[[], Awaitable[None]], on_death: Callable[[EngineDiedError], None]) -> None:
        """``probe`` is the engine's; ``on_death`` is called if it fails."""
        self._probe = probe
        self._on_death = on_death
        self._asking: asyncio.Task[None] | None = None

    def suspect(self) -> None:
        """A call has failed because of a dead engine, this one or one whose output it read."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask(), name="engine-suspected")

    def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()

    async def _ask(self) -> None:
        try:
            await self._probe()
        except Exception as error:  # noqa: BLE001 -- whatever it is, the engine does not work
            self._on_death(_died(error))
        self._asking = None


class Progress:
    """Counts outputs; the runner of every call adds to ``outputs`` directly."""

    def __init__(self) -> None:
        self.outputs = 0
        self.on_suspicion: Callable[[], None] = lambda: None
        """See ``DeathWatch.suspect``."""


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


class Vitality:
    """Tells that the engine has made progress: by output, or by an answered probe. All who ask at a time share one
    probe. Beats to the control plane and to gateways say nothing else."""

    def __init__(self, progress: Progress, load: LoadSource, probe: Callable[[], Awaitable[None]]) -> None:
        """``probe`` is the engine's."""
        self._progress = progress
        self._load = load
        self._probe = probe
        self._probing: asyncio.Future[None] | None = None
        self._asking = 0

    @property
    def outputs(self) -> int:
        """Outputs so far."""
        return self._progress.outputs

    async def shown(self, outputs: int) -> int:
        """Return the count of outputs once it is no longer ``outputs``, or a probe was answered; at once while the
        engine loads and cannot be asked. Waits while the engine hangs. Raises ``EngineDiedError``."""
        if self._load.started and self._progress.outputs == outputs:
            # One that is out already will do: its answer, when it comes, says that the engine lives then.
            if self._probing is None or self._probing.done():
                self._probing = asyncio.ensure_future(self._probe())
            probing = self._probing
            self._asking += 1
            try:
                while not probing.done() and self._progress.outputs == outputs:
                    await asyncio.wait([probing], timeout=_POLL_S)
                if probing.done():
                    probing.result()
            except Exception as error:
                raise _died(error) from error
            finally:
                self._asking -= 1
                if not self._asking:
                    # Forgotten before it has ended: who asks next must not wait for one that is being cancelled.
                    self._probing = None
                    probing.cancel()
        return self._progress.outputs


def _died(error: Exception) -> EngineDiedError:
    return EngineDiedError(f"the engine has died: {from_exception(error).message}")
