"""What a stage's plan and a request mean to vLLM, without vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from omni.v1 import pipeline_pb2, prompt_pb2, sampling_pb2
from omnicore.errors import InvalidRequestError, UnavailableError
from stage_worker.engines import vllm_args

KNOWN = {"dtype", "max_model_len", "enforce_eager", "kv_cache_memory_bytes", "gpu_memory_utilization", "max_num_seqs"}


def stage(**engine_args: Any) -> pipeline_pb2.Stage:
    result = pipeline_pb2.Stage(engine="vllm", model="m", tensor_parallel_size=1, max_num_seqs=4)
    result.engine_args.update(engine_args)
    return result


def arguments(plan: pipeline_pb2.Stage, *, on_cpu: bool = True, has_bfloat16: bool = False) -> dict[str, Any]:
    options = vllm_args.stage_options(plan)
    return vllm_args.engine_arguments(plan, options, KNOWN, on_cpu=on_cpu, has_bfloat16=has_bfloat16)


def test_whole_numbers_are_integers_again() -> None:
    options = vllm_args.stage_options(stage(max_model_len=2048, gpu_memory_utilization=0.5, nested={"n": [1, 2.5]}))
    assert repr(options["max_model_len"]) == "2048"
    assert options["gpu_memory_utilization"] == 0.5
    assert repr(options["nested"]) == "{'n': [1, 2.5]}"


def test_an_unknown_argument_is_named_with_the_nearest_known_one() -> None:
    with pytest.raises(InvalidRequestError, match=r"engine_args\.max_model_length.*did you mean 'max_model_len'"):
        arguments(stage(max_model_length=10))


@pytest.mark.parametrize("name", ["model", "tensor_parallel_size", "max_num_seqs"])
def test_what_the_stage_says_itself_is_refused_in_engine_args(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"engine_args\.{name}: not accepted here: set `{name}`"):
        vllm_args.stage_options(stage(**{name: 1}))


def test_cpu_defaults_give_way_to_what_is_said() -> None:
    plain = arguments(stage())
    assert (plain["dtype"], plain["enforce_eager"], plain["max_num_seqs"]) == ("float32", True, 4)
    assert plain["kv_cache_memory_bytes"] == vllm_args.CPU_KV_CACHE_BYTES
    assert arguments(stage(dtype="auto"), has_bfloat16=True)["dtype"] == "bfloat16"
    assert arguments(stage(dtype="float16"))["dtype"] == "float16"
    assert "kv_cache_memory_bytes" not in arguments(stage(gpu_memory_utilization=0.1))
    assert arguments(stage(), on_cpu=False) == {"tensor_parallel_size": 1, "max_num_seqs": 4}


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.33.1.dev5+cpu"])
def test_supported_versions(version: str) -> None:
    vllm_args.check_version(version)


@pytest.mark.parametrize("version", ["0.25.9", "0.34.0", "1.0.0", "dev"])
def test_other_versions_are_refused_with_the_range(version: str) -> None:
    with pytest.raises(UnavailableError, match=r"works with 0\.26 up to, not including, 0\.34"):
        vllm_args.check_version(version)


def test_the_environment_keeps_what_is_set_but_never_reports() -> None:
    environ = {"OMP_NUM_THREADS": "3", "VLLM_NO_USAGE_STATS": "0", "VLLM_LOGGING_LEVEL": "DEBUG"}
    vllm_args.set_environment(environ, on_cpu=True, in_process=True)
    assert environ["OMP_NUM_THREADS"] == "3"
    assert environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert environ["VLLM_NO_USAGE_STATS"] == environ["DO_NOT_TRACK"] == "1"
    assert environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags\t\t: fma avx2 avx512_bf16", True),
        ("Features : asimd bf16", True),
        ("flags : fma avx2", False),
        ("", False),
    ],
)
def test_bfloat16_of_the_processor(tmp_path: Path, flags: str, expected: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    assert vllm_args.cpu_has_bfloat16(tmp_path / "cpuinfo") is expected
    assert vllm_args.cpu_has_bfloat16(tmp_path / "none") is False


def test_sampling_fields_that_are_set_are_passed_and_others_are_not() -> None:
    params = sampling_pb2.SamplingParams(temperature=0.0, seed=7, stop=["x"], num_inference_steps=9)
    params.extra.update({"min_p": 0.5, "logit_bias": {"5": 1}})
    found = vllm_args.sampling_arguments(params, {"min_p", "logit_bias"}, max_new_tokens=100)
    assert found == {
        "temperature": 0.0,
        "seed": 7,
        "stop": ["x"],
        "max_tokens": 100,
        "min_p": 0.5,
        "logit_bias": {"5": 1},
    }
    limited = vllm_args.sampling_arguments(sampling_pb2.SamplingParams(max_tokens=500), set(), max_new_tokens=100)
    assert limited["max_tokens"] == 100


@pytest.mark.parametrize("name", ["n", "nonsense", "temperature", "_private"])
def test_extra_parameters_that_are_not_the_engines_are_refused(name: str) -> None:
    params = sampling_pb2.SamplingParams()
    params.extra.update({name: 2})
    with pytest.raises(InvalidRequestError, match=rf"sampling\.extra\.{name}"):
        vllm_args.sampling_arguments(params, {"n", "temperature", "_private"}, max_new_tokens=10)


def test_chat_messages_are_text_only() -> None:
    parts = [prompt_pb2.ContentPart(text="a"), prompt_pb2.ContentPart(text="b")]
    chat = prompt_pb2.ChatPrompt(messages=[prompt_pb2.ChatMessage(role="developer", parts=parts)])
    assert vllm_args.chat_messages(chat) == [{"role": "system", "content": "a\nb"}]
    parts.append(prompt_pb2.ContentPart(media=prompt_pb2.MediaPart(mime_type="image/png", data=b"x")))
    chat = prompt_pb2.ChatPrompt(messages=[prompt_pb2.ChatMessage(role="user", parts=parts)])
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]: image/png is not supported by this model"):
        vllm_args.chat_messages(chat)
    with pytest.raises(InvalidRequestError, match="at least one message"):
        vllm_args.chat_messages(prompt_pb2.ChatPrompt())


class Chance(NamedTuple):
    """As vLLM's Logprob."""

    logprob: float
    rank: int | None
    decoded_token: str | None


def test_log_probabilities_come_by_rank_and_with_the_token_that_was_taken() -> None:
    taken_is_fourth = {7: Chance(-3.0, 4, " seven"), 1: Chance(-0.5, 1, " one"), 2: Chance(-1.0, 2, None)}
    (entry,) = vllm_args.token_logprobs([7], [taken_is_fourth], 2)
    assert entry.token == (7, b" seven", -3.0)
    assert list(entry.top) == [(1, b" one", -0.5), (2, b"", -1.0)]
    (entry,) = vllm_args.token_logprobs([1], [{1: Chance(0.1, 1, "x")}], 0)
    assert entry == ((1, b"x", 0.0), [])
    assert vllm_args.token_logprobs([7], [taken_is_fourth], None) == []
    assert vllm_args.token_logprobs([7], None, 2) == []


def test_what_the_text_must_be() -> None:
    wanted = sampling_pb2.StructuredOutput
    assert vllm_args.structured_arguments(wanted(json_schema='{"type":"object"}')) == {"json": '{"type":"object"}'}
    assert vllm_args.structured_arguments(wanted(json_object=True)) == {"json_object": True}
    for wrong in (wanted(), wanted(json_object=False)):
        with pytest.raises(InvalidRequestError, match="structured_output"):
            vllm_args.structured_arguments(wrong)
