"""What a call gives to other stages: cut into chunks, published once, and handed to every edge that carries them.

Edges that carry the same chunks by the same connector share each payload: it is published once, with a consumer place
for each of them, and freed when the last has released it.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

from connectors.handles import HandleStore
from connectors.held import edge_key
from connectors.payload import Payload
from omni.v1 import stage_service_pb2, transfer_pb2
from omnicore.errors import OmniError
from omnicore.tracing import AttributeValue
from stage_worker.calls import WorkerParts
from stage_worker.chunking import text_cutter
from stage_worker.edges import edge_name
from stage_worker.engine import EngineOutput
from stage_worker.outbox import Outbox
from stage_worker.retention import Retention
from stage_worker.transfer_metrics import PathSeries

RETAINED = "retained"
"""The name under which what is retained of an edge that does not flow is claimed, beside its consumers."""


class Published:
    """What a call has given to edges that do not flow: its consumers release it, and while it is retained it outlives
    them."""

    def __init__(self, store: HandleStore, keeper: Retention, request_id: str, consumers: int, *, retained: bool):
        self.request_id = request_id
        self._store = store
        self._keeper = keeper
        self._consumers = consumers
        self._retained = retained
        self._data: list[tuple[str, bytes]] = []

    def __bool__(self) -> bool:
        return bool(self._data)

    @property
    def places(self) -> int:
        """Consumer places of the next handle."""
        return self._consumers + self._retained

    def add(self, handle: transfer_pb2.TransferHandle) -> None:
        """One more was published, with ``places``."""
        self._data.append((handle.key, handle.token))
        if handle.consumers > self._consumers:
            self._store.claim(handle.key, handle.token, RETAINED)
            self._keeper.add(self, handle)

    def free(self) -> None:
        """Take everything back: its consumers will not come."""
        for key, token in self._data:
            for _ in range(self._consumers):
                self._store.release(key, token)
        self.stop_retaining()
        self._data.clear()

    def stop_retaining(self) -> None:
        """Keep only what its consumers have not released."""
        self._keeper.forget(self)
        self.drop_retained()

    def drop_retained(self) -> None:
        """See ``retention.Holder``."""
        if self._retained:
            self._retained = False
            for key, token in self._data:
                self._store.release(key, token, RETAINED)


class Left:
    """What an ended call has given to others: nobody but its gateway knows when it is no longer needed."""

    def __init__(self, outboxes: Iterable[Outbox], published: Iterable[Published]) -> None:
        self._outboxes = list(outboxes)
        self._published = [given for given in published if given]

    def __bool__(self) -> bool:
        return bool(self._published) or not all(outbox.gone for outbox in self._outboxes)

    def discard(self, error: OmniError) -> None:
        """The request is over, because of ``error``: give it up."""
        for outbox in self._outboxes:
            outbox.discard(error)
        for given in self._published:
            given.free()

    def stop_retaining(self) -> None:
        """Nobody will name the call: keep only what its consumers still have to read."""
        for outbox in self._outboxes:
            outbox.stop_retaining()
        for given in self._published:
            given.stop_retaining()


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
        self.published: Published | None = None
        """Of edges that do not, once ``declare`` was called."""
        self._outputs = outputs
        self._parts = parts
        self._kind = kind
        self._consumers = sum(max(1, output.consumers) for output in outputs)
        self._cutter = text_cutter(outputs[0].chunk_by)
        self._edges: list[transfer_pb2.EdgeRef] = []
        self._sequence = 0
        self._size_bytes, self._tx_s = 0, 0.0
        self._paths: dict[str, list[PathSeries]] = {}

    def declare(self, call: stage_service_pb2.StageCall) -> None:
        """Name the edges, and declare the flows among them. Raises ``AlreadyExistsError``."""
        flows = self._parts.flows
        for output in self._outputs:
            edge = self._parts.edge(call, self._parts.stage.stage_id, output.to_stage)
            self._edges.append(edge)
            if self.flows:
                self.outboxes.append(flows.declare(edge, retained=output.retain))
        if not self.flows:
            retained = any(output.retain for output in self._outputs)
            store = self._parts.connectors.store
            self.published = Published(store, flows.keeper, call.request_id, self._consumers, retained=retained)

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
        if self.published is not None:
            self.published.free()
        self.handles.clear()

    async def _publish(self, payload: Payload) -> None:
        if self.published is not None:
            consumers = self.published.places
        else:
            for outbox in self.outboxes:
                if outbox.full:
                    await outbox.room()
            consumers = sum(outbox.wants_next for outbox in self.outboxes)
            if not consumers:
                self._pass_over(self.outboxes)
                self._sequence += 1
                return
        wanted = [outbox for outbox in self.outboxes if outbox.wants_next]
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
        if self.published is not None:
            self.handles.append(handle)
            self.published.add(handle)
            return
        for outbox in wanted:
            connectors.store.claim(handle.key, handle.token, outbox.claimant)
        for outbox in wanted:
            outbox.publish(handle)
        if len(wanted) < len(self.outboxes):
            self._pass_over([outbox for outbox in self.outboxes if outbox not in wanted])

    @staticmethod
    def _pass_over(outboxes: Iterable[Outbox]) -> None:
        for outbox in outboxes:
            outbox.pass_over()

    def _count(self, handle: transfer_pb2.TransferHandle, tx_s: float) -> None:
        backend = handle.WhichOneof("backend") or ""
        paths = self._paths.get(backend)
        if paths is None:
            connector = backend if backend == "inline" else self._kind
            metrics = self._parts.metrics
            paths = self._paths[backend] = [
                metrics.path(edge.from_stage, edge.to_stage, connector, backend) for edge in self._edges
            ]
        self._size_bytes += handle.size_bytes
        self._tx_s += tx_s
        for path in paths:
            path.size.observe(handle.size_bytes)
            path.tx.observe(tx_s)

    def told(self, to_stage: int) -> dict[str, AttributeValue]:
        """What was published on one of the edges, for a trace."""
        return {
            "omni.edge": edge_name(self._edges[self.to_stages.index(to_stage)]),
            "omni.chunks": self._sequence,
            "omni.bytes": self._size_bytes,
            "omni.connector": self._kind,
            "omni.publish_ms": round(self._tx_s * 1e3, 3),
        }

    def _located(self, error: OmniError) -> OmniError:
        edges = ", ".join(edge_name(edge) for edge in self._edges)
        error.message = f"chunk {self._sequence} of edge {edges} could not be published: {error.message}"
        error.args = (error.message,)
        error.metadata = {**error.metadata, "chunk": str(self._sequence), "connector": self._kind}
        return error


def output_groups(parts: WorkerParts, outputs: Iterable[stage_service_pb2.EdgeOutput]) -> list[OutputGroup]:
    """The outputs of a call, those together that carry the same chunks by the same connector. Raises
    ``InvalidRequestError`` for a connector that this worker does not have."""
    groups: dict[tuple[str, bool, int], list[stage_service_pb2.EdgeOutput]] = {}
    for output in outputs:
        kind = parts.connectors.resolve(output.connector)
        groups.setdefault((kind, output.flow, output.chunk_by), []).append(output)
    return [OutputGroup(parts, kind, found) for (kind, _, _), found in groups.items()]
