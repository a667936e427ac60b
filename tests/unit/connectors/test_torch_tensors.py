from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from connectors import codec, dtypes
from connectors.payload import Payload
from connectors.torch_tensors import as_torch
from omni.v1 import transfer_pb2
from omnicore import errors

torch = pytest.importorskip("torch")


def carried(tensor: Any) -> Any:
    """The array at the far end, read-only as consumers get it."""
    encoded = codec.encode(Payload({"x": tensor}))
    handle = transfer_pb2.TransferHandle(key="k")
    encoded.describe(handle)
    return codec.decode(handle, memoryview(encoded.to_bytes())).tensors["x"]


@pytest.mark.parametrize("name", [name for name in dtypes.DTYPES if hasattr(torch, name)])
def test_every_type_arrives_bit_for_bit(name: str) -> None:
    raw = torch.arange(96, dtype=torch.uint8) % (2 if name == "bool" else 251)
    sent = raw.view(getattr(torch, name)).reshape(2, -1, 3)
    got = carried(sent)
    assert dtypes.dtype_name(got.dtype) == name
    back = as_torch(got)
    assert (back.dtype, back.shape) == (sent.dtype, sent.shape)
    assert torch.equal(back.flatten().view(torch.uint8), raw)


def test_any_strides_and_no_gradient() -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    for sent in (
        base.transpose(0, 2),
        base[:, ::2],
        base[0].expand(5, 3, 4),
        torch.tensor(3.0),
        base.to(torch.bfloat16).mT,
    ):
        assert torch.equal(as_torch(carried(sent)), sent)
    assert torch.equal(as_torch(carried(torch.nn.Parameter(base))), base)
    assert Payload({"x": base}).size_bytes == 96


def test_nothing_is_copied_on_the_way_in_or_out() -> None:
    sent = torch.ones(8, dtype=torch.bfloat16)
    (source,) = codec.encode(Payload({"x": sent})).arrays
    assert isinstance(source, np.ndarray)
    assert source.__array_interface__["data"][0] == sent.data_ptr()
    array = carried(sent)
    assert not array.flags.writeable
    back = as_torch(array)
    assert back.data_ptr() == array.__array_interface__["data"][0]
    del array
    assert back.tolist() == [1.0] * 8, "the memory lives as long as the tensor"
    assert as_torch(back) is back


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(2).to_sparse(), torch.ones(2, device="meta")],
    ids=["sparse", "meta"],
)
def test_what_does_not_travel_is_named(tensor: Any) -> None:
    with pytest.raises(errors.InvalidRequestError, match=r"payload.tensors\['x'\]"):
        codec.encode(Payload({"x": tensor}))


@pytest.mark.parametrize("array", [np.arange(3)[::-1], np.arange(3, dtype=">i4")], ids=["reversed", "big-endian"])
def test_what_torch_cannot_share_is_refused(array: Any) -> None:
    with pytest.raises(errors.InvalidRequestError):
        as_torch(array)


def test_nobody_who_does_not_use_torch_imports_it() -> None:
    code = (
        "import sys, numpy; from connectors import codec, objects, connector_set\n"
        "from connectors.payload import Payload\n"
        "codec.encode(Payload({'x': numpy.zeros(3)})); objects.to_payload([1, numpy.zeros(3)])\n"
        "assert 'torch' not in sys.modules and 'PIL' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
