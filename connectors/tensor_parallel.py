"""KV caches between stages of different tensor-parallel sizes: who reads what of whom, cut and joined by heads.

A KV tensor has one axis of heads. A stage of ``tp`` ranks either splits its heads over the ranks, or, where it has
fewer heads than ranks, keeps each head on ``tp / kv_heads`` ranks in a row, as vLLM and SGLang do. From two such
layouts follows, for each consumer rank, which heads it takes from which producer rank:

    4 → 2, 8 heads     consumer 0 = producer 0 (all) + producer 1 (all)
    2 → 4, 8 heads     consumer 1 = producer 0 (its heads 2 and 3)
    4 → 4, 2 heads     consumer 3 = producer 2 or 3 (all): copies take turns

What cannot be is an error of ``plan_ranks``, before anything moves. Pure: no I/O, no clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from omnicore import errors

MAX_RANKS = 1024
"""Beyond any machine; keeps a wrong number from becoming a long loop."""


@dataclasses.dataclass(frozen=True, slots=True)
class KvLayout:
    """How one stage keeps its KV cache. Everything but ``tp_size`` must be equal at both ends of an edge."""

    tp_size: int
    """Tensor-parallel ranks, each with its part of the heads."""
    kv_heads: int
    """KV heads of the model, over all ranks (grouped-query attention: not the query heads)."""
    head_dim: int
    """Elements of one head."""
    layers: int
    dtype: str
    """Wire name: "bfloat16", …"""
    block_size: int
    """Tokens in one block of a paged cache."""

    def __post_init__(self) -> None:
        for name in ("tp_size", "kv_heads", "head_dim", "layers", "block_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise errors.InvalidRequestError.field(
                    f"kv_layout.{name}", f"must be a whole number from 1, got {value!r}"
                )
        if self.tp_size > MAX_RANKS:
            raise errors.InvalidRequestError.field("kv_layout.tp_size", f"at most {MAX_RANKS}, got {self.tp_size}")
        more, fewer = max(self.tp_size, self.kv_heads), min(self.tp_size, self.kv_heads)
        if more % fewer:
            raise errors.InvalidRequestError.field(
                "kv_layout.tp_size",
                f"{self.kv_heads} KV heads cannot be shared by {self.tp_size} ranks: one must divide the other",
                reason="IMPOSSIBLE_TP",
            )

    @property
    def heads_per_rank(self) -> int:
        """Heads that one rank holds, at least 1."""
        return max(1, self.kv_heads // self.tp_size)

    @property
    def copies(self) -> int:
        """Ranks that hold the same heads."""
        return max(1, self.tp_size // self.kv_heads)

    def first_head(self, rank: int) -> int:
        """The first head of ``rank``, counted over the model."""
        return rank // self.copies * self.heads_per_rank


@dataclasses.dataclass(frozen=True, slots=True)
class RankSource:
    """Heads that a consumer rank takes from one producer rank. Positions count within each rank's own heads."""

    producer_rank: int
    source_start: int
    source_stop: int
    target_start: int

    @property
    def heads(self) -> int:
        """How many."""
        return self.source_stop - self.source_start


@dataclasses.dataclass(frozen=True, slots=True)
class RankPlan:
    """Who reads what of whom, for one edge."""

    producer: KvLayout
    consumer: KvLayout
    sources: Sequence[Sequence[RankSource]]
    """One list for each consumer rank, by target position: together exactly that rank's heads."""

    def readers(self, producer_rank: int) -> int:
        """Consumer ranks that read of ``producer_rank``: the ``consumers`` of what it publishes. 0: it need not."""
        return sum(any(s.producer_rank == producer_rank for s in sources) for sources in self.sources)

    def producers_of(self, consumer_rank: int) -> list[int]:
        """Producer ranks that ``consumer_rank`` reads, in order."""
        return [source.producer_rank for source in self.sources[consumer_rank]]


