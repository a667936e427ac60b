"""Keys of a deploy file that the plan itself reads: top level, stages, edges, connectors, sampling, simulation."""

from __future__ import annotations

import re
from typing import Final

from control_plane.deploy.engine_keys import ENGINE_KEYS, INHERITED_KEYS
from control_plane.deploy.kinds import (
    INT32_MAX,
    INT64_MAX,
    UINT32_MAX,
    Anything,
    Bool,
    Choice,
    Either,
    FreeMap,
    Int,
    Key,
    ListOf,
    Map,
    Number,
    Text,
)
from omnicore.policies import BALANCING_POLICIES

PIPELINE_NAME: Final = Text(
    "a name: letters, digits, '.', '_', '-', beginning with a letter or digit, at most 128",
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}",
)
SHORT_NAME: Final = Text(
    "a name: letters, digits, '.', '_', '-', beginning with a letter or digit, at most 64",
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
)
STAGE_ID: Final = Int(0, 65535)
OUTPUT_TYPES: Final = ("text", "audio", "image", "video", "action")
TASKS: Final = ("chat", "speech", "transcription", "image", "video")
PLATFORMS: Final = ("cuda", "rocm", "npu", "xpu", "musa", "cpu")
ROLES: Final = ("cfg_text", "cfg_img")
"""Of companions: the negative prompt, or none, with the pictures; the prompt without pictures."""
CHUNK_BY: Final = ("step", "sentence", "final")
ENGINES: Final = (
    "vllm",
    "sim",
    "vllm-omni",
    "transformers-omni",
    "diffusers",
    "hibari-acoustic",
    "hibari-vocoder",
)
"""Engines that the project knows. Others may be installed as plugins: an unknown one is only warned about."""

TO_STAGE: Final = re.compile(r"to_stage_(\d{1,5})")
FROM_STAGE: Final = re.compile(r"from_stage_(\d{1,5})")

_COUNT32 = Int(1, UINT32_MAX)
_MS = Number(0, 3_600_000)

COMPANION_KEYS: Final[dict[str, Key]] = {
    "roles": Key(ListOf(Choice(ROLES), least=1), "which companions; required"),
    "timeout_s": Key(
        Number(0.001, 86_400), "a request with all its companions is done by then, or fails", "the request's own time"
    ),
    "only_if_negative": Key(Bool(), "`cfg_text` only where the request has a negative prompt", "false"),
    "max_tokens": Key(_COUNT32, "longest output of a companion", "as of the request"),
}

_AFTER = Int(0, 1_000_000, also=(-1,))

SIM_KEYS: Final[dict[str, Key]] = {
    "output": Key(Choice(("text", "tensor", "audio", "image")), "what the stage makes", "see Completion"),
    "start_ms": Key(_MS, "time to load", "0"),
    "ttft_ms": Key(_MS, "from the begin of work on an input to its first output", "0"),
    "tpot_ms": Key(_MS, "between the outputs of a request", "0"),
    "step_ms": Key(_MS, "one engine step, shared by all running requests", "`tpot_ms`"),
    "tokens": Key(Int(1, 1_000_000), "tokens of an answer (`max_tokens` still limits it)", "48"),
    "max_model_len": Key(Int(0, 1 << 30), "longest prompt of a text answer, in words; 0: any", "0"),
    "chunks": Key(Int(0, 1_000_000), "outputs for each input; 0: one", "0"),
    "chunk_bytes": Key(Int(4, 1 << 30), "bytes of one tensor chunk", "4096"),
    "seconds_per_chunk": Key(Number(0, 3600), "seconds of audio in one chunk", "0.5"),
    "seed": Key(Int(), "goes into everything it makes", "0"),
    "checksum": Key(Bool(), "write and check checksums of chunks", "true"),
    "fail_rate": Key(Number(0, 1), "share of requests that fail", "0; 1 with `fail_after_tokens`"),
    "fail_after_tokens": Key(_AFTER, "a failing request fails after so many outputs; -1: at once", "-1"),
    "hang_after_tokens": Key(_AFTER, "the engine stops dead after so many outputs; -1: never", "-1"),
    "crash_after_tokens": Key(_AFTER, "the engine dies after so many outputs; -1: never", "-1"),
}

SAMPLING_KEYS: Final[dict[str, Key]] = {
    "temperature": Key(Number(0), "0 is greedy"),
    "top_p": Key(Number(0, 1, above=True), "keep the most likely tokens up to this probability"),
    "top_k": Key(Int(1, INT32_MAX, also=(-1,)), "keep so many tokens; -1: off"),
    "max_tokens": Key(_COUNT32, "longest output"),
    "min_tokens": Key(Int(0, UINT32_MAX), "shortest output; at most max_tokens"),
    "seed": Key(Int(None, INT64_MAX), "same seed, same prompt: same output"),
    "repetition_penalty": Key(Number(0, above=True), "1 is off"),
    "presence_penalty": Key(Number(-2, 2), "0 is off"),
    "frequency_penalty": Key(Number(-2, 2), "0 is off"),
    "stop": Key(Either((Text(), ListOf(Text()))), "output ends before any of these"),
    "stop_token_ids": Key(ListOf(Int(0, UINT32_MAX)), "output ends at any of these"),
    "ignore_eos": Key(Bool(), "go on past the end token"),
    "detokenize": Key(Bool(), "false: token ids only"),
    "skip_special_tokens": Key(Bool(), "leave special tokens out of the text"),
    "num_inference_steps": Key(_COUNT32, "diffusion steps"),
    "guidance_scale": Key(Number(0), "strength of guidance; 0 is fine"),
    "width": Key(_COUNT32, "pixels of an image"),
    "height": Key(_COUNT32, "pixels of an image"),
}
"""Fields of ``SamplingParams``."""

