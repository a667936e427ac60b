"""Stage keys that the engine reads. The plan carries them in ``Stage.engine_args`` as they are written.

Names and types are those of vLLM's engine arguments and of vLLM-Omni's stage configuration, so that users' files load
unchanged. A key that is missing here can always be given under ``engine_args``.
"""

from __future__ import annotations

from typing import Final

from control_plane.deploy.kinds import (
    INT32_MAX,
    Anything,
    Bool,
    Choice,
    Either,
    Environment,
    FreeMap,
    Int,
    Key,
    ListOf,
    Map,
    Number,
    Text,
)

_COUNT = Int(1, INT32_MAX)
_SIZE = Int(0)
_TEXT = Text()
_DOTTED = Text("a dotted path (package.module.Class)", r"[A-Za-z_]\w*([.:][A-Za-z_]\w*)+")
_TEXT_OR_MAP = Either((_TEXT, FreeMap()))
_LENGTH = Either((Int(1, INT32_MAX, also=(-1,)), Choice(("auto",))))

PARALLEL_KEYS: Final[dict[str, Key]] = {
    "tensor_parallel_size": Key(_COUNT, "ranks that share each layer", "1"),
    "pipeline_parallel_size": Key(_COUNT, "ranks that each hold some of the layers", "1"),
    "data_parallel_size": Key(_COUNT, "ranks that each hold the whole model", "1"),
    "sequence_parallel_size": Key(_COUNT, "ranks that share a sequence", "ulysses × ring × allgather degree"),
    "ulysses_degree": Key(_COUNT, "sequence parallel ranks that exchange heads", "1"),
    "ring_degree": Key(_COUNT, "sequence parallel ranks in a ring", "1"),
    "allgather_degree": Key(_COUNT, "sequence parallel ranks that gather keys and values", "1"),
    "cfg_parallel_size": Key(_COUNT, "ranks that share the branches of classifier-free guidance", "1"),
    "vae_patch_parallel_size": Key(_COUNT, "ranks, among those of the stage, that share VAE decoding", "1"),
    "enable_expert_parallel": Key(Bool(), "spread experts, not slices of them, over the ranks", "false"),
    "use_hsdp": Key(Bool(), "shard weights over ranks, gather them layer by layer", "false"),
    "hsdp_shard_size": Key(Int(1, INT32_MAX, also=(-1,)), "ranks of one set of shards; -1: as fits", "-1"),
    "hsdp_replicate_size": Key(_COUNT, "copies of the set of shards", "1"),
}

KV_TRANSFER_KEYS: Final[dict[str, Key]] = {
    "kv_connector": Key(_TEXT, "vLLM KV connector class"),
    "kv_role": Key(Choice(("kv_producer", "kv_consumer", "kv_both")), "which end this stage is"),
    "kv_rank": Key(Int(0, INT32_MAX), "rank among the KV instances"),
    "kv_parallel_size": Key(_COUNT, "number of KV instances", "1"),
    "kv_ip": Key(_TEXT, "address of the bootstrap server"),
    "kv_port": Key(Int(0, 65535), "its port"),
    "kv_buffer_device": Key(Choice(("cpu", "cuda", "npu", "xpu")), "memory of the transfer buffer"),
    "kv_buffer_size": Key(Number(0, above=True), "bytes of the transfer buffer"),
    "engine_id": Key(_TEXT, "identity of the engine among its peers"),
    "kv_connector_module_path": Key(_TEXT, "module to import the connector from"),
    "kv_connector_extra_config": Key(FreeMap(), "options of that connector (`mooncake_bootstrap_port`, …)"),
    "kv_load_failure_policy": Key(Choice(("fail", "recompute")), "what to do when KV cannot be loaded"),
    "enable_permute_local_kv": Key(Bool(), "allow another KV layout at the other end", "false"),
}

OMNI_KV_KEYS: Final[dict[str, Key]] = {
    "need_send_cache": Key(Bool(), "the stage sends its KV cache when a request finishes", "false"),
    "need_recv_cache": Key(Bool(), "a request waits for KV from upstream", "false"),
    "enable_kv_async_prefetch": Key(Bool(), "fetch KV ahead of the request's turn", "false"),
    "kv_prefetch_min_free_mem_ratio": Key(Number(0, 1), "prefetch only with this share of memory free"),
    "recv_timeout": Key(Number(0, above=True), "seconds to wait for KV"),
    "rank_mapping": Key(
        Map({"from_tp": Key(_COUNT, "ranks of the sender"), "to_tp": Key(_COUNT, "ranks of the receiver")}),
        "tensor parallel sizes of both ends",
    ),
    "connector_config": Key(FreeMap(), "connector of the KV path"),
}

