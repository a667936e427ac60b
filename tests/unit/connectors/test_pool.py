from __future__ import annotations

import fcntl
import mmap
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from connectors import memory
from connectors.peers import PeerPools
from connectors.pool import HEADER, MemfdPool, PoolSlot, boot_id, fingerprint, process_start_ticks
from omni.v1 import transfer_pb2
from omnicore import errors
from tests.support.descriptors import open_pools

PAGE = mmap.PAGESIZE


@pytest.fixture
def pool() -> Iterator[MemfdPool]:
    pool = MemfdPool(16 * PAGE)
    yield pool
    pool.close()


@pytest.fixture
def peers() -> Iterator[PeerPools]:
    peers = PeerPools()
    yield peers
    peers.close()
    assert len(peers) == 0


def publish(pool: MemfdPool, data: bytes, key: str = "k") -> tuple[PoolSlot, transfer_pb2.TransferHandle]:
    slot = pool.allocate(len(data))
    slot.view[:] = data
    handle = transfer_pb2.TransferHandle(key=key, token=b"t" * 16, size_bytes=len(data))
    slot.locate(handle)
    return slot, handle


def number_of(pool: MemfdPool) -> int:
    slot, handle = publish(pool, b"")
    slot.free()
    return handle.shm.fd


def mapped_bytes(inode: int) -> int:
    """How much of a file's pages this process has in its page tables."""
    sizes, ours = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            ours = words[4] == str(inode)
        elif ours and words[0] == "Rss:":
            sizes.append(int(words[1]) * 1024)
    assert sizes, "it is not mapped at all"
    return sum(sizes)


def test_pages_are_there_but_not_mapped_before_they_are_used() -> None:
    """A killed process has its pages unmapped before its connections are closed: fewer pages, earlier news."""
    pool = MemfdPool(4096 * PAGE)
    try:
        slot, handle = publish(pool, b"x" * PAGE)
        found = Path(f"/proc/self/fd/{handle.shm.fd}").stat()
        assert found.st_blocks * 512 >= pool.size_bytes
        assert PAGE <= mapped_bytes(found.st_ino) <= pool.size_bytes // 8
        slot.free()
    finally:
        pool.close()


def test_memory_that_is_not_there_after_all_is_told() -> None:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        fcntl.fcntl(fd, 1033, 0x8)  # F_ADD_SEALS, F_SEAL_WRITE: every write fails
        with pytest.raises(errors.ResourceExhaustedError, match="a test of 8192 bytes does not fit") as caught:
            memory.fill(fd, 8192, "a test")
        assert caught.value.reason == "HOST_MEMORY"
    finally:
        os.close(fd)


