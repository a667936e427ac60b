"""Path templates of google.api.http."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.rest import templates
from gateway.rest.routes import SERVICES, RestRoutes
from omnicore import errors

ROUTES = RestRoutes(SERVICES)


@pytest.mark.parametrize(
    ("template", "path", "found"),
    [
        ("/v1/things", "/v1/things", {}),
        ("/v1/things", "/v1/things/", None),
        ("/v1/things/{id}", "/v1/things/a", {"id": "a"}),
        ("/v1/things/{id}", "/v1/things/a/b", None),
        ("/v1/things/{id}", "/v1/things/", None),
        ("/v1/things/{id}", "/v1/things/a%2Fb", {"id": "a/b"}),
        ("/v1/things/{id}:stop", "/v1/things/a:b:stop", {"id": "a:b"}),
        ("/v1/things/{id}:stop", "/v1/things/a", None),
        ("/v1/things:stop", "/v1/things:stop", {}),
        ("/v1/{name=things/*}", "/v1/things/x%20y", {"name": "things/x y"}),
        ("/v1/{name=things/*}/parts/{part.id}", "/v1/things/x/parts/7", {"name": "things/x", "part.id": "7"}),
        ("/v1/{name=things/*}", "/v1/other/x", None),
        ("/v1/{path=**}:get", "/v1/a/b/c:get", {"path": "a/b/c"}),
        ("/v1/*/end", "/v1/anything/end", {}),
        ("/v1/{id}", "/v1/%C3%A9", {"id": "é"}),
    ],
)
def test_matching(template: str, path: str, found: dict[str, str] | None) -> None:
    assert templates.parse(template).match(path) == found


@pytest.mark.parametrize("template", ["", "v1", "/v1/{}", "/v1/{a}/{a}", "/v1/{a=**", "/v1/a b", "/v1/{a={b}}"])
def test_malformed_templates_are_refused(template: str) -> None:
    with pytest.raises(ValueError, match=r"template|segment|stands twice"):
        templates.parse(template)


def test_what_is_not_utf_8_is_refused_by_name() -> None:
    with pytest.raises(errors.InvalidRequestError) as caught:
        templates.parse("/v1/{id}").match("/v1/%ff")
    assert caught.value.violations[0].field == "id"


def test_more_literal_paths_come_first() -> None:
    watch = ROUTES.find("GET", "/api/v1/pipelines:watch")
    one = ROUTES.find("GET", "/api/v1/pipelines/x")
    assert watch is not None
    assert one is not None
    assert (watch[0].method.name, one[0].method.name) == ("WatchPipelines", "GetPipeline")
    assert ROUTES.verbs("/api/v1/pipelines") == ["GET", "POST"]
    assert ROUTES.verbs("/api/v1/pipelines/x") == ["DELETE", "GET"]
    assert ROUTES.verbs("/api/v1/nothing") == []


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(["GET", "POST", "DELETE", "PUT"]), st.text(st.characters(codec="latin-1"), max_size=60))
def test_any_path_is_found_refused_or_unknown(verb: str, tail: str) -> None:
    try:
        found = ROUTES.find(verb, "/api/v1/" + tail)
    except errors.InvalidRequestError:
        return
    assert found is None or set(found[1]) == set(found[0].template.fields)
