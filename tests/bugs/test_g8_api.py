"""Known failures of the API; ``docs/known-failures.md`` has the list."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from tests.integration.gateway.conftest import USER, Stand, running_stand
from tests.integration.gateway.scripts import silent, speak, tokens
from tests.support.pipelines import speech_pipeline, text_pipeline

PNG = b"\x89PNG\r\n\x1a\n...."
WAV = b"RIFF....WAVEfmt "


async def ready_speech(stand: Stand) -> None:
    for stage_id, script in enumerate((tokens(2), silent, speak)):
        await stand.cluster.add("speech", stage_id, script)
    await stand.ready("speech")


@pytest.mark.parametrize("stream", [False, True])
async def test_bug_68_a_modality_that_the_pipeline_does_not_make_is_refused_with_those_it_makes(stream: bool) -> None:
    async with running_stand(speech_pipeline()) as stand:
        await ready_speech(stand)
        wrong: list[tuple[Any, str]] = [
            (["video"], "modalities[0]"),
            (["text", "video"], "modalities[1]"),
            (["image"], "modalities[0]"),
            ([], "modalities"),
            ("audio", "modalities"),
            ([3], "modalities[0]"),
        ]
        for modalities, param in wrong:
            status, body = await stand.chat("speech", modalities=modalities, stream=stream)
            assert status == 400, body
            error = body["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", param)
            if isinstance(modalities, list) and 3 not in modalities:
                assert "text, audio" in error["message"]
                assert error["code"] == "unsupported_modality"
        assert not any(worker.calls for worker in stand.cluster.workers)
        status, body = await stand.chat("speech", modalities=["text", "audio"])
        assert status == 200
        assert len(body["choices"]) == 1
        await stand.settled()


async def test_bug_70_a_model_that_is_missing_or_unknown_is_never_another_one() -> None:
    async with running_stand(speech_pipeline(), text_pipeline()) as stand:
        await ready_speech(stand)
        await stand.cluster.add("text", 0, tokens(1))
        await stand.ready("text")
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", {"messages": USER}),
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/audio/speech", {"input": "x"}),
            ("/v1/images/generations", {"prompt": "x"}),
            ("/tokenize", {"prompt": "x"}),
            ("/detokenize", {"tokens": [1]}),
        ]
        for path, body in bodies:
            for missing in ({}, {"model": None}, {"model": ""}):
                status, answer = await stand.post(path, {**body, **missing})
                assert (status, answer["error"]["param"]) == (400, "model"), (path, answer)
            for unknown in ("nope", "Text", "text ", "tex", "text/v1"):
                status, answer = await stand.post(path, {**body, "model": unknown})
                error = answer["error"]
                assert (status, error["code"], error["param"]) == (404, "model_not_found", "model"), (path, answer)
                assert "known models: speech, text" in error["message"]
            status, answer = await stand.post(path, {**body, "model": 5})
            assert (status, answer["error"]["param"]) == (400, "model")
        for path, file in (("/v1/images/edits", ("image", PNG)), ("/v1/audio/transcriptions", ("file", WAV))):
            form = aiohttp.FormData({"prompt": "x", "model": "nope"})
            form.add_field(file[0], file[1], filename="a")
            async with stand.http.post(path, data=form) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")
        async with stand.http.get("/v1/models/nope") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")
        assert not any(worker.calls for worker in stand.cluster.workers)
