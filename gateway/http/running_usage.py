"""What a stream has used so far, for clients that want it in every chunk (``continuous_usage_stats``, as in vLLM)."""

from __future__ import annotations

from omni.v1 import stage_service_pb2


class RunningUsage:
    """Counts one choice's events: its prompt, as soon as the engine tells, and the tokens of its text.

    What other stages make is only known when they end: it is in the last chunk's usage.
    """

    __slots__ = ("_completion_tokens", "_prompt_tokens")

    def __init__(self) -> None:
        self._prompt_tokens = 0
        self._completion_tokens = 0

    def count(self, event: stage_service_pb2.StageEvent) -> None:
        """This event is being passed on."""
        self._prompt_tokens = event.prompt_tokens or self._prompt_tokens
        self._completion_tokens += len(event.token_ids)

    def begin(self) -> bytes:
        """The field of the chunk before any token."""
        return self._field(0)

    def field(self) -> bytes:
        """The field of a chunk with the events counted."""
        return self._field(self._completion_tokens)

    def _field(self, made: int) -> bytes:
        prompt = self._prompt_tokens
        return b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (prompt, made, prompt + made)
