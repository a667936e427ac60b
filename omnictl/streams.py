"""Streams of control planes that are opened again, at whichever answers, when they break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc
import grpc.aio

from omnicore import errors
from omnicore.backoff import Backoff
from omnicore.clock import SYSTEM_CLOCK, Clock
from omnictl import connect
from omnictl.settings import Settings

# A control plane that restarts is back within this; beyond it, the operator should know that nothing is followed.
GIVE_UP_AFTER_S = 60.0

Note = Callable[[str], None]
"""Gets a line when a stream broke and when it goes on."""


async def responses(
    settings: Settings,
    begin: Callable[[connect.ControlPlane], Any],
    *,
    note: Note,
    clock: Clock = SYSTEM_CLOCK,
    may_end: bool = False,
) -> AsyncGenerator[Any, None]:
    """Responses of the stream that ``begin`` opens, at whichever control plane answers, over any number of breaks.

    ``may_end``: a stream that ends in good order is the end; otherwise it is a break like any other. Raises the error
    of a stream that cannot be opened at first, or not again for ``GIVE_UP_AFTER_S``, and whatever is not UNAVAILABLE.
    """
    backoff = Backoff(initial_s=0.2, max_s=3.0)
    begun = False
    lost_at: float | None = None
    while True:
        try:
            async with connect.control_plane(settings) as plane:
                async for response in begin(plane):
                    if lost_at is not None:
                        note(f"following again, at {plane.address}")
                    begun, lost_at = True, None
                    backoff.reset()
                    yield response
                if may_end:
                    return
            failure: errors.OmniError = errors.UnavailableError("the control plane ended the stream")
        except grpc.aio.AioRpcError as error:
            failure = connect.reachable_error(error, "control plane")
        except errors.UnavailableError as error:
            failure = error
        if not begun or not isinstance(failure, errors.UnavailableError):
            raise failure
        if lost_at is None:
            lost_at = clock.monotonic()
            note(f"{failure.message}; trying again")
        elif clock.monotonic() - lost_at > GIVE_UP_AFTER_S:
            raise failure
        await asyncio.sleep(backoff.next_delay_s())