def test_pool_is_private_sealed_and_present(pool: MemfdPool) -> None:
    _, handle = publish(pool, b"x")
    path = Path(f"/proc/self/fd/{handle.shm.fd}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_blocks * 512 >= pool.size_bytes, "pages are not there yet"
    with path.open("rb+") as file:
        with pytest.raises(PermissionError):
            os.ftruncate(file.fileno(), PAGE)
        with pytest.raises(PermissionError):
            os.ftruncate(file.fileno(), 100 * PAGE)
        with pytest.raises(PermissionError):
            mmap.mmap(file.fileno(), PAGE)  # writable
        with pytest.raises(PermissionError):
            fcntl.fcntl(file.fileno(), 1033, 0x8)
    assert (handle.shm.boot_id, handle.shm.pid) == (boot_id(), os.getpid())
    assert handle.shm.process_start_ticks == process_start_ticks(os.getpid())


def test_slots_are_aligned_reused_and_freed_once(pool: MemfdPool) -> None:
    before = pool.free_bytes
    slot, handle = publish(pool, b"a" * 100)
    assert handle.shm.offset_bytes % 64 == 0
    slot.free()
    slot.free()
    assert pool.free_bytes == before
    with pytest.raises(errors.InternalError):
        slot.locate(handle)
    whole = pool.allocate(pool.max_payload_bytes)
    with pytest.raises(errors.ResourceExhaustedError):
        pool.allocate(1)
    whole.free()


def test_peer_reads_without_copying_and_cannot_write(pool: MemfdPool, peers: PeerPools) -> None:
    slot, handle = publish(pool, b"hello")
    with peers.open(handle) as reading:
        assert bytes(reading.data) == b"hello"
        assert reading.data.readonly
        slot.view[:] = b"HELLO"
        assert bytes(reading.data) == b"HELLO", "a copy was made"
        reading.check_intact()
    with peers.open(handle):
        assert len(peers) == 1, "one mapping for each pool"


def test_an_error_that_left_a_read_does_not_keep_the_pool_mapped(pool: MemfdPool, peers: PeerPools) -> None:
    slot, handle = publish(pool, b"hello")
    with peers.open(handle) as reading:
        slot.free()
        with pytest.raises(errors.DataLossError) as kept:
            reading.check_intact()
    assert kept.value.__traceback__ is not None, "it holds the frame, and so the reading"
    with pytest.raises(ValueError, match="released memoryview"):
        bytes(reading.data)


def test_freed_data_is_not_read(pool: MemfdPool, peers: PeerPools) -> None:
    slot, handle = publish(pool, b"first")
    with peers.open(handle) as reading:
        slot.free()
        with pytest.raises(errors.DataLossError) as caught:
            reading.check_intact()
        assert caught.value.reason == "RELEASED_WHILE_READ"
    _, other = publish(pool, b"other", key="k2")
    assert other.shm.offset_bytes == handle.shm.offset_bytes, "the same place"
    with pytest.raises(errors.NotFoundError), peers.open(handle):
        pass


def test_other_hosts_dead_and_reused_pids(pool: MemfdPool, peers: PeerPools) -> None:
    _, handle = publish(pool, b"x")

    def changed(**fields: object) -> transfer_pb2.TransferHandle:
        other = transfer_pb2.TransferHandle()
        other.CopyFrom(handle)
        for name, value in fields.items():
            setattr(other.shm, name, value)
        return other

    for bad, error, reason in [
        (changed(boot_id="another"), errors.FailedPreconditionError, "OTHER_HOST"),
        (changed(boot_id=""), errors.FailedPreconditionError, "OTHER_HOST"),
        (changed(pid=0), errors.UnavailableError, "OWNER_GONE"),
        (changed(pid=2**32 - 1), errors.UnavailableError, "OWNER_GONE"),
        (changed(process_start_ticks=1), errors.UnavailableError, "OWNER_GONE"),
        (changed(fd=2**20), errors.UnavailableError, "OWNER_GONE"),
        (changed(pool_bytes=0), errors.DataLossError, "BAD_HANDLE"),
        (changed(pool_bytes=pool.size_bytes + PAGE), errors.DataLossError, "BAD_HANDLE"),
        (changed(offset_bytes=0), errors.DataLossError, "BAD_HANDLE"),
        (changed(offset_bytes=handle.shm.offset_bytes + 1), errors.DataLossError, "BAD_HANDLE"),
        (changed(offset_bytes=pool.size_bytes), errors.DataLossError, "BAD_HANDLE"),
        (changed(offset_bytes=2**64 - 64), errors.DataLossError, "BAD_HANDLE"),
        (changed(offset_bytes=handle.shm.offset_bytes + PAGE), errors.NotFoundError, "HANDLE_NOT_FOUND"),
    ]:
        with pytest.raises(error) as caught, peers.open(bad):
            pass
        assert caught.value.reason == reason, bad.shm


@pytest.mark.parametrize(
    "kind", ["file", "pipe", "socket", "directory", "memfd without seals", "sealed memfd of others"]
)
def test_descriptors_that_are_no_pool_are_refused(kind: str, peers: PeerPools, pool: MemfdPool, tmp_path: Path) -> None:
    _, handle = publish(pool, b"x")
    size = pool.size_bytes
    close: list[int] = []
    if kind == "pipe":
        close += os.pipe()
    elif kind == "socket":
        close += [end.detach() for end in socket.socketpair()]
    elif kind == "directory":
        close.append(os.open(tmp_path, os.O_RDONLY))
    elif kind == "file":
        close.append(os.open(tmp_path / "memfd:omni-pool", os.O_RDWR | os.O_CREAT))
        os.ftruncate(close[0], size)
    else:
        name = "omni-pool" if "without" in kind else "something"
        close.append(os.memfd_create(name, os.MFD_ALLOW_SEALING))
        os.ftruncate(close[0], size)
        if "sealed" in kind:
            fcntl.fcntl(close[0], 1033, 7)
    try:
        handle.shm.fd = close[0]
        with pytest.raises(errors.UnavailableError, match="closed its pool") as caught, peers.open(handle):
            pass
        assert caught.value.reason == "OWNER_GONE"
    finally:
        for fd in close:
            os.close(fd)


def test_closed_pool_is_gone_for_readers(peers: PeerPools) -> None:
    pool = MemfdPool(4 * PAGE)
    _, handle = publish(pool, b"data")
    with peers.open(handle) as reading:
        pool.close()
        pool.close()
        assert bytes(reading.data) == b"data", "what is mapped stays readable"
        with pytest.raises(errors.DataLossError):
            reading.check_intact()
        with pytest.raises(errors.UnavailableError):
            pool.allocate(1)
    assert peers.sweep() == 1
    with pytest.raises(errors.UnavailableError), peers.open(handle):
        pass


def test_pool_under_a_reused_descriptor_is_mapped_anew(peers: PeerPools) -> None:
    first = MemfdPool(4 * PAGE)
    _, old = publish(first, b"old")
    with peers.open(old):
        pass
    first.close()
    second, others = MemfdPool(4 * PAGE), list[MemfdPool]()
    while number_of(second) < old.shm.fd:  # a lower one has become free as well
        others.append(second)
        second = MemfdPool(4 * PAGE)
    _, new = publish(second, b"new", key="k2")
    assert new.shm.fd == old.shm.fd, "the test needs the same number"
    with peers.open(new) as reading:
        assert bytes(reading.data) == b"new"
    with pytest.raises(errors.NotFoundError), peers.open(old):
        pass
    assert len(peers) == 1
    for pool in (second, *others):
        pool.close()


def test_views_that_outlive_a_mapping_do_not_crash(pool: MemfdPool) -> None:
    peers = PeerPools()
    _, handle = publish(pool, b"abc")
    with peers.open(handle) as reading:
        kept = np.frombuffer(reading.data, np.uint8)
    peers.close()
    assert kept.tobytes() == b"abc"
    with pytest.raises(errors.UnavailableError), peers.open(handle):
        pass


def test_idle_peers_are_unmapped_least_recently_used_first() -> None:
    peers = PeerPools(max_peers=2)
    pools = [MemfdPool(2 * PAGE) for _ in range(4)]
    handles = [publish(pool, b"x")[1] for pool in pools]
    before = open_pools()
    with peers.open(handles[0]):
        for handle in handles[1:]:
            with peers.open(handle):
                pass
        assert len(peers) == 2, "the one in use and the last one"
        with peers.open(handles[0]) as reading:
            assert bytes(reading.data) == b"x"
    del reading  # its view keeps the mapping
    peers.close()
    assert not open_pools() - before
    for pool in pools:
        pool.close()


def test_a_pool_that_the_host_cannot_hold_is_refused() -> None:
    before = open_pools()
    with pytest.raises(errors.ResourceExhaustedError, match="lower pool_bytes") as caught:
        MemfdPool(1 << 50)
    assert caught.value.reason == "HOST_MEMORY"
    assert not open_pools() - before


def test_everything_that_locates_data_is_in_the_fingerprint(pool: MemfdPool) -> None:
    _, handle = publish(pool, b"x")
    handle.tensors.add(name="a", dtype="int8", shape=[1], size_bytes=1)
    base = fingerprint(handle)
    for change in (
        lambda h: setattr(h, "key", "other"),
        lambda h: setattr(h, "token", b"u" * 16),
        lambda h: setattr(h, "size_bytes", 2),
        lambda h: setattr(h, "sequence", 1),
        lambda h: setattr(h.owner, "epoch", 1),
        lambda h: setattr(h.edge, "attempt", 1),
        lambda h: setattr(h.shm, "offset_bytes", 1),
        lambda h: setattr(h.tensors[0], "dtype", "uint8"),
        lambda h: h.tensors[0].shape.append(1),
        lambda h: h.tensors.add(),
    ):
        other = transfer_pb2.TransferHandle()
        other.CopyFrom(handle)
        change(other)
        assert fingerprint(other) != base
    assert len(base) == 16
    assert HEADER.size == 64


_FORKED = """
import os, sys
from connectors.pool import HEADER, MemfdPool
from omnicore import errors
pool = MemfdPool(1 << 16)
slot = pool.allocate(100)
slot.mark(b"f" * 16)
if os.fork() == 0:
    slot.free()
    try:
        pool.allocate(100)
    except errors.UnavailableError:
        pool.close()
        os._exit(7)
    os._exit(1)
_, status = os.wait()
assert os.waitstatus_to_exitcode(status) == 7, status
assert HEADER.unpack_from(pool.memory, 0) == (b"f" * 16, 100)
slot.free()
assert HEADER.unpack_from(pool.memory, 0) == (bytes(16), 0)
"""


def test_a_forked_process_changes_nothing_in_the_pool_of_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", _FORKED], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
