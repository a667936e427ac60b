"""KV-sized tensors between processes on two GPUs of one host: cuda_ipc and Mooncake beside torch's own peer copy.

    python -m bench.gpu_transfer [--rounds 20] [--output FILE] [--mooncake PROTOCOL …]

Needs two NVIDIA GPUs and torch; Mooncake is measured where a CUDA build of it can be imported, and left out, with the
reason, where not. Each path has a producer process on GPU 0 and a consumer process on GPU 1. In the consumer, rounds of
the path and of ``torch`` (``target.copy_(source)`` between the two devices, one process) take turns, so that both see
the same machine. Every target is overwritten before and summed after every transfer; the sum must be the producer's,
over data that was made anew from the round's seed. What is timed ends when the consumer's device has all bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import multiprocessing
import multiprocessing.connection
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SHAPES = {"0.4 MB": (2, 99, 8, 128), "439 MB": (28, 2, 3828, 8, 128)}
"""bfloat16 KV caches of a 28-layer model with 8 KV heads of 128: one layer of 99 tokens, all layers of 3,828."""
POOL_BYTES = 1 << 30
OURS = {
    "torch": "target.copy_(source) of one process: the baseline",
    "put": "at the producer: one copy into its pool",
    "put in place": "at the producer: the data was made in the pool",
    "get_into": "at the consumer, which waited for the handle: the handle checked, one copy over NVLink",
    "get_into again": "the same handle again, the consumer busy: what a stream of chunks sees",
    "hand over": "from the consumer's word to all bytes in its memory: two messages over a pipe, put, get_into",
    "sum in place": "a kernel of the consumer reads the producer's memory",
    "copy of view": "torch copies from the tensor that get gives",
}
"""What is timed of cuda_ipc, and what it is."""
Pipe = multiprocessing.connection.Connection


def make(shape: Sequence[int], seed: int, device: int) -> Any:
    """Random bits, the same for a seed on every device of a kind."""
    import torch

    generator = torch.Generator(device=f"cuda:{device}").manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, tuple(shape), dtype=torch.int16, device=f"cuda:{device}", generator=generator)
    return (bits & ~0x4000).view(torch.bfloat16)  # no NaN: the exponent is never all ones


def checksum(tensor: Any) -> int:
    """Depends on every bit and on its place."""
    import torch

    words = tensor.reshape(-1).view(torch.int32).to(torch.int64)
    weights = torch.arange(words.numel(), device=words.device) % 65521 + 1
    return int((words * weights).sum())


def timed(work: Callable[[], object]) -> float:
    """Seconds until ``work`` has returned and both devices are idle."""
    import torch

    for device in (0, 1):
        torch.cuda.synchronize(device)
    started_s = time.perf_counter()
    work()
    for device in (1, 0):
        torch.cuda.synchronize(device)
    return time.perf_counter() - started_s


# --- cuda_ipc -------------------------------------------------------------------------------------------------------


def connector(device: int, pool_bytes: int) -> Any:
    """A worker's connector."""
    from connectors.cuda_ipc import CudaIpcConnector
    from connectors.handles import HandleStore
    from connectors.options import CudaIpcOptions
    from omni.v1 import types_pb2

    owner = types_pb2.ReplicaRef(stage=types_pb2.StageRef(pipeline="bench", stage_id=device), replica_id=0, epoch=1)
    store = HandleStore(lambda: owner, lambda: "")
    return CudaIpcConnector(store, CudaIpcOptions(device=device), pool_bytes=pool_bytes)


def cuda_ipc_producer(pipe: Pipe) -> None:
    """Answers each shape and seed with a handle, the sum of the data and the time that ``put`` took."""
    asyncio.run(_cuda_ipc_producer(pipe))


async def _cuda_ipc_producer(pipe: Pipe) -> None:
    import torch

    from connectors.payload import Payload
    from omni.v1 import transfer_pb2

    ours = connector(0, POOL_BYTES)
    edge = transfer_pb2.EdgeRef(request_id="bench", from_stage=0, to_stage=1)
    while (asked := pipe.recv()) is not None:
        shape, seed = asked
        data = make(shape, seed, 0)
        expected = checksum(data)
        pipe.send(expected)
        pipe.recv()
        started_s = time.perf_counter()
        handle = await ours.put(f"k{seed}", edge, seed, Payload({"kv": data}))
        put_s = time.perf_counter() - started_s
        pipe.send((handle.SerializeToString(), put_s))
        pipe.recv()
        ours.release(handle.key, handle.token)
        with await ours.allocate({"kv": (shape, "bfloat16")}) as buffer:
            buffer["kv"].copy_(data)
            torch.cuda.synchronize(0)
            started_s = time.perf_counter()
            handle = await ours.put(f"in place {seed}", edge, seed, buffer.payload())
            put_s = time.perf_counter() - started_s
        pipe.send((handle.SerializeToString(), put_s))
        pipe.recv()
        ours.release(handle.key, handle.token)
    await ours.close()


