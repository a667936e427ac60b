"""What a stage has brought, and that a second run of it repeats and loses nothing, however it is cut."""

from __future__ import annotations

import random

import pytest

from gateway.emitted import Emitted, Skip
from omni.v1 import output_pb2, stage_service_pb2
from omnicore import errors

TEXT = "".join(f"Satz {n} mit Ä und 漢字. " for n in range(40))
MEDIA = bytes(range(256)) * 8


def cut(rng: random.Random, text: str, tokens: list[int], media: bytes) -> list[stage_service_pb2.StageEvent]:
    """The same output in other events."""
    events: list[stage_service_pb2.StageEvent] = []
    while text or tokens or media:
        event = stage_service_pb2.StageEvent()
        t, k, m = rng.randint(0, 20), rng.randint(0, 6), rng.randint(0, 300)
        event.text, text = text[:t], text[t:]
        event.token_ids.extend(tokens[:k])
        del tokens[:k]
        if media and m and not any(e.media for e in events):
            event.media_info.CopyFrom(output_pb2.MediaInfo(mime_type="audio/pcm", sample_rate_hz=24000, channels=1))
        event.media, media = media[:m], media[m:]
        events.append(event)
    return events


def note(emitted: Emitted, event: stage_service_pb2.StageEvent) -> None:
    if event.media:
        emitted.add_media(event)
    else:
        emitted.add(event)


@pytest.mark.parametrize("seed", range(30))
def test_a_second_run_brings_exactly_the_rest(seed: int) -> None:
    rng = random.Random(seed)
    tokens = list(range(500))
    got_text, got_tokens, got_media, infos = "", list[int](), b"", 0
    emitted = Emitted()
    for run in range(3):  # lost twice, at any moment
        events = cut(rng, TEXT, list(tokens), MEDIA)
        skip = Skip(emitted, 0) if run else None
        for event in events[: rng.randint(0, len(events))] if run < 2 else events:
            rest = skip.rest(event) if skip is not None else event
            if rest is None:
                continue
            note(emitted, rest)
            got_text += rest.text
            got_tokens += rest.token_ids
            got_media += rest.media
            infos += rest.HasField("media_info")
        if run == 2 and skip is not None:
            skip.check_finished()
    assert (got_text, got_tokens, got_media, infos) == (TEXT, tokens, MEDIA, 1)
    assert (emitted.text, emitted.token_ids, emitted.media_bytes) == (TEXT, tokens, len(MEDIA))


def test_another_text_is_told() -> None:
    emitted = Emitted()
    emitted.add(stage_service_pb2.StageEvent(text="The cat sat"))
    skip = Skip(emitted, 3)
    assert skip.rest(stage_service_pb2.StageEvent(text="The ")) is None
    with pytest.raises(errors.DataLossError, match="stage 3") as caught:
        skip.rest(stage_service_pb2.StageEvent(text="dog sat down"))
    assert caught.value.reason == "REPLAY_DIVERGED"


def test_less_than_before_is_told() -> None:
    emitted = Emitted()
    emitted.add(stage_service_pb2.StageEvent(text="The cat sat"))
    skip = Skip(emitted, 0)
    skip.rest(stage_service_pb2.StageEvent(text="The cat"))
    with pytest.raises(errors.DataLossError, match="4 characters"):
        skip.check_finished()


def test_what_can_be_resumed() -> None:
    emitted, seen = Emitted(), []
    for text, token_ids, media in (("", [], b""), ("a", [], b""), ("", [7], b""), ("", [], b"x")):
        note(emitted, stage_service_pb2.StageEvent(text=text, token_ids=token_ids, media=media))
        seen.append(emitted.resumable)
    # Nothing; a text whose tokens are not known; with a token; media.
    assert seen == [False, False, True, False]
