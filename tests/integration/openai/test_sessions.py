"""Sessions over HTTP: what a body may say of one, and what becomes of it when its replica is gone."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.graph import PipelineGraph
from gateway.grpc_api import strict_session
from gateway.http.chat_schema import parse_chat
from gateway.http.completion_schema import parse_completion
from gateway.http.image_schema import parse_generation
from gateway.http.speech_schema import parse_speech
from omni.v1 import types_pb2
from omnicore import errors
from tests.integration.gateway.conftest import USER, Stand, running_stand
from tests.integration.gateway.scripts import speak, tokens
from tests.integration.openai.models import picture_model, voice_model
from tests.support.processes import wait_until

MESSAGES = {"messages": USER}


async def test_a_strict_session_outlives_no_replica() -> None:
    """The same over every endpoint; a session that may move does."""
    async with running_stand() as stand:
        await _check(stand)


async def _check(stand: Stand) -> None:
    endpoints: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"model": "text", **MESSAGES}),
        ("/v1/chat/completions", {"model": "text", **MESSAGES, "n": 2}),
        ("/v1/completions", {"model": "text", "prompt": "x"}),
        ("/v1/audio/speech", {"model": "speech", "input": "x"}),
    ]
    talker = ("speech", 1)
    first = [await stand.cluster.add("text", 0, tokens(1)), await stand.cluster.add(*talker, tokens(1))]
    await stand.cluster.add("speech", 0, tokens(1))
    await stand.cluster.add("speech", 2, speak)
    await stand.ready("text", "speech")

    async def ask(index: int, policy: str | None) -> tuple[int, str]:
        path, body = endpoints[index]
        asked = {**body, "session_id": f"{index}-{policy}", "session_policy": policy}
        async with stand.http.post(path, json=asked) as response:
            if response.status == 200:
                await response.read()
                return 200, ""
            return response.status, (await response.json())["error"]["code"]

    every = [(index, policy) for index in range(len(endpoints)) for policy in ("strict", "rebind", None)]
    assert {place: await ask(*place) for place in every} == dict.fromkeys(every, (200, ""))
    second = [
        await stand.cluster.add("text", 0, tokens(1), replica_id=1),
        await stand.cluster.add(*talker, tokens(1), replica_id=1),
    ]
    await stand.ready("text", "speech")
    for worker in first:
        stand.cluster.control_plane.remove(worker.ref)
    pools = stand.gateway.router.pools
    for key in (("text", 0), talker):
        await wait_until(lambda: [slot.key[2] for slot in pools[key].slots.values()] == [1], what="the other replica")  # noqa: B023
    answers = {place: await ask(*place) for place in every}
    assert answers == {place: (400, "session_lost") if place[1] == "strict" else (200, "") for place in every}
    assert all(worker.calls for worker in second)
    await stand.settled()


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (parse_chat, {"model": "voice", **MESSAGES}),
        (parse_completion, {"model": "voice", "prompt": "x"}),
        (parse_speech, {"model": "voice", "input": "x"}),
        (parse_generation, {"model": "pictures", "prompt": "x"}),
    ],
)
def test_what_a_body_may_say_of_its_session(parse: Any, body: dict[str, Any]) -> None:
    pipelines = {plan.name: PipelineGraph(plan) for plan in (voice_model(), picture_model())}

    def read(**fields: Any) -> Any:
        return parse({**body, **fields}, pipelines, 10_000)

    for policy, strict in (("strict", True), ("rebind", False), (None, None)):
        asked = read(session_id="s", session_policy=policy)
        assert (asked.session_id, asked.strict_session) == ("s", strict)
    for fields, message in (
        ({"session_id": "s", "session_policy": "STRICT"}, "must be one of: strict, rebind; got 'STRICT'"),
        ({"session_id": "s", "session_policy": True}, "must be a string"),
        ({"session_policy": "strict"}, "only with session_id"),
    ):
        with pytest.raises(errors.InvalidRequestError) as caught:
            read(**fields)
        assert caught.value.violations[0].field == "session_policy"
        assert message in caught.value.message


def test_what_a_message_may_say_of_its_session() -> None:
    """Over gRPC and in ``Route`` the same as in a body."""
    strict, rebind = types_pb2.SESSION_POLICY_STRICT, types_pb2.SESSION_POLICY_REBIND
    assert [strict_session(policy, "s") for policy in (strict, rebind)] == [True, False]
    assert strict_session(types_pb2.SESSION_POLICY_UNSPECIFIED, "") is None
    unknown: Any = 99  # of a client that knows more than we do
    for policy, session_id, message in ((strict, "", "only with session_id"), (unknown, "s", "got 99")):
        with pytest.raises(errors.InvalidRequestError, match=message) as caught:
            strict_session(policy, session_id)
        assert caught.value.violations[0].field == "session_policy"
