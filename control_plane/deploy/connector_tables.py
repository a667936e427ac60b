"""Connector kinds, the class names that users' files call them by, and their options: tables only.

Kinds and the names, types and ranges of options are those of ``connectors.registry`` and ``connectors.options``, which
a control plane does not load; ``tests/contract/test_connector_tables.py`` holds the two against each other.
"""

from __future__ import annotations

from typing import Final

from control_plane.deploy.kinds import Anything, Bool, Choice, Either, FreeMap, Int, Key, ListOf, Number, Text

AUTO: Final = "auto"

KINDS: Final[dict[str, str]] = {
    AUTO: "the best path that both replicas have",
    "shm": "shared memory of one host",
    "grpc": "bytes over gRPC, between any two hosts",
    "cuda_ipc": "device memory of GPUs of one host",
    "mooncake": "Mooncake transfer engine: TCP, RDMA, NVLink",
    "mooncake_store": "Mooncake store",
    "nixl": "NIXL",
    "mori": "Mori: RDMA, XGMI",
    "yuanrong": "Yuanrong data system",
    "yuanrong_transfer_engine": "Yuanrong transfer engine",
}

ALIASES: Final[dict[str, str]] = {
    "SharedMemoryConnector": "shm",
    "CudaIpcConnector": "cuda_ipc",
    "MooncakeTransferEngineConnector": "mooncake",
    "MooncakeStoreConnector": "mooncake_store",
    "MooncakeConnector": "mooncake_store",
    "NixlConnector": "nixl",
    "MoriTransferEngineConnector": "mori",
    "YuanrongConnector": "yuanrong",
    "YuanrongTransferEngineConnector": "yuanrong_transfer_engine",
    "mooncake-store": "mooncake_store",
    "yuanrong-te": "yuanrong_transfer_engine",
}

_HOST = Text("a host name, an IP address, or auto", r"[A-Za-z0-9._:%\[\]-]{1,253}|\*|\$\{\w+\}")
_PORT = Int(0, 65535)
_PORT_OR_AUTO = Either((_PORT, Choice(("auto",))))
_SECONDS = Number(0)
_COUNT = Int(1, 1 << 20)
_MILLISECONDS = Int(0, 2**31 - 1)
_DEVICE = Text(
    "a memory: cpu, cuda, npu, xpu, rocm or musa, or one of its devices (cuda:1)",
    r"(cpu|cuda|npu|xpu|rocm|musa)(:\d+)?",
)
_INLINE = Key(Int(0, 65536), "payloads below this size travel inside of their handle", "65536")

_PUBLISHING: Final[dict[str, Key]] = {
    "pool_bytes": Key(Int(0), "bytes of the pool that a worker publishes into; 0: what the worker was started with"),
    "put_wait_s": Key(_SECONDS, "how long a full pool is waited for", "10"),
    "checksum": Key(Bool(), "send a checksum with every payload, which readers check", "false"),
}
_ENGINE: Final[dict[str, Key]] = {
    **_PUBLISHING,
    "inline_bytes": _INLINE,
    "receive_pool_bytes": Key(Int(0), "bytes of the pool where reads arrive; 0: a stage that reads nothing", "256 MiB"),
    "get_timeout_s": Key(Number(0.001), "how long a reader waits for room, and then for the bytes", "30"),
}
_STORE: Final[dict[str, Key]] = {
    **_PUBLISHING,
    "pool_bytes": Key(Int(1), "most bytes that a worker has in the store and not yet removed", "512 MiB"),
    "inline_bytes": _INLINE,
    "timeout_s": Key(Number(0.1), "how long one write or read may take", "10"),
    "threads": Key(Int(1, 64), "calls to the store at once", "4"),
}
_REACHED_AT = Key(_HOST, "where peers reach this worker's engine; auto: the address that leads out of its host", "auto")