_MODEL: Final[dict[str, Key]] = {
    "tokenizer": Key(_TEXT, "tokenizer name or path", "the model's"),
    "tokenizer_mode": Key(_TEXT, "tokenizer implementation"),
    "skip_tokenizer_init": Key(Bool(), "prompts come as token ids"),
    "trust_remote_code": Key(Bool(), "run code that comes with the model", "top level's, else false"),
    "revision": Key(_TEXT, "model revision"),
    "tokenizer_revision": Key(_TEXT, "tokenizer revision"),
    "code_revision": Key(_TEXT, "revision of the model's code"),
    "dtype": Key(Choice(("auto", "bfloat16", "float16", "half", "float32", "float")), "type of weights", "auto"),
    "quantization": Key(_TEXT_OR_MAP, "quantization method"),
    "load_format": Key(_TEXT, "weight format; `dummy`: random weights", "auto"),
    "config_format": Key(_TEXT, "format of the model's configuration"),
    "download_dir": Key(_TEXT, "where weights are cached"),
    "hf_overrides": Key(FreeMap(), "laid over the model's own configuration"),
    "hf_config_path": Key(_TEXT, "where that configuration is"),
    "model_config": Key(FreeMap(), "model-specific options"),
    "model_class_name": Key(_TEXT, "diffusion pipeline class"),
    "model_impl": Key(_TEXT, "model implementation"),
    "model_loaded": Key(FreeMap(), "parts of the model that this stage loads"),
    "model_runner": Key(Choice(("v1", "v2")), "model runner generation"),
    "architecture": Key(_TEXT, "model architecture class"),
    "runner": Key(Choice(("auto", "generate", "pooling", "draft")), "what the model is run for", "auto"),
    "convert": Key(_TEXT, "adapter that turns the model into a pooling model"),
    "pooling_task": Key(_TEXT, "pooling task"),
    "seed": Key(Int(), "seed of the engine"),
    "logits_processors": Key(ListOf(_TEXT), "logits processor classes"),
    "generation_config": Key(_TEXT, "where generation defaults come from"),
    "override_generation_config": Key(FreeMap(), "laid over those"),
    "limit_mm_per_prompt": Key(FreeMap(), "media items per prompt, by modality"),
    "media_io_kwargs": Key(FreeMap(), "options of media decoding, by modality"),
    "mm_processor_kwargs": Key(FreeMap(), "options of the multimodal processor"),
    "mm_processor_cache_gb": Key(Number(0), "GiB of processed media kept"),
    "interleave_mm_strings": Key(Bool(), "keep text and media in the order of the prompt"),
    "skip_mm_profiling": Key(Bool(), "do not measure the memory of media at start"),
    "speculative_config": Key(FreeMap(), "speculative decoding"),
    "lora_path": Key(_TEXT, "adapter weights"),
    "lora_backend": Key(_TEXT, "adapter implementation"),
    "lora_scale": Key(Number(), "adapter strength"),
    "enable_lora": Key(Bool(), "load adapters on request"),
    "max_loras": Key(_COUNT, "adapters in one batch"),
    "max_lora_rank": Key(_COUNT, "largest adapter rank"),
    "tts_max_instructions_length": Key(_COUNT, "longest speaking instruction, in characters"),
    "custom_voice_dir": Key(_TEXT, "directory of voices"),
    "silence_ban_frames": Key(_SIZE, "frames at the start that may not be silent"),
}

