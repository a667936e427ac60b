"""What a stage's plan and a request mean to vLLM. Pure: knows vLLM's names, imports none of it."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from omni.v1 import pipeline_pb2, prompt_pb2, sampling_pb2
from omnicore.errors import FieldViolation, InvalidRequestError, UnavailableError
from stage_worker.engine import TokenChance, TokenLogprob

SUPPORTED_VERSIONS = ((0, 26), (0, 34))
"""From the first, below the second: the range that the project's ``vllm`` extra asks for."""

CPU_KV_CACHE_BYTES = 256 << 20
"""KV cache of a CPU engine that says nothing of it; vLLM's own default would take a share of the machine."""
_MAX_CPU_THREADS = 8  # more do not pay for the small models that a CPU can serve

# Set from other fields of the stage, or fixed by how a worker runs an engine.
_RESERVED = {
    "model": "set `model` of the stage",
    "tensor_parallel_size": "set `tensor_parallel_size` of the stage",
    "max_num_seqs": "set `max_num_seqs` of the stage",
    "distributed_executor_backend": "the worker chooses it",
    "disable_log_stats": "the worker decides it",
    "data_parallel_size": "set `num_replicas` of the stage",
}
_OWN_OPTIONS = frozenset({"in_process", "quick_start"})
_PLAIN_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "min_tokens",
    "logprobs",
)
_LIST_FIELDS = ("stop", "stop_token_ids")
# How many outputs there are and how they come is the worker's business; the others have fields of their own.
_REFUSED_EXTRA = frozenset({"n", "output_kind", "structured_outputs", *_PLAIN_FIELDS, *_LIST_FIELDS})


def check_version(version: str) -> None:
    """Raises ``UnavailableError`` unless this project was tested with the installed vLLM."""
    found = re.match(r"(\d+)\.(\d+)", version)
    low, high = SUPPORTED_VERSIONS
    if found is None or not low <= (int(found[1]), int(found[2])) < high:
        raise UnavailableError(
            f"vLLM {version} is installed; this engine works with {low[0]}.{low[1]} up to, not including, "
            f"{high[0]}.{high[1]}",
            reason="ENGINE_VERSION",
            metadata={"version": version},
        )


def stage_options(stage: pipeline_pb2.Stage) -> dict[str, Any]:
    """``engine_args`` of a stage as Python values. Struct has doubles only: whole ones become integers again."""
    options = _whole(json_format.MessageToDict(stage.engine_args))
    for name, remedy in _RESERVED.items():
        if name in options:
            raise InvalidRequestError.field(f"engine_args.{name}", f"not accepted here: {remedy}")
    options.pop("sim", None)
    return dict(options)