def cuda_ipc_consumer(pipe: Pipe, shape: Sequence[int], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round, by what was timed."""
    return asyncio.run(_cuda_ipc_consumer(pipe, shape, rounds))


async def _cuda_ipc_consumer(pipe: Pipe, shape: Sequence[int], rounds: int) -> dict[str, list[float]]:
    import torch

    from omni.v1 import transfer_pb2

    ours = connector(1, 0)
    target = torch.empty(tuple(shape), dtype=torch.bfloat16, device="cuda:1")
    source = make(shape, 1, 0)
    found: dict[str, list[float]] = {name: [] for name in OURS}
    for round_number in range(rounds + 2):  # two to warm up
        target.zero_()
        torch_s = timed(lambda: target.copy_(source))
        assert checksum(target) == checksum(source), "torch"
        target.zero_()
        pipe.send((shape, round_number))
        expected = pipe.recv()
        torch.cuda.synchronize(1)
        started_s = time.perf_counter()
        pipe.send("go")
        raw, put_s = pipe.recv()
        got_s = time.perf_counter()
        handle = transfer_pb2.TransferHandle.FromString(raw)
        await ours.get_into(handle, {"kv": target})
        ended_s = time.perf_counter()
        assert checksum(target) == expected, "cuda_ipc"
        target.zero_()
        await ours.get_into(handle, {"kv": target})  # busy from here on
        again_s = time.perf_counter()
        await ours.get_into(handle, {"kv": target})
        again_s = time.perf_counter() - again_s
        assert checksum(target) == expected, "cuda_ipc again"
        torch.cuda.synchronize(1)
        read_s = time.perf_counter()
        async with ours.get(handle) as payload:
            total = payload.tensors["kv"].reshape(-1).view(torch.int32).sum(dtype=torch.int64)
        in_place_s = time.perf_counter() - read_s
        assert int(total) == int(target.reshape(-1).view(torch.int32).sum(dtype=torch.int64)), "in place"
        target.zero_()
        async with ours.get(handle) as payload:
            view = payload.tensors["kv"]
            copy_s = timed(functools.partial(target.copy_, view))
        assert checksum(target) == expected, "copy of a view"
        pipe.send("release")
        raw, in_place_put_s = pipe.recv()
        target.zero_()
        await ours.get_into(transfer_pb2.TransferHandle.FromString(raw), {"kv": target})
        assert checksum(target) == expected, "put in place"
        pipe.send("release")
        if round_number >= 2:
            row = (
                *(torch_s, put_s, in_place_put_s, ended_s - got_s, again_s),
                *(ended_s - started_s, in_place_s, copy_s),
            )
            for name, value in zip(found, row, strict=True):
                found[name].append(value)
    await ours.close()
    return found


# --- Mooncake -------------------------------------------------------------------------------------------------------


def mooncake_engine(protocol: str) -> Any:
    """An engine, or the reason why there is none as a RuntimeError."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    if protocol == "nvlink_intra":
        os.environ["MC_INTRANODE_NVLINK"] = "1"
    if protocol == "tcp":
        os.environ["MC_FORCE_TCP"] = "1"
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if (code := engine.initialize("127.0.0.1", "P2PHANDSHAKE", protocol, "")) != 0:
        raise RuntimeError(f"initialize({protocol}) returned {code}")
    return engine


def mooncake_producer(protocol: str, pipe: Pipe) -> None:
    """Answers each shape and seed with where the data is and its sum."""
    import torch

    torch.cuda.set_device(0)
    engine = mooncake_engine(protocol)
    pool = torch.empty(POOL_BYTES, dtype=torch.uint8, device="cuda:0")
    if (code := engine.register_memory(pool.data_ptr(), POOL_BYTES)) != 0:
        raise RuntimeError(f"register_memory returned {code}")
    while (asked := pipe.recv()) is not None:
        shape, seed = asked
        data = make(shape, seed, 0)
        place = pool[: data.nbytes].view(torch.bfloat16).reshape(data.shape)
        place.copy_(data)
        torch.cuda.synchronize(0)
        pipe.send((f"127.0.0.1:{engine.get_rpc_port()}", pool.data_ptr(), checksum(data)))


def mooncake_consumer(protocol: str, pipe: Pipe, shape: Sequence[int], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round, by what was timed."""
    import torch

    torch.cuda.set_device(1)
    engine = mooncake_engine(protocol)
    pool = torch.empty(POOL_BYTES // 2, dtype=torch.uint8, device="cuda:1")
    if (code := engine.register_memory(pool.data_ptr(), pool.nbytes)) != 0:
        raise RuntimeError(f"register_memory returned {code}")
    source = make(shape, 1, 0)
    target = pool[: source.nbytes].view(torch.bfloat16).reshape(source.shape)
    found: dict[str, list[float]] = {"torch": [], "read": []}
    for round_number in range(rounds + 2):
        target.zero_()
        torch_s = timed(lambda: target.copy_(source))
        assert checksum(target) == checksum(source), "torch"
        target.zero_()
        pipe.send((shape, round_number))
        session, address, expected = pipe.recv()
        torch.cuda.synchronize(1)
        started_s = time.perf_counter()
        code = engine.transfer_sync_read(session, target.data_ptr(), address, target.nbytes)
        torch.cuda.synchronize(1)
        read_s = time.perf_counter() - started_s
        if code != 0:
            raise RuntimeError(f"transfer_sync_read returned {code}")
        if checksum(target) != expected:
            raise RuntimeError(f"round {round_number}: wrong bytes arrived")
        if round_number >= 2:
            found["torch"].append(torch_s)
            found["read"].append(read_s)
    return found


# --- processes ------------------------------------------------------------------------------------------------------


def _end(work: Callable[..., Any], arguments: tuple[Any, ...], result: Pipe | None) -> None:
    try:
        answer = work(*arguments)
        if result is not None:
            result.send(answer)
    except Exception as error:
        if result is not None:
            result.send(f"{type(error).__name__}: {error}")
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Libraries with threads of their own (Mooncake) do not all survive the interpreter's end.
        os._exit(0)


def pair(producer: tuple[Any, ...], consumer: tuple[Any, ...], shape: Sequence[int], rounds: int) -> Any:
    """Run both ends, each ``(function, *leading arguments)``; what the consumer found, or why not, as text."""
    context = multiprocessing.get_context("spawn")
    theirs, ours = context.Pipe()
    inner, outer = context.Pipe()
    left = context.Process(target=_end, args=(producer[0], (*producer[1:], theirs), None), daemon=True)
    right = context.Process(target=_end, args=(consumer[0], (*consumer[1:], ours, shape, rounds), inner), daemon=True)
    for process in (left, right):
        process.start()
    theirs.close()
    inner.close()
    try:
        with contextlib.suppress(EOFError):
            if outer.poll(180):
                return outer.recv()
        return f"the consumer process ended with code {right.exitcode}, or took longer than 180 s"
    finally:
        for process in (right, left):
            process.kill()
            process.join()


def table(shape_name: str, size: int, path: str, found: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Print one row per measured thing, GB/s and latency, beside torch in the same process."""
    rows: list[dict[str, Any]] = []
    base_s = statistics.median(found["torch"])
    for name, seconds in found.items():
        median_s = statistics.median(seconds)
        rows.append(
            {
                "size": shape_name,
                "bytes": size,
                "path": path,
                "what": name,
                "rounds": len(seconds),
                "median_us": round(median_s * 1e6, 1),
                "best_us": round(min(seconds) * 1e6, 1),
                "gb_per_s": round(size / median_s / 1e9, 2),
                "times_torch": round(base_s / median_s, 3),
            }
        )
        row = rows[-1]
        print(
            f"{shape_name:8} {path:22} {name:14} {row['median_us']:>10.1f} µs {row['best_us']:>10.1f} best "
            f"{row['gb_per_s']:>8.2f} GB/s {row['times_torch']:>7.3f} × torch",
            flush=True,
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20, help="timed transfers of every path and size")
    parser.add_argument("--output", type=Path, help="write all figures as JSON")
    parser.add_argument("--mooncake", nargs="*", default=["nvlink_intra", "tcp"], help="Mooncake protocols to try")
    chosen = parser.parse_args()
    import torch

    if torch.cuda.device_count() < 2:
        print("bench.gpu_transfer needs two CUDA devices", file=sys.stderr)
        return 2
    names = [torch.cuda.get_device_name(device) for device in (0, 1)]
    machine = f"{names}, torch {torch.__version__}, peer access {torch.cuda.can_device_access_peer(1, 0)}"
    print(machine, flush=True)
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for name, shape in SHAPES.items():
        size = 2
        for side in shape:
            size *= side
        paths: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
            "cuda_ipc": ((cuda_ipc_producer,), (cuda_ipc_consumer,)),
            **{f"mooncake {p}": ((mooncake_producer, p), (mooncake_consumer, p)) for p in chosen.mooncake},
        }
        for path, (producer, consumer) in paths.items():
            rounds = chosen.rounds if not path.endswith("tcp") else max(3, chosen.rounds // 4)
            found = pair(producer, consumer, shape, rounds)
            if isinstance(found, str):
                skipped[f"{path} {name}"] = found
                print(f"{name:8} {path:22} not measured: {found}", flush=True)
            else:
                rows += table(name, size, path, found)
    if chosen.output:
        figures = {"machine": machine, "rows": rows, "not_measured": skipped}
        chosen.output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 1 if any(key.startswith("cuda_ipc") for key in skipped) else 0


if __name__ == "__main__":
    sys.exit(main())
