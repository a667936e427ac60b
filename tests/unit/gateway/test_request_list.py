"""The requests of a gateway, by the page."""

from __future__ import annotations

import pytest

from gateway.request import RequestRecord, TimelineEntry
from gateway.request_list import list_requests
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
