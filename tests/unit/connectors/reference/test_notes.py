"""Notes in a store about who has which key."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from connectors.reference.rendezvous import Sender
from connectors.reference.stored import Notes
from connectors.stores.base import OpenObject
from omnicore import errors
from tests.support.processes import wait_until

SENDER = Sender("127.0.0.1:7", b"secret")


class _Found:
    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)

    def close(self) -> None:
        """Nothing is held."""


class _Store:
    """Whose removals can be held up, and whose answers can be lost."""

    address = "store:1"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.removing = threading.Event()
        self.proceed = threading.Event()
        self.proceed.set()
        self.lose_answers = False

    def put(self, object_key: str, size_bytes: int, fill: Callable[[memoryview], None]) -> None:
        if object_key in self.objects:
            raise errors.AlreadyExistsError("there is one")
        memory = bytearray(size_bytes)
        fill(memoryview(memory))
        self.objects[object_key] = bytes(memory)
        if self.lose_answers:
            raise errors.UnavailableError("no answer")

    def open(self, object_key: str, size_bytes: int) -> OpenObject:
        if object_key not in self.objects:
            raise errors.NotFoundError("there is none")
        return _Found(self.objects[object_key])

    def remove(self, object_keys: Sequence[str]) -> None:
        self.removing.set()
        assert self.proceed.wait(60)
        for object_key in object_keys:
            self.objects.pop(object_key, None)

    def healthy(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing to leave."""


async def test_a_key_that_is_used_again_while_its_last_note_goes_has_a_note() -> None:
    store = _Store()
    notes = Notes(store)
    await notes.write("k", SENDER)
    store.proceed.clear()
    keeping = asyncio.ensure_future(notes.keep(()))
    await wait_until(store.removing.is_set, what="the removal")
    writing = asyncio.ensure_future(notes.write("k", SENDER))
    await notes.write("other", SENDER)
    assert not writing.done()
    store.proceed.set()
    await asyncio.gather(keeping, writing)
    assert await notes.read("k") == SENDER
    await notes.keep(("other",))
    assert await notes.read("other") == SENDER
    with pytest.raises(errors.NotFoundError):
        await notes.read("k")


async def test_what_a_failed_call_has_written_is_removed() -> None:
    store = _Store()
    notes = Notes(store)
    store.lose_answers = True
    with pytest.raises(errors.UnavailableError):
        await notes.write("k", SENDER)
    assert store.objects
    await notes.keep(())
    assert not store.objects
