from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors import dtypes
from connectors.tensor_parallel import KvLayout, RankPlan, merge_heads, plan_ranks, rank_key, slice_heads
from omnicore import errors

SIZES = [1, 2, 3, 4, 6, 8, 12, 16]


def layout(tp_size: int, kv_heads: int = 8, **other: Any) -> KvLayout:
    fields = {"head_dim": 4, "layers": 2, "dtype": "bfloat16", "block_size": 16, **other}
    return KvLayout(tp_size, kv_heads, **fields)


def whole(kv_heads: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """A cache of 3 tokens: every element is another number. Axis 1 counts heads."""
    return np.arange(3 * kv_heads * 4, dtype=np.int32).reshape(3, kv_heads, 4)


def of_rank(cache: np.ndarray[Any, Any], of: KvLayout, rank: int) -> np.ndarray[Any, Any]:
    first = of.first_head(rank)
    return cache[:, first : first + of.heads_per_rank]


possible = st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES), st.sampled_from(SIZES)).filter(
    lambda sizes: all(max(tp, sizes[2]) % min(tp, sizes[2]) == 0 for tp in sizes[:2])
)


@given(possible)
def test_every_rank_gets_exactly_its_heads_from_ranks_that_have_them(sizes: tuple[int, int, int]) -> None:
    producers, consumers, heads = sizes
    plan = plan_ranks(layout(producers, heads), layout(consumers, heads))
    cache = whole(heads)
    published = {rank: of_rank(cache, plan.producer, rank) for rank in range(producers)}
    for rank in range(consumers):
        merged = merge_heads(plan, rank, {r: published[r] for r in plan.producers_of(rank)}, axis=1)
        np.testing.assert_array_equal(merged, of_rank(cache, plan.consumer, rank), strict=True)


@given(possible)
def test_readers_are_who_reads(sizes: tuple[int, int, int]) -> None:
    producers, consumers, heads = sizes
    plan = plan_ranks(layout(producers, heads), layout(consumers, heads))
    counted = [sum(rank in plan.producers_of(reader) for reader in range(consumers)) for rank in range(producers)]
    assert [plan.readers(rank) for rank in range(producers)] == counted
    assert sum(counted) == sum(len(sources) for sources in plan.sources)


def test_readers_of_copies_take_turns() -> None:
    plan = plan_ranks(layout(4, 2), layout(8, 2))
    assert [plan.readers(rank) for rank in range(4)] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("producers", "consumers", "first"),
    [(4, 2, [0, 1]), (4, 1, [0, 1, 2, 3]), (2, 4, [0]), (1, 4, [0]), (4, 4, [0])],
)
def test_sizes_of_the_references(producers: int, consumers: int, first: list[int]) -> None:
    assert plan_ranks(layout(producers), layout(consumers)).producers_of(0) == first


@pytest.mark.parametrize(("tp_size", "kv_heads"), [(3, 8), (5, 8), (16, 6), (6, 4)])
def test_heads_that_cannot_be_shared_are_refused_at_plan_time(tp_size: int, kv_heads: int) -> None:
    with pytest.raises(errors.InvalidRequestError, match=f"{kv_heads} KV heads cannot be shared by {tp_size} ranks"):
        layout(tp_size, kv_heads)


@pytest.mark.parametrize("field", ["tp_size", "kv_heads", "head_dim", "layers", "block_size"])
@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2"])
def test_numbers_of_a_layout_are_checked(field: str, value: object) -> None:
    with pytest.raises(errors.InvalidRequestError, match=rf"kv_layout\.{field}"):
        dataclasses.replace(layout(1), **{field: value})  # type: ignore[arg-type]


def test_no_layout_has_more_ranks_than_any_machine() -> None:
    with pytest.raises(errors.InvalidRequestError, match="at most 1024"):
        layout(4096, 4096)


def test_bug_62_layouts_that_differ_are_refused_with_both_values() -> None:
    with pytest.raises(errors.FailedPreconditionError) as caught:
        plan_ranks(layout(2), layout(4, block_size=32, dtype="float16"))
    assert caught.value.reason == "KV_LAYOUT_MISMATCH"
    assert "dtype bfloat16 and float16" in caught.value.message
    assert "block_size 16 and 32" in caught.value.message
    assert caught.value.metadata["producer_block_size"] == "16"
    assert caught.value.metadata["consumer_block_size"] == "32"


def plan_4_to_1() -> RankPlan:
    return plan_ranks(layout(4), layout(1))


def test_a_rank_that_is_missing_is_named() -> None:
    parts = {rank: of_rank(whole(8), layout(4), rank) for rank in (0, 1, 3)}
    with pytest.raises(errors.DataLossError, match=r"got nothing from producer ranks \[2\]"):
        merge_heads(plan_4_to_1(), 0, parts, axis=1)


@pytest.mark.parametrize(
    "part",
    [
        np.zeros((3, 1, 4), np.int32),
        np.zeros((2, 2, 4), np.int32),
        np.zeros((3, 2, 4), np.int64),
        np.zeros(3, np.int32),
    ],
    ids=["too few heads", "other length", "other type", "no such axis"],
)
def test_a_part_that_does_not_fit_names_its_rank(part: np.ndarray[Any, Any]) -> None:
    parts = {rank: of_rank(whole(8), layout(4), rank) for rank in range(4)} | {2: part}
    with pytest.raises(errors.DataLossError, match="the tensor of producer rank 2 does not fit"):
        merge_heads(plan_4_to_1(), 0, parts, axis=1)


def test_one_producer_with_what_is_wanted_is_not_copied() -> None:
    cache = whole(8)
    merged = merge_heads(plan_ranks(layout(1), layout(4)), 1, {0: cache}, axis=1)
    assert merged.base is not None
    assert np.shares_memory(merged, cache)


def test_joined_tensors_keep_the_name_of_their_type() -> None:
    raw = dtypes.mark(np.arange(6, dtype=np.uint16).reshape(1, 2, 3), "bfloat16")
    merged = merge_heads(plan_4_to_1(), 0, dict.fromkeys(range(4), raw), axis=1)
    assert dtypes.dtype_name(merged.dtype) == "bfloat16"


@pytest.mark.parametrize("axis", [0, -2, 1, 5])
def test_slices_name_what_is_not_there(axis: int) -> None:
    source = plan_ranks(layout(1), layout(2)).sources[1][0]
    with pytest.raises(errors.InvalidRequestError, match="has no heads 4 to 8"):
        slice_heads(np.zeros((2, 2, 2)), source, axis)


def test_ranks_have_keys_of_their_own() -> None:
    keys = {rank_key(key, rank) for key, rank in itertools.product(("req1/0/0-1/0", "req11/0/0-1/0"), range(12))}
    assert len(keys) == 24
