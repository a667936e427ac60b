"""What a stage has given to the client's output, and what a new run of it must leave out."""

from __future__ import annotations

from omni.v1 import stage_service_pb2
from omnicore import errors

FOLD_EVERY = 256
"""Most answers never pay for the sums: events are only kept, and read when this many have come, or when asked. They
cost some 150 bytes each: 40 kB for a request."""


class Emitted:
    """The output of one stage of a request so far, over all its runs."""

    __slots__ = ("_pieces", "_token_ids", "has_media_info", "media_bytes", "recent")

    def __init__(self, recent: list[stage_service_pb2.StageEvent] | None = None) -> None:
        """``recent``: passed on so far, in a list that is ours from now on."""
        self.media_bytes = 0
        self.has_media_info = False
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self.recent: list[stage_service_pb2.StageEvent] = recent if recent is not None else []
        """Not summed up yet; always this very list. Who appends to it himself, to save a call, calls ``fold``."""

    def add(self, event: stage_service_pb2.StageEvent) -> None:
        """Text or tokens were passed on."""
        self.recent.append(event)
        if len(self.recent) >= FOLD_EVERY:
            self.fold()

    def add_media(self, event: stage_service_pb2.StageEvent) -> None:
        """Media was passed on, maybe with text."""
        self.media_bytes += len(event.media)
        if event.HasField("media_info"):
            self.has_media_info = True
        if event.text or event.token_ids:
            self.fold()  # what came before it
            self._pieces_of(event)

    @property
    def text(self) -> str:
        """All of it."""
        self.fold()
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def token_ids(self) -> list[int]:
        """All of them. Not a copy."""
        self.fold()
        return self._token_ids

    @property
    def anything(self) -> bool:
        """The client's output has something of this stage."""
        return bool(self.recent or self._pieces or self._token_ids or self.media_bytes)

    @property
    def resumable(self) -> bool:
        """A new run can go on from it: it is text whose tokens are known."""
        return bool(self.token_ids) and not self.media_bytes

    def clear(self) -> None:
        """The output was taken back."""
        self.media_bytes, self.has_media_info = 0, False
        self._pieces, self._token_ids = [], []
        self.recent.clear()

    def fold(self) -> None:
        """Sum up what is ``recent``."""
        for event in self.recent:
            self._pieces_of(event)
        self.recent.clear()

    def _pieces_of(self, event: stage_service_pb2.StageEvent) -> None:
        if event.text:
            self._pieces.append(event.text)
        self._token_ids.extend(event.token_ids)


class Skip:
    """Leaves out of a new run's events what the client has already: as many bytes of media, and the same text."""

    __slots__ = ("_media_bytes", "_media_info", "_stage_id", "_text", "_tokens")

    def __init__(self, emitted: Emitted, stage_id: int) -> None:
        self._stage_id = stage_id
        self._text = emitted.text
        self._tokens = len(emitted.token_ids)
        self._media_bytes = emitted.media_bytes
        self._media_info = emitted.has_media_info

    @property
    def media_bytes(self) -> int:
        """Bytes of media that are still to come again."""
        return self._media_bytes

    @property
    def done(self) -> bool:
        """Everything that was to be left out has been."""
        return not (self._text or self._tokens or self._media_bytes or self._media_info)

    def rest(self, event: stage_service_pb2.StageEvent) -> stage_service_pb2.StageEvent | None:
        """What of ``event`` the client does not have; None if it has all.

        Raises ``DataLossError`` (REPLAY_DIVERGED) if its text is not what the client has.
        """
        if left_out := event.skipped_media_bytes:
            if left_out > self._media_bytes:
                raise self._diverged(f"left out {left_out - self._media_bytes} bytes that were never passed on")
            self._media_bytes -= left_out
            self._media_info = False  # it comes with the first bytes
        text, media, tokens = event.text, event.media, min(self._tokens, len(event.token_ids))
        if self._text and text:
            length = min(len(self._text), len(text))
            if not self._text.startswith(text[:length]):
                raise self._diverged("its text is not what was passed on")
            self._text, text = self._text[length:], text[length:]
        if self._media_bytes and media:
            length = min(self._media_bytes, len(media))
            self._media_bytes, media = self._media_bytes - length, media[length:]
        self._tokens -= tokens
        rest = stage_service_pb2.StageEvent()
        rest.CopyFrom(event)
        rest.text, rest.media = text, media
        del rest.token_ids[:tokens]
        del rest.logprobs[:tokens]
        if event.HasField("media_info") and self._media_info:
            rest.ClearField("media_info")
            self._media_info = False
        return rest if rest.text or rest.media or rest.token_ids else None

    def check_finished(self) -> None:
        """The run has ended. Raises ``DataLossError`` (REPLAY_DIVERGED) if it brought less than the client has."""
        if self._text or self._media_bytes:
            raise self._diverged(
                f"it ended {len(self._text)} characters and {self._media_bytes} bytes before what was passed on"
            )

    def _diverged(self, how: str) -> errors.DataLossError:
        return errors.DataLossError(
            f"stage {self._stage_id} was lost and made its output again, but {how}",
            reason="REPLAY_DIVERGED",
            metadata={"stage": self._stage_id},
        )