_SCHEDULING: Final[dict[str, Key]] = {
    "max_model_len": Key(_LENGTH, "longest prompt plus output, in tokens; -1 or auto: as fits", "the model's"),
    "max_num_batched_tokens": Key(_COUNT, "tokens of one step"),
    "enable_prefix_caching": Key(Bool(), "reuse KV of equal prefixes"),
    "prefix_caching_hash_algo": Key(_TEXT, "hash of prefix blocks"),
    "enable_chunked_prefill": Key(Bool(), "mix pieces of long prompts with decoding"),
    "async_scheduling": Key(Bool(), "plan a step while the last one runs"),
    "scheduling_policy": Key(Choice(("fcfs", "priority")), "order of waiting requests"),
    "scheduler_cls": Key(_DOTTED, "scheduler class"),
    "stream_interval": Key(_COUNT, "tokens between outputs"),
    "streaming_output": Key(Bool(), "give outputs while the request runs"),
    "step_execution": Key(Bool(), "give control back after each diffusion step"),
    "request_batch_max_wait_ms": Key(Number(0), "ms to wait for more requests of a batch"),
    "is_prefill_only": Key(Bool(), "first half of a split stage: makes KV", "false"),
    "is_decode_only": Key(Bool(), "second half of a split stage: reads KV", "false"),
    "kv_transfer_config": Key(Map(KV_TRANSFER_KEYS), "KV hand-over of vLLM"),
    "omni_kv_config": Key(Map(OMNI_KV_KEYS), "KV hand-over between stages"),
    "default_pooling_params": Key(FreeMap(), "parameters of pooling requests"),
    "subtalker_sampling_params": Key(
        Map(
            {
                "do_sample": Key(Bool(), "false: greedy"),
                "temperature": Key(Number(0), "0 or more"),
                "top_k": Key(Int(1, INT32_MAX, also=(-1,)), "-1: off"),
                "top_p": Key(Number(0, 1, above=True), "above 0, at most 1"),
            }
        ),
        "sampling inside of the talker",
    ),
}

_MEMORY: Final[dict[str, Key]] = {
    "gpu_memory_utilization": Key(Number(0, 1, above=True), "share of each device's memory to use"),
    "kv_cache_memory_bytes": Key(Int(1), "bytes of KV cache; goes before gpu_memory_utilization"),
    "kv_cache_dtype": Key(_TEXT, "type of cached keys and values", "auto"),
    "kv_cache_dtype_skip_layers": Key(ListOf(Either((_TEXT, Int(0)))), "layers that keep the model's type"),
    "calculate_kv_scales": Key(Bool(), "scale FP8 keys and values while running"),
    "block_size": Key(_COUNT, "tokens of one KV block"),
    "num_gpu_blocks_override": Key(_COUNT, "KV blocks, for tests"),
    "swap_space": Key(Number(0), "GiB of host memory for swapped KV"),
    "cpu_offload_gb": Key(Number(0), "GiB of weights kept on the host"),
    "mamba_ssm_cache_dtype": Key(_TEXT, "type of state-space caches"),
    "mamba_cache_dtype": Key(_TEXT, "type of convolution caches"),
    "disable_hybrid_kv_cache_manager": Key(Bool(), "one cache layout for all layers"),
    "enable_sleep_mode": Key(Bool(), "memory can be given back while idle"),
}

_EXECUTION: Final[dict[str, Key]] = {
    "enforce_eager": Key(Bool(), "no graph capture"),
    "compilation_config": Key(Either((FreeMap(), Int(0, 3))), "compilation and graph capture"),
    "cudagraph_capture_sizes": Key(ListOf(_COUNT), "batch sizes to capture"),
    "max_cudagraph_capture_size": Key(_SIZE, "largest batch size to capture"),
    "optimization_level": Key(Int(0, 3), "preset of optimisations"),
    "attention_backend": Key(_TEXT, "attention implementation"),
    "attention_config": Key(FreeMap(), "attention options"),
    "kernel_config": Key(FreeMap(), "kernel options"),
    "moe_backend": Key(_TEXT, "experts implementation"),
    "enable_flashinfer_autotune": Key(Bool(), "tune kernels at start"),
    "disable_custom_all_reduce": Key(Bool(), "use the library's all-reduce"),
    "enable_eplb": Key(Bool(), "balance experts while running"),
    "distributed_executor_backend": Key(_TEXT, "how ranks are started: mp, ray, uni, external_launcher"),
    "worker_cls": Key(_DOTTED, "worker class"),
    "worker_extension_cls": Key(_DOTTED, "mixed into the worker class"),
    "engine_backend": Key(_DOTTED, "engine class of the stage"),
    "parallel_config": Key(Map(PARALLEL_KEYS), "parallel sizes of a diffusion stage"),
    "profiler_config": Key(FreeMap(), "profiler options"),
    "additional_config": Key(FreeMap(), "options of a platform plugin"),
    "disable_log_stats": Key(Bool(), "no statistics"),
    "enable_log_requests": Key(Bool(), "log requests"),
    "env": Key(Environment(), "variables of the worker's process: for its engine and the libraries of its connectors"),
}

