"""Engine "vllm": a language model on vLLM. The one module that imports vLLM, and only once an engine starts.

Text in (a chat, a text, tokens, or the text of an upstream stage), text out, step by step. On a CPU the engine runs in
a thread of the worker, see ``vllm_runner``. Options beside vLLM's own, under ``engine_args``:

* ``in_process`` (default: true on a CPU): step the engine in this process rather than in one of its own;
* ``quick_start`` (default true): leave PyTorch's compiler out where nothing is compiled, see ``vllm_quick_start``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import gc
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from omni.v1 import pipeline_pb2, prompt_pb2, types_pb2
from omnicore.errors import (
    FailedPreconditionError,
    InvalidRequestError,
    OmniError,
    UnavailableError,
    UnimplementedError,
)
from omnicore.log import get_logger
from stage_worker.engine import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    Finish,
    Tokens,
    no_such_control,
    prompt_too_long,
)
from stage_worker.engines import transformers_scan, vllm_args, vllm_install, vllm_quick_start, vllm_resume
from stage_worker.engines.vllm_runner import ProcessRunner, Runner, ThreadRunner
from stage_worker.models import catalog
from stage_worker.models.cache import cache_dir

log = get_logger(__name__)


def create(stage: pipeline_pb2.Stage, devices: Sequence[str]) -> VllmEngine:
    """The engine of a stage, not started. Raises ``UnavailableError`` if no supported vLLM is installed and
    ``InvalidRequestError`` for engine arguments that the stage sets elsewhere; ``start`` checks the others."""
    version, on_cpu = vllm_install.installed()
    vllm_args.check_version(version)
    return VllmEngine(stage, vllm_args.stage_options(stage), version=version, on_cpu=on_cpu)


class VllmEngine:
    """See the module. One instance serves one replica; devices are what the process sees."""

    def __init__(self, stage: pipeline_pb2.Stage, options: Mapping[str, Any], *, version: str, on_cpu: bool) -> None:
        self._stage = stage
        self._options = options
        self._version = version
        self._on_cpu = on_cpu
        self._in_process = vllm_args.flag(options, "in_process", on_cpu and stage.tensor_parallel_size <= 1)
        self._usage = 0.0
        self._runner: Runner | None = None
        self._tokenizer: Any = None
        # One thread: a tokenizer must not be used by two at once, and a long prompt must not stop the event loop.
        self._text = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="vllm-text")
        self._active = 0
        self._max_model_len = 0
        self._eos_ids: frozenset[int] = frozenset()
        self._max_num_seqs = 0
        self._sampling_class: Any = None
        self._structured_class: Any = None
        self._sampling_fields: frozenset[str] = frozenset()
        self._delta: Any = None
        self._refusals: tuple[type[Exception], ...] = (ValueError, TypeError)

    async def start(self) -> EngineInfo:
        """Load the model. Raises ``InvalidRequestError`` for arguments that vLLM does not take."""
        began = time.monotonic()
        build: Callable[[], Any] = self._build
        runner: Runner = ThreadRunner(build) if self._in_process else ProcessRunner(build, lambda: self._usage)
        self._runner = runner
        try:
            engine = await runner.start()
        except OmniError:
            raise
        except (ValueError, TypeError) as error:  # pydantic's ValidationError is a ValueError
            raise vllm_args.refusal(error) from error
        except Exception as error:
            raise UnavailableError(f"vLLM could not start: {error}", reason="ENGINE_START_FAILED") from error
        config = engine.vllm_config
        self._tokenizer = engine.get_tokenizer()
        self._max_model_len = config.model_config.max_model_len
        self._eos_ids = vllm_args.end_tokens(
            self._tokenizer.eos_token_id, config.model_config.try_get_generation_config().get("eos_token_id")
        )
        self._max_num_seqs = config.scheduler_config.max_num_seqs
        dtype = str(config.model_config.dtype).removeprefix("torch.")
        log.info("vllm ready", seconds=round(time.monotonic() - began, 1), dtype=dtype, version=self._version)
        return EngineInfo(
            model=self._stage.model,
            kv_layout=f"{config.cache_config.block_size}:{dtype}",
            max_num_seqs=self._max_num_seqs,
            details={
                "vllm": self._version,
                "device": "cpu" if self._on_cpu else "cuda",
                "dtype": dtype,
                "max_model_len": str(self._max_model_len),
            },
            features=frozenset(("logprobs", "resume")) | vllm_install.structured_output(),
        )

    async def execute(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Run one request: text and token ids of each step, then the finish."""
        runner = self._running()
        self._active += 1
        try:
            prompt = await _prompt(request)
            loop = asyncio.get_running_loop()
            ids = await loop.run_in_executor(self._text, self._encode, prompt)
            arguments = vllm_args.sampling_arguments(
                request.sampling, self._sampling_fields, max_new_tokens=self._room(ids)
            )
            steps = self._steps if request.resume is None else self._resumed
            async with contextlib.aclosing(steps(runner, request, ids, arguments)) as outputs:
                async for output in outputs:
                    yield output
        except OmniError:
            raise
        except self._refusals as error:
            raise vllm_args.refused_request(error) from error
        finally:
            self._active -= 1

    async def _steps(
        self, runner: Runner, request: EngineRequest, ids: list[int], arguments: dict[str, Any]
    ) -> AsyncGenerator[EngineOutput, None]:
        params = self._sampling(request, arguments)
        count = 0
        async with contextlib.aclosing(runner.generate(request.request_id, ids, params)) as outputs:
            async for output in outputs:
                step = output.outputs[0]
                count += len(step.token_ids)
                finish = None
                if output.finished:
                    finish = Finish(step.finish_reason or "stop", len(ids), count)
                logprobs = vllm_args.token_logprobs(step.token_ids, step.logprobs, params.logprobs)
                first = request.prompt is not None and 0 < count == len(step.token_ids)
                yield EngineOutput(
                    text=step.text, token_ids=tuple(step.token_ids), logprobs=logprobs,
                    prompt_tokens=len(ids) if first else 0, finish=finish,
                )  # fmt: skip

    def _resumed(
        self, runner: Runner, request: EngineRequest, ids: list[int], arguments: dict[str, Any]
    ) -> AsyncGenerator[EngineOutput, None]:
        resume = request.resume
        assert resume is not None
        if request.sampling.HasField("structured_output"):
            raise vllm_resume.unsupported("in the middle of a structured output")
        self._known_tokens(resume.token_ids, "resume.token_ids")
        plain = {"skip_special_tokens": arguments.get("skip_special_tokens", True)}

        def generate(tokens: Sequence[int], rest: dict[str, Any]) -> AsyncGenerator[Any, None]:
            return runner.generate(request.request_id, tokens, self._sampling(request, rest))

        return vllm_resume.run(
            resume,
            ids,
            arguments,
            decode=lambda tokens: str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False, **plain)),
            ends={*arguments.get("stop_token_ids", ()), *(() if arguments.get("ignore_eos") else self._eos_ids)},
            thread=self._text,
            generate=generate,
        )

    async def abort(self, request_id: str) -> bool:
        """End a request now."""
        return await self._runner.abort(request_id) if self._runner is not None else False

    def load(self) -> types_pb2.LoadReport:
        """Requests here, split by what the scheduler takes at a time."""
        running = min(self._active, self._max_num_seqs or self._active)
        usage = self._runner.kv_usage() if self._runner is not None else 0.0
        return types_pb2.LoadReport(
            queue_length=self._active,
            running=running,
            waiting=self._active - running,
            kv_usage_ratio=min(1.0, max(0.0, usage)),
        )

    async def probe(self) -> None:
        """Answered by the thread or process that steps the engine."""
        await self._running().probe()

    async def control(self, method: types_pb2.ControlMethod.ValueType, args: Mapping[str, Any]) -> dict[str, Any]:
        """Sleep and wake up (CUDA, with ``enable_sleep_mode``), profiles (with ``profiler_config``), prefix cache."""
        runner = self._running()
        if method == types_pb2.CONTROL_METHOD_RESET_PREFIX_CACHE:
            return {"reset": bool(await runner.call("reset_prefix_cache"))}
        if method in (types_pb2.CONTROL_METHOD_SLEEP, types_pb2.CONTROL_METHOD_WAKE_UP):
            return await self._sleep_or_wake(runner, method, args)
        profile = {
            types_pb2.CONTROL_METHOD_START_PROFILE: "start_profile",
            types_pb2.CONTROL_METHOD_STOP_PROFILE: "stop_profile",
        }
        if method in profile:
            if "profiler_config" not in self._options:
                raise UnimplementedError("profiling needs engine_args.profiler_config in the deploy file")
            await runner.call(profile[method])
            return {}
        raise no_such_control("vllm", method)

    async def tokenize(
        self, prompt: prompt_pb2.Prompt, *, add_special_tokens: bool, add_generation_prompt: bool
    ) -> Tokens:
        """By the model's own tokenizer and chat template."""

        def work() -> Tokens:
            ids = self._encode(prompt, add_special_tokens, add_generation_prompt)
            return Tokens(ids, self._tokenizer.convert_ids_to_tokens(ids), self._max_model_len)

        self._running()
        return await asyncio.get_running_loop().run_in_executor(self._text, work)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """With special tokens."""

        def work() -> str:
            return str(self._tokenizer.decode(self._known_tokens(token_ids, "token_ids")))

        self._running()
        return await asyncio.get_running_loop().run_in_executor(self._text, work)

    async def close(self) -> None:
        """Stop the engine and free the model."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.close()
        self._text.shutdown(wait=False, cancel_futures=True)

    async def _sleep_or_wake(
        self, runner: Runner, method: types_pb2.ControlMethod.ValueType, args: Mapping[str, Any]
    ) -> dict[str, Any]:
        if self._on_cpu:
            # vLLM ignores the call on a CPU; a caller that wants memory back must know.
            raise UnimplementedError("sleep and wake_up free GPU memory; this engine runs on a CPU")
        if not self._options.get("enable_sleep_mode"):
            raise FailedPreconditionError("set engine_args.enable_sleep_mode to use sleep and wake_up")
        if method == types_pb2.CONTROL_METHOD_SLEEP:
            level = args.get("level", 1)
            if level not in (1, 2):
                raise InvalidRequestError.field("args.level", f"must be 1 or 2, got {level}")
            await runner.call("sleep", level=int(level))
        else:
            await runner.call("wake_up")
        return {}

    def _running(self) -> Runner:
        if self._runner is None or self._tokenizer is None:
            raise UnavailableError("the engine is not running", reason="ENGINE_STOPPED")
        return self._runner

    def _known_tokens(self, token_ids: Sequence[int], path: str) -> list[int]:
        ids = [int(token) for token in token_ids]
        size = len(self._tokenizer)
        if ids and max(ids) >= size:
            raise InvalidRequestError.field(path, f"must be below {size}, got {max(ids)}")
        return ids

    def _encode(
        self, prompt: prompt_pb2.Prompt, add_special_tokens: bool = True, add_generation_prompt: bool = True
    ) -> list[int]:
        kind = prompt.WhichOneof("kind")
        if kind == "tokens":
            ids = self._known_tokens(prompt.tokens.token_ids, "prompt.tokens.token_ids")
        elif kind == "chat":
            ids = self._apply_template(vllm_args.chat_messages(prompt.chat), add_generation_prompt)
        else:
            ids = list(self._tokenizer.encode(prompt.text, add_special_tokens=add_special_tokens))
        if not ids:
            raise InvalidRequestError.field(f"prompt.{kind or 'text'}", "is empty")
        return ids

    def _apply_template(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> list[int]:
        if not self._tokenizer.chat_template:
            raise InvalidRequestError.field("prompt.chat", "this model has no chat template; send text")
        import jinja2

        try:
            return list(
                self._tokenizer.apply_chat_template(
                    messages, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
                )
            )
        except jinja2.TemplateError as error:  # templates refuse roles and orders that a model was not trained on
            raise InvalidRequestError.field("prompt.chat.messages", f"the model's template: {error}") from error

    def _room(self, ids: Sequence[int]) -> int:
        room = self._max_model_len - len(ids)
        if room < 1:
            raise prompt_too_long(len(ids), self._max_model_len - 1)
        return room

    def _sampling(self, request: EngineRequest, arguments: dict[str, Any]) -> Any:
        try:
            if request.sampling.HasField("structured_output"):
                structured = vllm_args.structured_arguments(request.sampling.structured_output)
                arguments["structured_outputs"] = self._structured_class(**structured)
            return self._sampling_class(**arguments, output_kind=self._delta)
        except self._refusals as error:
            raise vllm_args.refused_request(error, "sampling") from error

    def _build(self) -> Any:
        """Import vLLM and make the engine. Takes seconds; in the runner's thread."""
        eager = self._options.get("enforce_eager", self._on_cpu)
        quick = vllm_args.flag(self._options, "quick_start", True) and self._on_cpu and self._in_process and bool(eager)
        model = catalog.resolve(self._stage.model)
        vllm_args.set_environment(os.environ, on_cpu=self._on_cpu, in_process=self._in_process)
        vllm_args.local_only(os.environ, model)
        if self._in_process:
            # Its log lines then come through ours. An engine core of its own keeps vLLM's format.
            os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
            logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
        with contextlib.ExitStack() as stack:
            stack.enter_context(vllm_quick_start.collector_paused())
            if quick:
                transformers_scan.keep(cache_dir() / "transformers")
                stack.enter_context(vllm_quick_start.compiler_left_out(_import_vllm))
                if not any("reasoning" in name for name in self._options):
                    stack.enter_context(vllm_quick_start.api_servers_left_out(_import_engine))
            return self._make(model)

    def _make(self, model: str) -> Any:
        import vllm.exceptions
        from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        # Older versions raise ValueError for what a client did wrong, newer ones a class of their own.
        client_error = getattr(vllm.exceptions, "VLLMClientError", ValueError)
        self._refusals = (ValueError, TypeError, client_error)
        self._delta = RequestOutputKind.DELTA
        self._sampling_class = SamplingParams
        self._structured_class = StructuredOutputsParams
        self._sampling_fields = frozenset(SamplingParams.__annotations__)
        args_class = EngineArgs if self._in_process else AsyncEngineArgs
        known = {field.name for field in dataclasses.fields(args_class)}
        arguments = vllm_args.engine_arguments(
            self._stage, self._options, known, on_cpu=self._on_cpu, has_bfloat16=vllm_args.cpu_has_bfloat16()
        )
        if "use_tqdm_on_load" in known:
            arguments.setdefault("use_tqdm_on_load", False)  # progress bars do not belong into a log
        if self._in_process:
            from vllm.v1.engine.llm_engine import LLMEngine

            gc.freeze()
            return LLMEngine.from_engine_args(args_class(model=model, disable_log_stats=True, **arguments))
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(args_class(model=model, **arguments), stat_loggers=[self._stat_logger()])

    def _stat_logger(self) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        outer = self

        class UsageLogger(StatLoggerBase):  # type: ignore[misc]
            """Keeps the KV cache usage of the last step."""

            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

            def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
                if scheduler_stats is not None:
                    outer._usage = scheduler_stats.kv_cache_usage

            def log_engine_initialized(self) -> None: ...

        return UsageLogger


def _import_vllm() -> None:
    import vllm  # noqa: F401


def _import_engine() -> None:
    import vllm.engine.arg_utils

    try:
        import vllm.renderers.hf
    except ModuleNotFoundError:  # older versions have none, and make no copies; what else is missing the engine reports
        return
    # It copies the tokenizer for threads that prepare prompts. We give it tokens.
    vllm.renderers.hf.maybe_make_thread_pool = lambda tokenizer, copies=1: tokenizer


async def _prompt(request: EngineRequest) -> prompt_pb2.Prompt:
    """The request's own prompt, else the text of its upstream stages joined."""
    if request.prompt is not None:
        return request.prompt
    texts: list[str] = []
    for stage_id in sorted(request.inputs):
        async for payload in request.inputs[stage_id]:
            if payload.text is None:
                raise InvalidRequestError(f"stage {stage_id} sends tensors; engine vllm reads text")
            texts.append(payload.text)
    return prompt_pb2.Prompt(text="".join(texts))
