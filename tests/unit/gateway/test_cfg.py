"""Companions of a request: which there are, and what they are asked."""

from __future__ import annotations

import pytest

from gateway import cfg
from gateway.graph import PipelineGraph, StageStep
from omni.v1 import pipeline_pb2, prompt_pb2
from tests.support.pipelines import guided_pipeline

PICTURE = prompt_pb2.ContentPart(media=prompt_pb2.MediaPart(mime_type="image/png", data=b"picture"))


def words(text: str) -> prompt_pb2.ContentPart:
    return prompt_pb2.ContentPart(text=text)


def chat(*parts: prompt_pb2.ContentPart, negative: str = "") -> prompt_pb2.Prompt:
    messages = [
        prompt_pb2.ChatMessage(role="system", parts=[words("You paint.")]),
        prompt_pb2.ChatMessage(role="user", parts=parts),
    ]
    return prompt_pb2.Prompt(chat=prompt_pb2.ChatPrompt(messages=messages), negative_prompt=negative)


def step(plan: pipeline_pb2.CompanionPlan | None = None, wants: str = "image") -> StageStep:
    pipeline = guided_pipeline()
    if plan is not None:
        pipeline.stages[0].companions.CopyFrom(plan)
    return PipelineGraph(pipeline).plan("chat", [wants]).steps[0]


def test_pictures_have_both_companions_and_words_alone_one() -> None:
    assert cfg.roles(step(), chat(PICTURE, words("in blue"))) == ("cfg_text", "cfg_img")
    assert cfg.roles(step(), chat(words("a city"))) == ("cfg_text",)
    assert cfg.roles(step(), prompt_pb2.Prompt(text="a city")) == ("cfg_text",)


def test_there_are_none_where_nobody_reads_them() -> None:
    assert cfg.roles(step(wants="text"), chat(PICTURE)) == ()
    last = PipelineGraph(guided_pipeline()).plan("chat", ["image"]).steps[1]
    assert cfg.roles(last, chat(PICTURE)) == ()
    assert cfg.roles(step(pipeline_pb2.CompanionPlan()), chat(PICTURE)) == ()


def test_only_if_negative_wants_a_negative_prompt() -> None:
    plan = pipeline_pb2.CompanionPlan(roles=["cfg_text"], only_if_negative=True)
    assert cfg.roles(step(plan), chat(words("a city"))) == ()
    assert cfg.roles(step(plan), chat(words("a city"), negative="fog")) == ("cfg_text",)


def test_cfg_text_keeps_pictures_and_instructions_and_says_what_is_not_wanted() -> None:
    prompt = chat(PICTURE, words("in blue"), negative="fog")
    before = prompt.SerializeToString(deterministic=True)
    assert cfg.companion_prompt("cfg_text", prompt) == chat(PICTURE, words("fog"))
    assert cfg.companion_prompt("cfg_text", chat(words("a city"))) == chat(words(""))
    assert prompt.SerializeToString(deterministic=True) == before, "the request's own prompt stays"


def test_cfg_img_is_the_prompt_without_pictures() -> None:
    assert cfg.companion_prompt("cfg_img", chat(PICTURE, words("in blue"), negative="fog")) == chat(words("in blue"))


@pytest.mark.parametrize(
    "prompt", [prompt_pb2.Prompt(text="a city"), prompt_pb2.Prompt(tokens=prompt_pb2.TokenPrompt(token_ids=[1, 2]))]
)
def test_other_prompts_become_a_question_of_no_words(prompt: prompt_pb2.Prompt) -> None:
    assert [part.text for part in cfg.companion_prompt("cfg_text", prompt).chat.messages[0].parts] == [""]
    prompt.negative_prompt = "fog"
    assert [part.text for part in cfg.companion_prompt("cfg_text", prompt).chat.messages[0].parts] == ["fog"]


def test_ids() -> None:
    assert [cfg.companion_id("r", role) for role in ("", "cfg_text", "cfg_img")] == ["r", "r__cfg_text", "r__cfg_img"]
