from __future__ import annotations

import itertools
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from connectors.allocator import BufferAllocator
from omnicore import errors

POOL = 64 * 1024


class AllocatorMachine(RuleBasedStateMachine):
    """Any sequence of calls, against a list of ranges as the model."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BufferAllocator(POOL, 256)
        self.held: dict[int, int] = {}

    @rule(size=st.integers(1, POOL // 3))
    def allocate(self, size: int) -> None:
        largest = self.allocator.largest_free_bytes
        if size > largest:
            with pytest.raises(errors.ResourceExhaustedError) as caught:
                self.allocator.allocate(size)
            assert caught.value.metadata["largest_free_bytes"] == str(largest)
            return
        offset = self.allocator.allocate(size)
        assert offset % 256 == 0
        assert offset + size <= POOL
        assert all(offset + size <= o or o + s <= offset for o, s in self.held.items()), "overlap"
        self.held[offset] = size

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 10**6))
    def free(self, pick: int) -> None:
        offset = sorted(self.held)[pick % len(self.held)]
        del self.held[offset]
        self.allocator.free(offset)
        with pytest.raises(ValueError, match="double free"):
            self.allocator.free(offset)

    @invariant()
    def free_ranges_are_maximal_and_add_up(self) -> None:
        ranges = self.allocator.free_ranges
        assert all(a + size < b for (a, size), (b, _) in itertools.pairwise(ranges)), "neighbours not joined"
        assert sum(size for _, size in ranges) == self.allocator.free_bytes
        assert self.allocator.free_bytes == POOL - sum(-(-size // 256) * 256 for size in self.held.values())

    def teardown(self) -> None:
        for offset in list(self.held):
            self.allocator.free(offset)
        assert self.allocator.free_ranges == [(0, POOL)]


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.integers(1, 10**6), st.sampled_from([1, 2, 64, 4096]))
def test_whole_pool_can_be_allocated_at_once_and_comes_back(size: int, alignment: int) -> None:
    if size < alignment:
        with pytest.raises(ValueError, match="pool_size_bytes"):
            BufferAllocator(size, alignment)
        return
    allocator = BufferAllocator(size, alignment)
    assert allocator.allocate(allocator.capacity_bytes) == 0
    assert (allocator.free_bytes, allocator.largest_free_bytes) == (0, 0)
    with pytest.raises(errors.ResourceExhaustedError, match="no free range"):
        allocator.allocate(1)
    allocator.free(0)
    assert allocator.free_ranges == [(0, allocator.capacity_bytes)]


def test_takes_the_smallest_range_that_fits() -> None:
    allocator = BufferAllocator(100, 1)
    for size in (10, 5, 20, 5, 60):
        allocator.allocate(size)
    allocator.free(0)  # 10 bytes at 0
    allocator.free(15)  # 20 bytes at 15
    assert allocator.allocate(15) == 15
    assert allocator.allocate(10) == 0


@pytest.mark.parametrize("size", [0, -1])
def test_refuses_sizes_below_one(size: int) -> None:
    with pytest.raises(ValueError, match="size_bytes"):
        BufferAllocator(4096).allocate(size)


@pytest.mark.parametrize("alignment", [0, 3, -4096])
def test_refuses_alignments_that_are_no_power_of_two(alignment: int) -> None:
    with pytest.raises(ValueError, match="alignment"):
        BufferAllocator(4096, alignment)


def test_threads_share_one_allocator() -> None:
    allocator = BufferAllocator(1 << 20, 64)
    owner = [0] * ((1 << 20) // 64)  # who holds each unit; a unit held twice is an overlap
    failures: list[str] = []

    def work(me: int) -> None:
        rng = random.Random(me)
        held: list[tuple[int, int]] = []
        for _ in range(2000):
            if held and rng.random() < 0.5:
                offset, units = held.pop(rng.randrange(len(held)))
                for unit in range(offset // 64, offset // 64 + units):
                    if owner[unit] != me:
                        failures.append(f"unit {unit} of {me} is held by {owner[unit]}")
                    owner[unit] = 0
                allocator.free(offset)
                continue
            units = rng.randrange(1, 20)
            offset = allocator.allocate(units * 64)
            for unit in range(offset // 64, offset // 64 + units):
                if owner[unit]:
                    failures.append(f"unit {unit} given to {me} is held by {owner[unit]}")
                owner[unit] = me
            held.append((offset, units))
            if len(held) > 100:
                for offset, units in held:
                    owner[offset // 64 : offset // 64 + units] = [0] * units
                    allocator.free(offset)
                held.clear()
        for offset, units in held:
            owner[offset // 64 : offset // 64 + units] = [0] * units
            allocator.free(offset)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert allocator.free_ranges == [(0, 1 << 20)]
