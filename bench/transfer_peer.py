"""The connectors of vLLM-Omni 0.30.0 as paths of ``bench.transfer``; runs in an environment of its own.

    python -m bench.transfer_peer produce|consume shm|mooncake FD SOCKET_PORT LARGEST

They are used as their adapters use them: ``put`` returns metadata, which travels beside the key; ``get`` with metadata.
The Mooncake connector insists on pinned memory, which a machine without accelerator does not have: ``pin_memory`` gives
the tensor itself here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

from bench import transfer_wire
from bench.transfer_wire import BlockingChannel, Bytes

FROM, TO = "0", "1"
_POOL_SLACK = 64 << 20


def connector(kind: str, role: str, port: int, largest: int) -> Any:
    """One end's connector."""
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", MC_LOG_LEVEL="ERROR", MC_FORCE_TCP="1")
    import torch  # type: ignore[import-not-found,unused-ignore]

    torch.set_num_threads(1)
    from vllm_omni.distributed import omni_connectors as omni  # type: ignore[import-not-found]

    if kind == "shm":
        return omni.SharedMemoryConnector({"stage_id": 0 if role == "sender" else 1})
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    config: dict[str, Any] = {"host": "127.0.0.1", "protocol": "tcp", "role": role, "memory_pool_device": "cpu"}
    config |= {"memory_pool_size": largest + _POOL_SLACK, "zmq_port": port if role == "sender" else port + 1}
    if role == "receiver":
        config |= {"sender_host": "127.0.0.1", "sender_zmq_port": port}
    made = omni.MooncakeTransferEngineConnector(config)
    made.pool.zero_()  # its first use of each page would be page faults
    return made


class PeerProducer(transfer_wire.Producer):
    """``put`` of a tensor."""

    def __init__(self, kind: str, port: int, largest: int) -> None:
        self._connector = connector(kind, "sender", port, largest)
        self._kind = kind
        self._key = ""

    async def put(self, number: int, data: Bytes) -> bytes:
        import torch

        self._key = f"omni-bench-{os.getpid()}-{number}"
        put, _, metadata = self._connector.put(FROM, TO, self._key, torch.from_numpy(data))
        if not put:
            raise RuntimeError("its put failed; the log says why")
        return json.dumps([self._key, metadata]).encode()

    async def done(self) -> None:
        if self._kind != "shm":  # there the receiver has unlinked it
            self._connector.cleanup(self._key, FROM, TO)


class PeerConsumer(transfer_wire.Consumer):
    """``get`` of a tensor."""

    def __init__(self, kind: str, port: int, largest: int) -> None:
        self._connector = connector(kind, "receiver", port, largest)

    @contextlib.asynccontextmanager
    async def get(self, message: bytes, size: int) -> AsyncIterator[Bytes]:
        import torch

        key, metadata = json.loads(message)
        result = self._connector.get(FROM, TO, key, metadata)
        if result is None:
            raise RuntimeError("its get gave nothing; the log says why")
        found = result[0]
        if isinstance(found, torch.Tensor):
            yield found.view(torch.uint8).reshape(-1).numpy()
            return
        yield found.as_tensor(torch.uint8, (size,)).numpy()
        found.release()


async def main(role: str, kind: str, fd: str, port: str, largest: str) -> None:
    channel = BlockingChannel(int(fd))
    if role == "produce":
        await transfer_wire.produce(channel, PeerProducer(kind, int(port), int(largest)))
    else:
        await transfer_wire.consume(channel, PeerConsumer(kind, int(port), int(largest)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
    os._exit(0)  # nothing of theirs is closed in an order that always ends
