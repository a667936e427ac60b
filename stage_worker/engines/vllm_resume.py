"""Going on from tokens that another replica made: vLLM takes them as the end of the prompt. Imports no vLLM.

What then differs from one uninterrupted run is put right here, as far as it can be:

* text: detokenized from the first token that was made, with the prompt before it, and stop strings looked for in all
  of it, so that characters and stops that span the cut come out right;
* ``max_tokens``, ``min_tokens`` and the counts of the finish include what was made;
* ``repetition_penalty`` covers the prompt anyway; ``frequency_penalty`` of what was made becomes a bias, exactly;
  ``presence_penalty`` too, which is exact until a token that was made before comes again: it then counts twice;
* ``seed``: vLLM cannot skip the random numbers that were used, so the rest is as reproducible as the whole, but not the
  same; its seed depends on how much was made, so that the same numbers are not used twice;
* bad words of several tokens that span the cut are not seen.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from typing import Any

from omnicore.errors import UnimplementedError
from stage_worker.engine import EngineOutput, Finish, Resume
from stage_worker.engines import vllm_args

_CONTEXT_TOKENS = 5
"""Of the prompt, before the first token: whether a word begins with a space shows only there. As vLLM has it."""
_INCOMPLETE = "\ufffd"  # what a part of a character is decoded to
_SEED_STEP = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits: seeds of neighbouring cuts are far apart
_SEED_BITS = 0x7FFF_FFFF_FFFF_FFFF


class AnswerText:
    """The text of an answer, token by token, as vLLM's detokenizer makes it; it ends at a stop string."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int], sampling: Mapping[str, Any]
    ) -> None:
        """``sampling``: vLLM's parameters of the whole answer."""
        self._decode = decode
        self._ids = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._begin, self._read = 0, len(self._ids)
        self._stops: list[str] = list(sampling.get("stop", ()))
        self._include = bool(sampling.get("include_stop_str_in_output", False))
        self._min_tokens = int(sampling.get("min_tokens", 0))
        self._held = max((len(stop) for stop in self._stops), default=1) - 1 if not self._include else 0
        self._text = ""
        self._taken = 0
        self.tokens = 0
        """Added so far."""

    def add(self, token_id: int, *, silent: bool = False) -> bool:
        """The next token; one that is ``silent`` has ended the answer and is no text. True: a stop string is
        complete."""
        self.tokens += 1
        if silent and not self._include:
            return False
        self._ids.append(token_id)
        before = self._decode(self._ids[self._begin : self._read])
        after = self._decode(self._ids[self._begin :])
        known = len(self._text)
        if len(after) > len(before) and not after.endswith(_INCOMPLETE):
            self._text += after[len(before) :]
            self._begin, self._read = self._read, len(self._ids)
        return self.tokens > self._min_tokens and self._cut_at_stop(known)

    def skip(self, text: str) -> None:
        """So much was sent before."""
        self._taken = len(text)

    def take(self, *, all_of_it: bool) -> str:
        """What is new. Text that may begin a stop string is held back until ``all_of_it`` is wanted."""
        end = len(self._text) if all_of_it else len(self._text) - self._held
        if end <= self._taken:
            return ""
        text, self._taken = self._text[self._taken : end], end
        return text

    def _cut_at_stop(self, known: int) -> bool:
        if len(self._text) == known:
            return False
        for stop in self._stops:
            at = self._text.find(stop, max(0, known + 1 - len(stop)))
            if at >= 0:
                self._text = self._text[: at + len(stop) if self._include else at]
                return True
        return False


def rest_of_sampling(sampling: Mapping[str, Any], made: Sequence[int]) -> dict[str, Any]:
    """vLLM's parameters for what follows ``made``, from those of the whole answer. ``max_tokens`` may be 0 or less."""
    rest = {name: value for name, value in sampling.items() if name not in ("stop", "include_stop_str_in_output")}
    rest["max_tokens"] = sampling["max_tokens"] - len(made)
    if "min_tokens" in rest:
        rest["min_tokens"] = max(0, rest["min_tokens"] - len(made))
    if rest.get("seed") is not None:
        rest["seed"] = (int(rest["seed"]) + _SEED_STEP * len(made)) & _SEED_BITS
    presence = float(rest.get("presence_penalty", 0.0))
    frequency = float(rest.get("frequency_penalty", 0.0))
    if made and (presence or frequency):
        bias = collections.defaultdict[int, float](
            float, {int(token): float(value) for token, value in (rest.get("logit_bias") or {}).items()}
        )
        for token_id, count in collections.Counter(made).items():
            bias[token_id] -= presence + frequency * count
        rest["logit_bias"] = dict(bias)
    return rest


async def run(
    resume: Resume,
    prompt_ids: Sequence[int],
    sampling: Mapping[str, Any],
    *,
    decode: Callable[[Sequence[int]], str],
    ends: Collection[int],
    thread: concurrent.futures.Executor,
    generate: Callable[[Sequence[int], dict[str, Any]], AsyncGenerator[Any, None]],
) -> AsyncGenerator[EngineOutput, None]:
    """What follows ``resume``. ``sampling``: vLLM's parameters of the whole answer; ``ends``: token ids that end one;
    ``thread``: where ``decode`` may be called for long; ``generate``: vLLM, from a prompt and parameters."""
    text = AnswerText(decode, prompt_ids, sampling)
    prompt_tokens = len(prompt_ids)

    def take_up() -> str:
        return _take_up(text, resume, sampling["max_tokens"], ends)

    reason = await asyncio.get_running_loop().run_in_executor(thread, take_up)
    if reason:
        finish = Finish(reason, prompt_tokens, len(resume.token_ids))
        yield EngineOutput(text=text.take(all_of_it=True), finish=finish)
        return
    rest = rest_of_sampling(sampling, resume.token_ids)
    async with contextlib.aclosing(generate([*prompt_ids, *resume.token_ids], rest)) as outputs:
        async for output in outputs:
            made = _step(text, output, prompt_tokens, sampling.get("logprobs"))
            yield made
            if made.finish is not None:
                return


def unsupported(why: str) -> UnimplementedError:
    """Of a request that has to run from the start."""
    return UnimplementedError(f"vLLM cannot go on {why}", reason="RESUME_UNSUPPORTED")


def _take_up(text: AnswerText, resume: Resume, max_tokens: int, ends: Collection[int]) -> str:
    """Take what was made into ``text``. Why the answer ends there, if only its end was lost; else empty."""
    made = resume.token_ids
    stopped = False
    for index, token_id in enumerate(made):
        if stopped := text.add(token_id, silent=index == len(made) - 1 and token_id in ends):
            break
    text.skip(resume.text)
    if stopped or (made and made[-1] in ends):
        return "stop"
    return "length" if len(made) >= max_tokens else ""


def _step(text: AnswerText, output: Any, prompt_tokens: int, logprobs: int | None) -> EngineOutput:
    """Ours, of one of vLLM's outputs."""
    step = output.outputs[0]
    by_token = output.finished and step.finish_reason == "stop"
    stopped, taken = False, 0
    for taken, token_id in enumerate(step.token_ids, 1):
        if stopped := text.add(token_id, silent=by_token and taken == len(step.token_ids)):
            break
    finish = None
    if stopped or output.finished:
        finish = Finish("stop" if stopped else step.finish_reason or "stop", prompt_tokens, text.tokens)
    return EngineOutput(
        text=text.take(all_of_it=finish is not None),
        token_ids=tuple(step.token_ids[:taken]),
        logprobs=vllm_args.token_logprobs(step.token_ids, step.logprobs, logprobs)[:taken],
        finish=finish,
    )
