"""What only devices can show: tensors that stay on them, streams, peers on another device. Skipped without GPU."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connectors.connector_set import ConnectorSet
from connectors.handles import HandleStore
from connectors.payload import Payload
from connectors.torch_tensors import as_torch
from omni.v1 import transfer_pb2, types_pb2
from omnicore import errors, process
from tests.contract.connectors.conftest import needs_gpu
from tests.contract.connectors.peer import EDGE

pytestmark = needs_gpu
SHAPE = (4, 1000, 128)


def last_device() -> int:
    """Of two, the second: its peer is the first."""
    import torch

    return int(torch.cuda.device_count()) - 1


def end(device: int, pool_bytes: int = 64 << 20) -> ConnectorSet:
    """One worker's connectors."""
    ref = types_pb2.ReplicaRef(stage=types_pb2.StageRef(pipeline="p"), replica_id=device, epoch=5)

    def nothing(handle: transfer_pb2.TransferHandle) -> AsyncIterator[bytes]:
        raise errors.UnavailableError("this test has no Fetch")

    return ConnectorSet(
        lambda: ref, lambda: "", nothing, pool_bytes=pool_bytes, options={"cuda_ipc": {"device": device}}
    )


def values(seed: int, device: int) -> Any:
    """bfloat16 numbers of a seed."""
    import torch

    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(SHAPE, generator=generator).to(torch.bfloat16).to(f"cuda:{device}")


async def main() -> int:
    """The producer on the last device: publishes what each line asks for."""
    process.die_with_parent()
    ours = end(last_device())
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        if "release" in asked:
            store: HandleStore = ours.store
            answer = str(store.release(asked["release"], base64.b64decode(asked["token"])))
        else:
            tensors = {"kv": values(asked["seed"], last_device()), "host": np.arange(5)}
            handle = await ours.put("cuda_ipc", asked["key"], EDGE, 0, Payload(tensors, metadata={"tokens": 1000}))
            answer = base64.b64encode(handle.SerializeToString()).decode()
        print(answer, flush=True)
    await ours.close()
    return 0


