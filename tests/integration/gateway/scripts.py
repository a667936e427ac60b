"""What scripted workers do with a call."""

from __future__ import annotations

import asyncio

from omnicore import errors
from tests.integration.gateway.scripted import Call, Script


def tokens(count: int, *, prompt: int = 3, reason: str = "stop") -> Script:
    """``count`` tokens, then the end."""

    async def script(call: Call) -> None:
        for number in range(count):
            call.text(f"t{number} ")
        call.finish(reason, prompt, count)

    return script


async def silent(call: Call) -> None:
    """A stage that only feeds others."""
    call.finish()


async def speak(call: Call) -> None:
    """Two pieces of audio."""
    call.audio(b"\x01\x00" * 240)
    call.audio(b"\x02\x00" * 120)
    call.finish()


async def hang(call: Call) -> None:
    """Nothing, for ever."""
    await asyncio.Event().wait()


def held(go: asyncio.Event, script: Script) -> Script:
    """``script``, after ``go``."""

    async def waiting(call: Call) -> None:
        await go.wait()
        await script(call)

    return waiting


async def endless(call: Call) -> None:
    """A token every few milliseconds, for ever."""
    while True:
        call.text("more ")
        await asyncio.sleep(0.005)


def broken(error: errors.OmniError, after: int = 0) -> Script:
    """``after`` tokens, then ``error``."""

    async def script(call: Call) -> None:
        for number in range(after):
            call.text(f"t{number} ")
        call.fail(error)

    return script
