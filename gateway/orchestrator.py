"""The flow of requests: admission, execution, the end. Routing is the pools', transport the sessions'.

Every admitted request has one owner task here, which awaits its ``Execution`` within the request's deadline. Whatever
the end, every place, call and count it held is given back.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine

from gateway.admission import Admission
from gateway.execution import Execution
from gateway.execution_parts import Counts, ExecutionParts, Limits
from gateway.paths import EdgePaths
from gateway.request import RequestRecord, RequestSpec, RequestState
from gateway.retry_budget import RetryBudget
from gateway.router import Router
from gateway.stage_work import EdgeKey
from omnicore import errors
from omnicore.log import get_logger
from omnicore.turns import Turns

_log = get_logger(__name__)


class _Owner:
    """What runs for one request: its execution and the owner task. ``stop`` ends both, without waiting."""

    __slots__ = ("execution", "retired", "task")

    def __init__(self, execution: Execution) -> None:
        self.retired = False
        self.execution: Execution | None = execution
        self.task: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """The calls are aborted in this loop turn; the task follows."""
        if self.execution is not None:
            self.execution.stop()
        if self.task is not None:
            self.task.cancel()


class Orchestrator:
    """Runs requests. Used from one event loop."""

    def __init__(
        self,
        router: Router,
        admission: Admission,
        *,
        limits: Limits = Limits(),  # noqa: B008 -- frozen
        buffer_limit_bytes: int = 8 * 1024 * 1024,
        kept_requests: int = 1000,
        on_end: Callable[[RequestState], None] | None = None,
    ) -> None:
        self.running: dict[str, RequestState] = {}
        self.counts = Counts()
        self.budget = RetryBudget()
        self.edges: Turns[EdgeKey] = Turns()
        """Turns at edges with ``max_inflight``."""
        self.paths = EdgePaths()
        self.admission = admission
        self._parts = ExecutionParts(router, self.edges, self.paths, limits, self.budget, self.counts)
        self._buffer_limit_bytes = buffer_limit_bytes
        self._kept_requests = kept_requests
        self._kept: OrderedDict[str, RequestRecord] = OrderedDict()
        self._on_end = on_end
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
        self.budget.request_begun()
        owner = _Owner(Execution(state, self._parts))
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

    def records(self) -> list[RequestRecord]:
        """Those that run, and those that ended not long ago."""
        return [*self._kept.values(), *(state.record() for state in self.running.values())]

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
        execution = owner.execution
        try:
            if execution is not None:
                async with asyncio.timeout(state.spec.timeout_s):
                    await execution.run()
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

    def _retire(self, state: RequestState, owner: _Owner, error: errors.OmniError | None) -> None:
        """Give back all that the request held. Only the first call does something."""
        if owner.retired:
            return
        owner.retired = True
        execution, owner.execution, owner.task = owner.execution, None, None
        state.stoppable = None
        if execution is not None:
            execution.stop()
        if error is not None:
            state.end("failed", error)
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
