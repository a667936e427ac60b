"""Pictures: made of words, made of pictures, in images and in chats; every answer of its own request."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Any

import aiohttp

from stage_worker.engines.sim_content import picture
from tests.integration.gateway.conftest import Stand, running_stand
from tests.integration.openai.models import picture_model, running_models, text_model
from tests.support.pipelines import text_pipeline

PNG = picture(1)
FIELDS = {"bot_task": "think_recaption", "n": "1", "num_inference_steps": "50", "guidance_scale": "1", "seed": "42"}
PROMPT = "Make it night.\nKeep the 猫 — and the “sign”.\r\nThank you! 🙂"


def form(image: bytes | list[bytes] = PNG, prompt: str | None = PROMPT, /, **fields: str) -> aiohttp.FormData:
    data = aiohttp.FormData()
    for one in [image] if isinstance(image, bytes) else image:
        data.add_field("image" if isinstance(image, bytes) else "image[]", one, filename="a.png")
    if prompt is not None:
        data.add_field("prompt", prompt)
    for name, value in fields.items():
        data.add_field(name, value)
    return data


async def edit(stand: Stand, data: aiohttp.FormData) -> tuple[int, dict[str, Any]]:
    async with stand.http.post("/v1/images/edits", data=data) as response:
        return response.status, await response.json()


def size_of(encoded: str) -> tuple[int, int]:
    data = base64.b64decode(encoded)
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


async def test_edits_and_generations_and_chats_agree() -> None:
    async with running_models(picture_model(), text_model()) as stand:
        status, body = await edit(stand, form(model="pictures", **FIELDS))
        assert status == 200, body
        assert body["id"].startswith("img-")
        assert [size_of(item["b64_json"]) for item in body["data"]] == [(64, 64)]
        assert body["usage"]["input_tokens"] > 0
        # Whatever steers it makes another picture; the same makes the same, also where the only such model is meant.
        seen = {body["data"][0]["b64_json"]}
        for changed in ({"seed": "43"}, {"num_inference_steps": "49"}, {"guidance_scale": "1.5"}, {"bot_task": "x"}):
            status, other = await edit(stand, form(**{**FIELDS, **changed}))
            assert status == 200, other
            seen.add(other["data"][0]["b64_json"])
        _, other = await edit(stand, form([PNG, picture(2)], **FIELDS))
        seen.add(other["data"][0]["b64_json"])
        assert len(seen) == 6
        assert (await edit(stand, form(**FIELDS)))[1]["data"] == body["data"]

        status, several = await edit(stand, form(**{**FIELDS, "n": "3"}))
        assert status == 200
        assert several["data"][0] == body["data"][0]
        assert len({item["b64_json"] for item in several["data"]}) == 3

        made = {"model": "pictures", "prompt": PROMPT, "seed": 5, "num_inference_steps": 4}
        status, body = await stand.post("/v1/images/generations", {**made, "size": "32x16", "negative_prompt": "rain"})
        assert status == 200, body
        assert size_of(body["data"][0]["b64_json"]) == (32, 16)
        status, body = await stand.post("/v1/images/generations", {**made, "size": "auto", "user": "u"})
        assert status == 200, body

        # The same words in a chat are the same picture.
        chat = {"messages": [{"role": "user", "content": PROMPT}], "seed": 5, "extra_body": {"num_inference_steps": 4}}
        status, answer = await stand.chat("pictures", modalities=["image"], **chat)
        assert status == 200, answer
        url = f"data:image/png;base64,{body['data'][0]['b64_json']}"
        part = {"type": "image_url", "image_url": {"url": url}}
        assert answer["choices"][0]["message"]["content"] == [part]
        assert answer["id"].startswith("chatcmpl-")
        _, answer = await stand.chat("pictures", modalities=["text", "image"], **chat)
        words, shown = answer["choices"][0]["message"]["content"]
        assert words["text"].startswith("Answer-")
        assert shown == part
        received: list[Any] = await stand.stream("pictures", modalities=["image"], **chat)
        deltas = [chunk["choices"][0]["delta"].get("content") for chunk in received[:-1]]
        assert [delta for delta in deltas if delta] == [[part]]
        assert received[-2]["choices"][0]["finish_reason"] == "stop"
        await stand.settled()


async def test_each_picture_follows_its_own_input() -> None:
    """E-08: many at once, over every endpoint, each with another picture: the answers are those of one at a time."""
    async with running_models(picture_model()) as stand:

        async def by_form(number: int) -> str:
            status, body = await edit(stand, form(picture(number), "same words", seed="1"))
            assert status == 200, body
            return str(body["data"][0]["b64_json"])

        async def by_chat(number: int) -> str:
            url = "data:image/png;base64," + base64.b64encode(picture(number)).decode()
            content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "same words"}]
            messages = [{"role": "user", "content": content}]
            status, body = await stand.chat("pictures", messages=messages, modalities=["image"], seed=1)
            assert status == 200, body
            return str(body["choices"][0]["message"]["content"][0]["image_url"]["url"].partition(",")[2])

        numbers = range(1, 25)
        together = await asyncio.gather(*(by_form(n) for n in numbers), *(by_chat(n) for n in numbers))
        assert together[:24] == together[24:]
        assert len(set(together)) == 24
        assert [await by_form(number) for number in (3, 17)] == [together[2], together[16]]
        await stand.settled()


async def test_what_is_wrong_is_named() -> None:
    async with running_models(picture_model(), text_model()) as stand:
        for fields, param, words in (
            ({"seed": "abc"}, "seed", "must be a whole number, got 'abc'"),
            ({"num_inference_steps": "1.5"}, "num_inference_steps", "whole number"),
            ({"num_inference_steps": "0"}, "num_inference_steps", "at least 1"),
            ({"guidance_scale": "much"}, "guidance_scale", "must be a number"),
            ({"n": "0"}, "n", "1 to 10"),
            ({"n": "11"}, "n", "1 to 10"),
            ({"size": "huge"}, "size", "WIDTHxHEIGHT"),
            ({"stream": "maybe"}, "stream", "true or false"),
            ({"response_format": "url"}, "response_format", "not supported"),
            ({"output_format": "webp"}, "output_format", "not supported"),
            ({"sed": "1"}, "sed", "did you mean 'seed'"),
            ({"model": "words"}, "model", "makes no images; it offers: text"),
        ):
            status, body = await edit(stand, form(**fields))
            assert (status, body["error"]["param"]) == (400, param), body
            assert words in body["error"]["message"]
        twice = form(seed="1")
        twice.add_field("seed", "2")
        masked = form()
        masked.add_field("mask", PNG, filename="mask.png")
        for data, param, words in (
            (form(b"GIF", PROMPT), "image", "is not an image that is known here: PNG"),
            (form(b"", PROMPT), "image", "is empty"),
            (form([PNG, b"%PDF"], PROMPT), "image[1]", "is not an image"),
            (form(PNG, None), "prompt", "required"),
            (form(PNG, " \n"), "prompt", "must not be empty"),
            (form([], PROMPT, n="1"), "image", "1 to 16 files, got 0"),
            (twice, "seed", "given 2 times"),
            (masked, "mask", "not supported"),
        ):
            if not data.is_multipart:
                data = aiohttp.FormData({"prompt": PROMPT}, default_to_multipart=True)
            status, body = await edit(stand, data)
            assert (status, body["error"]["param"]) == (400, param), body
            assert words in body["error"]["message"]
        status, body = await stand.post("/v1/images/edits", {"prompt": "x"})
        assert (status, body["error"]["code"]) == (415, "unsupported_media_type")
        status, body = await stand.post("/v1/images/generations", {"model": "nope", "prompt": "x"})
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        status, body = await stand.chat("pictures", modalities=["audio"])
        assert (status, body["error"]["code"]) == (400, "unsupported_modality")
        await stand.settled()


async def test_the_gateway_fetches_only_from_allowed_public_hosts() -> None:
    async def refusal(stand: Stand, url: str) -> dict[str, Any]:
        content = [{"type": "image_url", "image_url": {"url": url}}]
        status, body = await stand.chat("text", messages=[{"role": "user", "content": content}])
        assert (status, body["error"]["param"]) == (400, "messages[0].content[0].image_url.url"), body
        assert body["error"]["code"] == "media_not_fetched"
        error: dict[str, Any] = body["error"]
        return error

    async with running_stand(text_pipeline()) as stand:
        assert "fetches nothing" in (await refusal(stand, "https://example.org/a.png"))["message"]
    async with running_stand(text_pipeline(), allow_media_domains=("localhost",)) as stand:
        assert "media may come from: localhost" in (await refusal(stand, "https://example.org/a.png"))["message"]
        # Nor is anything fetched for whom admission refuses, whatever the address.
        stand.gateway.orchestrator.admission.draining = True
        content = [{"type": "image_url", "image_url": {"url": "http://localhost/a.png"}}]
        status, body = await stand.chat("text", messages=[{"role": "user", "content": content}])
        assert (status, body["error"]["code"]) == (503, "gateway_draining")
        stand.gateway.orchestrator.admission.draining = False
        # The name is allowed, its address is not.
        assert "not at a public address" in (await refusal(stand, "http://localhost/a.png"))["message"]
