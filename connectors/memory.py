"""Memory of this process that pools are made of: looked for before it is taken, and touched before it is used."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

from omnicore import errors

_MADV_POPULATE_WRITE = 23  # linux/mman.h, Linux 5.14
_FILL_BYTES = 1024 * 1024  # fits into a cache


def check_available(size_bytes: int, what: str) -> None:
    """Raises ``ResourceExhaustedError`` if this host has not that much memory left. Touching memory that is not there
    ends in the kernel's OOM killer, which may choose anybody. ``what``: "a shared-memory pool", …"""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            if size_bytes > available:
                raise errors.ResourceExhaustedError(
                    f"{what} of {size_bytes} bytes was asked for, this host has {available} left: lower pool_bytes",
                    reason="HOST_MEMORY",
                    metadata={"pool_bytes": size_bytes, "available_bytes": available},
                )


def populate(mapping: mmap.mmap, what: str) -> None:
    """Touch every page, once: page faults cost ten times as much as copying. Raises ``ResourceExhaustedError`` if the
    memory is not there after all."""
    try:
        mapping.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise errors.ResourceExhaustedError(
                f"{what} of {len(mapping)} bytes does not fit: {error.strerror}", reason="HOST_MEMORY"
            ) from error
        for offset in range(0, len(mapping), mmap.PAGESIZE):  # Linux before 5.14
            mapping[offset] = 0


def fill(fd: int, size_bytes: int, what: str) -> None:
    """Have every page of a new memfd there, zeroed, and none of them mapped yet: mapping one later takes 2 µs, once.
    What is mapped the kernel must unmap when the process is killed, before it closes its connections: with two busy
    cores, 256 MiB delayed the news of a death by 50 ms. Raises ``ResourceExhaustedError`` if the memory is not there
    after all."""
    zeros = bytes(min(size_bytes, _FILL_BYTES))
    offset = 0
    try:
        while offset < size_bytes:
            offset += os.pwrite(fd, zeros[: size_bytes - offset], offset)
    except OSError as error:
        raise errors.ResourceExhaustedError(
            f"{what} of {size_bytes} bytes does not fit: {error.strerror}", reason="HOST_MEMORY"
        ) from error


def private_memory(size_bytes: int, what: str) -> mmap.mmap:
    """Memory of this process alone, every page of it there, in huge pages where the kernel has them. Children that are
    forked do not have it: what a network device reads and writes there must stay in this process. Raises
    ``ResourceExhaustedError``."""
    check_available(size_bytes, what)
    mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
        try:
            mapping.madvise(advice)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel without huge pages
                raise
    populate(mapping, what)
    return mapping