SAMPLING_EXTRA_KEYS: Final[dict[str, Key]] = {
    "include_stop_str_in_output": Key(Bool(), "keep the stop text"),
    "spaces_between_special_tokens": Key(Bool(), "spaces between special tokens"),
    "min_p": Key(Number(0, 1), "drop tokens below this share of the best one"),
    "n": Key(Int(1, 1024), "answers for one prompt"),
    "logprobs": Key(Int(0, INT32_MAX, also=(-1,)), "log probabilities for each output token"),
    "prompt_logprobs": Key(Int(0, INT32_MAX, also=(-1,)), "log probabilities for each prompt token"),
    "bad_words": Key(ListOf(Text()), "texts that must not appear"),
    "logit_bias": Key(FreeMap(), "token id to bias"),
    "allowed_token_ids": Key(ListOf(Int(0, UINT32_MAX)), "only these tokens"),
    "truncate_prompt_tokens": Key(Int(1, INT32_MAX, also=(-1,)), "keep the last tokens of the prompt"),
    "structured_outputs": Key(FreeMap(), "grammar of the output"),
    "do_sample": Key(Bool(), "false: greedy"),
    "output_type": Key(Text(), "form of a diffusion stage's output"),
    "height": Key(Int(1, INT32_MAX), "pixels"),
    "width": Key(Int(1, INT32_MAX), "pixels"),
    "num_frames": Key(Int(1, INT32_MAX), "frames of a video"),
    "fps": Key(Number(0, above=True), "frames per second"),
    "negative_prompt": Key(Text(empty=True), "what to keep out"),
    "num_outputs_per_prompt": Key(Int(1, 1024), "pictures for one prompt"),
    "guidance_scale_2": Key(Number(0), "guidance of the second model"),
    "true_cfg_scale": Key(Number(0), "classifier-free guidance"),
    "strength": Key(Number(0, 1), "how much of the input picture to change"),
    "extra_args": Key(FreeMap(), "anything else that the engine knows"),
}
"""Parameters of single engines; they travel in ``SamplingParams.extra``."""

CONNECTOR_KEYS: Final[dict[str, Key]] = {
    "name": Key(Text(), "class or kind of the connector; required"),
    "extra": Key(FreeMap(), "its options", "none"),
}
CONNECTOR_USE: Final = Either((SHORT_NAME, FreeMap()))
"""A name, or the connector itself (checked like an entry of ``connectors``)."""

STAGE_KEYS: Final[dict[str, Key]] = {
    "stage_id": Key(STAGE_ID, "number of the stage, unique; required"),
    "name": Key(SHORT_NAME, "for people", "`stage-N`"),
    "engine": Key(SHORT_NAME, "engine entry point", "top level's `engine`, else by topology, else `vllm`"),
    "model": Key(Text(), "model name or path, handed to the engine", "top level's `model`"),
    "num_replicas": Key(Int(1, 4096), "replicas that a local launcher starts", "1"),
    "devices": Key(Anything('device ids: 0, "0,1" or [0, 1]'), "devices of all local replicas", "host only"),
    "tensor_parallel_size": Key(Int(1, 4096), "tensor parallel ranks of one replica", "1"),
    "max_num_seqs": Key(_COUNT32, "requests that one replica works on at a time", "engine's"),
    "final_output": Key(Bool(), "its output goes to the client", "true where no edge leaves"),
    "final_output_type": Key(Choice(OUTPUT_TYPES), "what that output is", "see Completion"),
    "is_comprehension": Key(Bool(), "it understands prompts", "true where chat enters"),
    "default_sampling_params": Key(
        Map({**SAMPLING_KEYS, **SAMPLING_EXTRA_KEYS}), "used where a request leaves a parameter unset"
    ),
    "input_connectors": Key(FreeMap(), "`from_stage_N: name`: connector of the edge N → this stage"),
    "output_connectors": Key(FreeMap(), "`to_stage_N: name`: connector of the edge this stage → N"),
    "async_chunk": Key(Bool(), "must say the same as the top level: it holds for the whole pipeline"),
    "balancing_policy": Key(
        Choice(BALANCING_POLICIES),
        "how gateways choose among its replicas, until an operator sets another",
        "gateways' own",
    ),
    "companions": Key(
        Map(COMPANION_KEYS, required=("roles",)),
        "each request runs again with other prompts, for guidance",
        "none",
    ),
    "sim": Key(Map(SIM_KEYS), "options of the `sim` engine; others ignore them"),
    "engine_args": Key(FreeMap(), "engine arguments that have no key of their own, passed on as they are"),
    "engine_extras": Key(FreeMap(), "the same as `engine_args`"),
    "runtime": Key(FreeMap(), "old layout: `devices`, `num_replicas`, `env`"),
}
"""Stage keys read while planning."""

