"""Calls made of the OpenAPI document, by schemathesis: what comes back is what the document says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import load_all_checks
from schemathesis.core.result import Ok

# Documented, and no fault: nothing routable, stopped, not offered, too slow for the timeout that was asked for.
EXPECTED_5XX = {501, 503, 504}


def operations(url: str, left_out: Callable[[str, str], bool]) -> Iterator[Any]:
    """Every operation of the document at ``url`` but for those that ``left_out(verb, path)`` names."""
    schema = schemathesis.openapi.from_url(url, timeout=30)
    for result in schema.get_all_operations():
        assert isinstance(result, Ok), result
        operation = result.ok()
        if not left_out(operation.method.upper(), operation.path):
            yield operation


def call_all(url: str, left_out: Callable[[str, str], bool], examples: int) -> dict[str, int]:
    """Make ``examples`` calls of every operation, the same ones every time; returns how often each status came."""
    load_all_checks()
    names = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
    checks = schemathesis.checks.CHECKS.get_by_names(names)
    seen: dict[str, int] = {}
    for operation in operations(url, left_out):

        @settings(
            max_examples=examples, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy())
        def run(case: Any) -> None:
            response = case.call(timeout=30)
            status = response.status_code
            seen[str(status)] = seen.get(str(status), 0) + 1
            assert status < 500 or status in EXPECTED_5XX, f"{case.as_curl_command()}\n{response.text}"
            case.validate_response(response, checks=checks)
            if response.headers.get("content-type", [""])[0].startswith("application/x-ndjson"):
                for line in response.text.splitlines():
                    assert isinstance(json.loads(line), dict)

        run()
    return seen
