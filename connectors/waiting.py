"""Waiting for work that writes to memory and cannot be stopped."""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


async def to_the_end(future: asyncio.Future[T]) -> T:
    """The result of ``future``, which is done when this returns or raises: also when the caller is cancelled, who hears
    of it then."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # it was looked at: nobody need be told that it was not
        raise cancelled
    return future.result()
