"""What engines share whose model runs one call at a time, in one thread of the worker.

Requests take turns call by call (a sentence, a chunk), so a long one delays a short one by one call only. The same
thread answers ``probe``: while a call hangs, the engine does.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

from omni.v1 import types_pb2
from omnicore.errors import AlreadyExistsError, RequestCancelledError, UnavailableError
from stage_worker.engine import no_such_control

T = TypeVar("T")


class Job:
    """One running request."""

    def __init__(self, engine: ThreadEngine, request_id: str) -> None:
        self._engine = engine
        self._request_id = request_id
        self.aborted = asyncio.Event()

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run ``function`` in the engine's thread. Raises ``RequestCancelledError`` once the job is aborted."""
        return await self._unless_aborted(self._engine.in_thread(function, *args))

    async def each(self, items: AsyncIterator[T]) -> AsyncIterator[T]:
        """The items of a stream, until the job is aborted."""
        while True:
            try:
                yield await self._unless_aborted(anext(items))
            except StopAsyncIteration:
                return

    async def _unless_aborted(self, awaitable: Awaitable[T]) -> T:
        work = asyncio.ensure_future(awaitable)
        stop = asyncio.ensure_future(self.aborted.wait())
        try:
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
            if self.aborted.is_set():
                raise RequestCancelledError(f"request {self._request_id} was aborted")
            return work.result()
        finally:
            for task in (work, stop):
                task.cancel()
            # Cancelled, both end now; what they raise has been dealt with or belongs to nobody.
            await asyncio.gather(work, stop, return_exceptions=True)


class ThreadEngine:
    """One thread, the jobs that run, and the parts of the engine contract that follow from them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._executor: concurrent.futures.ThreadPoolExecutor | None = concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix=name
        )
        self._jobs: dict[str, Job] = {}

    def in_thread(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run ``function`` in the engine's thread."""
        if self._executor is None:
            raise UnavailableError("the engine is not running", reason="ENGINE_STOPPED")
        return asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    @contextlib.contextmanager
    def job(self, request_id: str) -> Iterator[Job]:
        """Register a request while it runs. Raises ``AlreadyExistsError`` for an id that runs already."""
        if request_id in self._jobs:
            raise AlreadyExistsError(f"request {request_id} is running already")
        self._jobs[request_id] = job = Job(self, request_id)
        try:
            yield job
        finally:
            del self._jobs[request_id]

    async def abort(self, request_id: str) -> bool:
        """End a request; what its current call computes is dropped."""
        job = self._jobs.get(request_id)
        if job is None:
            return False
        job.aborted.set()
        return True

    def load(self) -> types_pb2.LoadReport:
        """Every request counts as running: they take turns."""
        return types_pb2.LoadReport(queue_length=len(self._jobs), running=len(self._jobs))

    async def probe(self) -> None:
        """Answered by the thread that does the work."""
        await self.in_thread(_nothing)

    async def control(self, method: types_pb2.ControlMethod.ValueType, args: Mapping[str, Any]) -> dict[str, Any]:
        """Nothing to control."""
        raise no_such_control(self._name, method)

    async def close(self) -> None:
        """End the thread after its current call."""
        executor, self._executor = self._executor, None
        for job in self._jobs.values():
            job.aborted.set()
        if executor is not None:
            await asyncio.to_thread(executor.shutdown, cancel_futures=True)


def _nothing() -> None:
    return None
