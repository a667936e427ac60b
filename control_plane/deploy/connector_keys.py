"""Connector kinds, the class names that users' files call them by, and their options."""

from __future__ import annotations

from typing import Any, Final

from control_plane.deploy.document import Value
from control_plane.deploy.faults import Faults, nearest, shorten
from control_plane.deploy.kinds import Anything, Bool, Choice, Either, Int, Key, ListOf, Number, Text, check_keys

KINDS: Final[dict[str, str]] = {
    "auto": "the best path that both replicas have",
    "shm": "shared memory of one host",
    "grpc": "bytes over gRPC, between any two hosts",
    "mooncake": "Mooncake transfer engine: TCP, RDMA, NVLink",
    "mooncake-store": "Mooncake store",
    "nixl": "NIXL",
    "mori": "Mori: RDMA, XGMI",
    "yuanrong": "Yuanrong data system",
    "yuanrong-te": "Yuanrong transfer engine",
}

ALIASES: Final[dict[str, str]] = {
    "SharedMemoryConnector": "shm",
    "MooncakeTransferEngineConnector": "mooncake",
    "MooncakeStoreConnector": "mooncake-store",
    "MooncakeConnector": "mooncake-store",
    "NixlConnector": "nixl",
    "MoriTransferEngineConnector": "mori",
    "YuanrongConnector": "yuanrong",
    "YuanrongTransferEngineConnector": "yuanrong-te",
}

_HOST = Text("a host name, an IP address, or auto", r"[A-Za-z0-9._:%\[\]-]{1,253}|\*")
_PORT = Int(0, 65535)
_PORT_OR_AUTO = Either((_PORT, Choice(("auto",))))
_SECONDS = Number(0)
_COUNT = Int(1, 1 << 20)
_DEVICE = Text(
    "a memory: cpu, cuda, npu, xpu, rocm or musa, or one of its devices (cuda:1)",
    r"(cpu|cuda|npu|xpu|rocm|musa)(:\d+)?",
)

_POOL: Final[dict[str, Key]] = {
    "memory_pool_size": Key(Int(1), "bytes of the transfer pool", "connector's"),
    "memory_pool_device": Key(_DEVICE, "where the pool is", "cpu"),
    "buffer_ttl_seconds": Key(Number(0, above=True), "unread data is freed after so long", "connector's"),
}
_NETWORK: Final[dict[str, Key]] = {
    "host": Key(_HOST, "address peers reach this host by; auto: found out", "auto"),
    "zmq_port": Key(_PORT_OR_AUTO, "accepted for older files: ports are chosen free and registered", "any"),
    "role": Key(Choice(("sender", "receiver", "both")), "accepted for older files: both ends are derived"),
    "sender_host": Key(_HOST, "accepted for older files: addresses come from the registry"),
    "sender_zmq_port": Key(_PORT_OR_AUTO, "accepted for older files"),
    "device_name": Key(Text(empty=True), "network device such as mlx5_0; empty: chosen", "chosen"),
}


_ANY_NETWORK: Final = {**_POOL, **_NETWORK}


def _protocol(*names: str) -> dict[str, Key]:
    return {"protocol": Key(Choice(names), "transport", "connector's")}


_PUBLISHING: Final[dict[str, Key]] = {
    "pool_bytes": Key(Int(0), "bytes of the pool that a worker publishes into; 0: what the worker was started with"),
    "memory_pool_size": Key(Int(1), "the same as `pool_bytes`"),
    "memory_pool_device": Key(Choice(("cpu",)), "host memory is all there is", "cpu"),
    "put_wait_s": Key(_SECONDS, "how long a full pool is waited for", "10"),
    "checksum": Key(Bool(), "send a checksum with every payload, which readers check", "false"),
}
_INLINE = Key(Int(0, 65536), "payloads below this size travel inside of their handle", "65536")

