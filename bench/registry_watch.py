"""One watching gateway of bench.registry: the gateway's own watch and table, and the times at which they changed.

    python -m bench.registry_watch CONTROL_PLANE

Answers each line of JSON on stdin with one on stdout:

* ``{"do": "count"}``: how many replicas are routable now;
* ``{"do": "events"}``: since it was last asked, when which instance became routable, and when it ceased to be so
  (monotonic seconds).
"""

from __future__ import annotations

import sys
import time
from typing import Any

from bench.harness import serve_lines
from gateway.control_plane_watch import ControlPlaneWatch
from gateway.graph import PipelineGraph
from gateway.replica_table import ReplicaTable, ReplicaView
from omnicore import process
from omnicore.log import setup_logging


class Times:
    """Listens to the table of a gateway."""

    def __init__(self) -> None:
        self.routable = 0
        self._came: dict[str, float] = {}
        self._went: dict[str, float] = {}

    def on_pipeline(self, name: str, graph: PipelineGraph | None) -> None:
        """Not of interest."""

    def on_replica(self, old: ReplicaView | None, new: ReplicaView | None) -> None:
        """Note when routing to it began or ended."""
        before, after = _in_use(old), _in_use(new)
        if before == after:
            return
        view = new or old
        assert view is not None
        if after:
            self.routable += 1
            self._came.setdefault(view.record.instance_uuid, time.monotonic())
        else:
            self.routable -= 1
            self._went.setdefault(view.record.instance_uuid, time.monotonic())

    async def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command."""
        if command["do"] == "count":
            return {"routable": self.routable}
        came, self._came = self._came, {}
        went, self._went = self._went, {}
        return {"came": came, "went": went}


def _in_use(view: ReplicaView | None) -> bool:
    """Routed to while something else is left as well."""
    return view is not None and view.routable and not view.suspect


async def _serve(control_plane: str) -> int:
    table, times = ReplicaTable(), Times()
    table.add_listener(times)
    watch = ControlPlaneWatch([control_plane], table)
    watch.start()
    try:
        await serve_lines(times.answer)
    finally:
        await watch.close()
    return 0


if __name__ == "__main__":
    setup_logging("watch", "warning", False)
    sys.exit(process.run(_serve(sys.argv[1])))
