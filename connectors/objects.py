"""Structured objects as payloads, and back, by a closed list of types: nothing that arrives can name code to run.

Accepted: None, bool, int (any size), float, str, bytes, list, tuple, dict (keys: str, int, float, bool, None, bytes),
numpy arrays and scalars, torch tensors, PIL images, nested up to ``MAX_DEPTH``. What arrives is of exactly the type
that was sent, with these exceptions: bytearray and memoryview arrive as bytes, arrays little-endian and C-contiguous,
device tensors on the CPU, images with their pixels, mode and palette only. Types that are not exactly one of these
(subclasses too) are refused by path, as are cycles. An object that stands in two places is sent twice.

The structure is JSON in the tensor ``TREE``; every array, tensor, image and longer byte string is a tensor of its own,
named by its number, which moves without being looked at. JSON values stand for themselves; whatever JSON has not is an
object with one key, its tag::

    {"d": [[key, value], …]}   dict          {"t": [value, …]}        tuple
    {"i": "123…"}              large int     {"f": "nan"|"inf"|"-inf"}
    {"b": "base64"}            short bytes   {"B": n}                 bytes in tensor n
    {"a": n}, {"s": n}         numpy array, numpy scalar              {"T": n}  torch tensor
    {"P": {…}}                 PIL image     in tensor n
"""

from __future__ import annotations

import base64
import binascii
import math
from typing import Any

import numpy as np
import orjson

from connectors import images
from connectors.codec import MAX_TENSORS
from connectors.dtypes import dtype_name
from connectors.payload import Payload
from connectors.torch_tensors import as_torch, from_torch, is_torch
from omnicore import errors

TREE = "omni.object"
"""Name of the tensor that holds the structure."""
MAX_DEPTH = 64
"""Levels of nesting. Deeper is a mistake, and recursion has an end."""
MAX_TREE_BYTES = 64 * 1024 * 1024
"""Of structure: parsed JSON takes about ten times as much memory."""
MAX_NODES = 1_000_000
"""Values in one object: a small one that holds the same list again and again would fill memory before it is refused."""
_ACCEPTED = "None, bool, int, float, str, bytes, list, tuple, dict, numpy arrays, torch tensors, PIL images"
_SHORT_BYTES = 1024
_EXACT_INT = 2**63
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_payload(value: object) -> Payload:
    """A payload of ``value``; arrays in it are not copied. Raises ``InvalidRequestError`` that names the path of what
    cannot be sent (reason UNSUPPORTED_TYPE, CYCLE, TOO_DEEP or TOO_LARGE)."""
    writer = _Writer()
    tree = orjson.dumps(writer.node(value, "object"))
    if len(tree) > MAX_TREE_BYTES:
        raise _refused("object", f"has {len(tree)} bytes of structure, at most {MAX_TREE_BYTES} fit", "TOO_LARGE")
    return Payload({TREE: np.frombuffer(tree, np.uint8), **writer.tensors})


def is_object(payload: Payload) -> bool:
    """The payload was made by ``to_payload``."""
    return payload.text is None and TREE in payload.tensors


def from_payload(payload: Payload, *, copy: bool = False) -> Any:
    """The object that was sent. Arrays are read-only views, valid as long as the payload's; with ``copy``, writable and
    their own. Raises ``DataLossError`` (BAD_OBJECT) naming the path of what is not as ``to_payload`` makes it, and
    ``FailedPreconditionError`` (LIBRARY_MISSING) for torch tensors or images where that library is missing."""
    if not is_object(payload):
        raise _bad("object", f"no tensor {TREE!r}: this payload is not a structured object")
    try:
        raw = np.asarray(payload.tensors[TREE])
        tree = orjson.loads(raw.tobytes() if raw.nbytes <= MAX_TREE_BYTES else b"")
    except orjson.JSONDecodeError as error:
        raise _bad("object", f"its structure is not JSON: {error}") from None
    return _Reader(payload, copy).value(tree, "object", 0)


