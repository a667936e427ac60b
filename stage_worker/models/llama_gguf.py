"""Turns a Llama GGUF file into the checkpoint directory that vLLM and transformers load.

Two traps that the usual converters fall into are handled here: llama.cpp stores the query and key projections with the
halves of each rotary pair interleaved, and the ``smollm`` pre-tokenizer splits every digit (transformers' own GGUF
reader leaves that out and tokenises numbers wrongly).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omnicore.errors import DataLossError
from stage_worker.models.gguf import GgufFile
from stage_worker.models.safetensors_writer import write_bfloat16

_CONTROL_TOKEN = 3  # llama.cpp's token type of special tokens
_NORMAL_TOKEN = 1
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, target: Path) -> None:
    """Write config, tokenizer and bfloat16 weights of ``source`` into the directory ``target``.

    Raises ``DataLossError`` if the file is damaged or is not a Llama with a ``smollm`` tokenizer.
    """
    with GgufFile(source) as file:
        meta = file.metadata
        for key, expected in (
            ("general.architecture", "llama"),
            ("tokenizer.ggml.model", "gpt2"),
            ("tokenizer.ggml.pre", "smollm"),
        ):
            if meta.get(key) != expected:
                raise DataLossError(f"{source.name}: {key} is {meta.get(key)!r}, can convert {expected!r}")
        try:
            config = _config(meta, tied="output.weight" not in file.tensors)
            tokenizer = _tokenizer(meta)
            special = _special_tokens(meta)
            template = str(meta["tokenizer.chat_template"])
        except KeyError as error:
            raise DataLossError(f"{source.name}: has no metadata {error}") from error
        names = _tensor_names(int(config["num_hidden_layers"]), tied=bool(config["tie_word_embeddings"]))
        missing = sorted(set(names.values()) - set(file.tensors))
        if missing:
            raise DataLossError(f"{source.name}: has no tensor {missing[0]!r}")

        def load(name: str) -> npt.NDArray[np.float32]:
            return _rotary_halves(name, file.read(names[name]), config)

        shapes = {name: file.tensors[stored].shape for name, stored in names.items()}
        write_bfloat16(target / "model.safetensors", shapes, load)
    _write_json(target / "config.json", config)
    _write_json(
        target / "generation_config.json",
        {f"{kind}_token_id": config[f"{kind}_token_id"] for kind in ("bos", "eos", "pad")},
    )
    _write_json(target / "tokenizer.json", tokenizer)
    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            **special,
        },
    )
    (target / "chat_template.jinja").write_text(template, encoding="utf-8")


def _config(meta: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    heads = int(meta["llama.attention.head_count"])
    hidden = int(meta["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "num_hidden_layers": int(meta["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta.get("llama.attention.head_count_kv", heads)),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": int(meta["llama.context_length"]),
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(meta.get("llama.rope.freq_base", 10_000.0))},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(meta.get("tokenizer.ggml.padding_token_id", meta["tokenizer.ggml.eos_token_id"])),
    }


def _tensor_names(layers: int, *, tied: bool) -> dict[str, str]:
    """Name in the checkpoint → name in the GGUF file."""
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not tied:
        names["lm_head.weight"] = "output.weight"
    for layer in range(layers):
        for stored, ours in _LAYER_TENSORS.items():
            names[f"model.layers.{layer}.{ours}.weight"] = f"blk.{layer}.{stored}.weight"
    return names


def _rotary_halves(name: str, weight: npt.NDArray[np.float32], config: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's interleaving of the rows of q_proj and k_proj; other tensors as they are."""
    if name.endswith("q_proj.weight"):
        heads = config["num_attention_heads"]
    elif name.endswith("k_proj.weight"):
        heads = config["num_key_value_heads"]
    else:
        return weight
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(meta: Mapping[str, Any]) -> dict[str, Any]:
    """A ``tokenizer.json``: byte-level BPE with single digits."""
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    types: list[int] = meta.get("tokenizer.ggml.token_type", [_NORMAL_TOKEN] * len(tokens))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, **flags}
            for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind == _CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in meta["tokenizer.ggml.merges"]],
        },
    }


def _special_tokens(meta: Mapping[str, Any]) -> dict[str, str]:
    tokens = meta["tokenizer.ggml.tokens"]
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {name: meta.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[index] for name, index in found.items() if index is not None}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=None if len(str(value)) > 10_000 else 2), "utf-8")
