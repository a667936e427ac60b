"""The flow of requests: admission, execution, the end. Routing is the pools', transport the sessions'.

Every admitted request has one owner here. It needs no task while nothing has to be waited for: its calls begin at once,
and their sessions tell when they end. Where something does (a replica, a turn at an edge, others' news of a loss), a
task goes on with the ``Execution``. Whatever the end, every place, call and count it held is given back.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from gateway.admission import Admission
from gateway.deadlines import Deadlines
from gateway.direct import DirectCalls, DirectRequest
from gateway.execution import Execution
from gateway.execution_parts import Counts, ExecutionParts, Limits
from gateway.paths import EdgePaths
from gateway.request import MOST_ANSWER_BYTES, RequestRecord, RequestSpec, RequestState, too_late
from gateway.retry_budget import RetryBudget
from gateway.router import Router
from gateway.stage_work import EdgeKey
from gateway.traces import Tracing
from omnicore import errors
from omnicore.log import get_logger
from omnicore.turns import Turns

_log = get_logger(__name__)


class _Owner:
    """What runs for one request."""

    __slots__ = ("_retire", "_spawn", "deadline", "execution", "retired", "state", "task")

    def __init__(
        self,
        state: RequestState,
        parts: ExecutionParts,
        retire: Callable[[_Owner, errors.OmniError | None], None],
        spawn: Callable[[_Owner], None],
    ) -> None:
        self.state = state
        self.execution: Execution | None = Execution(state, parts, on_change=self._changed)
        self.retired = False
        self.task: asyncio.Task[None] | None = None
        self.deadline: asyncio.TimerHandle | None = None
        self._retire = retire
        self._spawn = spawn

    def begin(self) -> None:
        """Call what can be called at once."""
        self._limit_time()
        self._changed()

    def _limit_time(self) -> None:
        left_s = self.state.deadline_s - time.monotonic()
        self.deadline = asyncio.get_running_loop().call_later(max(0.0, left_s), self.state.end_late)

    def stop(self) -> None:
        """The calls are aborted in this loop turn; a task follows."""
        if self.execution is not None:
            self.execution.stop()
        if self.task is not None:
            self.task.cancel()
        else:
            self._retire(self, None)

    def _changed(self) -> None:
        """The execution has something to do, or is done; a task that runs sees to that itself."""
        if self.task is not None:
            return
        try:
            if self.state.ended:
                self._retire(self, None)
            elif self.execution is not None and not self.execution.advance() and self.task is None:
                self._spawn(self)  # unless a call that failed at once has led here already
        except Exception as failure:  # noqa: BLE001 -- the request must end, and the client must hear of it
            _log.exception("request failed", request_id=self.state.request_id)
            self.state.end("failed", errors.from_exception(failure))

    def adopt(self, state: DirectRequest, error: errors.OmniError) -> None:
        """Go on with a request whose only call has failed."""
        self._limit_time()
        try:
            if self.execution is not None:
                self.execution.adopt(state, error)
        except Exception as failure:  # noqa: BLE001 -- as above
            _log.exception("request failed", request_id=state.request_id)
            state.end("failed", errors.from_exception(failure))


class Orchestrator:
    """Runs requests. Used from one event loop."""

    def __init__(
        self,
        router: Router,
        admission: Admission,
        *,
        limits: Limits = Limits(),  # noqa: B008 -- frozen
        buffer_limit_bytes: int = 8 * 1024 * 1024,
        answer_limit_bytes: int = MOST_ANSWER_BYTES,
        kept_requests: int = 1000,
        on_end: Callable[[RequestState], None] | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.running: dict[str, RequestState] = {}
        self.counts = Counts()
        self.budget = RetryBudget()
        self.edges: Turns[EdgeKey] = Turns()
        """Turns at edges with ``max_inflight``."""
        self.paths = EdgePaths()
        self.admission = admission
        self._parts = ExecutionParts(router, self.edges, self.paths, limits, self.budget, self.counts)
        self._direct = DirectCalls(self._parts)
        self._deadlines = Deadlines()
        self._buffer_limit_bytes = buffer_limit_bytes
        self._answer_limit_bytes = answer_limit_bytes
        self._kept: deque[RequestRecord] = deque(maxlen=kept_requests)
        self._on_end = on_end
        self._tracing = tracing
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, spec: RequestSpec) -> RequestState:
        """Admit a request and begin it. The caller consumes the state, or aborts it.

        Raises ``AlreadyExistsError`` while a request of the same id runs, and what admission raises.
        """
        plan = spec.graph.plan(spec.task, spec.modalities)
        queued_at_s = waited_s = 0.0
        if not self.admission.try_enter(spec.entry):
            queued_at_s = time.time()
            waited_s = await self._enter(spec, queued_at_s)
        if spec.request_id in self.running:
            self.admission.leave(spec.entry)
            raise errors.AlreadyExistsError(
                f"request {spec.request_id!r} is running", metadata={"request_id": spec.request_id}
            )
        state = RequestState(
            spec, plan, buffer_limit_bytes=self._buffer_limit_bytes, answer_limit_bytes=self._answer_limit_bytes
        )
        state.deadline_s -= waited_s
        state.note("admitted")
        if self._tracing is not None:
            state.trace = self._tracing.begin(spec, queued_at_s)
        self.budget.request_begun()
        owner = _Owner(state, self._parts, self._retire, self._go_on)
        state.stoppable = owner
        self.running[spec.request_id] = state
        owner.begin()
        return state

    def submit_directly(self, spec: RequestSpec) -> DirectRequest | None:
        """As ``submit``, if nothing has to be waited for and one call is all there is to it. None, and nothing has
        happened, for any other request. Raises what admission raises."""
        if self.admission.full or spec.request_id in self.running:
            return None
        account = self.admission.check(spec.entry)  # who is refused takes nobody's turn
        plan = spec.graph.plan(spec.task, spec.modalities)
        if (placed := self._direct.place(spec, plan)) is None:
            return None
        assignment, session = placed
        try:
            trace = self._tracing.begin(spec) if self._tracing is not None else None
            call = self._direct.call(spec, plan, trace)
            self.admission.take(spec.entry, account)
        except Exception:
            assignment.release()
            raise
        state = DirectRequest(
            spec, plan, assignment, session, self._deadlines, buffer_limit_bytes=self._buffer_limit_bytes,
            answer_limit_bytes=self._answer_limit_bytes, notes_output=self._parts.limits.replays > 0,
            on_end=self._ended, on_trouble=self._take_over,
        )  # fmt: skip
        state.trace = trace
        self.budget.request_begun()
        self.running[spec.request_id] = state
        state.begin(call)
        return state

    def find(self, request_id: str) -> RequestRecord | None:
        """A running request, or one that ended not long ago."""
        state = self.running.get(request_id)
        if state is not None:
            return state.record()
        return next((record for record in reversed(self._kept) if record.request_id == request_id), None)

    def records(self) -> list[RequestRecord]:
        """Those that run, and those that ended not long ago."""
        latest = {record.request_id: record for record in self._kept}  # of a client's own id there may be several
        return [*latest.values(), *(state.record() for state in self.running.values())]

    def abort(self, request_id: str, reason: str) -> bool:
        """End a running request; False if none has this id."""
        state = self.running.get(request_id)
        if state is None:
            return False
        state.abort(reason)
        return True

    async def drain(self, timeout_s: float) -> bool:
        """Admit nothing new and wait for what runs and for what has been let into the queue; False if some still ran
        after ``timeout_s``, which then fail."""
        self.admission.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self.admission.empty()
        except TimeoutError:
            self.admission.refuse_waiting()
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

    async def _enter(self, spec: RequestSpec, queued_at_s: float) -> float:
        """Wait for admission; returns how many seconds that took of the request's time. Raises
        ``DeadlineExceededError`` when that is over."""
        begun_s = time.monotonic()
        try:
            try:
                async with asyncio.timeout(spec.timeout_s):
                    await self.admission.enter(spec.entry)
            except TimeoutError:
                raise too_late(spec) from None
        except errors.OmniError as error:
            if self._tracing is not None:
                self._tracing.refused(spec, queued_at_s, error)
            raise
        return time.monotonic() - begun_s

    def _take_over(self, state: DirectRequest, error: errors.OmniError) -> None:
        """Its call has failed: from here on it is a request as all others."""
        owner = _Owner(state, self._parts, self._retire, self._go_on)
        state.stoppable = owner
        owner.adopt(state, error)

    def _go_on(self, owner: _Owner) -> None:
        """Something has to be waited for."""
        task = owner.task = asyncio.create_task(self._own(owner))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before its first step never enters its coroutine.
        task.add_done_callback(lambda _: self._retire(owner, None))

    async def _own(self, owner: _Owner) -> None:
        state, execution = owner.state, owner.execution
        error: errors.OmniError | None = None
        try:
            if execution is not None:
                await execution.run()
        except errors.OmniError as failure:
            error = failure
        except asyncio.CancelledError:
            # The state was ended by somebody else, or the process goes down with the task.
            state.stoppable = None
            state.abort("its owner was cancelled")
            raise
        except Exception as failure:  # noqa: BLE001 -- the request must end, and the client must hear of it
            _log.exception("request failed", request_id=state.request_id)
            error = errors.from_exception(failure)
        finally:
            self._retire(owner, error)

    def _retire(self, owner: _Owner, error: errors.OmniError | None) -> None:
        """Give back all that the request held. Only the first call does something."""
        if owner.retired:
            return
        owner.retired = True
        state, execution, deadline = owner.state, owner.execution, owner.deadline
        owner.execution = owner.task = owner.deadline = None
        state.stoppable = None
        if deadline is not None:
            deadline.cancel()
        if execution is not None:
            execution.stop()
        if error is not None:
            state.end("failed", error)
        self._ended(state)

    def _ended(self, state: RequestState) -> None:
        """It holds nothing any more but its place among those that run."""
        self.running.pop(state.request_id, None)
        self.admission.leave(state.spec.entry, state.usage.prompt_tokens + state.usage.completion_tokens)
        self._kept.append(state.record())
        if self._on_end is not None:
            self._on_end(state)
        if state.trace is not None and self._tracing is not None:
            self._tracing.ended(state)
