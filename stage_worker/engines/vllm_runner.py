"""Two ways to run a vLLM engine behind one shape. Imports no vLLM: engines are handed in.

``ThreadRunner`` steps an ``LLMEngine`` in a thread of this process: one process, one import of the libraries, half the
time and memory to start; right for a CPU. ``ProcessRunner`` drives an ``AsyncLLM``, whose engine core is a process of
its own, so that Python work of the worker never delays the accelerator; right for GPUs.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, Protocol, TypeVar

from omnicore.errors import AlreadyExistsError, OmniError, RequestCancelledError, UnavailableError
from omnicore.log import get_logger
from stage_worker.engine import ENGINE_DEAD

log = get_logger(__name__)
T = TypeVar("T")

RequestOutput = Any  # vllm.outputs.RequestOutput
SamplingParams = Any  # vllm.SamplingParams


class Runner(Protocol):
    """What the engine asks of either way."""

    async def start(self) -> Any:
        """Build the engine; returns it. What building raises goes through."""
        ...

    def generate(
        self, request_id: str, token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request. Closing the generator aborts it."""
        ...

    async def abort(self, request_id: str) -> bool:
        """End a request; False if it does not run."""
        ...

    async def call(self, method: str, **kwargs: Any) -> Any:
        """Call a method of the engine, where its steps run."""
        ...

    async def probe(self) -> None:
        """Return once the engine core has answered. Raises ``UnavailableError`` if it is dead."""
        ...

    def kv_usage(self) -> float:
        """Share of KV blocks in use, as of the last step."""
        ...

    async def close(self) -> None:
        """Stop and free the engine."""
        ...