class _Writer:
    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self._open: set[int] = set()
        self._nodes = 0

    def node(self, value: Any, path: str) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise _refused(path, f"the object has more than {MAX_NODES} values", "TOO_LARGE")
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return self._text(value, path)
        if kind is int:
            return value if -_EXACT_INT <= value < _EXACT_INT else {"i": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"f": str(value)}
        if kind in (list, tuple, dict):
            return self._container(value, path)
        if kind in (bytes, bytearray, memoryview):
            return self._bytes(value, path)
        return self._array(value, path)

    def _container(self, value: Any, path: str) -> Any:
        if id(value) in self._open:
            raise _refused(path, "contains itself", "CYCLE")
        if len(self._open) >= MAX_DEPTH:
            raise _refused(path, f"is nested deeper than {MAX_DEPTH} levels", "TOO_DEEP")
        self._open.add(id(value))
        try:
            if isinstance(value, dict):
                return {"d": [[self._key(k, path), self.node(v, f"{path}[{k!r}]")] for k, v in value.items()]}
            items = [self.node(item, f"{path}[{index}]") for index, item in enumerate(value)]
        finally:
            self._open.discard(id(value))
        return {"t": items} if isinstance(value, tuple) else items

    def _key(self, key: Any, path: str) -> Any:
        if key is not None and type(key) not in (str, int, float, bool, bytes):
            raise _refused(f"{path}[{key!r}]", f"has a key of type {_name(key)}", "UNSUPPORTED_TYPE")
        if type(key) is bytes:
            return {"b": base64.b64encode(key).decode()}
        return self.node(key, f"{path}[{key!r}]")

    @staticmethod
    def _text(value: str, path: str) -> str:
        try:
            if not value.isascii():
                value.encode()
        except UnicodeEncodeError as error:
            raise _refused(path, f"is not valid Unicode: {error}", "UNSUPPORTED_TYPE") from None
        return value

    def _bytes(self, value: bytes | bytearray | memoryview, path: str) -> Any:
        view = memoryview(value)
        raw = np.frombuffer(view if view.c_contiguous else view.tobytes(), np.uint8)
        if raw.nbytes <= _SHORT_BYTES:
            return {"b": base64.b64encode(raw.data).decode()}
        return {"B": self._add(raw, path)}

    def _array(self, value: Any, path: str) -> Any:
        try:
            if type(value) is np.ndarray or isinstance(value, np.generic):
                dtype_name(value.dtype)
                return {"s" if isinstance(value, np.generic) else "a": self._add(np.asarray(value), path)}
            if is_torch(value):
                from_torch(value)
                return {"T": self._add(value, path)}
        except errors.InvalidRequestError as error:
            if error.reason == "TOO_LARGE":
                raise
            raise _refused(path, error.message, "UNSUPPORTED_TYPE") from None
        if images.is_image(value):
            facts, pixels = images.to_array(value, path)
            return {"P": {**facts, "n": self._add(pixels, path)}}
        raise _refused(
            path,
            f"has type {_name(value)}; accepted: {_ACCEPTED}",
            "UNSUPPORTED_TYPE",
        )

    def _add(self, tensor: Any, path: str) -> int:
        if len(self.tensors) >= MAX_TENSORS - 1:
            raise _refused(
                path, f"is array number {MAX_TENSORS}; at most {MAX_TENSORS - 1} fit: stack them", "TOO_LARGE"
            )
        number = len(self.tensors)
        self.tensors[str(number)] = tensor
        return number


class _Reader:
    def __init__(self, payload: Payload, copy: bool) -> None:
        self._payload = payload
        self._copy = copy

    def value(self, node: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise _bad(path, f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(node, list):
            return [self.value(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(node)]
        if not isinstance(node, dict):
            return node
        if len(node) != 1:
            raise _bad(path, f"a node has {len(node)} tags")
        ((tag, inner),) = node.items()
        if tag == "d":
            return self._dict(inner, path, depth)
        if tag == "t" and isinstance(inner, list):
            return tuple(self.value(inner, path, depth))
        if tag in ("a", "s", "T", "B", "P"):
            return self._array(tag, inner, path)
        return self._scalar(tag, inner, path)

    def _dict(self, inner: Any, path: str, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for pair in inner if isinstance(inner, list) else [None]:
            if not isinstance(pair, list) or len(pair) != 2:
                raise _bad(path, "a dict is not a list of pairs")
            key = self.value(pair[0], path, depth + 1)
            if isinstance(key, list | dict | tuple | np.ndarray) or key in found:
                raise _bad(path, f"a key is {type(key).__name__}, or there twice")
            found[key] = self.value(pair[1], f"{path}[{key!r}]", depth + 1)
        return found

    @staticmethod
    def _scalar(tag: str, inner: Any, path: str) -> Any:
        try:
            if tag == "i" and isinstance(inner, str):
                return int(inner, 16)
            if tag == "f":
                return _FLOATS[inner]
            if tag == "b" and isinstance(inner, str):
                return base64.b64decode(inner, validate=True)
        except (ValueError, KeyError, TypeError, binascii.Error):
            raise _bad(path, f"{inner!r} is no value of tag {tag!r}") from None
        raise _bad(path, f"no value has the tag {tag!r}; this version reads d t i f b B a s T P")

    def _array(self, tag: str, inner: Any, path: str) -> Any:
        if (tag == "P") != isinstance(inner, dict):
            raise _bad(path, f"{inner!r} is no value of tag {tag!r}")
        number = inner.get("n") if tag == "P" else inner
        array = self._payload.tensors.get(str(number)) if type(number) is int else None
        if array is None:
            raise _bad(path, f"there is no tensor {number!r}")
        if is_torch(array):  # of a connector that gives device memory
            array = array.clone() if self._copy else array
            if tag == "T":
                return array
            array = array.cpu().numpy()
        elif self._copy and tag in ("a", "T"):
            array = array.copy()
        if tag == "a":
            return array
        if tag == "T":
            return as_torch(array)
        if tag == "B":
            return array.tobytes()
        if tag == "s":
            if array.shape:
                raise _bad(path, f"a scalar of shape {array.shape}")
            return array[()]
        return images.from_array(inner, array, path)


def _name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _refused(path: str, why: str, reason: str) -> errors.InvalidRequestError:
    return errors.InvalidRequestError.field(path, why, reason=reason)


def _bad(path: str, why: str) -> errors.DataLossError:
    return errors.DataLossError(f"{path}: {why}", reason="BAD_OBJECT", metadata={"path": path})
