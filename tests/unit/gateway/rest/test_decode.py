"""Requests of the REST API as messages: what is taken, and what every refusal names."""

from __future__ import annotations

import base64
from typing import Any

import orjson
import pytest
from google.protobuf import json_format
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.rest import decode, encode
from gateway.rest.routes import SERVICES, RestRoutes, Route, message_class
from omni.v1 import admin_service_pb2, inference_service_pb2, registry_service_pb2, types_pb2
from omnicore import errors

ROUTES = RestRoutes(SERVICES)
Query = list[tuple[str, str]]


def read(verb: str, path: str, query: Query | None = None, body: Any = None) -> Message:
    found = ROUTES.find(verb, path)
    assert found is not None
    return decode.request_message(*found, query or [], body)


def refusal(verb: str, path: str, query: Query | None = None, body: Any = None) -> tuple[str, str]:
    with pytest.raises(errors.InvalidRequestError) as caught:
        read(verb, path, query, body)
    (violation,) = caught.value.violations
    return violation.field, violation.description


def generate(**fields: Any) -> inference_service_pb2.GenerateRequest:
    message = read("POST", "/api/v1/generate", body=fields)
    assert isinstance(message, inference_service_pb2.GenerateRequest)
    return message


def generate_refusal(**fields: Any) -> tuple[str, str]:
    return refusal("POST", "/api/v1/generate", body=fields)


def test_a_whole_body() -> None:
    asked = generate(
        model="speech",
        requestId="r-1",
        session_id="s",  # names as in the protos are taken, too
        prompt={"chat": {"messages": [{"parts": [{"media": {"mimeType": "image/png", "data": "_-8"}}]}]}},
        sampling={"temperature": 1, "topK": "-1", "maxTokens": 7.0, "seed": "-9223372036854775808", "stop": ["a", "b"],
                  "stopTokenIds": [1, "2"], "ignoreEos": True, "extra": {"a": [1, None, {"b": "c"}]}, "topP": None},
        timeout="1.5s",
        modalities=[],
    )  # fmt: skip
    assert (asked.model, asked.request_id, asked.session_id) == ("speech", "r-1", "s")
    assert asked.prompt.chat.messages[0].parts[0].media.data == base64.urlsafe_b64decode("_-8=")
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens, sampling.seed) == (1.0, -1, 7, -(2**63))
    assert (list(sampling.stop), list(sampling.stop_token_ids), sampling.ignore_eos) == (["a", "b"], [1, 2], True)
    assert not sampling.HasField("top_p")
    assert json_format.MessageToDict(sampling.extra) == {"a": [1.0, None, {"b": "c"}]}
    assert (asked.timeout.seconds, asked.timeout.nanos) == (1, 500_000_000)


def test_a_query() -> None:
    asked = read("GET", "/api/v1/replicas", [("pipeline", "x"), ("stageId", "2"), ("page_size", "7")])
    assert asked == registry_service_pb2.ListReplicasRequest(pipeline="x", stage_id=2, page_size=7)
    watch = read(
        "GET", "/api/v1/replicas:watch", [("pipelines", "a"), ("pipelines", "b"), ("resumeRevision", str(2**64 - 1))]
    )
    assert watch == registry_service_pb2.WatchReplicasRequest(pipelines=["a", "b"], resume_revision=2**64 - 1)


def test_fields_of_fields_in_a_query() -> None:
    # No method of ours has such a query; any message can.
    message = types_pb2.Replica()
    query = [("ref.stage.pipeline", "x"), ("ref.replicaId", "3"), ("registerTime", "2026-01-02T03:04:05Z"),
             ("drain_limit", "3s"), ("state", "REPLICA_STATE_READY"), ("suspect", "true")]  # fmt: skip
    decode.read_query(message, query, ())
    assert (message.ref.stage.pipeline, message.ref.replica_id, message.drain_limit.seconds) == ("x", 3, 3)
    assert (message.register_time.ToJsonString(), message.state, message.suspect) == ("2026-01-02T03:04:05Z", 2, True)
    for name, part in [("ref", "ref.stage"), ("connectors", "no single value"), ("ref.stage.nothing", "unknown field")]:
        with pytest.raises(errors.InvalidRequestError, match=part) as caught:
            decode.read_query(types_pb2.Replica(), [(name, "1")], ())
        assert caught.value.violations[0].field == name


def test_the_path_and_the_body_may_agree() -> None:
    path = "/api/v1/requests/r%2F1:abort"
    expected = inference_service_pb2.InferenceServiceAbortRequest(request_id="r/1")
    assert read("POST", path) == expected
    assert read("POST", path, body={"request_id": "r/1"}) == expected
    assert refusal("POST", path, body={"requestId": "other"}) == ("request_id", "differs from the one in the path")


