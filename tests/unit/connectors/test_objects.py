from __future__ import annotations

import collections
import contextlib
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from connectors import codec, objects
from connectors.payload import Payload
from omni.v1 import transfer_pb2
from omnicore import errors

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(2**62, 2**66),
    st.floats(allow_nan=True),
    st.text(max_size=8),
    st.binary(max_size=8),
)
ARRAYS = hnp.arrays(
    dtype=st.sampled_from([np.dtype(name) for name in ("bool", "int8", "uint16", "int64", "float16", "complex64")]),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
LEAVES = st.one_of(SCALARS, ARRAYS, st.integers(-9, 9).map(np.int32), st.binary(min_size=1500, max_size=1600))
OBJECTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(SCALARS, inner, max_size=4),
    ),
    max_leaves=20,
)


def carried(value: object) -> Any:
    """``value`` at the far end of a connector."""
    encoded = codec.encode(objects.to_payload(value))
    handle = transfer_pb2.TransferHandle(key="k")
    encoded.describe(handle)
    data = memoryview(encoded.to_bytes())
    return objects.from_payload(codec.decode(transfer_pb2.TransferHandle.FromString(handle.SerializeToString()), data))


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and bool(a.tobytes() == b.tobytes())
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)  # nan is nan, and -0.0 is not 0.0


@settings(deadline=None, max_examples=150)
@given(OBJECTS)
def test_objects_come_back_as_they_were(value: Any) -> None:
    assert same(carried(value), value)
    assert same(objects.from_payload(objects.to_payload(value), copy=True), value)


def test_torch_tensors_and_images_come_back() -> None:
    torch = pytest.importorskip("torch")
    image_module = pytest.importorskip("PIL.Image")
    sent = {
        "hidden": torch.arange(12, dtype=torch.float32).reshape(3, 4).to(torch.bfloat16).T,
        "kv": [(torch.ones(2), torch.zeros(0, 3)), None],
        "grad": torch.nn.Parameter(torch.tensor(2.5)),
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }
    got = carried(sent)
    assert got["hidden"].dtype == torch.bfloat16
    assert torch.equal(got["hidden"], sent["hidden"])
    assert torch.equal(got["kv"][0][0], torch.ones(2))
    assert got["kv"][0][1].shape == (0, 3)
    assert (float(got["grad"]), got["grad"].requires_grad) == (2.5, False)
    assert got["conjugate"][0] == 1 - 2j
    noise = np.random.default_rng(1).integers(0, 256, (7, 13, 3), dtype=np.uint8)
    picture = image_module.fromarray(noise)
    for mode in ("1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I", "F", "LA"):
        image = picture.convert(mode)
        arrived = carried([image])[0]
        assert (arrived.mode, arrived.size, arrived.tobytes()) == (mode, (13, 7), image.tobytes())
        assert arrived.convert("RGB").tobytes() == image.convert("RGB").tobytes()
    png = io.BytesIO()
    picture.save(png, "png")
    assert carried(image_module.open(png)).tobytes() == picture.tobytes(), "a file that is read when it is needed"
    assert carried(image_module.new("RGB", (0, 5))).size == (0, 5)


def test_views_by_default_and_copies_on_demand() -> None:
    payload = objects.to_payload([np.arange(4)])
    sent = payload.tensors["0"]
    assert np.shares_memory(objects.from_payload(payload)[0], sent)
    assert not np.shares_memory(objects.from_payload(payload, copy=True)[0], sent)
    torch = pytest.importorskip("torch")
    (view,) = carried([torch.ones(3)])  # read-only memory, and no warning (they are errors here)
    assert view.tolist() == [1, 1, 1]


def cycle() -> list[Any]:
    inner: list[Any] = []
    inner.append({"again": [inner]})
    return inner


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def wide() -> list[Any]:
    value: list[Any] = [0] * 100
    for _ in range(3):
        value = [value] * 100
    return value


class Text(str):
    pass


