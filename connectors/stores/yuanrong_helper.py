"""The process in which ``yr.datasystem`` runs: requests in JSON from a socket, one at a time, bytes in shared memory.

    python -m connectors.stores.yuanrong_helper SOCKET_FD

It ends when its socket does, and so with the process that started it. It imports nothing of this project's: each
helper is a process."""

from __future__ import annotations

import json
import mmap
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

MAX_MESSAGE_BYTES = 64 * 1024
"""Of a request or an answer."""
_CODE = re.compile(r"code: \[(.*?)\], msg: \[(.*)", re.DOTALL)


class Refused(Exception):  # noqa: N818 (it is an answer)
    """What went wrong, by name, and in words."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class Server:
    """Answers requests with a client of the library."""

    def __init__(self) -> None:
        self._client: Any = None
        self._memory: dict[int, mmap.mmap] = {}

    def answer(self, request: Mapping[str, Any], fds: list[int]) -> dict[str, Any]:
        """What to say to ``request``; ``fds``: the memory of its buffer, if that is new."""
        try:
            if fds:
                self._memory[request["buffer"]] = mmap.mmap(fds[0], request["buffer_bytes"])
            work = getattr(self, f"_{request['op']}")
            work(request)
        except Refused as refused:
            return {"error": refused.name, "message": str(refused)}
        except (RuntimeError, TypeError, ValueError, ImportError) as error:  # what the library raises
            found = _CODE.match(str(error))
            name, message = found.groups() if found else (type(error).__name__, str(error))
            return {"error": name, "message": message.splitlines()[0][:1000] if message else name}
        finally:
            for fd in fds:
                os.close(fd)
        return {}

    def _connect(self, options: Mapping[str, Any]) -> None:
        from yr.datasystem import KVClient

        client = KVClient(
            options["host"],
            options["port"],
            connect_timeout_ms=options["connect_timeout_ms"],
            req_timeout_ms=max(1, int(options["timeout_s"] * 1000)),
        )
        client.init()
        self._client = client

    def _put(self, request: Mapping[str, Any]) -> None:
        key, size = request["key"], request["size"]
        if self._client.exist([key])[0]:
            raise Refused("exists", f"there is an object {key!r} already")
        buffers = self._client.mcreate([key], [size], ttl_second=request["ttl_s"])
        with memoryview(self._memory[request["buffer"]]) as memory:
            memoryview(buffers[0].MutableData()).cast("B")[:size] = memory[:size]
        self._client.mset_buffer(buffers)

    def _get(self, request: Mapping[str, Any]) -> None:
        size = request["size"]
        # The object stays as it is while this buffer is held, also when it is deleted.
        held = self._client.get_read_only_buffers([request["key"]], request["wait_ms"])[0]
        if held is None:
            raise Refused("Key not found", f"no object {request['key']!r}")
        data = held.immutable_data()
        if data.nbytes != size:
            raise Refused("length", f"object {request['key']!r} has {data.nbytes} bytes, not {size}")
        with memoryview(self._memory[request["buffer"]]) as memory:
            memory[:size] = data.cast("B")

    def _remove(self, request: Mapping[str, Any]) -> None:
        failed = self._client.delete(request["keys"])
        if failed:
            raise Refused("not deleted", f"{len(failed)} objects are still there, {failed[0]!r} for one")

    def _health(self, request: Mapping[str, Any]) -> None:
        status = self._client.health_check()
        if not status.is_ok():
            raise Refused("not healthy", status.to_string())

    def _unmap(self, request: Mapping[str, Any]) -> None:
        self._memory.pop(request["buffer"]).close()


def main(argv: list[str]) -> int:
    """Answer until the socket ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started it
    server = Server()
    with socket.socket(fileno=int(argv[0])) as connection:
        while True:
            raw, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 1)
            if not raw:
                return 0
            connection.send(json.dumps(server.answer(json.loads(raw), fds)).encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