def engine_arguments(
    stage: pipeline_pb2.Stage, options: Mapping[str, Any], known: Collection[str], *, on_cpu: bool, has_bfloat16: bool
) -> dict[str, Any]:
    """Keyword arguments for vLLM's ``EngineArgs``, whose field names are ``known``.

    Raises ``InvalidRequestError`` naming an unknown argument and the nearest known one. ``has_bfloat16``: this CPU
    computes in bfloat16; emulating it makes the first token three times slower than float32 does.
    """
    given = {name: value for name, value in options.items() if name not in _OWN_OPTIONS}
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *_OWN_OPTIONS], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidRequestError.field(f"engine_args.{name}", f"vLLM has no such argument{hint}")
    arguments: dict[str, Any] = {}
    if on_cpu:
        arguments = {"enforce_eager": True, "gpu_memory_utilization": 0.2}
        if not {"kv_cache_memory_bytes", "num_gpu_blocks_override", "gpu_memory_utilization"} & set(given):
            arguments["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
    arguments |= given
    if on_cpu and arguments.get("dtype", "auto") == "auto":
        arguments["dtype"] = "bfloat16" if has_bfloat16 else "float32"
    arguments["tensor_parallel_size"] = max(1, stage.tensor_parallel_size)
    if stage.max_num_seqs:
        arguments["max_num_seqs"] = stage.max_num_seqs
    return arguments


def refusal(error: Exception) -> InvalidRequestError:
    """What vLLM says of engine arguments it does not take, with the argument's name where it tells it."""
    errors = getattr(error, "errors", None)  # pydantic's ValidationError: one entry per accepted type that failed
    if not callable(errors):
        return InvalidRequestError.field("engine_args", str(error))
    violations: dict[str, FieldViolation] = {}
    for entry in errors(include_url=False):
        path = ".".join(["engine_args", *(str(part) for part in entry["loc"][:1])])
        violations.setdefault(path, FieldViolation(path, f"{entry['msg']}, got {entry['input']!r:.100}"))
    message = "; ".join(f"{violation.field}: {violation.description}" for violation in violations.values())
    return InvalidRequestError(message, violations=list(violations.values()))


def refused_request(error: Exception, field: str = "") -> InvalidRequestError:
    """What vLLM says of a request that it does not take, with the parameter's name where it tells it, else with
    ``field``."""
    parameter = getattr(error, "parameter", None)
    if parameter in sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name:
        return InvalidRequestError.field(f"sampling.{parameter}", str(error.args[0] if error.args else error))
    if field:
        return InvalidRequestError.field(field, str(error))
    return InvalidRequestError(f"vLLM refuses the request: {error}")


def set_environment(environ: MutableMapping[str, str], *, on_cpu: bool, in_process: bool) -> None:
    """What vLLM and its libraries read from the environment, before they are imported. Set values are kept, except
    that nothing is ever reported to anybody."""
    environ["VLLM_NO_USAGE_STATS"] = "1"
    environ["DO_NOT_TRACK"] = "1"
    environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it warns of ten harmless things at each start
    environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0" if in_process else "1")
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if on_cpu:
        # By default every engine on the machine would pin its threads to the same cores, the first ones.
        environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        environ.setdefault("OMP_NUM_THREADS", str(min(_MAX_CPU_THREADS, len(os.sched_getaffinity(0)))))


def local_only(environ: MutableMapping[str, str], model: str) -> None:
    """A model on disk is loaded without asking any hub about it."""
    if Path(model).is_dir():
        environ.setdefault("HF_HUB_OFFLINE", "1")
        environ.setdefault("TRANSFORMERS_OFFLINE", "1")


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """True if the processor has bfloat16 instructions (x86 AVX512_BF16 or AMX, or ARM)."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return found is not None and bool({"avx512_bf16", "amx_bf16", "bf16"} & set(found[1].split()))


def sampling_arguments(
    params: sampling_pb2.SamplingParams, known: Collection[str], *, max_new_tokens: int
) -> dict[str, Any]:
    """Keyword arguments for vLLM's ``SamplingParams``, whose field names are ``known``.

    ``max_new_tokens`` is what fits after the prompt; it is the default and the upper limit of max_tokens. Parameters of
    diffusion stages are not read. Raises ``InvalidRequestError`` for a name in ``extra`` that vLLM does not have.
    """
    given = {field.name for field, _ in params.ListFields()}
    arguments: dict[str, Any] = {name: getattr(params, name) for name in _PLAIN_FIELDS if name in given}
    arguments |= {name: list(getattr(params, name)) for name in _LIST_FIELDS if getattr(params, name)}
    arguments["max_tokens"] = min(arguments.get("max_tokens", max_new_tokens), max_new_tokens)
    for name, value in _whole(json_format.MessageToDict(params.extra)).items():
        if name not in known or name in _REFUSED_EXTRA or name.startswith("_"):
            raise InvalidRequestError.field(f"sampling.extra.{name}", "not a sampling parameter of this engine")
        arguments[name] = value
    return arguments


def structured_arguments(wanted: sampling_pb2.StructuredOutput) -> dict[str, Any]:
    """Keyword arguments for vLLM's ``StructuredOutputsParams``."""
    kind = wanted.WhichOneof("kind")
    if kind == "json_schema":
        return {"json": wanted.json_schema}
    if kind == "json_object" and wanted.json_object:
        return {"json_object": True}
    raise InvalidRequestError.field("sampling.structured_output", "must have json_schema, or json_object: true")


def end_tokens(*found: int | Sequence[int] | None) -> frozenset[int]:
    """Tokens that end an answer, as tokenizers and generation configs name them."""
    ids: set[int] = set()
    for one in found:
        if one is not None:
            ids.update([one] if isinstance(one, int) else one)
    return frozenset(ids)


def token_logprobs(
    token_ids: Sequence[int], steps: Sequence[Mapping[int, Any]] | None, top: int | None
) -> list[TokenLogprob]:
    """vLLM's log probabilities of the tokens of one step: of each, a mapping from token id to its chance."""
    if top is None or steps is None:
        return []
    found = []
    for token_id, chances in zip(token_ids, steps, strict=True):
        ranked = sorted(chances.items(), key=lambda item: (item[1].rank or 0, item[0]))
        made = {i: TokenChance(i, (c.decoded_token or "").encode(), min(0.0, c.logprob)) for i, c in ranked}
        # The token taken comes besides, where it is not among the likeliest.
        found.append(TokenLogprob(made[token_id], list(made.values())[:top]))
    return found


def chat_messages(chat: prompt_pb2.ChatPrompt) -> list[dict[str, str]]:
    """A conversation for a chat template. Raises ``InvalidRequestError`` for media: text models only."""
    if not chat.messages:
        raise InvalidRequestError.field("prompt.chat.messages", "needs at least one message")
    messages: list[dict[str, str]] = []
    for index, message in enumerate(chat.messages):
        texts: list[str] = []
        for part in message.parts:
            if part.WhichOneof("kind") == "media":
                kind = part.media.mime_type or "media"
                raise InvalidRequestError.field(
                    f"prompt.chat.messages[{index}]", f"{kind} is not supported by this model, text is"
                )
            texts.append(part.text)
        # "developer" is what newer clients call the system role; templates know the old name.
        role = "system" if message.role == "developer" else message.role
        messages.append({"role": role, "content": "\n".join(texts)})
    return messages


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def flag(options: Mapping[str, Any], name: str, default: bool) -> bool:
    """An option that is true or false. Raises ``InvalidRequestError`` for anything else."""
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise InvalidRequestError.field(f"engine_args.{name}", f"must be true or false, got {value!r}")
    return value
