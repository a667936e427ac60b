"""Gateways that are processes of their own: what they know."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from typing import Any

import aiohttp

from tests.support.processes import POLL_S


async def until_routable(
    url: str,
    pipeline: str,
    replicas: Mapping[int, int],
    *,
    tls: ssl.SSLContext | None = None,
    timeout_s: float = 60.0,
) -> None:
    """Wait until the gateway at ``url`` ("http://host:port") routes to so many replicas (stage id → how many).

    A worker is ready once its control plane knows it; a gateway hears of that later.
    """
    expected = {str(stage_id): count for stage_id, count in replicas.items()}
    deadline_s = time.monotonic() + timeout_s
    known: dict[str, Any] = {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls or True)) as http:
        while known.get("routable_replicas") != expected:
            assert time.monotonic() < deadline_s, f"{pipeline} should have {expected}, the gateway has {known}"
            await asyncio.sleep(POLL_S)
            async with http.get(f"{url}/ready") as response:
                known = (await response.json())["pipelines"].get(pipeline, {})
