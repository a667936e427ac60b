"""What one stage gives another: named tensors, or text, with a few small facts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

JsonValue = str | int | float | bool | None | list["JsonValue"] | dict[str, "JsonValue"]


@dataclasses.dataclass(frozen=True, slots=True)
class Payload:
    """One chunk of data between stages.

    Exactly one of ``text`` and ``tensors`` is meaningful; a payload with neither is an empty chunk. Tensors are numpy
    arrays of any shape and of a dtype that ``connectors.codec`` lists; consumers get read-only views that are valid
    until the payload's handle is released.
    """

    tensors: Mapping[str, npt.NDArray[Any]] = dataclasses.field(default_factory=dict)
    text: str | None = None
    metadata: Mapping[str, JsonValue] = dataclasses.field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors, or of the text as UTF-8."""
        if self.text is not None:
            return len(self.text.encode())
        return sum(int(np.asarray(tensor).nbytes) for tensor in self.tensors.values())