OPTIONS: Final[dict[str, dict[str, Key]]] = {
    "auto": {},
    "shm": {
        **_PUBLISHING,
        "shm_threshold_bytes": _INLINE,
        "max_peers": Key(_COUNT, "pools of other workers that stay mapped while idle", "connector's"),
    },
    "grpc": {
        **_PUBLISHING,
        "inline_bytes": _INLINE,
        "shm_threshold_bytes": Key(_INLINE.kind, "the same as `inline_bytes`"),
        "max_fetch_bytes": Key(Int(1), "larger payloads are refused", "4 GiB"),
    },
    "mooncake": {**_POOL, **_NETWORK, **_protocol("tcp", "rdma", "nvlink", "ascend")},
    "mooncake-store": {
        **_POOL,
        **_NETWORK,
        **_protocol("tcp", "rdma", "ascend"),
        "metadata_server": Key(Text(), "metadata service"),
        "master": Key(Text(), "store master, host:port"),
        "segment": Key(Int(0), "bytes given to the store"),
        "localbuf": Key(Int(0), "bytes of the local buffer"),
        "proto": Key(Choice(("tcp", "rdma", "ascend")), "transport"),
        "rdma": Key(Text(empty=True), "network device"),
    },
    "nixl": {
        **_POOL,
        **_NETWORK,
        "backends": Key(ListOf(Text(), least=1), "NIXL backends, best first", "[UCX]"),
        "agent_name": Key(Text(), "NIXL agent name"),
        "num_threads": Key(_COUNT, "transfer threads"),
        "memory_type": Key(Text(), "memory that is registered"),
        "receive_device": Key(_DEVICE, "where data arrives"),
        "lease_seconds": Key(_SECONDS, "unread data is freed after so long"),
        "transfer_timeout_s": Key(_SECONDS, "a transfer may take so long"),
        "handshake_timeout_ms": Key(_SECONDS, "a handshake may take so long"),
        "handshake_retry_s": Key(_SECONDS, "wait between handshakes"),
        "handshake_max_wait_s": Key(_SECONDS, "all handshakes may take so long"),
        "metadata_query_timeout_ms": Key(_SECONDS, "a metadata query may take so long"),
        "poll_interval_s": Key(_SECONDS, "wait between looks at a transfer"),
    },
    "mori": {
        **_POOL,
        **_NETWORK,
        **_protocol("rdma", "tcp"),
        "backend_type": Key(Choice(("rdma", "xgmi")), "between hosts, or between GPUs of one", "rdma"),
        "xgmi_num_streams": Key(_COUNT, "XGMI streams"),
        "xgmi_num_events": Key(_COUNT, "XGMI events"),
        "qp_per_transfer": Key(_COUNT, "queue pairs of one transfer"),
        "num_worker_threads": Key(_COUNT, "worker threads"),
        "post_batch_size": Key(Int(1, 1 << 20, also=(-1,)), "work requests posted at once; -1: chosen"),
    },
    "yuanrong": {
        **_POOL,
        "host": _NETWORK["host"],
        "port": Key(_PORT, "port of the data worker"),
        "get_sub_timeout_ms": Key(_SECONDS, "one look for data may take so long"),
    },
    "yuanrong-te": {**_POOL, **_NETWORK, **_protocol("ascend", "rdma", "tcp"), "rpc_port": Key(_PORT_OR_AUTO, "port")},
}

STRICT_KINDS: Final = ("auto", "shm", "grpc")
"""Connectors of the project: they refuse options they do not know. Those of libraries may know more than is listed."""

_SAME_AS: Final = {
    "shm": {"memory_pool_size": "pool_bytes"},
    "grpc": {"memory_pool_size": "pool_bytes", "shm_threshold_bytes": "inline_bytes"},
}
_UNUSED: Final = ("memory_pool_device", *_NETWORK, "buffer_ttl_seconds")
"""Options of users' files that the strict kinds have no use for: checked, and left out of the plan."""

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
        "codec_chunk_ramp",
        "codec_left_context_frames",
        "codec_right_holdback_frames",
        "codec_streaming",
        "codec_token_offset",
        "codec_vocab_size",
        "connector_get_max_wait",
        "connector_get_max_wait_first_chunk",
        "connector_get_sleep_s",
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
_MODEL_KEY = Key(Either((Bool(), Number(), Text(empty=True), ListOf(Anything()))), "read by the model")


def kind_of(name: str) -> str:
    """The kind that a class name or kind stands for; "" for an unknown one."""
    return name if name in KINDS else ALIASES.get(name, "")


def unknown_kind(name: str) -> str:
    """The message about an unknown class or kind."""
    near = nearest(name, [*KINDS, *ALIASES]) or next(
        (known for known in (*KINDS, *ALIASES) if known.lower() == name.lower()), ""
    )
    hint = f"; did you mean {near!r}?" if near else ""
    return f"unknown connector class {shorten(name)!r}{hint} (known: {', '.join((*KINDS, *ALIASES))})"


def check_options(kind: str, extra: Value, faults: Faults) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ``extra`` mapping of a connector, checked: its own options, and those that models read.

    What is unknown is a fault if the connector would refuse it or it looks like a misspelt option; else it is passed
    on with a warning.
    """
    own: dict[str, Any] = {}
    model: dict[str, Any] = {}
    strict = kind in STRICT_KINDS
    unused = {name: _ANY_NETWORK[name] for name in _UNUSED if name not in OPTIONS[kind]} if strict else {}
    names = [*OPTIONS[kind], *MODEL_OPTIONS]

    def unknown(name: str, item: Value) -> bool:
        if name in MODEL_OPTIONS:
            model.update(check_keys(Value({name: item}, item.line), {name: _MODEL_KEY}, faults))
        elif name in unused:
            check_keys(Value({name: item}, item.line), unused, faults)
            faults.warn(item, f"connector {kind!r} has no use for it")
        elif (near := nearest(name, names)) or strict:
            hint = f"; did you mean {near!r}?" if near else f"; known: {', '.join(OPTIONS[kind])}"
            faults.error(item, f"unknown option {shorten(name)!r} of connector {kind!r}{hint}")
        else:
            own[name] = Anything().check(item, faults)
            faults.warn(item, f"not an option of connector {kind!r} that is known here; it is passed on as it is")
        return True

    checked = check_keys(extra, OPTIONS[kind], faults, unknown=unknown)
    if strict:
        checked.pop("memory_pool_device", None)
    for name, target in _SAME_AS.get(kind, {}).items():
        if name in checked:
            value = checked.pop(name)
            if checked.setdefault(target, value) != value:
                faults.error(extra.at(name), f"{value} disagrees with {target} = {checked[target]}: they are the same")
    return {**checked, **own}, model
