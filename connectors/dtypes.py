"""Element types that cross the wire, by name.

numpy has no bfloat16 and no 8-bit floats. They travel under their own names and are, on both ends, unsigned integers of
the same width whose numpy dtype carries the name: an array of ``BFLOAT16`` is a ``uint16`` array in every respect, and
``dtype_name`` tells what its bits mean. Nothing depends on whether ml_dtypes is installed; arrays of its types are
accepted and sent under the same names. What consumers do with such an array:

    torch:      torch.from_numpy(array.copy()).view(torch.bfloat16)
    ml_dtypes:  array.view(ml_dtypes.bfloat16)

numpy keeps the name in views, slices, reshapes and copies, but not when arrays are combined: ``mark`` it again then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from omnicore import errors

_MARK = "omni_dtype"
_NUMPY_NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
RAW_NAMES = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
}


def _marked(name: str, carrier: str) -> np.dtype[Any]:
    return np.dtype(np.dtype(carrier), metadata={_MARK: name})


# Little-endian on the wire, which is native wherever this runs; "<" makes big-endian sources convert while copied.
DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name).newbyteorder("<") for name in _NUMPY_NAMES},
    **{name: _marked(name, carrier) for name, carrier in RAW_NAMES.items()},
}
"""Wire name → numpy dtype of the array that a consumer gets."""

BFLOAT16 = DTYPES["bfloat16"]
"""uint16 whose bits are a bfloat16."""


# By type, because ``dtype.name`` takes numpy microseconds.
_NATIVE = {np.dtype(name): name for name in _NUMPY_NAMES}


def mark(array: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    """A view of ``array`` (unsigned integers of the right width) whose bits are ``name``. Raises
    ``InvalidRequestError`` if they cannot be."""
    dtype = DTYPES.get(name)
    if dtype is None or array.dtype != dtype:
        raise errors.InvalidRequestError.field(
            "dtype", f"{array.dtype} cannot carry {name!r}; raw types are {RAW_NAMES}", reason="UNSUPPORTED_DTYPE"
        )
    return array.view(dtype)


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The wire name of a numpy dtype, of ml_dtypes' too. Raises ``InvalidRequestError`` for others."""
    if dtype.metadata is None and (known := _NATIVE.get(dtype)) is not None:
        return known
    facts: Mapping[str, Any] = dtype.metadata or {}
    name = facts.get(_MARK)
    if name in RAW_NAMES and dtype == RAW_NAMES[name]:
        return str(name)
    if dtype.name in _NUMPY_NAMES or dtype.name in RAW_NAMES:
        return dtype.name
    raise errors.InvalidRequestError.field(
        "dtype", f"cannot send {dtype}; accepted: {', '.join(DTYPES)}", reason="UNSUPPORTED_DTYPE"
    )


def raw_view(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """``array`` with elements that numpy itself can copy: unsigned integers where it holds ml_dtypes' types."""
    if array.dtype in _NATIVE:  # what an array is marked as does not count here
        return array
    carrier = RAW_NAMES.get(array.dtype.name)
    return array.view(carrier) if carrier is not None else array