_DIFFUSION: Final[dict[str, Key]] = {
    "ulysses_mode": Key(_TEXT, "how heads are split"),
    "ulysses_a2a_permute": Key(Bool(), "permute before the exchange"),
    "vae_parallel_mode": Key(_TEXT, "how VAE work is split"),
    "vae_use_slicing": Key(Bool(), "decode one image at a time"),
    "vae_use_tiling": Key(Bool(), "decode tile by tile"),
    "vae_fast_path": Key(Bool(), "faster VAE where it exists"),
    "text_encoder_tp_size": Key(_COUNT, "ranks of the text encoder"),
    "auxiliary_text_encoder": Key(Anything(), "further text encoder"),
    "diffusion_load_format": Key(_TEXT, "weight format of diffusion parts"),
    "diffusers_load_kwargs": Key(FreeMap(), "arguments of loading"),
    "diffusers_call_kwargs": Key(FreeMap(), "arguments of each call"),
    "diffusion_quantization_config": Key(_TEXT_OR_MAP, "quantization of diffusion parts"),
    "diffusion_attention_backend": Key(_TEXT, "attention of diffusion parts"),
    "diffusion_attention_config": Key(FreeMap(), "its options"),
    "diffusion_compile_granularity": Key(_TEXT, "what is compiled as one"),
    "diffusion_compile_dynamic": Key(Bool(), "compile for any shape"),
    "diffusion_kv_mode": Key(_TEXT, "how diffusion keeps KV"),
    "diffusion_kv_max_rows_per_request": Key(_COUNT, "most KV rows of a request"),
    "diffusion_kv_cache_dtype": Key(_TEXT, "type of that KV"),
    "diffusion_kv_cache_skip_steps": Key(Anything(), "steps that keep the model's type"),
    "diffusion_kv_cache_skip_layers": Key(Anything(), "layers that keep the model's type"),
    "diffusion_offload_config": Key(FreeMap(), "offloading"),
    "fastvideo_vsa_topk": Key(Number(0), "sparse attention: blocks kept"),
    "fa_deterministic": Key(Bool(), "deterministic attention"),
    "cache_backend": Key(_TEXT, "cache of diffusion steps"),
    "cache_config": Key(FreeMap(), "its options"),
    "enable_cache_dit_summary": Key(Bool(), "log what the cache saved"),
    "video_output_transport": Key(_TEXT, "how video leaves the engine"),
    "boundary_ratio": Key(Number(0, 1), "where the second model takes over"),
    "flow_shift": Key(Number(), "shift of the noise schedule"),
    "enable_multithread_weight_load": Key(Bool(), "load weights on several threads"),
    "enable_broadcast_weight_load": Key(Bool(), "one rank loads, the others receive"),
    "num_weight_load_threads": Key(_COUNT, "threads that load weights"),
    "enable_cpu_offload": Key(Bool(), "keep idle parts on the host"),
    "enable_layerwise_offload": Key(Bool(), "keep idle layers on the host"),
    "enable_distributed_layerwise_offload": Key(Bool(), "the same, shared by ranks"),
    "dlo_use_allgather": Key(Bool(), "gather offloaded layers from all ranks"),
    "dlo_resident_layers": Key(_SIZE, "layers that stay on the device"),
    "dlo_host_registration_limit_gib": Key(Number(0), "GiB of pinned host memory"),
    "host_weight_runtime_mode": Key(_TEXT, "where host weights live"),
    "host_weight_runtime_root": Key(_TEXT, "their directory"),
    "enable_diffusion_pipeline_profiler": Key(Bool(), "time the parts of the pipeline"),
    "max_generated_image_size": Key(_COUNT, "largest image, in pixels"),
}

_STAGE_PARALLEL = {name: key for name, key in PARALLEL_KEYS.items() if name != "tensor_parallel_size"}

GROUPS: Final[dict[str, dict[str, Key]]] = {
    "Model and inputs": _MODEL,
    "Scheduling and hand-over": _SCHEDULING,
    "Memory": _MEMORY,
    "Execution": _EXECUTION,
    "Parallel sizes": _STAGE_PARALLEL,
    "Diffusion": _DIFFUSION,
}
"""Engine keys in the groups of the reference page."""

ENGINE_KEYS: Final[dict[str, Key]] = {name: key for group in GROUPS.values() for name, key in group.items()}

INHERITED_KEYS: Final = (
    "trust_remote_code",
    "dtype",
    "quantization",
    "distributed_executor_backend",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "data_parallel_size",
    "pipeline_parallel_size",
    "model_runner",
    "custom_voice_dir",
)
"""Engine keys that may stand at top level and then hold for every stage that does not say otherwise."""
