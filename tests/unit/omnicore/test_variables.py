"""Environment variables in options."""

from __future__ import annotations

import pytest

from omnicore.errors import InvalidRequestError
from omnicore.variables import expand

ENVIRON = {"A": "1", "LONG_NAME": "two", "EMPTY": ""}


@pytest.mark.parametrize(
    ("text", "bare", "expanded"),
    [
        ("plain", False, "plain"),
        ("${A}-${LONG_NAME}", False, "1-two"),
        ("${EMPTY}", False, ""),
        ("$A ${A}", False, "$A 1"),
        ("$A ${A}", True, "1 1"),
        ("$A-$LONG_NAME", True, "1-two"),
        ("a $ b $5", True, "a $ b $5"),
    ],
)
def test_variables_are_put_in(text: str, bare: bool, expanded: str) -> None:
    assert expand(text, ENVIRON, "field", bare=bare) == expanded


@pytest.mark.parametrize(("text", "bare"), [("${B}", False), ("${B}", True), ("$B", True)])
def test_one_that_is_not_set_is_named_with_its_field(text: str, bare: bool) -> None:
    with pytest.raises(InvalidRequestError, match="variable B, which is not set") as caught:
        expand(text, ENVIRON, "connectors.x.extra.host", bare=bare)
    assert (caught.value.reason, caught.value.violations[0].field) == ("UNSET_VARIABLE", "connectors.x.extra.host")
