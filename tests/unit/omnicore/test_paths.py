from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnicore.errors import FailedPreconditionError
from omnicore.paths import ONE_STORE, ONE_WAY, PREFERENCE, SAME_HOST, End, Path, choose_path

KINDS = sorted({kind for kind, _, _ in PREFERENCE} | {"cuda_ipc"})


@dataclasses.dataclass(frozen=True)
class Offered:
    name: str
    address: str = ""
    healthy: bool = True
    backend: str = ""


@dataclasses.dataclass(frozen=True)
class Place:
    boot_id: str = "host-a"


def end(name: str, *offers: Offered | str, host: str = "host-a") -> End:
    return End.of(name, [Offered(o) if isinstance(o, str) else o for o in offers], Place(host))


def both(*offers: Offered | str, hosts: tuple[str, str] = ("host-a", "host-a")) -> tuple[End, End]:
    return end("p/0/0", *offers, host=hosts[0]), end("p/1/0", *offers, host=hosts[1])


TWO_HOSTS = ("host-a", "host-b")
MOONCAKE_TCP, MOONCAKE_RDMA = Offered("mooncake", backend="tcp"), Offered("mooncake", backend="rdma")


@pytest.mark.parametrize(
    ("ends", "connector"),
    [
        (both("shm", "grpc"), "shm"),
        (both("shm", "mooncake", "nixl", "grpc"), "shm"),
        (both("shm", "mooncake", "grpc", hosts=TWO_HOSTS), "mooncake"),
        (both("mooncake", "nixl", "grpc", hosts=TWO_HOSTS), "nixl"),
        (both(Offered("mooncake", backend="rdma"), "nixl", "grpc", hosts=TWO_HOSTS), "mooncake"),
        (both("shm", "grpc", hosts=TWO_HOSTS), "grpc"),
        (both("cuda_ipc", "grpc"), "grpc"),
        (both(Offered("shm", healthy=False), "grpc"), "grpc"),
        (both(Offered("mooncake_store", "m:1"), "grpc", hosts=TWO_HOSTS), "mooncake_store"),
        ((end("a", Offered("yuanrong", "m:1"), "grpc"), end("b", Offered("yuanrong", "m:2"), "grpc")), "grpc"),
        ((end("a", "mooncake", "grpc"), end("b", "nixl", "grpc")), "grpc"),
        ((end("a", MOONCAKE_TCP, "grpc"), end("b", MOONCAKE_RDMA, "grpc")), "grpc"),
        ((end("a", MOONCAKE_TCP, "grpc"), end("b", "mooncake", "grpc")), "mooncake"),
    ],
)
def test_auto_takes_the_best_that_both_have(ends: tuple[End, End], connector: str) -> None:
    assert choose_path(*ends).connector == connector


def test_auto_keeps_to_what_the_edge_allows() -> None:
    ends = both("shm", "mooncake", "grpc")
    assert choose_path(*ends, among={"mooncake"}).connector == "mooncake"
    assert choose_path(*ends, among={"nixl"}).connector == "grpc"


def test_a_path_says_how_bytes_move_and_why() -> None:
    path = choose_path(*both(Offered("mooncake", backend="tcp"), "grpc", hosts=TWO_HOSTS))
    assert path == Path("mooncake", "tcp", "both have Mooncake")
    mixed = end("a", Offered("mori", backend="rdma")), end("b", Offered("mori", backend="rdma+xgmi"))
    assert choose_path(*mixed).backend == "rdma/rdma+xgmi"
    assert choose_path(*both("nixl"), wanted="nixl").reason == "the edge names it"


@pytest.mark.parametrize(
    ("ends", "wanted", "why"),
    [
        ((end("a", "shm"), end("b", "grpc")), "shm", r"b has no 'shm' \(it has: grpc\)"),
        ((end("a"), end("b")), "auto", r"a has no 'shm' \(it has: nothing\)"),
        (both("shm", hosts=TWO_HOSTS), "shm", "'shm' needs one host, and p/0/0 and p/1/0 run on two"),
        (both(Offered("nixl", healthy=False)), "nixl", "'nixl' of p/0/0 is not well"),
        (
            (end("a", Offered("mooncake_store", "m:1")), end("b", Offered("mooncake_store", "m:2"))),
            "mooncake_store",
            r"they use two stores \(m:1 and m:2\)",
        ),
        ((end("a", MOONCAKE_TCP), end("b", MOONCAKE_RDMA)), "mooncake", "moves bytes by tcp at a and by rdma at b"),
    ],
)
def test_what_cannot_work_names_the_side_that_lacks_it(ends: tuple[End, End], wanted: str, why: str) -> None:
    with pytest.raises(FailedPreconditionError, match=why) as caught:
        choose_path(*ends, wanted=wanted)
    assert caught.value.reason == "NO_COMMON_PATH"


offers = st.lists(
    st.builds(
        Offered,
        st.sampled_from(KINDS),
        st.sampled_from(["m:1", "m:2"]),
        st.booleans(),
        st.sampled_from(["", "tcp", "rdma"]),
    ),
    unique_by=lambda offer: offer.name,
)
ends = st.builds(lambda found, host: end("x", *found, host=host), offers, st.sampled_from(TWO_HOSTS))


@given(ends, ends)
def test_a_path_works_at_both_ends_and_every_better_one_does_not(producer: End, consumer: End) -> None:
    order = [(kind, backend) for kind, backend, _ in PREFERENCE]
    try:
        path = choose_path(producer, consumer)
    except FailedPreconditionError:
        better = order
    else:
        assert all((offer := e.offer(path.connector)) is not None and offer.healthy for e in (producer, consumer))
        better = order[
            : min(n for n, (kind, how) in enumerate(order) if kind == path.connector and how in ("", path.backend))
        ]
    for kind, backend in better:
        found = [offer for e in (producer, consumer) if (offer := e.offer(kind)) is not None and offer.healthy]
        well = len(found) == 2
        apart = kind in SAME_HOST and producer.placement != consumer.placement
        two_stores = well and kind in ONE_STORE and found[0].address != found[1].address
        two_ways = well and kind in ONE_WAY and len({offer.backend for offer in found} - {""}) > 1
        otherwise = well and backend != "" and {backend} != {offer.backend for offer in found}
        assert not well or apart or two_stores or two_ways or otherwise


@given(ends, ends)
def test_which_way_data_goes_makes_no_difference(producer: End, consumer: End) -> None:
    def kind(a: End, b: End) -> str:
        try:
            return choose_path(a, b).connector
        except FailedPreconditionError:
            return ""

    assert kind(producer, consumer) == kind(consumer, producer)
