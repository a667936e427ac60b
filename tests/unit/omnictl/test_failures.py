from __future__ import annotations

import pytest

from omnicore import errors
from omnictl import failures


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            errors.NotFoundError("no pipeline 'x'; known: speech"),
            "error: no pipeline 'x'; known: speech\nhint: 'omnictl get pipelines|stages|replicas' lists what exists",
        ),
        # Of a file of the user's, which no cluster can list.
        (
            errors.NotFoundError("no context 'x'", reason="CONTEXT_NOT_FOUND"),
            "hint: 'omnictl context list' shows those that there are",
        ),
        (errors.ResourceExhaustedError("too many requests", retry_after_s=1.5), "hint: try again in 1.5 s"),
        (errors.InvalidRequestError("bad", reason="USAGE"), "hint: see 'omnictl get --help'"),
        (errors.UnavailableError("x", metadata={"hint": "do this"}), "hint: do this"),
        (errors.InternalError("broken"), "error: broken"),
        (
            errors.InvalidRequestError(
                "2 faults", violations=[errors.FieldViolation("a", "is b"), errors.FieldViolation("c", "is d")]
            ),
            "error: 2 faults\n  a: is b\n  c: is d",
        ),
        # Whose word was refused: a gateway's, or a control plane's.
        (
            errors.UnauthenticatedError("x", reason="INVALID_API_KEY"),
            "--api-key-file; 'omnictl api-key create' makes keys",
        ),
        (errors.UnauthenticatedError("x", reason="TOKEN_REQUIRED"), "a certificate with --tls-cert and --tls-key"),
        # Not said twice.
        (errors.InvalidRequestError.field("model", "is required"), "error: model: is required"),
    ],
)
def test_rendering(error: errors.OmniError, text: str) -> None:
    rendered = failures.render(error, "omnictl get")
    assert rendered == text or rendered.endswith(text)


def test_what_a_server_says_cannot_draw_on_the_terminal() -> None:
    rendered = failures.render(errors.InternalError("a\x1b[2J\r\nb"))
    assert rendered == "error: a [2J b"


def test_faults_of_a_deploy_file_one_a_line() -> None:
    error = errors.InvalidRequestError(
        "2 faults",
        violations=[errors.FieldViolation("stages[0].engin", "unknown key"), errors.FieldViolation("", "no stages")],
    )
    assert failures.violations_of(error, "a.yaml") == [
        "a.yaml: stages[0].engin: unknown key",
        "a.yaml: no stages",
    ]
    assert failures.violations_of(errors.InvalidRequestError("not YAML"), "a.yaml") == ["a.yaml: not YAML"]