def plan_ranks(producer: KvLayout, consumer: KvLayout) -> RankPlan:
    """The plan of an edge. Raises ``FailedPreconditionError`` (KV_LAYOUT_MISMATCH), naming every field that differs
    with both of its values: block sizes and types are not converted."""
    differing = {
        name: (getattr(producer, name), getattr(consumer, name))
        for name in ("kv_heads", "head_dim", "layers", "dtype", "block_size")
        if getattr(producer, name) != getattr(consumer, name)
    }
    if differing:
        told = ", ".join(f"{name} {ours} and {theirs}" for name, (ours, theirs) in differing.items())
        raise errors.FailedPreconditionError(
            f"producer and consumer keep their KV caches differently: {told}",
            reason="KV_LAYOUT_MISMATCH",
            metadata={
                key: value
                for name, (ours, theirs) in differing.items()
                for key, value in ((f"producer_{name}", ours), (f"consumer_{name}", theirs))
            },
        )
    return RankPlan(producer, consumer, [_sources(producer, consumer, rank) for rank in range(consumer.tp_size)])


def _sources(producer: KvLayout, consumer: KvLayout, rank: int) -> list[RankSource]:
    first = consumer.first_head(rank)
    sources: list[RankSource] = []
    head = first
    while head < first + consumer.heads_per_rank:
        holder = head // producer.heads_per_rank
        # Readers of heads that several ranks hold take turns, so that no copy is read by all of them.
        holder_rank = holder * producer.copies + rank % producer.copies
        start = head - holder * producer.heads_per_rank
        stop = min(producer.heads_per_rank, start + first + consumer.heads_per_rank - head)
        sources.append(RankSource(holder_rank, start, stop, head - first))
        head += stop - start
    return sources


def slice_heads(tensor: npt.NDArray[Any], source: RankSource, axis: int) -> npt.NDArray[Any]:
    """The heads of ``source`` in a producer rank's tensor, as a view. Raises ``InvalidRequestError`` if the axis
    has not that many."""
    if not -tensor.ndim <= axis < tensor.ndim or tensor.shape[axis] < source.source_stop:
        raise errors.InvalidRequestError.field(
            "tensor",
            f"shape {list(tensor.shape)} has no heads {source.source_start} to {source.source_stop} in axis {axis}",
        )
    index = [slice(None)] * tensor.ndim
    index[axis] = slice(source.source_start, source.source_stop)
    return tensor[tuple(index)]


def merge_heads(
    plan: RankPlan, consumer_rank: int, parts: Mapping[int, npt.NDArray[Any]], axis: int
) -> npt.NDArray[Any]:
    """One tensor of a consumer rank from the whole tensors of its producer ranks (``parts``: producer rank → tensor).

    A view where one producer has exactly what is wanted, else one copy. Raises ``DataLossError`` for a producer rank
    that is missing and for tensors that do not fit together, naming the rank."""
    sources = plan.sources[consumer_rank]
    missing = [source.producer_rank for source in sources if source.producer_rank not in parts]
    if missing:
        raise errors.DataLossError(
            f"consumer rank {consumer_rank} got nothing from producer ranks {missing}",
            reason="RANK_MISSING",
            metadata={"consumer_rank": consumer_rank, "missing_ranks": missing},
        )
    pieces: list[npt.NDArray[Any]] = []
    for source in sources:
        part = parts[source.producer_rank]
        _check_part(plan, source.producer_rank, part, pieces, axis)
        pieces.append(slice_heads(part, source, axis))
    if len(pieces) == 1:
        return pieces[0]
    joined = np.concatenate(pieces, axis=axis)
    # numpy drops the name of a dtype that it does not know; all pieces have the same one.
    return joined.view(pieces[0].dtype) if pieces[0].dtype.metadata else joined


def _check_part(
    plan: RankPlan, rank: int, part: npt.NDArray[Any], pieces: Sequence[npt.NDArray[Any]], axis: int
) -> None:
    heads = plan.producer.heads_per_rank
    wrong = ""
    if not -part.ndim <= axis < part.ndim or part.shape[axis] != heads:
        wrong = f"shape {list(part.shape)}, its axis {axis} must be {heads} heads long"
    elif pieces:
        other = pieces[0]
        rest, others = list(part.shape), list(other.shape)
        rest[axis] = others[axis] = 0
        if rest != others or part.dtype != other.dtype:
            wrong = f"{part.dtype} {list(part.shape)} beside {other.dtype} {list(other.shape)} of another rank"
    if wrong:
        raise errors.DataLossError(
            f"the tensor of producer rank {rank} does not fit: {wrong}",
            reason="RANK_MISMATCH",
            metadata={"producer_rank": rank},
        )


def rank_key(key: str, rank: int) -> str:
    """The key of what producer rank ``rank`` publishes, where its stage's other ranks publish under ``key`` too."""
    return f"{key}#tp{rank}"
