"""What one stage gives another: named tensors, or text, with a few small facts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

JsonValue = str | int | float | bool | None | list["JsonValue"] | dict[str, "JsonValue"]


@dataclasses.dataclass(frozen=True, slots=True)
class Payload:
    """One chunk of data between stages.

    Exactly one of ``text`` and ``tensors`` is meaningful; a payload with neither is an empty chunk. Producers give
    numpy arrays, torch tensors (on the CPU or a CUDA device) or bytes, of any shape and strides and of a dtype that
    ``connectors.dtypes`` lists. Consumers get read-only numpy views, or torch tensors where the data is in device
    memory, valid until the payload's handle is released; ``connectors.torch_tensors.as_torch`` makes tensors of both.
    """

    tensors: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    text: str | None = None
    metadata: Mapping[str, JsonValue] = dataclasses.field(default_factory=dict)
    buffer: Any = dataclasses.field(default=None, compare=False, repr=False)
    """The ``ManagedBuffer`` that the tensors lie in, if they do: see ``connectors.managed``."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors, or of the text as UTF-8."""
        if self.text is not None:
            return len(self.text.encode())
        return sum(len(t) if isinstance(t, bytes | bytearray) else int(t.nbytes) for t in self.tensors.values())
