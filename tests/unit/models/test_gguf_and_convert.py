"""GGUF reading, bfloat16 writing and the Llama conversion, on a file that the test writes itself."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnicore.errors import DataLossError
from stage_worker.models import llama_gguf
from stage_worker.models.gguf import GgufFile
from stage_worker.models.safetensors_writer import to_bfloat16

HIDDEN, HEADS, LAYERS, FEED_FORWARD = 32, 2, 1, 64
TOKENS = ["<|endoftext|>", "<|im_start|>", "a", "b", "ab"]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def item(key: str, value: Any) -> bytes:
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    if isinstance(value, float):
        return text(key) + struct.pack("<If", 6, value)
    if isinstance(value, int):
        return text(key) + struct.pack("<II", 4, value)
    if isinstance(value[0], str):
        return text(key) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    return text(key) + struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)


METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": FEED_FORWARD,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100_000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.chat_template": "{{ messages }}",
}


def tensors() -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    random = np.random.default_rng(1)
    shapes = {
        "token_embd.weight": (len(TOKENS), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_up.weight": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FEED_FORWARD),
    }
    shapes |= {f"blk.0.attn_{name}.weight": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, metadata: dict[str, Any], values: dict[str, tuple[tuple[int, ...], int, bytes]]) -> None:
    """``values``: name → row-major shape, ggml type, raw bytes."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(values), len(metadata))
    head += b"".join(item(key, value) for key, value in metadata.items())
    body = b""
    for name, (shape, kind, raw) in values.items():
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += text(name) + dimensions + struct.pack("<IQ", kind, len(body))
        body += raw + b"\0" * (-len(raw) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + body)


def as_f32(values: dict[str, np.ndarray[Any, np.dtype[np.float32]]]) -> dict[str, tuple[tuple[int, ...], int, bytes]]:
    return {name: (value.shape, 0, value.tobytes()) for name, value in values.items()}


def test_quantised_blocks_are_read_as_ggml_defines_them(tmp_path: Path) -> None:
    nibbles = bytes(low | (high << 4) for low, high in zip(range(16), reversed(range(16)), strict=True))
    q4_1 = struct.pack("<ee", 0.5, -1.0) + nibbles
    q8_0 = struct.pack("<e", 0.25) + np.arange(-16, 16, dtype=np.int8).tobytes()
    path = tmp_path / "x.gguf"
    write_gguf(path, {"k": 1}, {"four": ((1, 32), 3, q4_1), "eight": ((32,), 8, q8_0)})
    with GgufFile(path) as file:
        four, eight = file.read("four"), file.read("eight")
    assert four.shape == (1, 32)
    assert four[0].tolist() == [0.5 * n - 1.0 for n in [*range(16), *reversed(range(16))]]
    assert eight.tolist() == [0.25 * n for n in range(-16, 16)]


@pytest.mark.parametrize("cut", [3, 20, 60, 300, -40])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, METADATA, as_f32(tensors()))
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataLossError, match=r"x\.gguf"):
        llama_gguf.convert(path, tmp_path)


def test_another_architecture_is_refused_with_both_names(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, METADATA | {"general.architecture": "qwen2"}, as_f32(tensors()))
    with pytest.raises(DataLossError, match=r"architecture is 'qwen2', can convert 'llama'"):
        llama_gguf.convert(path, tmp_path)


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -2.5, 0.0, 3.4e38], np.float32)
    back = (to_bfloat16(values).astype(np.uint32) << 16).view(np.float32)
    assert back[:5].tolist() == [1.0, 1.0, 1.015625, -2.5, 0.0]
    assert back[5] > 3.3e38


def test_conversion_writes_a_checkpoint_with_unpermuted_rotary_rows(tmp_path: Path) -> None:
    values = tensors()
    source = tmp_path / "x.gguf"
    write_gguf(source, METADATA, as_f32(values))
    target = tmp_path / "out"
    target.mkdir()
    llama_gguf.convert(source, target)

    config = json.loads((target / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert (config["hidden_size"], config["head_dim"], config["eos_token_id"]) == (HIDDEN, HIDDEN // HEADS, 0)
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    assert tokenizer["pre_tokenizer"]["pretokenizers"][0] == {"type": "Digits", "individual_digits": True}
    assert [token["content"] for token in tokenizer["added_tokens"]] == TOKENS[:2]
    assert tokenizer["model"]["merges"] == [["a", "b"]]

    stored = read_bfloat16(target / "model.safetensors")
    assert len(stored) == len(values)
    wanted = values["blk.0.attn_v.weight"]
    assert np.allclose(stored["model.layers.0.self_attn.v_proj.weight"], wanted, rtol=1e-2)
    # llama.cpp's converter: (head, 2, half, in) → (head, half, 2, in). Applied to our result it must give the file's.
    query = stored["model.layers.0.self_attn.q_proj.weight"]
    again = query.reshape(HEADS, 2, HIDDEN // HEADS // 2, HIDDEN).swapaxes(1, 2).reshape(HIDDEN, HIDDEN)
    assert np.allclose(again, values["blk.0.attn_q.weight"], rtol=1e-2)


def read_bfloat16(path: Path) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__")
    found = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        bits = np.frombuffer(raw[begin:end], "<u2").astype(np.uint32) << 16
        found[name] = bits.view(np.float32).reshape(entry["shape"])
    return found