class ThreadRunner:
    """An ``LLMEngine`` and the one thread that builds, steps and calls it."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build
        self._commands: queue.SimpleQueue[tuple[Callable[[Any], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._streams: dict[str, asyncio.Queue[RequestOutput | OmniError]] = {}
        self._failure: UnavailableError | None = None
        self._kv_usage = 0.0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> Any:
        """Build the engine in its thread."""
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[Any] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, args=(ready,), name="vllm-engine", daemon=True)
        self._thread.start()
        return await ready

    async def generate(
        self, request_id: str, token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request."""
        if request_id in self._streams:
            raise AlreadyExistsError(f"request {request_id} is running already")
        outputs: asyncio.Queue[RequestOutput | OmniError] = asyncio.Queue()
        self._streams[request_id] = outputs
        finished = False
        try:
            prompt = {"prompt_token_ids": list(token_ids)}
            await self._run(lambda engine: engine.add_request(request_id, prompt, params))
            while not finished:
                output = await outputs.get()
                if isinstance(output, OmniError):
                    finished = True
                    raise output
                finished = output.finished
                yield output
        finally:
            self._streams.pop(request_id, None)
            if not finished and self._failure is None:
                # Shielded: the abort is on its way whatever happens to the caller.
                await asyncio.shield(self._run(lambda engine: engine.abort_request([request_id])))

    async def abort(self, request_id: str) -> bool:
        """End a request; its generator raises ``RequestCancelledError``."""
        stream = self._streams.get(request_id)
        if stream is None:
            return False
        await self._run(lambda engine: engine.abort_request([request_id]))
        stream.put_nowait(RequestCancelledError(f"request {request_id} was aborted"))
        return True

    async def call(self, method: str, **kwargs: Any) -> Any:
        """Between two steps."""
        return await self._run(lambda engine: getattr(engine, method)(**kwargs))

    async def probe(self) -> None:
        """Answered between two steps, so not while one hangs."""
        await self._run(lambda engine: None)

    def kv_usage(self) -> float:
        """Read from the scheduler after each step."""
        return self._kv_usage

    async def close(self) -> None:
        """Let the thread finish its step, shut the engine down and end."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._commands.put(None)
            await asyncio.to_thread(thread.join)

    def _run(self, function: Callable[[Any], T]) -> asyncio.Future[T]:
        if self._loop is None or self._thread is None:
            raise UnavailableError("the engine is not running", reason="ENGINE_STOPPED")
        if self._failure is not None:
            raise self._failure
        done: asyncio.Future[T] = self._loop.create_future()
        self._commands.put((function, done))
        return done

    def _main(self, ready: asyncio.Future[Any]) -> None:
        try:
            engine = self._build()
        except BaseException as error:
            self._post(_reject, ready, error)
            if not isinstance(error, Exception):
                raise
            return
        self._post(_resolve, ready, engine)
        try:
            while self._run_commands(engine):
                if engine.has_unfinished_requests():
                    outputs = engine.step()
                    self._kv_usage = _scheduler_usage(engine)
                    if outputs:
                        self._post(self._deliver, outputs)
        except Exception as error:
            log.exception("engine step failed")
            self._post(self._fail, UnavailableError(f"the engine failed: {error}", reason=ENGINE_DEAD))
            self._refuse_commands()
        finally:
            engine.engine_core.shutdown()

    def _run_commands(self, engine: Any) -> bool:
        """Run what is waiting, and wait for something if there is nothing to step. False: stop."""
        wait = not engine.has_unfinished_requests()
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            wait = False
            function, done = command
            try:
                result = function(engine)
                self._kv_usage = _scheduler_usage(engine)
            except Exception as error:  # noqa: BLE001  it belongs to the caller, who gets it
                self._post(_reject, done, error)
            else:
                self._post(_resolve, done, result)

    def _refuse_commands(self) -> None:
        """After a failure: answer until closed, so that nobody waits for ever."""
        while (command := self._commands.get()) is not None:
            self._post(_reject, command[1], self._failure or UnavailableError("the engine failed"))

    def _post(self, function: Callable[..., object], *args: Any) -> None:
        assert self._loop is not None
        # The loop may have been closed under a daemon thread at the end of the process.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.put_nowait(output)

    def _fail(self, error: UnavailableError) -> None:
        self._failure = error
        for stream in self._streams.values():
            stream.put_nowait(error)


class ProcessRunner:
    """An ``AsyncLLM``. ``usage`` is filled by its statistics logger."""

    def __init__(self, build: Callable[[], Any], usage: Callable[[], float]) -> None:
        self._build = build
        self._usage = usage
        self._engine: Any = None
        self._running: set[str] = set()

    async def start(self) -> Any:
        """Build it in a thread: that takes seconds, and the worker goes on meanwhile."""
        self._engine = await asyncio.to_thread(self._build)
        return self._engine

    async def generate(
        self, request_id: str, token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request."""
        if request_id in self._running:
            raise AlreadyExistsError(f"request {request_id} is running already")
        self._check()
        self._running.add(request_id)
        prompt = {"prompt_token_ids": list(token_ids)}
        outputs: AsyncIterator[RequestOutput] = self._engine.generate(prompt, params, request_id)
        try:
            async with contextlib.aclosing(outputs) as stream:  # type: ignore[type-var]
                async for output in stream:
                    if output.finished and output.outputs[0].finish_reason == "abort":
                        raise RequestCancelledError(f"request {request_id} was aborted")
                    yield output
        except Exception:
            self._check()
            raise
        finally:
            self._running.discard(request_id)

    async def abort(self, request_id: str) -> bool:
        """End a request."""
        if request_id not in self._running:
            return False
        await self._engine.abort(request_id)
        return True

    async def call(self, method: str, **kwargs: Any) -> Any:
        """By a message to the engine core."""
        self._check()
        return await getattr(self._engine, method)(**kwargs)

    async def probe(self) -> None:
        """A question that the engine core's own loop answers."""
        self._check()
        await self._engine.is_sleeping()

    def kv_usage(self) -> float:
        """From the last statistics of the engine core."""
        return self._usage()

    async def close(self) -> None:
        """Stop the engine core's process."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)
            # That had this loop close the sockets, before it told us of its end. Their context is left to the garbage
            # collector, which warns of it.
            resources = getattr(engine.engine_core, "resources", None)
            if resources is not None:
                await asyncio.to_thread(resources.ctx.term)

    def _check(self) -> None:
        if self._engine is None:
            raise UnavailableError("the engine is not running", reason="ENGINE_STOPPED")
        if self._engine.errored:
            raise UnavailableError(f"the engine failed: {self._engine.dead_error}", reason=ENGINE_DEAD)


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _reject(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _scheduler_usage(engine: Any) -> float:
    # InprocClient → EngineCore → Scheduler. Statistics would tell it too, at the price of collecting all of them.
    return float(engine.engine_core.engine_core.scheduler.kv_cache_manager.usage)
