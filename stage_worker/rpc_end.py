"""Knowing that a stream is over, however it ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from omnicore.rpc import ServicerContext


def on_done(context: ServicerContext, callback: Callable[[], None]) -> None:
    """Run ``callback`` when the RPC has ended: served, failed, cancelled by the client, or its connection lost."""
    context.add_done_callback(cast("Any", lambda _: callback()))