@pytest.mark.parametrize(
    ("value", "path", "reason"),
    [
        ({"a": [1, {2}]}, "object['a'][1]", "UNSUPPORTED_TYPE"),
        ([Path("/")], "object[0]", "UNSUPPORTED_TYPE"),
        (Text("x"), "object", "UNSUPPORTED_TYPE"),
        (collections.OrderedDict(), "object", "UNSUPPORTED_TYPE"),
        ({(1, 2): 3}, "object[(1, 2)]", "UNSUPPORTED_TYPE"),
        (["\ud800"], "object[0]", "UNSUPPORTED_TYPE"),
        ([np.array(["a"])], "object[0]", "UNSUPPORTED_TYPE"),
        ([np.array([print])], "object[0]", "UNSUPPORTED_TYPE"),
        ((cycle(),), "object[0][0]['again'][0]", "CYCLE"),
        (deep(64), "object" + "[0]" * 64, "TOO_DEEP"),
        ([np.zeros(1)] * 4096, "object[4095]", "TOO_LARGE"),
        (wide(), "object[0]", "TOO_LARGE"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_sent_is_named(value: Any, path: str, reason: str) -> None:
    with pytest.raises(errors.InvalidRequestError) as caught:
        objects.to_payload(value)
    assert caught.value.reason == reason
    assert caught.value.message.startswith(path)
    assert carried(deep(63)) == deep(63)


def test_sparse_tensors_are_refused_by_path() -> None:
    torch = pytest.importorskip("torch")
    for tensor in (torch.eye(2).to_sparse(), torch.ones(2, device="meta")):
        with pytest.raises(errors.InvalidRequestError, match=r"object\['t'\]"):
            objects.to_payload({"t": tensor})


@pytest.mark.parametrize(
    "tree",
    [
        *(
            {"x": 1},
            {"d": [[1]]},
            {"d": 3},
            {"d": [[[], 1]]},
            {"d": [[1, 2], [1, 3]]},
            {"t": 1},
            {"i": "1.5"},
            {"i": 5},
        ),
        *({"f": "1"}, {"f": []}, {"b": "%"}, {"a": 7}, {"a": "0"}, {"a": True}, {"s": 0}, {"B": None}, {}),
        *({"a": 0, "b": 1}, {"P": {"n": 0}}, {"P": 0}, deep(80)),
        *({"P": {"n": 0, "mode": mode, "size": size}} for mode in ("RGB", "L", "no", 5) for size in ([1, 4], [-1, 1])),
        *({"P": {"n": 1, "mode": "P", "size": [2, 2], "palette": p, "colors": "RGB"}} for p in ([256], ["a"], 5)),
    ],
    ids=str,
)
def test_what_nobody_sends_is_refused(tree: Any) -> None:
    tensors = {
        "omni.object": np.frombuffer(orjson.dumps([tree]), np.uint8),
        "0": np.arange(3),
        "1": np.zeros(4, np.uint8),
    }
    with pytest.raises(errors.DataLossError) as caught:
        objects.from_payload(Payload(tensors))
    assert caught.value.reason == "BAD_OBJECT"


def test_pickles_and_other_payloads_are_no_objects() -> None:
    for tensors in ({}, {"x": np.zeros(1)}, {"omni.object": np.frombuffer(pickle.dumps(print), np.uint8)}):
        with pytest.raises(errors.DataLossError):
            objects.from_payload(Payload(tensors))
    with pytest.raises(errors.DataLossError):
        objects.from_payload(Payload(text="{}"))


@settings(deadline=None, max_examples=60)
@given(OBJECTS, st.data())
def test_damaged_structure_is_an_error_or_another_object(value: Any, data: st.DataObject) -> None:
    payload = objects.to_payload(value)
    tree = bytearray(payload.tensors["omni.object"].tobytes())
    tree[data.draw(st.integers(0, len(tree) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(errors.OmniError):
        objects.from_payload(Payload({**payload.tensors, "omni.object": np.frombuffer(bytes(tree), np.uint8)}))
