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


def leave_out(events: list[stage_service_pb2.StageEvent], size: int, last: bool) -> list[stage_service_pb2.StageEvent]:
    """As a worker that was told how much media the client has: it says so at once, or with its ``last`` event."""
    told = stage_service_pb2.StageEvent(skipped_media_bytes=size)
    for event in events:
        cut_off = min(size, len(event.media))
        size, event.media = size - cut_off, event.media[cut_off:]
        if cut_off:
            event.ClearField("media_info")
    return [*events, told] if last else [told, *events]


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
        if skip is not None and seed % 3:
            whole = skip.media_bytes == len(MEDIA)
            events = leave_out(events, skip.media_bytes, last=whole and seed % 3 == 2)
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


def test_more_left_out_than_was_had_is_told() -> None:
    emitted = Emitted()
    note(emitted, stage_service_pb2.StageEvent(media=b"four"))
    skip = Skip(emitted, 0)
    with pytest.raises(errors.DataLossError, match="left out 1 bytes"):
        skip.rest(stage_service_pb2.StageEvent(skipped_media_bytes=5))


def test_what_can_be_resumed() -> None:
    emitted, seen = Emitted(), []
    for text, token_ids, media in (("", [], b""), ("a", [], b""), ("", [7], b""), ("", [], b"x")):
        note(emitted, stage_service_pb2.StageEvent(text=text, token_ids=token_ids, media=media))
        seen.append(emitted.resumable)
    # Nothing; a text whose tokens are not known; with a token; media.
    assert seen == [False, False, True, False]
