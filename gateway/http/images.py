"""POST /v1/images/generations and /v1/images/edits: words, and pictures, in; pictures out."""

from __future__ import annotations

import time
from typing import Any

from gateway.http.choices import begin_choices, seeded
from gateway.http.exchange import Exchange
from gateway.http.image_schema import ImageRequest, parse_edit, parse_generation
from gateway.http.multipart import read_form
from gateway.http.pictures import Picture, pictures
from gateway.http.service import HttpService
from gateway.http.speech import token_usage
from gateway.request import RequestState, Usage
from omni.v1 import prompt_pb2
from omnicore import errors


class ImageEndpoints:
    """Both answer in one piece: ``data`` has one picture for each of ``n``."""

    def __init__(self, service: HttpService) -> None:
        self._service = service

    async def generations(self, exchange: Exchange) -> None:
        """Pictures of a text."""
        limits = self._service.limits
        body = await exchange.read_json(limits.max_body_bytes)
        await self._answer(exchange, parse_generation(body, self._service.pipelines, limits.max_prompt_bytes))

    async def edits(self, exchange: Exchange) -> None:
        """Pictures made of pictures, which come in a form."""
        limits = self._service.limits
        form = await read_form(exchange, limits.max_body_bytes)
        await self._answer(exchange, parse_edit(form, self._service.pipelines, limits.max_prompt_bytes))

    async def _answer(self, exchange: Exchange, asked: ImageRequest) -> None:
        async def submit(index: int, image_id: str) -> RequestState:
            return await self._service.begin(
                exchange, image_id, asked.graph, asked.task, ("image",), asked.prompt,
                seeded(asked.sampling, asked.graph, index), prompt_pb2.SpeechOptions(), asked.session_id,
                asked.priority, asked.timeout_s, asked.strict_session,
            )  # fmt: skip

        created = int(time.time())
        request_id = "img-" + exchange.id
        choices = await begin_choices(
            self._service.orchestrator.admission, exchange, request_id, asked.n, asked.n, submit
        )
        made = [picture for events in await choices.collect() for picture in pictures(events)]
        if not made:
            raise errors.InternalError(f"model {asked.graph.name!r} made no image", reason="NO_OUTPUT")
        await exchange.json(_response(request_id, created, made, choices.usage))


def _response(request_id: str, created: int, made: list[Picture], usage: Usage) -> dict[str, Any]:
    """OpenAI's object; ``id`` is ours."""
    return {
        "id": request_id,
        "created": created,
        "data": [{"b64_json": picture.base64} for picture in made],
        "output_format": made[0].mime_type.removeprefix("image/"),
        "usage": {
            **token_usage(usage),
            "input_tokens_details": {"text_tokens": usage.prompt_tokens, "image_tokens": 0},
        },
    }