OPTIONS: Final[dict[str, dict[str, Key]]] = {
    AUTO: {
        "among": Key(
            ListOf(Text(), least=1), "kinds that may be chosen, and are started for it; gRPC always is", "any"
        ),
        "options": Key(FreeMap(), "options of those kinds, by kind"),
    },
    "shm": {
        **_PUBLISHING,
        "shm_threshold_bytes": _INLINE,
        "max_peers": Key(_COUNT, "pools of other workers that stay mapped while idle", "64"),
        "pin_memory": Key(Bool(), "page-lock the pool for CUDA, where there is a device", "false"),
        "in_place_bytes": Key(
            Int(0), "payloads from here on stay in the producer's memory, and peers copy them out of it; 0: none", "0"
        ),
    },
    "grpc": {
        **_PUBLISHING,
        "pool_bytes": Key(Int(0), "most bytes that a worker has published and not yet released", "256 MiB"),
        "inline_bytes": _INLINE,
        "max_fetch_bytes": Key(Int(1), "larger payloads are refused", "4 GiB"),
    },
    "cuda_ipc": {
        **_PUBLISHING,
        "device": Key(Int(0), "number of the device among those that the worker sees", "0"),
        "inline_bytes": Key(_INLINE.kind, _INLINE.meaning, "0"),
        "max_peers": Key(_COUNT, "pools of other workers that stay open while idle", "64"),
        "to_host": Key(Bool(), "readers get copies in host memory", "false"),
    },
    "mooncake": {
        **_ENGINE,
        "protocol": Key(Choice(("tcp", "rdma", "nvlink")), "transport", "tcp"),
        "host": _REACHED_AT,
        "device_name": Key(Text(empty=True), "RDMA devices such as mlx5_0, separated by commas; empty: all"),
    },
    "mooncake_store": {
        **_STORE,
        "host": Key(_HOST, "this worker's address, at which others read what lies in its segment", "127.0.0.1"),
        "master": Key(Text(), "store master, host:port", "127.0.0.1:50051"),
        "metadata_server": Key(Text(), "metadata service: a URL, or P2PHANDSHAKE", "http://127.0.0.1:8080/metadata"),
        "proto": Key(Choice(("tcp", "rdma")), "transport", "tcp"),
        "rdma": Key(Text(empty=True), "RDMA devices, separated by commas"),
        "localbuf": Key(Int(0), "bytes of staging memory that is kept", "64 MiB"),
        "segment": Key(Int(0), "bytes that the worker lends to the store", "512 MiB"),
        "replica_num": Key(_COUNT, "copies of every object", "1"),
        "hard_pin": Key(Bool(), "objects are never evicted", "true"),
    },
    "nixl": _ENGINE,
    "mori": {
        **_ENGINE,
        "backend": Key(Choice(("rdma", "xgmi", "fabric")), "between hosts, or between GPUs of one", "rdma"),
        "host": _REACHED_AT,
        "port": Key(_PORT, "where the engine listens; 0: any", "0"),
    },
    "yuanrong": {
        **_STORE,
        "host": Key(_HOST, "host of the data worker", "127.0.0.1"),
        "port": Key(Int(1, 65535), "port of the data worker", "31501"),
        "cluster": Key(Text(empty=True), "name of the data workers' cluster; empty: a cluster of one"),
        "get_sub_timeout_ms": Key(_MILLISECONDS, "one look for data may take so long", "1000"),
        "connect_timeout_ms": Key(Int(1, 2**31 - 1), "connecting may take so long", "3000"),
        "object_ttl_s": Key(
            Int(0, 2**32 - 1), "age at which the store drops what a dead worker left; 0: never", "3900"
        ),
    },
    "yuanrong_transfer_engine": {
        **_ENGINE,
        "host": _REACHED_AT,
        "port": Key(_PORT, "where the engine listens; 0: any", "0"),
        "device": Key(Text("auto or npu:N", r"auto|npu:\d+"), "device; auto: the first that the worker sees", "auto"),
    },
}

# Options that users' files have under other names, or for which ours has no use: checked, translated or left out.

