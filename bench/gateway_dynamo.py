"""A worker of Dynamo's runtime that gives tokens at once: what its frontend costs without a simulated engine.

    PEER/bin/python bench/gateway_dynamo.py TTFT_S ITL_S TOKENS MODEL_DIR DISCOVERY

Runs in the peer's own environment and imports nothing of this project.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

_FIRST_TOKEN_ID = 300  # of any vocabulary: an ordinary piece of text


async def main(ttft_s: float, itl_s: float, tokens: int, model_dir: Path, discovery: str) -> None:
    """Serve until killed."""
    llm = importlib.import_module("dynamo.llm")  # not in the environment of this project
    utils = importlib.import_module("dynamo.common.utils.runtime")

    async def generate(request: Any, context: Any = None) -> AsyncIterator[dict[str, Any]]:
        # A stream that migrated asks for the rest: the tokens that are still missing, after those that it had.
        missing = min(tokens, (request.get("stop_conditions") or {}).get("max_tokens") or tokens)
        await asyncio.sleep(ttft_s)
        for index in range(tokens - missing, tokens):
            if index > tokens - missing and itl_s:
                await asyncio.sleep(itl_s)
            token: dict[str, Any] = {"token_ids": [_FIRST_TOKEN_ID + index]}
            if index == tokens - 1:
                token["finish_reason"] = "length"
            yield token

    made = utils.create_runtime(discovery_backend=discovery, request_plane="tcp", event_plane="zmq")
    runtime = made[0] if isinstance(made, tuple) else made
    endpoint = runtime.endpoint("dynamo.backend.generate")
    kinds = llm.ModelType.Chat | llm.ModelType.Completions
    await llm.register_model(
        llm.ModelInput.Tokens,
        kinds,
        endpoint,
        str(model_dir),
        "mock",
        worker_type=llm.WorkerType.Aggregated,
        ignore_weights=True,
    )
    await endpoint.serve_endpoint(generate, graceful_shutdown=False)


if __name__ == "__main__":
    ttft, itl, count, folder, backend = sys.argv[1:]
    asyncio.run(main(float(ttft), float(itl), int(count), Path(folder), backend))
