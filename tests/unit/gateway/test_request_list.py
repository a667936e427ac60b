"""The requests of a gateway, by the page."""

from __future__ import annotations

import pytest

from gateway.request import RequestRecord, TimelineEntry
from gateway.request_list import list_requests, merge_pages
from omni.v1 import inference_service_pb2 as pb
from omni.v1 import types_pb2
from omnicore import errors


def record(number: int, status: str = "finished", model: str = "m", companions: tuple[str, ...] = ()) -> RequestRecord:
    ref = types_pb2.ReplicaRef(stage=types_pb2.StageRef(pipeline=model), replica_id=number % 3)
    timeline = [TimelineEntry(100.0 + number // 2, "admitted"), TimelineEntry(200.0, "dispatched", ref)]
    timeline += [TimelineEntry(200.0, "dispatched", ref, role=role) for role in companions]
    return RequestRecord(f"r{number}", status, tuple(timeline), model, companions)


def test_pages_have_every_request_once_in_order() -> None:
    records = [record(number) for number in (4, 2, 0, 3, 1, 5, 6)]
    token, seen = "", []
    while True:
        page = list_requests(records, pb.ListRequestsRequest(include_ended=True, page_size=2, page_token=token))
        seen += [row.request_id for row in page.requests]
        if not (token := page.next_page_token):
            break
        assert len(page.requests) == 2
    assert seen == [f"r{number}" for number in range(7)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_pages_of_several_processes_are_as_those_of_one(size: int) -> None:
    every = [record(number, companions=("cfg_text",) if number % 3 == 0 else ()) for number in range(9)]
    processes = [every[0:9:2], every[1:9:4], every[3:9:4], []]
    tokens = {"one": "", "several": ""}
    while True:
        asked = {
            name: pb.ListRequestsRequest(include_ended=True, page_size=size, page_token=token)
            for name, token in tokens.items()
        }
        one = list_requests(every, asked["one"])
        several = merge_pages([list_requests(part, asked["several"]) for part in processes], asked["several"])
        assert several == one
        if not one.next_page_token:
            break
        tokens = {"one": one.next_page_token, "several": several.next_page_token}


def test_running_ones_only_unless_asked_and_by_pipeline() -> None:
    records = [record(0), record(1, "running"), record(2, "running", "other")]
    assert [row.request_id for row in list_requests(records, pb.ListRequestsRequest()).requests] == ["r1", "r2"]
    ended = pb.ListRequestsRequest(include_ended=True, model="m")
    assert [row.request_id for row in list_requests(records, ended).requests] == ["r0", "r1"]


def test_companions_follow_their_request() -> None:
    page = list_requests([record(1, "running", companions=("cfg_text", "cfg_img"))], pb.ListRequestsRequest())
    assert [(row.request_id, row.parent_id) for row in page.requests] == [
        ("r1", ""),
        ("r1__cfg_text", "r1"),
        ("r1__cfg_img", "r1"),
    ]
    assert [[ref.replica_id for ref in row.replicas] for row in page.requests] == [[1], [1], [1]]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.ListRequestsRequest(page_size=-1), "page_size"),
        (pb.ListRequestsRequest(page_size=1001), "page_size"),
        (pb.ListRequestsRequest(page_token="x"), "page_token"),
    ],
)
def test_wrong_pages_are_refused_by_name(request_: pb.ListRequestsRequest, field: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match=field):
        list_requests([], request_)
