"""What vLLM is told of an answer that was begun elsewhere, and the text that it then makes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from stage_worker.engine import EngineOutput, Resume
from stage_worker.engines.vllm_resume import AnswerText, rest_of_sampling, run

END = 0
PROMPT = [ord(character) for character in "Say it: "]


def decode(tokens: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes; 0 is special and no text."""
    return bytes(token for token in tokens if token != END).decode(errors="replace")


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


class Model:
    """Goes on with a fixed answer, as vLLM does."""

    def __init__(self, answer: bytes) -> None:
        self.answer = [*answer, END]
        self.asked: list[dict[str, Any]] = []

    async def generate(self, tokens: Sequence[int], sampling: dict[str, Any]) -> AsyncGenerator[Any, None]:
        self.asked.append(sampling)
        at = len(tokens) - len(PROMPT)
        for count in range(1, sampling["max_tokens"] + 1):
            token = self.answer[at]
            reason = "stop" if token == END else "length" if count == sampling["max_tokens"] else None
            step = SimpleNamespace(token_ids=[token], text="", finish_reason=reason, logprobs=None)
            yield SimpleNamespace(outputs=[step], finished=reason is not None)
            at += 1
            if reason:
                return

    async def resumed(self, thread: ThreadPoolExecutor, made: bytes, text: str, **sampling: Any) -> list[EngineOutput]:
        whole = {"max_tokens": 100, **sampling}
        outputs = run(
            Resume(list(made), text), PROMPT, whole, decode=decode, ends={END}, thread=thread, generate=self.generate
        )
        return [output async for output in outputs]


def text_of(outputs: Sequence[EngineOutput]) -> str:
    return "".join(output.text for output in outputs)


@pytest.mark.parametrize("cut", range(14))
async def test_characters_that_span_the_cut_come_whole(cut: int, thread: ThreadPoolExecutor) -> None:
    answer = "Zürich, 你好".encode()
    sent = answer[:cut].decode(errors="ignore")
    rest = await Model(answer).resumed(thread, answer[:cut], sent)
    assert sent + text_of(rest) == "Zürich, 你好"
    assert rest[-1].finish is not None
    assert (rest[-1].finish.reason, rest[-1].finish.completion_tokens) == ("stop", len(answer) + 1)
    assert rest[-1].finish.prompt_tokens == len(PROMPT)


@pytest.mark.parametrize("cut", range(12))
@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_that_spans_the_cut_stops(cut: int, include: bool, thread: ThreadPoolExecutor) -> None:
    answer = b"one two three four"
    sent = "one two three"[: max(0, cut - 5)]  # what may begin a stop was held back
    rest = await Model(answer).resumed(
        thread, answer[:cut], sent, stop=["x", " three"], include_stop_str_in_output=include
    )
    assert sent + text_of(rest) == ("one two three" if include else "one two")
    assert rest[-1].finish is not None
    assert (rest[-1].finish.reason, rest[-1].finish.completion_tokens) == ("stop", len(b"one two three"))
    assert len([token for output in rest for token in output.token_ids]) == len(b"one two three") - cut


async def test_stops_count_from_min_tokens(thread: ThreadPoolExecutor) -> None:
    rest = await Model(b"no no no no").resumed(thread, b"no n", "no n", stop=["no"], min_tokens=6)
    assert "no n" + text_of(rest) == "no no "


@pytest.mark.parametrize(
    ("made", "sent", "sampling", "text", "reason"),
    [
        (b"yes\0", "yes", {}, "", "stop"),
        (b"yes", "ye", {"max_tokens": 3}, "s", "length"),
        (b"yes, no", "ye", {"stop": [", no"]}, "s", "stop"),
    ],
)
async def test_what_was_at_its_end_ends_at_once(
    made: bytes, sent: str, sampling: dict[str, Any], text: str, reason: str, thread: ThreadPoolExecutor
) -> None:
    model = Model(b"never asked")
    (end,) = await model.resumed(thread, made, sent, **sampling)
    assert end.finish is not None
    assert (end.text, end.finish.reason, end.finish.completion_tokens) == (text, reason, len(made))
    assert not model.asked


async def test_limits_count_what_was_made(thread: ThreadPoolExecutor) -> None:
    model = Model(b"a long answer")
    rest = await model.resumed(thread, b"a lo", "a lo", max_tokens=8, min_tokens=6, stop=["zzz"])
    assert "a lo" + text_of(rest) == "a long a"
    assert rest[-1].finish is not None
    assert (rest[-1].finish.reason, rest[-1].finish.completion_tokens) == ("length", 8)
    assert model.asked == [{"max_tokens": 4, "min_tokens": 2}], "stop strings are looked for here"


def test_penalties_and_seeds_of_what_was_made() -> None:
    whole = {"max_tokens": 10, "presence_penalty": 0.5, "frequency_penalty": 0.25, "seed": 7, "logit_bias": {"3": 1}}
    rest = rest_of_sampling(whole, [3, 3, 4])
    assert rest["logit_bias"] == {3: 1 - 0.5 - 0.5, 4: -0.75}
    assert rest["max_tokens"] == 7
    assert 0 <= rest["seed"] < 2**63
    assert rest["seed"] not in (7, rest_of_sampling(whole, [3, 3])["seed"])
    assert rest == rest_of_sampling(whole, [3, 3, 4])
    assert rest_of_sampling({"max_tokens": 10}, [3]) == {"max_tokens": 9}


def test_a_word_begins_with_the_space_that_the_prompt_leaves_it() -> None:
    def joined(tokens: Sequence[int]) -> str:
        return " ".join(f"w{token}" for token in tokens)  # drops the space before the first, as some tokenizers do

    text = AnswerText(joined, [1, 2, 3], {})
    for token in (4, 5):
        text.add(token)
    assert text.take(all_of_it=False) == " w4 w5"
