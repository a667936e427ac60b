from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from connectors import codec, dtypes
from connectors.payload import JsonValue, Payload
from omni.v1 import transfer_pb2
from omnicore import errors

ARRAYS = hnp.arrays(
    dtype=st.sampled_from([np.dtype(name) for name in dtypes.DTYPES if "float8" not in name and name != "bfloat16"]),
    shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
)


def to_handle(payload: Payload) -> tuple[transfer_pb2.TransferHandle, memoryview]:
    encoded = codec.encode(payload)
    handle = transfer_pb2.TransferHandle(key="k")
    encoded.describe(handle)
    if encoded.in_handle:
        handle.inline.SetInParent()
        return handle, memoryview(b"")
    target = bytearray(b"\xff" * encoded.size_bytes)
    encoded.write_into(memoryview(target))
    return handle, memoryview(target)


def same(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@settings(deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=8), ARRAYS, max_size=4))
def test_tensors_come_back_bit_for_bit(tensors: dict[str, npt.NDArray[Any]]) -> None:
    handle, data = to_handle(Payload(tensors=tensors))
    got = codec.decode(handle, data).tensors
    assert list(got) == list(tensors)
    for name, tensor in tensors.items():
        assert same(got[name], tensor)
        assert not got[name].flags.writeable


def test_views_are_aligned_and_gaps_hold_nothing() -> None:
    handle, data = to_handle(Payload(tensors={"a": np.ones(3, np.uint8), "b": np.ones(5, np.float64)}))
    assert [spec.offset_bytes for spec in handle.tensors] == [0, 64]
    assert bytes(data[3:64]) == bytes(61)
    base = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    got = codec.decode(handle, data).tensors["b"]
    assert got.__array_interface__["data"][0] - base == 64, "a copy was made"


@pytest.mark.parametrize(
    "source",
    [
        np.arange(24, dtype=np.float32).reshape(4, 6).T,
        np.arange(24, dtype=np.int16)[::3],
        np.arange(24, dtype=np.int64).reshape(2, 3, 4)[:, ::-1],
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(6, dtype=">f4"),
        np.broadcast_to(np.float32(3), (2, 5)),
    ],
    ids=["transposed", "strided", "reversed", "fortran", "big-endian", "broadcast"],
)
def test_any_layout_is_sent_contiguous_and_little_endian(source: npt.NDArray[Any]) -> None:
    handle, data = to_handle(Payload(tensors={"x": source}))
    got = codec.decode(handle, data).tensors["x"]
    np.testing.assert_array_equal(got, source)
    assert got.flags.c_contiguous


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
def test_types_that_numpy_lacks_keep_their_bits_and_their_name(name: str) -> None:
    carrier = np.uint16 if name == "bfloat16" else np.uint8
    bits = np.arange(200, dtype=carrier).reshape(20, 10)
    handle, data = to_handle(Payload(tensors={"x": dtypes.mark(bits, name)}))
    assert handle.tensors[0].dtype == name
    got = codec.decode(handle, data).tensors["x"]
    np.testing.assert_array_equal(got, bits)
    assert dtypes.dtype_name(got.dtype) == name
    forwarded, _ = to_handle(Payload(tensors={"y": got[1:]}))
    assert forwarded.tensors[0].dtype == name


def test_plain_integers_are_not_taken_for_raw_floats() -> None:
    assert dtypes.dtype_name(np.dtype(np.uint16)) == "uint16"
    with pytest.raises(errors.InvalidRequestError, match="cannot carry 'bfloat16'"):
        dtypes.mark(np.zeros(3, np.int32), "bfloat16")
    with pytest.raises(errors.InvalidRequestError, match="cannot carry 'float4'"):
        dtypes.mark(np.zeros(3, np.uint8), "float4")


@pytest.mark.parametrize("text", ["", "añ😀", "x" * 65536, "é" * 40000])
def test_text_comes_back_short_or_long(text: str) -> None:
    handle, data = to_handle(Payload(text=text, metadata={"n": 1}))
    assert handle.HasField("text") == (len(text.encode()) <= codec.MAX_HANDLE_TEXT_BYTES)
    assert handle.size_bytes == len(text.encode())
    got = codec.decode(handle, data)
    assert (got.text, got.metadata) == (text, {"n": 1})


def test_an_empty_payload_stays_empty() -> None:
    handle, data = to_handle(Payload())
    assert (handle.size_bytes, handle.HasField("text")) == (0, False)
    assert codec.decode(handle, data) == Payload()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=8), JSON, max_size=4))
def test_metadata_comes_back(metadata: dict[str, JsonValue]) -> None:
    handle, data = to_handle(Payload(metadata=metadata))
    got = codec.decode(handle, data).metadata
    assert got == metadata
    parsed = transfer_pb2.TransferHandle.FromString(handle.SerializeToString())
    assert parsed == handle


def test_whole_numbers_come_back_as_int() -> None:
    handle, data = to_handle(Payload(metadata={"sample_rate_hz": 24000, "gain": 0.5}))
    got = codec.decode(handle, data).metadata
    assert isinstance(got["sample_rate_hz"], int)
    assert isinstance(got["gain"], float)


