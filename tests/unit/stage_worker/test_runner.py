"""The end of a call."""

from __future__ import annotations

import asyncio

import pytest

from stage_worker.runner import CallRunner


class _Input:
    """Whose leaving takes until it is cancelled, or no time."""

    def __init__(self, *, slow: bool) -> None:
        self.slow = slow
        self.leaving = False
        self.left = False

    async def aclose(self) -> None:
        self.leaving = True
        try:
            if self.slow:
                await asyncio.Event().wait()
        finally:
            self.left = True


async def test_a_task_that_is_cancelled_while_it_leaves_its_inputs_leaves_them_all() -> None:
    runner = object.__new__(CallRunner)  # all else of a worker plays no part
    inputs = [_Input(slow=True), _Input(slow=False), _Input(slow=False)]
    runner._inputs = dict(enumerate(inputs))  # type: ignore[arg-type]
    closing = asyncio.ensure_future(runner._close_inputs(None))
    while not inputs[0].leaving:
        await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert [item.left for item in inputs] == [True, True, True]