class Producer:
    """That process."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.child = child

    async def ask(self, **asked: Any) -> str:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(json.dumps(asked).encode() + b"\n")
        return (await self.child.stdout.readline()).decode().strip()

    async def put(self, key: str, seed: int) -> transfer_pb2.TransferHandle:
        return transfer_pb2.TransferHandle.FromString(base64.b64decode(await self.ask(key=key, seed=seed)))

    async def release(self, handle: transfer_pb2.TransferHandle) -> None:
        assert await self.ask(release=handle.key, token=base64.b64encode(handle.token).decode()) == "True"


@pytest.fixture
async def producer() -> AsyncIterator[Producer]:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.contract.connectors.test_cuda_ipc_on_gpus",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    yield Producer(child)
    if child.returncode is None:
        child.kill()
        await child.wait()


@pytest.fixture
async def consumer() -> AsyncIterator[ConnectorSet]:
    """On the first device; whatever happens, nothing of a peer stays open."""
    ours = end(0, pool_bytes=0)
    yield ours
    await ours.close()


async def test_cuda_ipc_gives_tensors_of_the_consumers_device(producer: Producer, consumer: ConnectorSet) -> None:
    import torch

    for seed in range(5):
        handle = await producer.put(f"k{seed}", seed)
        assert handle.WhichOneof("backend") == "cuda_ipc"
        async with consumer.get(handle) as got:
            kv = got.tensors["kv"]
            assert (kv.dtype, tuple(kv.shape), str(kv.device)) == (torch.bfloat16, SHAPE, "cuda:0")
            assert got.metadata == {"tokens": 1000}
            assert torch.equal(kv, values(seed, 0))
            assert got.tensors["host"].tolist() == [0, 1, 2, 3, 4]
            doubled = kv.float() * 2  # a kernel of this device over the peer's memory
        assert torch.equal(doubled, values(seed, 0).float() * 2)
        await producer.release(handle)
        with pytest.raises(errors.NotFoundError):
            async with consumer.get(handle):
                pass


async def test_cuda_ipc_copies_into_tensors_of_the_consumer(producer: Producer, consumer: ConnectorSet) -> None:
    import torch

    handle = await producer.put("k", 7)
    ours: Any = consumer._connectors["cuda_ipc"]
    target = torch.zeros(SHAPE, dtype=torch.bfloat16, device="cuda:0")
    host = torch.zeros(5, dtype=torch.int64)
    await ours.get_into(handle, {"kv": target, "host": host})
    assert torch.equal(target, values(7, 0))
    assert host.tolist() == [0, 1, 2, 3, 4]
    for wrong in ({"kv": target[:1]}, {"kv": target.float()}, {"no": target}):
        with pytest.raises(errors.InvalidRequestError):
            await ours.get_into(handle, wrong)


async def test_cuda_ipc_waits_for_the_producers_stream_and_for_the_consumers() -> None:
    """One process, both ends: what is still being computed when it is put arrives computed."""
    import torch

    ours = end(0)
    big = torch.randn(4096, 4096, device="cuda:0")
    stream = torch.cuda.Stream(0)
    for round_number in range(5):
        with torch.cuda.stream(stream):
            product = big
            for _ in range(30):
                product = (product @ big).clamp_(-1, 1)
            result = product * 0 + round_number
            handle = await ours.put("cuda_ipc", f"k{round_number}", EDGE, 0, Payload({"x": result}))
            result.zero_()
        async with ours.get(handle) as got:
            kept = got.tensors["x"].clone()
        assert kept.unique().tolist() == [round_number]
        assert ours.store.release(handle.key, handle.token)
    await ours.close()


async def test_cuda_ipc_publishes_what_was_made_in_its_pool() -> None:
    import torch

    ours = end(0)
    free = ours.usage("cuda_ipc").free_bytes
    for round_number in range(3):
        with await ours.allocate("cuda_ipc", {"kv": (SHAPE, "bfloat16"), "odd": ((7,), "uint8")}) as buffer:
            torch.mul(values(round_number, 0), 2, out=buffer["kv"])
            buffer["odd"].fill_(round_number)
            handle = await ours.put("cuda_ipc", f"k{round_number}", EDGE, 0, buffer.payload())
            assert not buffer.held
        async with ours.get(handle) as got:
            assert got.tensors["kv"].data_ptr() % 512 == 0
            assert torch.equal(got.tensors["kv"], values(round_number, 0) * 2)
            assert got.tensors["odd"].tolist() == [round_number] * 7
        assert ours.store.release(handle.key, handle.token)
    (await ours.allocate("cuda_ipc", 5)).release()
    assert ours.usage("cuda_ipc").free_bytes == free
    await ours.close()
    assert ours.leaked == 0


async def test_host_pools_are_pinned_for_cuda_ipc_machines() -> None:
    """shm with ``pin_memory``: what is copied from a device arrives, and the pool is CUDA's to copy to."""
    import torch

    ref = types_pb2.ReplicaRef(stage=types_pb2.StageRef(pipeline="p"), replica_id=1, epoch=5)

    def nothing(handle: transfer_pb2.TransferHandle) -> AsyncIterator[bytes]:
        raise errors.UnavailableError("this test has no Fetch")

    ours = ConnectorSet(lambda: ref, lambda: "", nothing, pool_bytes=64 << 20, options={"shm": {"pin_memory": True}})
    async with await ours.allocate("shm", {"x": ((1000,), "float32")}) as buffer:
        assert buffer.torch("x").is_pinned()
    handle = await ours.put("shm", "k", EDGE, 0, Payload({"kv": values(3, last_device())}))
    assert handle.WhichOneof("backend") == "shm"
    async with ours.get(handle) as got:
        assert torch.equal(as_torch(got.tensors["kv"]), values(3, 0).cpu())
    await ours.close()


async def test_cuda_ipc_says_what_was_freed_while_it_was_read(producer: Producer, consumer: ConnectorSet) -> None:
    handle = await producer.put("k", 1)

    async def read_too_long() -> None:
        async with consumer.get(handle):
            await producer.release(handle)

    with pytest.raises(errors.DataLossError) as caught:
        await read_too_long()
    assert caught.value.reason == "RELEASED_WHILE_READ"


async def test_cuda_ipc_survives_the_death_of_its_peer(producer: Producer, consumer: ConnectorSet) -> None:
    import torch

    handle = await producer.put("k", 3)
    async with consumer.get(handle) as got:
        producer.child.kill()
        await producer.child.wait()
        assert torch.equal(got.tensors["kv"], values(3, 0)), "what is being read stays readable"
    with pytest.raises(errors.UnavailableError):
        async with consumer.get(handle):
            pass
    ours: Any = consumer._connectors["cuda_ipc"]
    assert ours.sweep() == 1
    assert torch.ones(3, device="cuda:0").sum() == 3, "the device is well"


async def test_cuda_ipc_pools_share_a_process_and_give_their_memory_back() -> None:
    import torch

    free_bytes, _ = torch.cuda.mem_get_info(0)
    for _ in range(3):
        ours = end(0, pool_bytes=1 << 30)
        assert torch.cuda.mem_get_info(0)[0] <= free_bytes - (1 << 30)
        await ours.close()
    assert torch.cuda.mem_get_info(0)[0] >= free_bytes - (256 << 20)
    with pytest.raises(errors.ResourceExhaustedError) as caught:
        end(0, pool_bytes=1 << 44)
    assert caught.value.reason in ("DEVICE_MEMORY", "HOST_MEMORY")


if __name__ == "__main__":
    sys.exit(process.run(main()))
