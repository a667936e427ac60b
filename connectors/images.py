"""PIL images as arrays of bytes, and back. PIL is looked up, never imported, by who only sends."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from omnicore import errors

MODES = {
    "1": 0,
    **dict.fromkeys(("L", "P"), 8),
    **dict.fromkeys(("LA", "PA", "La", "I;16"), 16),
    **dict.fromkeys(("RGB", "YCbCr", "LAB", "HSV"), 24),
    **dict.fromkeys(("RGBA", "RGBa", "RGBX", "CMYK", "I", "F"), 32),
}
"""PIL mode → bits of a pixel in ``tobytes``; of mode "1", rows are padded to whole bytes."""
MAX_PIXELS = 2**30
"""More is no picture; PIL's own limit (a tenth of it) is a warning about files, which these are not."""


def is_image(value: object) -> bool:
    """``value`` is a PIL image. False where PIL is not loaded: then there is none."""
    module = sys.modules.get("PIL.Image")
    kind = getattr(module, "Image", None)
    return kind is not None and isinstance(value, kind)


def to_array(image: Any, path: str) -> tuple[dict[str, Any], npt.NDArray[np.uint8]]:
    """Facts for JSON, and the pixels. Raises ``InvalidRequestError`` for a mode that does not travel."""
    if image.mode not in MODES:
        raise errors.InvalidRequestError.field(
            path, f"an image of mode {image.mode!r}; accepted: {', '.join(MODES)}", reason="UNSUPPORTED_TYPE"
        )
    facts: dict[str, Any] = {"mode": image.mode, "size": list(image.size)}
    if image.mode in ("P", "PA"):
        facts["palette"] = image.getpalette("RGBA") if "A" in image.palette.mode else image.getpalette("RGB")
        facts["colors"] = "RGBA" if "A" in image.palette.mode else "RGB"
    return facts, np.frombuffer(image.tobytes(), np.uint8)


def from_array(facts: Mapping[str, Any], pixels: npt.NDArray[Any], path: str) -> Any:
    """The image. Raises ``DataLossError`` (BAD_OBJECT) for facts that do not fit the pixels, and
    ``FailedPreconditionError`` (LIBRARY_MISSING) without PIL."""
    try:
        from PIL import Image
    except ImportError as error:
        raise errors.FailedPreconditionError(
            f"{path}: an image, and PIL cannot be imported: {error}",
            reason="LIBRARY_MISSING",
            metadata={"library": "pillow"},
        ) from error
    mode, size = facts.get("mode"), facts.get("size")
    if not isinstance(mode, str) or mode not in MODES or not _is_size(size) or _bytes_of(mode, *size) != pixels.nbytes:
        raise errors.DataLossError(
            f"{path}: an image of mode {mode!r} and size {size!r} does not have {pixels.nbytes} bytes",
            reason="BAD_OBJECT",
            metadata={"path": path},
        )
    image = Image.frombytes(mode, tuple(size), pixels.tobytes()) if pixels.nbytes else Image.new(mode, tuple(size))
    if mode in ("P", "PA"):
        palette, colors = facts.get("palette"), facts.get("colors")
        if colors not in ("RGB", "RGBA") or not _is_palette(palette, len(colors)):
            raise errors.DataLossError(
                f"{path}: an image without palette", reason="BAD_OBJECT", metadata={"path": path}
            )
        image.putpalette(palette, colors)
    return image


def _bytes_of(mode: str, width: int, height: int) -> int:
    return -(-width * MODES[mode] // 8) * height if mode != "1" else -(-width // 8) * height


def _is_size(size: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(size, list)
        and len(size) == 2
        and all(type(side) is int and side >= 0 for side in size)
        and size[0] * size[1] <= MAX_PIXELS
    )


def _is_palette(palette: Any, width: int) -> TypeGuard[list[int]]:
    return (
        isinstance(palette, list)
        and len(palette) <= 256 * width
        and len(palette) % width == 0
        and all(type(entry) is int and 0 <= entry < 256 for entry in palette)
    )
