"""What a call gives to other stages: cut into chunks, published once, and handed to every edge that carries them.

Edges that carry the same chunks by the same connector share each payload: it is published once, with a consumer place
for each of them, and freed when the last has released it.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

from connectors.handles import HandleStore, edge_key
from connectors.payload import Payload
from omni.v1 import stage_service_pb2, transfer_pb2
from omnicore.errors import OmniError
from stage_worker.calls import WorkerParts
from stage_worker.chunking import text_cutter
from stage_worker.engine import EngineOutput
from stage_worker.flows import Outbox
from stage_worker.reading import edge_name
from stage_worker.transfer_metrics import PathSeries

Published = tuple[str, bytes, int]
"""Key, token and consumer places of data that its consumers release."""


class OutputGroup:
    """Edges out of a call that carry the same chunks. Construction declares their flows: raises
    ``AlreadyExistsError``; those declared before are in ``outboxes``."""

    def __init__(self, parts: WorkerParts, kind: str, outputs: list[stage_service_pb2.EdgeOutput]) -> None:
        self.to_stages = [output.to_stage for output in outputs]
        self.flows = outputs[0].flow
        self.outboxes: list[Outbox] = []
        """Of edges that flow, in the order of ``to_stages``."""
        self.handles: list[transfer_pb2.TransferHandle] = []
        """Of edges that do not, each handle for all of them."""
        self._parts = parts
        self._kind = kind
        self._consumers = sum(max(1, output.consumers) for output in outputs)
        self._cutter = text_cutter(outputs[0].chunk_by)
        self._edges: list[transfer_pb2.EdgeRef] = []
        self._sequence = 0
        self._paths: dict[str, list[PathSeries]] = {}

    def declare(self, call: stage_service_pb2.StageCall) -> None:
        """Name the edges, and declare the flows among them. Raises ``AlreadyExistsError``."""
        for to_stage in self.to_stages:
            edge = self._parts.edge(call, self._parts.stage.stage_id, to_stage)
            self._edges.append(edge)
            if self.flows:
                self.outboxes.append(self._parts.flows.declare(edge))

    async def write(self, output: EngineOutput) -> None:
        """Publish what one step brought."""
        if output.text:
            for piece in self._cutter.feed(output.text):
                await self._publish(Payload(text=piece))
        if output.chunk is not None:
            await self._publish(output.chunk)

    async def end(self) -> None:
        """Publish what was held back."""
        for piece in self._cutter.flush():
            await self._publish(Payload(text=piece))

    def free(self) -> None:
        """Take back data that nobody was told of."""
        free_published(self._parts.connectors.store, self.published())
        self.handles.clear()

    def published(self) -> list[Published]:
        """What edges that do not flow have been given."""
        return [(handle.key, handle.token, self._consumers) for handle in self.handles]

    async def _publish(self, payload: Payload) -> None:
        consumers = self._consumers
        if self.flows:
            for outbox in self.outboxes:
                if outbox.full:
                    await outbox.room()
            consumers = sum(outbox.wanted for outbox in self.outboxes)
            if not consumers:
                return
        wanted = [outbox for outbox in self.outboxes if outbox.wanted]
        edge, connectors = self._edges[0], self._parts.connectors
        begin_s = perf_counter()
        try:
            handle = await connectors.put(
                self._kind, edge_key(edge, self._sequence), edge, self._sequence, payload, consumers
            )
        except OmniError as error:
            raise self._located(error) from error
        self._count(handle, perf_counter() - begin_s)
        self._sequence += 1
        if not self.flows:
            self.handles.append(handle)
            return
        for outbox in wanted:
            connectors.store.claim(handle.key, handle.token, outbox.claimant)
        for outbox in wanted:
            outbox.publish(handle)

    def _count(self, handle: transfer_pb2.TransferHandle, tx_s: float) -> None:
        backend = handle.WhichOneof("backend") or ""
        paths = self._paths.get(backend)
        if paths is None:
            connector = backend if backend == "inline" else self._kind
            metrics = self._parts.metrics
            paths = self._paths[backend] = [
                metrics.path(edge.from_stage, edge.to_stage, connector, backend) for edge in self._edges
            ]
        for path in paths:
            path.size.observe(handle.size_bytes)
            path.tx.observe(tx_s)

    def _located(self, error: OmniError) -> OmniError:
        edges = ", ".join(edge_name(edge) for edge in self._edges)
        error.message = f"chunk {self._sequence} of edge {edges} could not be published: {error.message}"
        error.args = (error.message,)
        error.metadata = {**error.metadata, "chunk": str(self._sequence), "connector": self._kind}
        return error


def free_published(store: HandleStore, published: Iterable[Published]) -> None:
    """Take back data whose consumers will not come."""
    for key, token, places in published:
        for _ in range(places):
            store.release(key, token)


def output_groups(parts: WorkerParts, outputs: Iterable[stage_service_pb2.EdgeOutput]) -> list[OutputGroup]:
    """The outputs of a call, those together that carry the same chunks by the same connector. Raises
    ``InvalidRequestError`` for a connector that this worker does not have."""
    groups: dict[tuple[str, bool, int], list[stage_service_pb2.EdgeOutput]] = {}
    for output in outputs:
        kind = parts.connectors.resolve(output.connector)
        groups.setdefault((kind, output.flow, output.chunk_by), []).append(output)
    return [OutputGroup(parts, kind, found) for (kind, _, _), found in groups.items()]