ALL_STAGE_KEYS: Final[dict[str, Key]] = {**STAGE_KEYS, **ENGINE_KEYS}
PLAN_KEYS: Final = frozenset(STAGE_KEYS) - {"sim", "engine_args"}
"""Stage keys with a place of their own in the plan: not among ``Stage.engine_args``."""

EDGE_KEYS: Final[dict[str, Key]] = {
    "from": Key(STAGE_ID, "producer stage; required"),
    "to": Key(STAGE_ID, "consumer stage; required"),
    "connector": Key(CONNECTOR_USE, "name of an entry of `connectors`, or `{name, extra}`", "best common path"),
    "window_size": Key(
        Int(1, INT32_MAX, also=(-1,)), "chunks of a request not yet acknowledged; -1: no limit", "16 (async), -1"
    ),
    "max_inflight": Key(
        Int(1, INT32_MAX),
        "requests of one gateway that use the edge at a time, and transfers at a time to one consumer replica",
        "no limit",
    ),
    "chunk_timeout_s": Key(
        Number(0.001, 86_400),
        "longest time that the consumer waits for a chunk, and for its bytes",
        "the worker's `--chunk-timeout-s`",
    ),
    "chunk_by": Key(Choice(CHUNK_BY), "how text is cut for this edge", "see Completion"),
}

DUPLEX_KEYS: Final[dict[str, Key]] = {
    "idle_ttl_s": Key(Number(0), "idle session lives so long; null: for ever"),
    "disconnect_grace_s": Key(Number(0), "session waits so long for its client to come back"),
    "reaper_interval_s": Key(Number(0, above=True), "how often dead sessions are looked for"),
    "resume_replay_ttl_s": Key(Number(0), "output is kept so long for a client that comes back"),
    "resume_replay_max_bytes_per_session": Key(Int(0), "bytes kept for that"),
    "max_pending_input_bytes_per_session": Key(Int(0), "input waiting"),
    "max_pending_turns_per_session": Key(Int(0), "turns waiting"),
    "max_sessions": Key(Int(1), "sessions at a time"),
    "completed_append_cache_size": Key(Int(0), "answers kept for repeated appends"),
    "server_vad_model_path": Key(Text(), "voice activity model"),
    "warmup_frames": Key(Int(0), "frames run at start"),
}

TOP_KEYS: Final[dict[str, Key]] = {
    "pipeline": Key(PIPELINE_NAME, "name of the pipeline and of its topology", "required if the call gives no name"),
    "async_chunk": Key(Bool(), "chunks flow from stage to stage while a request runs", "true"),
    "stages": Key(ListOf(Map(ALL_STAGE_KEYS), least=1), "the stages; required"),
    "edges": Key(ListOf(Map(EDGE_KEYS, required=("from", "to"))), "the stage graph", "see Completion"),
    "connectors": Key(FreeMap(), "named connectors: `NAME: {name: KIND, extra: {…}}`", "none"),
    "entrypoints": Key(
        Map({task: Key(STAGE_ID, "stage where it enters") for task in TASKS}),
        "stage where each task enters: " + ", ".join(TASKS),
        "see Completion",
    ),
    "platforms": Key(FreeMap(), "`PLATFORM: {stages: […]}`: laid over the stages on that platform", "none"),
    "engine": Key(SHORT_NAME, "engine of stages that name none", "`vllm`"),
    "model": Key(Text(), "model of stages that name none", "none"),
    "base_config": Key(Text(), "file that this one is laid over; see Several documents"),
    "session_policy": Key(
        Choice(("rebind", "strict")), "a session whose replica is gone goes on at another one, or is refused", "rebind"
    ),
    "session_mode": Key(Choice(("turn", "duplex")), "not used yet", "turn"),
    "duplex_session": Key(Map(DUPLEX_KEYS), "not used yet"),
    "active_stream_window": Key(Int(1), "not used yet"),
    "forced_aligner": Key(FreeMap(), "stage keys of a forced aligner; a file with nothing else is that one stage"),
    **{name: ENGINE_KEYS[name] for name in INHERITED_KEYS},
}

UNUSED_TOP_KEYS: Final = ("duplex_session", "active_stream_window")
"""Checked and warned about; no component reads them yet."""

PLATFORM_KEYS: Final[dict[str, Key]] = {
    "stages": Key(ListOf(Map(ALL_STAGE_KEYS)), "stage keys by stage_id"),
    **{name: ENGINE_KEYS[name] for name in INHERITED_KEYS},
}
