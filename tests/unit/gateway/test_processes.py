"""Several processes as one: what is merged, and how they are started."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.accounts import Accounts
from gateway.config import GatewayConfig
from gateway.processes import together
from gateway.processes.shared_use import SharedUse
from gateway.processes.siblings import Place, Siblings
from gateway.processes.supervisor import flags, share
from gateway.processes.watchdog import Watchdog
from omnicore import config as configuration
from omnicore import errors
from omnicore.api_keys import ApiKey

TEXT = b"""\
# HELP a_total Some.
# TYPE a_total counter
a_total{x="1, {2}"} 3.0
a_total{x="y"} 4.0
# HELP b Other.
# TYPE b gauge
b 5.0
"""


def test_metrics_of_processes_are_told_apart_and_read_as_one() -> None:
    third = b"# HELP c C.\n# TYPE c gauge\nc 1.0\n"
    text = together.metrics({0: TEXT, 1: TEXT.replace(b"3.0", b"30.0"), 2: third}, 4)
    families = {family.name: family for family in text_string_to_metric_families(text.decode())}
    assert list(families) == ["a", "b", "c", "omni_gateway_process_up"]
    up = families["omni_gateway_process_up"]
    assert [(s.labels["process"], s.value) for s in up.samples] == [("0", 1), ("1", 1), ("2", 1), ("3", 0)]
    assert families["a"].type == "counter"
    values = {(s.labels["process"], s.labels["x"]): s.value for s in families["a"].samples}
    assert values == {("0", "1, {2}"): 3, ("0", "y"): 4, ("1", "1, {2}"): 30, ("1", "y"): 4}
    assert [(s.labels, s.value) for s in families["b"].samples] == [({"process": "0"}, 5), ({"process": "1"}, 5)]
    assert text.count(b"# TYPE a_total") == 1


def _row(*, ready: bool = True, revision: int = 5, **replicas: int) -> dict[str, Any]:
    return {
        "ready": ready, "draining": False, "control_plane_connected": True, "stale": False, "revision": revision,
        "inflight_requests": 2, "pipelines": {"text": {"ready": ready, "routable_replicas": replicas}},
    }  # fmt: skip


def test_ready_is_what_all_that_are_there_say() -> None:
    both = together.readiness(1, {0: _row(s0=2, revision=4), 1: _row(s0=3)}, 2)
    assert both["ready"]
    assert (both["revision"], both["inflight_requests"]) == (4, 4)
    assert both["pipelines"]["text"] == {"ready": True, "routable_replicas": {"s0": 2}}
    assert both["processes"] == {"0": True, "1": True}
    one_not = together.readiness(0, {0: _row(s0=2), 1: _row(ready=False, s0=0)}, 2)
    assert not one_not["ready"]
    assert one_not["pipelines"]["text"] == {"ready": False, "routable_replicas": {"s0": 0}}
    crashed = together.readiness(0, {0: _row(s0=2)}, 2)
    assert crashed["ready"]
    assert crashed["processes"] == {"0": True, "1": None}
    hangs = together.readiness(0, {0: _row(s0=2)}, 3, silent=(2,))
    assert not hangs["ready"], "it gets its share of the connections"
    assert hangs["processes"] == {"0": True, "1": None, "2": False}
    assert hangs["silent_processes"] == [2]
    unheard = together.readiness(0, {0: _row(s0=2), 1: {**_row(), "pipelines": {}}}, 2)
    assert unheard["pipelines"]["text"] == {"ready": False, "routable_replicas": {"s0": 0}}


async def test_siblings_answer_each_other_and_who_is_gone_is_left_out(tmp_path: Path) -> None:
    processes = [Siblings(Place(str(tmp_path), index, 4), answer_s=30.0) for index in range(4)]
    for process in processes[:3]:
        await process.start()
    hang = asyncio.Event()

    async def answer(details: Any) -> Any:
        return [details["n"], None]

    async def never(_: Any) -> Any:
        await hang.wait()

    async def late(_: Any) -> Any:
        await asyncio.sleep(0)
        return "at last"

    processes[1].answer("thing", answer)
    processes[2].answer("thing", late)
    assert await processes[0].ask("thing", n=7) == ({1: [7, None], 2: "at last"}, ()), "3 is not there"
    hasty = Siblings(Place(str(tmp_path), 3, 4), answer_s=0.3)
    processes[2].answer("hang", never)
    answers = await hasty.ask("hang")
    assert (answers.given, answers.silent) == ({}, (0, 1, 2)), (
        "they are there: it hangs, and the others do not know the question"
    )
    with pytest.raises(errors.UnavailableError, match="process 0, 1, 2 of this gateway") as caught:
        answers.check("it")
    assert caught.value.reason == "PROCESS_SILENT"
    assert (await processes[0].ask("unknown")).given == {}
    for process in processes:
        await process.close()
    for answers in (await processes[0].ask("thing", n=7), await Siblings().ask("thing")):
        assert (answers.given, answers.silent) == ({}, ())
        answers.check("it")


async def test_who_leaves_several_questions_in_a_row_unanswered_is_replaced(tmp_path: Path) -> None:
    processes = [Siblings(Place(str(tmp_path), index, 3)) for index in range(3)]
    hang = asyncio.Event()

    async def never(_: Any) -> Any:
        await hang.wait()

    async def alive(_: Any) -> Any:
        return True

    for process in processes[:2]:
        await process.start()
    replaced: list[int] = []
    parent = Siblings(Place(str(tmp_path), 3, 3), answer_s=0.2)
    watchdog = Watchdog(parent, replaced.append, hung_after_s=3.0, answer_s=0.5, pause_s=0.5)
    processes[1].answer("alive", never)
    for _ in range(2):
        await watchdog.ask()
    processes[1].answer("alive", alive)
    await watchdog.ask()  # it only stalled
    processes[1].answer("alive", never)
    for _ in range(2):
        await watchdog.ask()
    assert replaced == []
    await watchdog.ask()
    assert replaced == [1], "and not 2, which is not there"
    await watchdog.ask()
    assert replaced == [1], "its successor has as much time"
    for process in processes:
        await process.close()


async def test_a_question_that_is_too_long_has_no_answer_and_troubles_nobody(tmp_path: Path) -> None:
    troubles: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: troubles.append(context))
    processes = [Siblings(Place(str(tmp_path), index, 2), answer_s=30.0) for index in range(2)]

    async def echo(question: Any) -> Any:
        return question

    for process in processes:
        process.answer("thing", echo)
        await process.start()
    try:
        assert (await processes[0].ask("thing", text="x" * 60_000)).given == {1: {"text": "x" * 60_000}}
        assert await processes[0].ask("thing", text="x" * 100_000) == ({}, ())
    finally:
        for process in processes:
            await process.close()
    gc.collect()
    assert troubles == []


def test_a_child_gets_all_of_the_configuration() -> None:
    words = (
        "--control-plane", "127.0.0.1:1,127.0.0.1:2", "--http", "[::1]:0", "--api-keys", "a b", "--max-queued", "0",
        "--wait-for-planned-replicas", "--cors-origin", "https://a.example", "--ready-file", "x", "--workers", "3",
    )  # fmt: skip

    def parse(argv: tuple[str, ...], **environ: str) -> GatewayConfig:
        return configuration.parse(GatewayConfig, argv, program="p", component="gateway", environ=environ)

    config = parse(words)
    environ = {"OMNI_GATEWAY_WORKERS": "3", "OMNI_GATEWAY_API_KEYS": "other", "OMNI_GATEWAY_INSECURE": "true"}
    child = parse(flags(config, workers=1, process="0/3:/run/x", max_inflight=7), **environ)
    assert child.ready_file == ""
    assert (child.workers, child.process, child.max_inflight, child.insecure) == (1, "0/3:/run/x", 7, False)
    same = ("control_plane", "http", "api_keys", "max_queued", "wait_for_planned_replicas", "cors_origin")
    assert [getattr(child, name) for name in same] == [getattr(config, name) for name in same]
    assert [share(10, 4), share(0, 4), share(1, 4)] == [3, 0, 1]


@pytest.mark.parametrize("text", ["x", "0/0:/d", "2/2:/d", "a/2:/d", "0/2"])
def test_wrong_places(text: str) -> None:
    with pytest.raises(ValueError, match="INDEX/COUNT"):
        Place.parse(text)
    place = Place("/d:e", 1, 2)
    assert Place.parse(str(place)) == place
    assert Place.parse("").alone


def test_limits_of_a_key_are_for_all_processes_together(tmp_path: Path) -> None:
    places = [Place(str(tmp_path), index, 3) for index in range(3)]
    uses = [SharedUse(place) for place in places]
    ids = [f"key-{number}" for number in range(50)]
    for number, use in enumerate(uses):  # whoever sees a key first, all find the same column
        for key_id in (ids, ids[::-1], ids)[number]:
            found = use.of(key_id)
            assert found is not None
            found.add(len(key_id), 1, 0)
    for key_id in ids:
        found = uses[0].of(key_id)
        assert found is not None
        assert found.others() == (2 * len(key_id), 2, 0)

    key = ApiKey("alice", "0" * 64, requests_per_minute=6, tokens_per_minute=100, max_concurrent=2)
    first, second, third = (Accounts(elsewhere=use.of).of(key, 0.0) for use in uses)
    for account in (first, second):
        assert account.check(0.0) is None
        account.enter()
    refused = third.check(0.0)
    assert refused is not None
    assert refused.metadata["cause"] == "too_many_concurrent"
    first.exit()
    second.exit()
    for account in (third, first, second, third):
        assert account.check(0.0) is None
    assert [account.check(0.0) is None for account in (first, second, third)] == [False] * 3, "six in all"
    third.not_served(0.0)
    assert first.check(0.0) is None
    second.enter()
    second.served(150, 0.0)
    refused = first.check(10.0)
    assert refused is not None
    assert refused.metadata["cause"] == "token_limited"
    assert first.check(41.0) is None

    # A process that died with requests running is replaced: they do not run any more, what was used stays used.
    second.enter()
    again = SharedUse(places[1])
    found = uses[0].of("alice")
    assert found is not None
    assert found.others()[2] == 0
    assert found.others()[1] == 150
    for use in (*uses, again):
        use.close()
