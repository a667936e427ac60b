"""The requests of a gateway, a page at a time. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from gateway.request import RequestRecord
from omni.v1 import inference_service_pb2 as pb
from omni.v1 import types_pb2
from omnicore.errors import InvalidRequestError

DEFAULT_PAGE: Final = 100
MAX_PAGE: Final = 1000


def list_requests(records: Iterable[RequestRecord], request: pb.ListRequestsRequest) -> pb.ListRequestsResponse:
    """One page of ``records``, by the time of their admission. Raises ``InvalidRequestError`` for a wrong page.

    A page may be longer than was asked for by the companions of its last request, which follow it.
    """
    if not 0 <= request.page_size <= MAX_PAGE:
        raise InvalidRequestError.field("page_size", f"must be from 0 to {MAX_PAGE}, got {request.page_size}")
    size = request.page_size or DEFAULT_PAGE
    after = _read_token(request.page_token)
    wanted = [
        (_admitted_ns(record), record)
        for record in records
        if (request.include_ended or record.status == "running") and request.model in ("", record.model)
    ]
    left = sorted((found for found in wanted if (found[0], found[1].request_id) > after), key=_place)
    page = left[:size]
    response = pb.ListRequestsResponse()
    for admitted_ns, record in page:
        response.requests.extend(_rows(record, admitted_ns))
    if len(left) > size:
        response.next_page_token = _token(*_place(page[-1]))
    return response


def merge_pages(pages: Iterable[pb.ListRequestsResponse], request: pb.ListRequestsRequest) -> pb.ListRequestsResponse:
    """One page of those that several processes gave to the same, valid ``request``."""
    pages = list(pages)
    size = request.page_size or DEFAULT_PAGE
    found = sorted((group for page in pages for group in _groups(page)), key=_row_place)
    response = pb.ListRequestsResponse()
    for group in found[:size]:
        response.requests.extend(group)
    # A page with a token is full, so there are enough. What a process left out comes after all that it told.
    if len(found) > size or any(page.next_page_token for page in pages):
        response.next_page_token = _token(*_row_place(found[size - 1]))
    return response


def _groups(page: pb.ListRequestsResponse) -> list[list[pb.RequestSummary]]:
    """Requests, each with its companions."""
    groups: list[list[pb.RequestSummary]] = []
    for row in page.requests:
        if row.parent_id and groups:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _row_place(group: Sequence[pb.RequestSummary]) -> tuple[int, str]:
    return group[0].admit_time.ToNanoseconds(), group[0].request_id


def _place(found: tuple[int, RequestRecord]) -> tuple[int, str]:
    return found[0], found[1].request_id


def _token(admitted_ns: int, request_id: str) -> str:
    return f"{admitted_ns}.{request_id}"


def _read_token(token: str) -> tuple[int, str]:
    if not token:
        return -1, ""
    admitted, _, request_id = token.partition(".")
    if not admitted.isdecimal() or not admitted.isascii():
        raise InvalidRequestError.field("page_token", "not from an earlier answer")
    return int(admitted), request_id


def _admitted_ns(record: RequestRecord) -> int:
    return int(record.timeline[0].time_s * 1e9) if record.timeline else 0


def _rows(record: RequestRecord, admitted_ns: int) -> Iterator[pb.RequestSummary]:
    """The request, then its companions."""
    for role in ("", *record.companions):
        row = pb.RequestSummary(
            request_id=f"{record.request_id}__{role}" if role else record.request_id,
            parent_id=record.request_id if role else "",
            model=record.model,
            status=record.status,
        )
        row.admit_time.FromNanoseconds(admitted_ns)
        last: dict[int, types_pb2.ReplicaRef] = {}
        for entry in record.timeline:
            if entry.event == "dispatched" and entry.ref is not None and entry.role == role:
                last[entry.ref.stage.stage_id] = entry.ref
        row.replicas.extend(last[stage_id] for stage_id in sorted(last))
        yield row
