"""Writes safetensors files of bfloat16 tensors, one tensor in memory at a time.

The format: eight bytes of header length, a JSON header, then the tensors without gaps. numpy has no bfloat16, so the
values are rounded here (to nearest, ties to even, as torch does).
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

_ITEM_BYTES = 2


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bit patterns of finite float32 values as bfloat16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_bfloat16(
    path: Path, shapes: Mapping[str, Sequence[int]], load: Callable[[str], npt.NDArray[np.float32]]
) -> None:
    """Write one file with the tensors of ``shapes``, asking ``load`` for each in turn; on disk when it returns."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * _ITEM_BYTES
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data begins aligned to eight bytes
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for name, shape in shapes.items():
            tensor = load(name)
            if tensor.shape != tuple(shape):
                raise ValueError(f"{name}: shape {tensor.shape}, announced {tuple(shape)}")
            file.write(to_bfloat16(tensor).astype("<u2").tobytes())
        file.flush()
        os.fsync(file.fileno())
