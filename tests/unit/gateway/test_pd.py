"""Split stages: which belong together, what each half is asked, and what becomes of one when the other fails."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from google.protobuf import json_format, struct_pb2
from hypothesis import given
from hypothesis import strategies as st

from gateway import pd
from gateway.pd import Cleanup, Leg, LegState, StagePair
from omni.v1 import pipeline_pb2, sampling_pb2, stage_service_pb2, transfer_pb2
from omnicore import errors

P, D = "is_prefill_only", "is_decode_only"


def pipeline(*flags: str, edges: list[tuple[int, int]] | None = None, replicas: int = 1) -> pipeline_pb2.Pipeline:
    """A chain, unless ``edges`` says otherwise; each stage with its flag, or ""."""
    made = pipeline_pb2.Pipeline(name="split")
    for stage_id, flag in enumerate(flags):
        stage = made.stages.add(stage_id=stage_id, num_replicas=replicas)
        if flag:
            stage.engine_args.update({flag: True})
    for source, target in edges if edges is not None else itertools.pairwise(range(len(flags))):
        made.edges.add(from_stage=source, to_stage=target)
    return made


def kv_of(sampling: sampling_pb2.SamplingParams) -> dict[str, object]:
    extra = json_format.MessageToDict(sampling.extra)
    found: dict[str, object] = extra["extra_args"]["kv_transfer_params"]
    return found


def handed(kv: Mapping[str, str | float | bool] | None, to_stage: int = 1) -> stage_service_pb2.StageOutput:
    handle = transfer_pb2.TransferHandle(key="k")
    if kv is not None:
        handle.metadata.update({"kv_transfer_params": dict(kv), "sample_rate_hz": 1})
    return stage_service_pb2.StageOutput(to_stage=to_stage, handles=[handle])


def struct(**values: str | float | bool | list[str]) -> struct_pb2.Struct:
    made = struct_pb2.Struct()
    made.update(values)
    return made


# -- pairs --


@pytest.mark.parametrize(
    ("flags", "edges", "pairs"),
    [
        ((P, D), None, [(0, 1)]),
        ((P, D, "", ""), None, [(0, 1)]),
        (("", P, D), None, [(1, 2)]),
        (("", "", ""), None, []),
        ((P, D, P, D), None, [(0, 1), (2, 3)]),
        ((P, P, D, D), [(0, 3), (1, 2)], [(0, 3), (1, 2)]),
    ],
)
@pytest.mark.parametrize("replicas", [1, 3])
def test_pairs_follow_edges_whatever_stands_around_them(
    flags: tuple[str, ...], edges: list[tuple[int, int]] | None, pairs: list[tuple[int, int]], replicas: int
) -> None:
    found = pd.stage_pairs(pipeline(*flags, edges=edges, replicas=replicas))
    assert found == tuple(StagePair(*pair) for pair in pairs)


@pytest.mark.parametrize(
    ("flags", "edges", "said"),
    [
        ((P, ""), None, "stage 0 has edges with none: it needs one decode stage"),
        (("", D), None, "stage 1 has edges with none: it needs one prefill stage"),
        ((P, D, D), [(0, 1), (0, 2)], "stage 0 has edges with 1, 2: it needs one decode stage"),
        ((P, P, D), [(0, 2), (1, 2)], "stage 2 has edges with 0, 1: it needs one prefill stage"),
        ((D, P), None, "stage 1 has edges with none: it needs one decode stage"),
    ],
)
def test_a_half_without_its_other_half_is_named(
    flags: tuple[str, ...], edges: list[tuple[int, int]] | None, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        pd.stage_pairs(pipeline(*flags, edges=edges))


def test_a_stage_that_is_both_halves_is_named() -> None:
    made = pipeline(P, D)
    made.stages[1].engine_args.update({P: True})
    with pytest.raises(ValueError, match="stage 1 is prefill only and decode only"):
        pd.stage_pairs(made)


def test_a_flag_that_is_false_is_none() -> None:
    made = pipeline("", "")
    made.stages[0].engine_args.update({P: False})
    assert pd.stage_pairs(made) == ()


# -- sampling --

SAMPLING = st.builds(
    sampling_pb2.SamplingParams,
    temperature=st.none() | st.floats(0, 2),
    max_tokens=st.none() | st.integers(1, 10_000),
    min_tokens=st.none() | st.integers(0, 10_000),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(st.text(max_size=5), max_size=3),
    stop_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=3),
    ignore_eos=st.none() | st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    structured_output=st.none() | st.just(sampling_pb2.StructuredOutput(json_object=True)),
    extra=st.none() | st.sampled_from([struct(include_stop_str_in_output=True, bad_words=["x"]), struct(extra_args=3)]),
)


@given(asked=SAMPLING)
def test_prefill_makes_one_token_that_only_its_length_ends(asked: sampling_pb2.SamplingParams) -> None:
    before = asked.SerializeToString(deterministic=True)
    made = pd.prefill_sampling(asked, "t")
    assert asked.SerializeToString(deterministic=True) == before, "the original stays"
    assert made.max_tokens == 1
    assert made.min_tokens <= 1
    assert made.min_tokens <= made.max_tokens
    assert made.HasField("min_tokens") == asked.HasField("min_tokens")
    assert (list(made.stop), list(made.stop_token_ids), made.ignore_eos) == ([], [], True)
    assert not made.HasField("logprobs")
    assert not made.HasField("structured_output")
    assert "include_stop_str_in_output" not in made.extra.fields
    assert kv_of(made) == {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t"}
    for name in ("temperature", "seed"):
        assert made.HasField(name) == asked.HasField(name)
        assert getattr(made, name) == getattr(asked, name)


@given(asked=SAMPLING)
def test_decode_is_asked_what_the_client_asked(asked: sampling_pb2.SamplingParams) -> None:
    before = asked.SerializeToString(deterministic=True)
    made = pd.decode_sampling(asked, struct(remote_host="h"))
    assert asked.SerializeToString(deterministic=True) == before
    assert kv_of(made) == {"remote_host": "h"}
    made.ClearField("extra")
    asked.ClearField("extra")
    assert made == asked, "stops, limits and all"


def params(seed: int) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(seed=seed)


def test_parameters_for_the_stages_before_the_split_serve_both_halves() -> None:
    one, two = StagePair(0, 1), StagePair(2, 3)
    given_three = [params(n) for n in range(3)]
    expanded = pd.expand_sampling(given_three, [0, 1, 2, 3], [one])
    assert [p.seed for p in expanded] == [0, 0, 1, 2]
    expanded[0].seed = 9
    assert (expanded[1].seed, given_three[0].seed) == (0, 0), "copies"
    assert [p.seed for p in pd.expand_sampling(given_three[:2], [0, 1, 2, 3], [one, two])] == [0, 0, 1, 1]
    assert [p.seed for p in pd.expand_sampling([params(n) for n in range(4)], [0, 1, 2, 3], [one])] == [0, 1, 2, 3]
    for wrong in (0, 1, 2, 5):
        with pytest.raises(ValueError, match=f"{wrong} sets of sampling parameters for 4 stages; accepted: 3 or 4"):
            pd.expand_sampling([params(n) for n in range(wrong)], [0, 1, 2, 3], [one])
    with pytest.raises(ValueError, match=r"accepted: 2$"):
        pd.expand_sampling([], [0, 1], [])


# -- KV parameters --


def test_what_prefill_gave_is_captured_and_told_to_decode() -> None:
    gave: dict[str, str | float | bool] = {
        "remote_host": "h",
        "remote_port": 25201,
        "transfer_id": "t",
        "do_remote_decode": True,
    }
    outputs = [handed({"remote_host": "other"}, to_stage=2), handed(None), handed(gave)]
    captured = pd.captured_kv(outputs, 1)
    assert json_format.MessageToDict(captured) == gave
    told = pd.decode_kv(captured, transfer_id="t", prefill_request_id="r-prefill")
    assert json_format.MessageToDict(told) == {
        "remote_host": "h", "remote_port": 25201, "transfer_id": "t", "remote_request_id": "r-prefill",
        "do_remote_prefill": True, "do_remote_decode": False,
    }  # fmt: skip
    assert json_format.MessageToDict(captured) == gave, "stays as it is"
    captured["remote_host"] = "changed"
    assert pd.captured_kv(outputs, 1)["remote_host"] == "h", "a copy"


def test_the_engines_own_request_id_stands() -> None:
    told = pd.decode_kv(struct(remote_request_id="engine's"), transfer_id="t", prefill_request_id="r")
    assert (told["remote_request_id"], told["transfer_id"]) == ("engine's", "t")


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ([], "KV_PARAMS_MISSING"),
        ([handed(None)], "KV_PARAMS_MISSING"),
        ([handed({"a": 1}, to_stage=2)], "KV_PARAMS_MISSING"),
        ([handed({"a": 1}), handed({"a": 2})], "KV_PARAMS_AMBIGUOUS"),
    ],
)
def test_none_and_several_are_refused(outputs: list[stage_service_pb2.StageOutput], reason: str) -> None:
    with pytest.raises(errors.InternalError) as refused:
        pd.captured_kv(outputs, 1)
    assert refused.value.reason == reason


def test_kv_parameters_of_another_type_are_none() -> None:
    handle = transfer_pb2.TransferHandle()
    handle.metadata.update({"kv_transfer_params": "x"})
    with pytest.raises(errors.InternalError, match="0 sets"):
        pd.captured_kv([stage_service_pb2.StageOutput(to_stage=1, handles=[handle])], 1)


def test_the_cache_of_another_prompt_is_refused() -> None:
    with pytest.raises(errors.InternalError) as refused:
        pd.decode_kv(struct(transfer_id="other"), transfer_id="t", prefill_request_id="r")
    assert refused.value.reason == "KV_PARAMS_FOREIGN"


# -- failures --

BOTH = frozenset(Leg)


@pytest.mark.parametrize(
    ("failed", "other", "todo"),
    [
        (Leg.PREFILL, LegState.WAITING, Cleanup(withhold=frozenset({Leg.DECODE}))),
        (Leg.PREFILL, LegState.RUNNING, Cleanup(abort=frozenset({Leg.DECODE}))),
        (Leg.PREFILL, LegState.FINISHED, Cleanup()),
        (Leg.PREFILL, LegState.ENDED, Cleanup()),
        (Leg.DECODE, LegState.WAITING, Cleanup(withhold=frozenset({Leg.PREFILL}))),
        (Leg.DECODE, LegState.RUNNING, Cleanup(abort=frozenset({Leg.PREFILL}))),
        (Leg.DECODE, LegState.FINISHED, Cleanup(release_kv=True)),
        (Leg.DECODE, LegState.ENDED, Cleanup()),
    ],
)
def test_one_half_takes_the_other_with_it(failed: Leg, other: LegState, todo: Cleanup) -> None:
    assert pd.after_failure(failed, other) == todo


@pytest.mark.parametrize(("prefill", "decode"), list(itertools.product(LegState, LegState)))
def test_after_an_abort_no_call_runs_begins_or_keeps_a_cache_that_nobody_reads(
    prefill: LegState, decode: LegState
) -> None:
    todo = pd.after_abort(prefill, decode)
    for leg, state in ((Leg.PREFILL, prefill), (Leg.DECODE, decode)):
        assert (leg in todo.withhold) == (state is LegState.WAITING)
        assert (leg in todo.abort) == (state is LegState.RUNNING)
    assert todo.release_kv == (prefill is LegState.FINISHED and decode is not LegState.FINISHED)
    assert not todo.withhold & todo.abort
    assert todo.withhold | todo.abort <= BOTH
