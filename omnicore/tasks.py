"""Running coroutines together without exception groups."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def together(*coroutines: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run all at once and return their results in order. If one fails, the others are cancelled and awaited, and the
    first failure is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as failures:
        error: Exception = failures
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise error from None
    return [task.result() for task in tasks]
