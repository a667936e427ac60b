"""The flow of requests: admission, attempts, retries, the end. Routing is the pools', transport the sessions'.

Every admitted request has one owner task here. A try that fails with UNAVAILABLE before any output was delivered is
begun again on other replicas, a bounded number of times within the request's deadline; after output, and for any other
error, the request fails at once. Whatever the end, every place, call and count it held is given back.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable, Coroutine

from gateway.admission import Admission
from gateway.attempt import Attempt, EdgeKey
from gateway.paths import EdgePaths
from gateway.replica_table import Claim
from gateway.request import RequestRecord, RequestSpec, RequestState
from gateway.router import Router
from omnicore import errors
from omnicore.backoff import Backoff
from omnicore.log import get_logger
from omnicore.turns import Turns

_log = get_logger(__name__)


class _Owner:
    """What runs for one request: the owner task and its attempt. ``stop`` ends both, without waiting."""

    __slots__ = ("attempt", "retired", "task")

    def __init__(self) -> None:
        self.retired = False
        self.attempt: Attempt | None = None
        self.task: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """The calls are aborted in this loop turn; the task follows."""
        if self.attempt is not None:
            self.attempt.stop()
        if self.task is not None:
            self.task.cancel()


class Orchestrator:
    """Runs requests. Used from one event loop."""

    def __init__(
        self,
        router: Router,
        admission: Admission,
        *,
        retry_limit: int = 2,
        buffer_limit_bytes: int = 8 * 1024 * 1024,
        kept_requests: int = 1000,
        on_end: Callable[[RequestState], None] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.running: dict[str, RequestState] = {}
        self.retries: dict[str, int] = {}
        """Pipeline → attempts begun again."""
        self.edges: Turns[EdgeKey] = Turns()
        """Turns at edges with ``max_inflight``."""
        self.paths = EdgePaths()
        self.admission = admission
        self._router = router
        self._retry_limit = retry_limit
        self._buffer_limit_bytes = buffer_limit_bytes
        self._kept_requests = kept_requests
        self._kept: OrderedDict[str, RequestRecord] = OrderedDict()
        self._on_end = on_end
        self._rng = rng or random.Random()
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def submit(self, spec: RequestSpec) -> RequestState:
        """Admit a request and begin it. The caller consumes the state, or aborts it.

        Raises ``AlreadyExistsError`` while a request of the same id runs, and what admission raises.
        """
        plan = spec.graph.plan(spec.task, spec.modalities)
        await self.admission.enter(spec.entry)
        if spec.request_id in self.running:
            self.admission.leave(spec.entry)
            raise errors.AlreadyExistsError(
                f"request {spec.request_id!r} is running", metadata={"request_id": spec.request_id}
            )
        state = RequestState(spec, plan, buffer_limit_bytes=self._buffer_limit_bytes)
        state.note("admitted")
        owner = _Owner()
        state.stoppable = owner
        self.running[spec.request_id] = state
        self._idle.clear()
        owner.task = self._spawn(self._own(state, owner))
        # A task that is cancelled before its first step never enters its coroutine.
        owner.task.add_done_callback(lambda _: self._retire(state, owner, None))
        return state

    def find(self, request_id: str) -> RequestRecord | None:
        """A running request, or one that ended not long ago."""
        state = self.running.get(request_id)
        return state.record() if state is not None else self._kept.get(request_id)

    def abort(self, request_id: str, reason: str) -> bool:
        """End a running request; False if none has this id."""
        state = self.running.get(request_id)
        if state is None:
            return False
        state.abort(reason)
        return True

    async def drain(self, timeout_s: float) -> bool:
        """Admit nothing new and wait for the rest; False if some still ran after ``timeout_s``, which then fail."""
        self.admission.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            for state in list(self.running.values()):
                state.end(
                    "failed",
                    errors.UnavailableError("this gateway is shutting down", reason="GATEWAY_DRAINING"),
                )
            return False
        return True

    async def close(self) -> None:
        """End everything that still runs."""
        for state in list(self.running.values()):
            state.abort("this gateway is shutting down")
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _own(self, state: RequestState, owner: _Owner) -> None:
        error: errors.OmniError | None = None
        try:
            async with asyncio.timeout(state.spec.timeout_s):
                await self._attempts(state, owner)
        except errors.OmniError as failure:
            error = failure
        except TimeoutError:
            error = errors.DeadlineExceededError(
                f"request {state.request_id} was not done within {state.spec.timeout_s:g} s",
                metadata={"request_id": state.request_id},
            )
        except asyncio.CancelledError:
            # The state was ended by somebody else, or the process goes down with the task.
            state.stoppable = None
            state.abort("its owner was cancelled")
            raise
        except Exception as failure:  # noqa: BLE001 -- the request must end, and the client must hear of it
            _log.exception("request failed", request_id=state.request_id)
            error = errors.from_exception(failure)
        finally:
            self._retire(state, owner, error)

    async def _attempts(self, state: RequestState, owner: _Owner) -> None:
        tried: set[Claim] = set()
        backoff = Backoff(initial_s=0.03, max_s=0.5, rng=self._rng)
        number = 0
        while True:
            attempt = owner.attempt = Attempt(state, self._router, number, tried, self.edges, self.paths)
            try:
                return await attempt.run()
            except errors.UnavailableError as error:
                if state.delivered or number >= self._retry_limit or attempt.failed_at is None:
                    raise
                # The wait also lets the table hear who really broke: often a stage reports its neighbour's death.
                await asyncio.sleep(backoff.next_delay_s())
                if state.delivered:
                    raise
                # Waited for: the abort goes by request id and must not meet the next attempt.
                await asyncio.gather(*(r.session.abort_request(state.wire_id, "retry") for r in attempt.leftovers))
                culprits = self._culprits(attempt, error)
                tried |= culprits
                number += 1
                state.discard_output()
                state.note("retried", attempt.failed_at.ref, error.message)
                self.retries[state.spec.graph.name] = self.retries.get(state.spec.graph.name, 0) + 1
                _log.warning(
                    "request retried",
                    request_id=state.request_id,
                    attempt=number,
                    reason=error.message,
                    excluded=sorted(culprits),
                )

    def _culprits(self, attempt: Attempt, error: errors.OmniError) -> set[Claim]:
        """The instances not to use again: those that are gone, else the one that the error names, else its sender."""
        claims = {stage_id: run.assignment.slot.claim for stage_id, run in attempt.runs.items()}
        if lost := {claim for claim in claims.values() if not self._router.is_routable(claim)}:
            return lost
        named = error.metadata.get("stage", "")
        if named.isdigit() and int(named) in claims:
            return {claims[int(named)]}
        assert attempt.failed_at is not None
        return {attempt.failed_at.assignment.slot.claim}

    def _retire(self, state: RequestState, owner: _Owner, error: errors.OmniError | None) -> None:
        """Give back all that the request held. Only the first call does something."""
        if owner.retired:
            return
        owner.retired = True
        attempt, owner.attempt, owner.task = owner.attempt, None, None
        state.stoppable = None
        if attempt is not None:
            attempt.stop()
        if error is not None:
            state.end("failed", error)
        if attempt is not None and state.status != "finished":
            # Data that a finished stage published and nobody will read: freed now, not when it expires.
            for run in attempt.leftovers:
                self._spawn(run.session.abort_request(state.wire_id, state.status))
        self.running.pop(state.request_id, None)
        self.admission.leave(state.spec.entry, state.usage.prompt_tokens + state.usage.completion_tokens)
        self._kept[state.request_id] = state.record()
        self._kept.move_to_end(state.request_id)
        if len(self._kept) > self._kept_requests:
            self._kept.popitem(last=False)
        if not self.running:
            self._idle.set()
        if self._on_end is not None:
            self._on_end(state)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
