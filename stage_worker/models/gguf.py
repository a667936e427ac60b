"""Reads GGUF files: metadata, and tensors as float32.

Only what the catalog needs: GGUF version 3, little-endian, tensors of type F32, F16, Q8_0 and Q4_1. Everything is
bounds-checked, a damaged file raises ``DataLossError``. Layouts are those of the GGUF specification and of ggml's
``block_q8_0`` and ``block_q4_1``.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from omnicore.errors import DataLossError

_MAGIC = b"GGUF"
_VERSION = 3
_DEFAULT_ALIGNMENT = 32
_BLOCK = 32  # values per quantised block, both types
_MAX_ITEMS = 1 << 24  # more metadata items or array elements than any tokenizer has: the file is damaged

# GGUF value types → struct formats. 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True, slots=True)
class _TensorType:
    name: str
    block_values: int
    block_bytes: int


# ggml tensor types. Q8_0: f16 scale, 32 × int8. Q4_1: f16 scale, f16 minimum, 32 × 4 bit.
_TENSOR_TYPES = {
    0: _TensorType("F32", 1, 4),
    1: _TensorType("F16", 1, 2),
    3: _TensorType("Q4_1", _BLOCK, 20),
    8: _TensorType("Q8_0", _BLOCK, 34),
}


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    """Row-major, as numpy and torch have it (GGUF itself writes the fastest dimension first)."""
    type_id: int
    offset: int
    """From the start of the file."""
    size_bytes: int


class GgufFile:
    """An open GGUF file. Use as a context manager; tensors are read on demand."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        try:
            self.metadata, self.tensors = self._parse()
        except (struct.error, UnicodeDecodeError) as error:
            self.close()
            raise DataLossError(f"{path.name}: not a readable GGUF file ({error})") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor ``name`` as float32 in its own memory. Raises ``DataLossError`` if the file has none."""
        info = self.tensors.get(name)
        if info is None:
            raise DataLossError(f"{self._path.name}: has no tensor {name!r}")
        raw = np.frombuffer(self._map[info.offset : info.offset + info.size_bytes], np.uint8)
        values: npt.NDArray[np.float32] = _DECODERS[_TENSOR_TYPES[info.type_id].name](raw)
        return values.reshape(info.shape)

    def _parse(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self._map[:4] != _MAGIC:
            raise DataLossError(f"{self._path.name}: not a GGUF file")
        self._at = 4
        version, tensor_count, item_count = self._unpack("IQQ")
        if version != _VERSION:
            raise DataLossError(f"{self._path.name}: GGUF version {version}, can read {_VERSION}")
        if tensor_count > _MAX_ITEMS or item_count > _MAX_ITEMS:
            raise DataLossError(f"{self._path.name}: damaged header")
        metadata: dict[str, Any] = {}
        for _ in range(item_count):
            key = self._string()
            metadata[key] = self._value(*self._unpack("I"))
        infos = [self._tensor_header() for _ in range(tensor_count)]
        alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        if alignment < 1:
            raise DataLossError(f"{self._path.name}: alignment {alignment}")
        start = math.ceil(self._at / alignment) * alignment
        return metadata, {info.name: self._placed(info, start) for info in infos}

    def _tensor_header(self) -> TensorInfo:
        name = self._string()
        (dimensions,) = self._unpack("I")
        if dimensions > 4:
            raise DataLossError(f"{self._path.name}: tensor {name!r} has {dimensions} dimensions")
        shape = tuple(int(n) for n in reversed(self._unpack("Q" * dimensions)))
        type_id, offset = self._unpack("IQ")
        kind = _TENSOR_TYPES.get(type_id)
        if kind is None:
            known = ", ".join(t.name for t in _TENSOR_TYPES.values())
            raise DataLossError(f"{self._path.name}: tensor {name!r} has type {type_id}, can read {known}")
        count = math.prod(shape)
        if not shape or count == 0 or shape[-1] % kind.block_values:
            raise DataLossError(f"{self._path.name}: tensor {name!r} has shape {shape} with type {kind.name}")
        return TensorInfo(name, shape, type_id, offset, count // kind.block_values * kind.block_bytes)

    def _placed(self, info: TensorInfo, start: int) -> TensorInfo:
        placed = dataclasses.replace(info, offset=start + info.offset)
        if placed.offset + placed.size_bytes > len(self._map):
            raise DataLossError(f"{self._path.name}: tensor {info.name!r} ends after the file does")
        return placed

    def _unpack(self, fmt: str) -> tuple[Any, ...]:
        packed = struct.Struct("<" + fmt)
        values = packed.unpack_from(self._map, self._at)
        self._at += packed.size
        return values

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        if self._at + length > len(self._map):
            raise DataLossError(f"{self._path.name}: a text ends after the file does")
        text = self._map[self._at : self._at + length].decode()
        self._at += length
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind, count = self._unpack("IQ")
            if count > _MAX_ITEMS:
                raise DataLossError(f"{self._path.name}: an array of {count} items")
            if item_kind in _SCALARS:
                return list(self._unpack(_SCALARS[item_kind] * count))
            return [self._value(item_kind) for _ in range(count)]
        if kind not in _SCALARS:
            raise DataLossError(f"{self._path.name}: unknown value type {kind}")
        return self._unpack(_SCALARS[kind])[0]


def _decode_f32(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    return raw.view("<f4").astype(np.float32)


def _decode_f16(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    return raw.view("<f2").astype(np.float32)


def _decode_q8_0(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    blocks = raw.reshape(-1, 34)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    return blocks[:, 2:].view(np.int8).astype(np.float32) * scale


def _decode_q4_1(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    blocks = raw.reshape(-1, 20)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    minimum = blocks[:, 2:4].copy().view("<f2").astype(np.float32)
    packed = blocks[:, 4:]
    # Low nibbles are values 0 to 15 of the block, high nibbles 16 to 31.
    values = np.concatenate([packed & 0x0F, packed >> 4], axis=1).astype(np.float32)
    return values * scale + minimum


_DECODERS = {"F32": _decode_f32, "F16": _decode_f16, "Q8_0": _decode_q8_0, "Q4_1": _decode_q4_1}
