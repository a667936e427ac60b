"""Cutting streamed text: sentences as a speaker would hear them, whatever the size of the tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni.v1 import pipeline_pb2
from omnicore.errors import InvalidRequestError
from stage_worker.chunking import SentenceCutter, StepCutter, split_sentences, text_cutter


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("The sky is blue. Grass is green.", ["The sky is blue. ", "Grass is green."]),
        ("Dr. Smith met Mrs. Jones. They talked.", ["Dr. Smith met Mrs. Jones. ", "They talked."]),
        ("Pi is 3.14 or so. Euler is 2.71 then.", ["Pi is 3.14 or so. ", "Euler is 2.71 then."]),
        ("Well... maybe it works. It does... Now go on.", ["Well... maybe it works. ", "It does... ", "Now go on."]),
        ('"Stop right there!" she cried. He did.', ['"Stop right there!" she cried. ', "He did."]),
        ('He said "I will stop." Then he left.', ['He said "I will stop." ', "Then he left."]),
        ("Use tools, e.g. Hammers. Also nails work.", ["Use tools, e.g. Hammers. ", "Also nails work."]),
        ("J. R. R. Tolkien wrote it. Nobody else.", ["J. R. R. Tolkien wrote it. ", "Nobody else."]),
        ("It opens at 9 a.m. The door is red.", ["It opens at 9 a.m. ", "The door is red."]),
        ("Visit example.com today. It is free.", ["Visit example.com today. ", "It is free."]),
        ("It was the year 2024. Then came more.", ["It was the year 2024. ", "Then came more."]),
        ("You and I. The others left us.", ["You and I. ", "The others left us."]),
        ("Yes. It really is.", ["Yes. It really is."]),
        ("Is it so? Certainly it is! Good to know.", ["Is it so? Certainly it is! ", "Good to know."]),
        ("Steps are:\n1. Mix the flour\n2. Bake it well", ["Steps are:\n", "1. Mix the flour\n", "2. Bake it well"]),
        ("First paragraph here\n\nSecond one there", ["First paragraph here\n", "\nSecond one there"]),
        (
            "今天的天气真的非常好啊。我们一起出去走走吧！「真的可以吗？」当然可以的，我们走吧。",
            ["今天的天气真的非常好啊。", "我们一起出去走走吧！", "「真的可以吗？」当然可以的，我们走吧。"],
        ),
        ("", []),
        ("  \n ", []),
    ],
)
def test_sentences(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


def test_a_sentence_leaves_with_the_first_token_of_the_next() -> None:
    cutter = SentenceCutter()
    assert [list(cutter.feed(token)) for token in ("The end", " is", " near", ".")] == [[], [], [], []]
    assert list(cutter.feed(" But")) == ["The end is near. "]
    assert list(cutter.flush()) == ["But"]


def test_text_without_an_end_is_cut_at_a_clause_then_at_a_space_then_anywhere() -> None:
    clause = SentenceCutter(max_chars=40)
    assert clause.feed("one two three four five, six seven eight nine ten") == ["one two three four five, "]
    space = SentenceCutter(max_chars=20)
    assert space.feed("alpha beta gamma delta epsilon") == ["alpha beta gamma "]
    nowhere = SentenceCutter(max_chars=20)
    assert nowhere.feed("x" * 45) == ["x" * 20, "x" * 20]


@given(
    st.lists(st.text(alphabet="aB1 .!?…\n\"')。！」,;Dr", max_size=12), max_size=60),
    st.integers(1, 20),
    st.integers(20, 60),
)
def test_nothing_is_lost_and_nothing_is_huge(tokens: list[str], low: int, high: int) -> None:
    cutter = SentenceCutter(low, high)
    pieces = [piece for token in tokens for piece in cutter.feed(token)]
    pieces += cutter.flush()
    text = "".join(tokens)
    assert "".join(pieces).rstrip() == text.rstrip()
    assert text.startswith("".join(pieces))
    assert all(0 < len(piece) <= high for piece in pieces)


@given(st.text(alphabet='aB .!?\nDr。」"', max_size=200))
def test_token_borders_do_not_matter(text: str) -> None:
    cutter = SentenceCutter()
    by_character = [piece for character in text for piece in cutter.feed(character)]
    by_character += cutter.flush()
    assert "".join(by_character).rstrip() == "".join(split_sentences(text)).rstrip()


def test_step_and_final() -> None:
    step = text_cutter(pipeline_pb2.CHUNK_BY_STEP)
    assert isinstance(step, StepCutter)
    assert [*step.feed("a"), *step.feed(""), *step.feed("b"), *step.flush()] == ["a", "b"]
    final = text_cutter(pipeline_pb2.CHUNK_BY_FINAL)
    assert [*final.feed("a"), *final.feed("b")] == []
    assert list(final.flush()) == ["ab"]
    assert list(final.flush()) == []


def test_a_plan_must_say_how() -> None:
    with pytest.raises(InvalidRequestError, match="STEP, SENTENCE or FINAL"):
        text_cutter(pipeline_pb2.CHUNK_BY_UNSPECIFIED)


@pytest.mark.parametrize("unit", ["hello there. ", "a", "Mr. ", "1.", "a b\n"])
def test_a_long_text_costs_in_proportion_to_its_length(unit: str) -> None:
    """It is cut in the event loop of a worker. Searched as a whole, any of these took minutes or hours."""
    text = unit * (200_000 // len(unit))
    pieces = split_sentences(text)
    assert "".join(pieces).rstrip() == text.rstrip()
    assert max(map(len, pieces)) <= 300