@pytest.mark.parametrize(
    ("fields", "where", "what"),
    [
        ({"modell": "x"}, "modell", "did you mean 'model'?"),
        ({"model": 5}, "model", "must be a string, got 5"),
        ({"requestId": "a", "request_id": "b"}, "request_id", "given twice"),
        ({"prompt": {"text": "a", "chat": {}}}, "prompt.chat", "only one of chat, text, tokens may be given"),
        ({"prompt": []}, "prompt", "must be an object, got a list"),
        ({"prompt": {"chat": {"messages": {}}}}, "prompt.chat.messages", "must be a list"),
        ({"prompt": {"chat": {"messages": [None]}}}, "prompt.chat.messages[0]", "must be an object, got null"),
        ({"prompt": {"tokens": {"tokenIds": [1, -1]}}}, "prompt.tokens.tokenIds[1]", "from 0 to 4294967295, got -1"),
        ({"sampling": {"temperature": "hot"}}, "sampling.temperature", "must be a number, got 'hot'"),
        ({"sampling": {"temperature": "1e999"}}, "sampling.temperature", "must be a number"),
        ({"sampling": {"ignoreEos": 1}}, "sampling.ignoreEos", "must be true or false, got 1"),
        ({"sampling": {"topK": 1.5}}, "sampling.topK", "must be a whole number"),
        ({"sampling": {"topK": True}}, "sampling.topK", "must be a whole number"),
        ({"sampling": {"seed": 2**63}}, "sampling.seed", "must be a whole number"),
        ({"timeout": 5}, "timeout", 'such as "1.5s"'),
        ({"timeout": "999999999999s"}, "timeout", 'such as "1.5s"'),
        ({"modalities": "text"}, "modalities", "must be a list"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_what_is_accepted(fields: dict[str, Any], where: str, what: str) -> None:
    field, description = generate_refusal(**fields)
    assert field == where
    assert what in description


def test_other_refusals() -> None:
    collective = "/api/v1/stages:collective"
    field, what = refusal("POST", collective, body={"method": "SLEEP"})
    assert field == "method"
    assert "CONTROL_METHOD_SLEEP" in what
    deep: Any = 1
    for _ in range(70):
        deep = {"a": [deep]}
    assert refusal("POST", collective, body={"args": deep})[0] == "args"
    assert refusal("POST", collective, [("pipeline", "x")], {})[0] == "pipeline"
    assert refusal("GET", "/api/v1/replicas", [("stageId", "1"), ("stage_id", "1")])[0] == "stage_id"
    assert refusal("DELETE", "/api/v1/pipelines/x", [("name", "y")])[0] == "name"
    assert refusal("POST", "/api/v1/generate", body=[])[0] == "body"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def bodies(route: Route) -> st.SearchStrategy[Any]:
    """Objects with names that the message knows, and anything behind them."""
    names = [field.json_name for field in route.request.fields]
    return st.dictionaries(st.sampled_from([*names, "other"]), JSON, max_size=4)


def attempt(
    route: Route, values: dict[str, str], query: Query, body: Any
) -> tuple[Message | None, errors.InvalidRequestError | None]:
    try:
        return decode.request_message(route, values, query, body), None
    except errors.InvalidRequestError as error:
        return None, error


@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("route", ROUTES.routes, ids=lambda route: route.method.name)
@given(st.data())
def test_anything_is_read_or_refused_by_name(route: Route, data: st.DataObject) -> None:
    names = [field.json_name for field in route.request.fields] or ["other"]
    query = data.draw(
        st.lists(st.tuples(st.sampled_from(names) | st.text(max_size=8), st.text(max_size=8)), max_size=3)
    )
    values = {field: data.draw(st.text(min_size=1, max_size=8)) for field in route.template.fields}
    body = data.draw(bodies(route) | JSON) if route.body else None
    message, refused = attempt(route, values, query, body)
    if refused is not None:
        assert refused.violations
        assert orjson.dumps(encode.status_body(refused))
    if message is None:
        return
    # What was read goes out, and comes in again as it was.
    again = message_class(route.request)()
    decode.read_object(again, orjson.loads(encode.message_json(message)), "")
    assert again == message


def test_responses_need_no_defaults() -> None:
    response = admin_service_pb2.CollectiveRpcResponse(revision=2**63)
    response.results.add().status.code = 5
    assert orjson.loads(encode.message_json(response)) == {
        "results": [{"status": {"code": 5, "message": "", "details": []}}],
        "revision": "9223372036854775808",
    }
    aborted = inference_service_pb2.InferenceServiceAbortResponse()
    assert encode.message_json(aborted) == b'{"found":false}'


def test_errors_have_openais_shape_and_grpcs_details() -> None:
    error = errors.UnavailableError("later", retry_after_s=2, metadata={"stage": 1})
    assert encode.status_body(error)["error"] == {
        "message": "later",
        "type": "service_unavailable",
        "param": None,
        "code": "unavailable",
        "status": "UNAVAILABLE",
        "details": [
            {
                "@type": "type.googleapis.com/google.rpc.ErrorInfo",
                "reason": "UNAVAILABLE",
                "domain": "omniplane",
                "metadata": {"stage": "1"},
            },
            {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "2s"},
        ],
    }
