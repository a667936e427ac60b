"""Memory of processes of this host, this one among them, for doubles that move bytes: what is not there is an error."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("size", ctypes.c_size_t)]


for _call in (_libc.process_vm_readv, _libc.process_vm_writev):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]


def copy(pid: int, local: int, remote: int, size_bytes: int, *, write: bool = False) -> None:
    """From ``remote`` in process ``pid`` to ``local`` here, or the other way. Raises ``OSError``."""
    done = 0
    while done < size_bytes:
        here, there = _Range(local + done, size_bytes - done), _Range(remote + done, size_bytes - done)
        call = _libc.process_vm_writev if write else _libc.process_vm_readv
        moved = call(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if moved <= 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        done += moved