deep: JsonValue = 1
for _ in range(40):
    deep = [deep]


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (Payload(text="a", tensors={"x": np.zeros(1)}), "both text and tensors"),
        (Payload(text="\ud800"), "not valid Unicode"),
        (Payload(tensors={"o": np.array([object()])}), r"tensors\['o'\].*cannot send object; accepted: bool"),
        (Payload(tensors={"s": np.array(["a"])}), r"tensors\['s'\].*cannot send"),
        (Payload(tensors={"t": np.zeros(1, "M8[s]")}), r"tensors\['t'\].*cannot send"),
        (Payload(tensors={"v": np.zeros(1, [("a", "i4")])}), r"tensors\['v'\].*cannot send"),
        (Payload(tensors={"l": [1, 2]}), "must be a numpy array, a torch tensor or bytes, got list"),
        (Payload(tensors={"": np.zeros(1)}), "non-empty"),
        (Payload(tensors={"d": np.zeros((1,) * 33)}), "33 dimensions"),
        (Payload(tensors={f"t{i}": np.zeros(0) for i in range(4097)}), "4097, at most 4096"),
        (Payload(metadata={"a": {"b": [1, b"raw"]}}), r"metadata.a.b\[1\].*got bytes"),  # type: ignore[list-item]
        (Payload(metadata={"n": float("nan")}), "metadata.n.*finite"),
        (Payload(metadata={"n": 2**53 + 1}), r"metadata.n.*2\*\*53"),
        (Payload(metadata={"d": deep}), "nested deeper"),
        (Payload(metadata={"big": "x" * 70000}), "at most 65536"),
        (Payload(metadata={1: 2}), "keys must be strings"),  # type: ignore[dict-item]
        (Payload(tensors={"\ud800": np.zeros(1)}), r"tensors\['\\ud800'\].*not valid Unicode"),
        (Payload(metadata={"a": {"\ud800": 1}}), "metadata.a: is not valid Unicode"),
        (Payload(metadata={"a": ["\ud800"]}), r"metadata.a\[0\].*not valid Unicode"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_sent_is_named(payload: Payload, message: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match=message) as caught:
        codec.encode(payload)
    assert caught.value.violations


def spec(**changes: Any) -> transfer_pb2.TransferHandle:
    handle, _ = to_handle(Payload(tensors={"a": np.ones((2, 3), np.int32), "b": np.ones(4, np.float64)}))
    target = handle.tensors[1] if changes.pop("second", False) else handle.tensors[0]
    for name, value in changes.items():
        if name == "size":
            handle.size_bytes = value
        elif name == "shape":
            target.shape[:] = value
        else:
            setattr(target, name, value)
    return handle


@pytest.mark.parametrize(
    "handle",
    [
        spec(size=0),
        spec(size=95),
        spec(size=97),
        spec(size=2**63),
        spec(size_bytes=23),
        spec(size_bytes=0),
        spec(size_bytes=2**64 - 1),
        spec(offset_bytes=4),
        spec(second=True, offset_bytes=0),
        spec(second=True, offset_bytes=128),
        spec(second=True, offset_bytes=2**64 - 64),
        spec(shape=[2, 4]),
        spec(shape=[]),
        spec(shape=[0, 2**63], size_bytes=0),
        spec(shape=[2**40, 0, 2**40], size_bytes=0),
        spec(shape=[1] * 33),
        spec(dtype="int64"),
        spec(dtype="utf8"),
        spec(name=""),
        spec(second=True, name="a"),
    ],
)
def test_headers_that_do_not_fit_together_are_refused(handle: transfer_pb2.TransferHandle) -> None:
    with pytest.raises(errors.DataLossError) as caught:
        codec.decode(handle, memoryview(bytes(96)))
    assert caught.value.reason == "BAD_HANDLE"


def test_dtype_of_a_later_version_is_named() -> None:
    with pytest.raises(errors.UnimplementedError, match=r"'float4'.*reads bool"):
        codec.decode(spec(dtype="float4"), memoryview(bytes(96)))


@pytest.mark.parametrize("length", [0, 95, 97])
def test_data_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(errors.DataLossError) as caught:
        codec.decode(spec(), memoryview(bytes(length)))
    assert caught.value.reason == "WRONG_LENGTH"


def test_long_text_that_is_not_utf8_is_refused() -> None:
    handle, data = to_handle(Payload(text="x" * 70000))
    broken = bytearray(data)
    broken[100] = 0xFF
    with pytest.raises(errors.DataLossError, match="not UTF-8"):
        codec.decode(handle, memoryview(broken))


@pytest.mark.parametrize("text", [None, "short", "long" * 30000])
def test_checksum_finds_one_flipped_bit(text: str | None) -> None:
    handle, data = to_handle(Payload(tensors={"a": np.arange(100)}) if text is None else Payload(text=text))
    handle.crc32 = zlib.crc32(handle.text.encode() if handle.HasField("text") else data)
    codec.check_checksum(handle, data)
    if handle.HasField("text"):
        handle.text = "Short"
    else:
        broken = bytearray(data)
        broken[17] ^= 1
        data = memoryview(broken)
    with pytest.raises(errors.DataLossError) as caught:
        codec.check_checksum(handle, data)
    assert caught.value.reason == "WRONG_CHECKSUM"


def test_bytes_are_sent_as_they_are() -> None:
    for raw in (b"abc", bytearray(b"abc"), memoryview(b"xabc")[1:]):
        handle, data = to_handle(Payload({"x": raw, "empty": b""}))
        got = codec.decode(handle, data).tensors
        assert (got["x"].tobytes(), got["empty"].nbytes) == (b"abc", 0)
        assert Payload({"x": raw}).size_bytes == 3
    with pytest.raises(errors.InvalidRequestError, match=r"payload\.tensors"):
        codec.encode(Payload({"x": memoryview(b"abcd")[::2]}))