_OTHER_NAMES: Final = Key(Int(1), "the same as `pool_bytes`")
_MEMORY = Key(_DEVICE, "accepted for older files: where a pool is depends on the kind", "cpu")
_OLDER: Final[dict[str, Key]] = {
    "memory_pool_size": _OTHER_NAMES,
    "memory_pool_device": _MEMORY,
    "buffer_ttl_seconds": Key(Number(0, above=True), "accepted for older files: unread data is kept for 300 s"),
    "host": Key(_HOST, "accepted for older files"),
    "zmq_port": Key(_PORT_OR_AUTO, "accepted for older files: ports are chosen free and registered"),
    "rpc_port": Key(_PORT_OR_AUTO, "accepted for older files: ports are chosen free and registered"),
    "role": Key(Choice(("sender", "receiver", "both")), "accepted for older files: both ends are derived"),
    "sender_host": Key(_HOST, "accepted for older files: addresses come from the registry"),
    "sender_zmq_port": Key(_PORT_OR_AUTO, "accepted for older files"),
    "device_name": Key(Text(empty=True), "accepted for older files"),
    "protocol": Key(Choice(("tcp", "rdma", "nvlink", "ascend")), "accepted for older files"),
    "shm_threshold_bytes": Key(_INLINE.kind, "the same as `inline_bytes`"),
}
_OLDER_OF: Final[dict[str, dict[str, Key]]] = {
    "nixl": {
        "backends": Key(ListOf(Text(), least=1), "NIXL backends, best first"),
        "agent_name": Key(Text(), "NIXL agent name"),
        "num_threads": Key(_COUNT, "transfer threads"),
        "memory_type": Key(Text(), "memory that is registered"),
        "receive_device": Key(_DEVICE, "where data arrives"),
        "lease_seconds": Key(_SECONDS, "unread data is freed after so long"),
        "transfer_timeout_s": Key(Number(0.001), "the same as `get_timeout_s`"),
        "handshake_timeout_ms": Key(_SECONDS, "a handshake may take so long"),
        "handshake_retry_s": Key(_SECONDS, "wait between handshakes"),
        "handshake_max_wait_s": Key(_SECONDS, "all handshakes may take so long"),
        "metadata_query_timeout_ms": Key(_SECONDS, "a metadata query may take so long"),
        "poll_interval_s": Key(_SECONDS, "wait between looks at a transfer"),
    },
    "mori": {
        "backend_type": Key(Choice(("rdma", "xgmi", "fabric")), "the same as `backend`"),
        "xgmi_num_streams": Key(_COUNT, "XGMI streams"),
        "xgmi_num_events": Key(_COUNT, "XGMI events"),
        "qp_per_transfer": Key(_COUNT, "queue pairs of one transfer"),
        "num_worker_threads": Key(_COUNT, "worker threads"),
        "post_batch_size": Key(Int(1, 1 << 20, also=(-1,)), "work requests posted at once; -1: chosen"),
    },
}

SAME_AS: Final[dict[str, dict[str, str]]] = {
    kind: {
        "memory_pool_size": "pool_bytes",
        **({"shm_threshold_bytes": "inline_bytes"} if "inline_bytes" in keys else {}),
        **({"transfer_timeout_s": "get_timeout_s"} if kind == "nixl" else {}),
        **({"backend_type": "backend"} if kind == "mori" else {}),
        **({"rpc_port": "port"} if kind == "yuanrong_transfer_engine" else {}),
        **({"protocol": "proto", "device_name": "rdma"} if kind == "mooncake_store" else {}),
    }
    for kind, keys in OPTIONS.items()
    if kind != AUTO
}
"""Kind → names of options that users' files have, and ours for the same."""


def older_options(kind: str) -> dict[str, Key]:
    """Options of users' files that ``kind`` does not have under that name."""
    if kind == AUTO:
        return {}
    return {name: key for name, key in {**_OLDER, **_OLDER_OF.get(kind, {})}.items() if name not in OPTIONS[kind]}


# Options of models, which users' files put beside the connector's own because their stages read them there.
MODEL_OPTIONS: Final = frozenset(
    (
        "audio8_tts_codec_dtype",
        "audiocodec_token_offset",
        "audiocodec_vocab_size",
        "cfm_graph_bucket_frames",
        "cfm_max_graphs",
        "code_predictor_prefix_graph_buckets",
        "code_predictor_prefix_graph_seq_lens",
        "code_predictor_prefix_graphs",
        "codec_chunk_frames",
        "codec_chunk_frames_at_begin",
        "codec_chunk_ramp",
        "codec_left_context_frames",
        "codec_right_holdback_frames",
        "codec_streaming",
        "codec_token_offset",
        "codec_vocab_size",
        "connector_get_max_wait",
        "connector_get_max_wait_first_chunk",
        "connector_get_sleep_s",
        "crossfade_sec",
        "decode_batch_max_size",
        "decode_cudagraph_batch_sizes",
        "decode_cudagraph_capture_sizes",
        "decode_enable_tf32",
        "decoder_emit_chunk_frames",
        "enable_cfm_graph",
        "enable_hift_graph",
        "fish_speech_backlog_codec_chunk_frames",
        "fish_speech_backlog_load_threshold",
        "fish_speech_dac_dtype",
        "fish_speech_dac_max_batch",
        "fish_speech_dac_max_padded_frames",
        "fish_speech_single_initial_chunk",
        "fish_speech_tensor_codes",
        "initial_codec_chunk_frames",
        "initial_latent_chunk_size",
        "latent_chunk_size",
        "latent_left_context",
        "native_talker",
        "ref_audio_artifact_cache_max_entries",
        "ref_code_context_frames",
    )
)
MODEL_KEY = Key(Either((Bool(), Number(), Text(empty=True), ListOf(Anything()))), "read by the model")
