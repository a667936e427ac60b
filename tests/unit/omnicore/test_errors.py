"""The error table: one row an error, the same on every protocol, nothing lost on the wire."""

from __future__ import annotations

import grpc
import pytest

from omnicore import errors


@pytest.mark.parametrize("cls", errors.TABLE.values(), ids=lambda cls: cls.__name__)
def test_status_round_trip_keeps_everything(cls: type[errors.OmniError]) -> None:
    error = cls(
        "stage 1 is full",
        reason="STAGE_FULL",
        metadata={"stage": 1, "replica": 0},
        violations=[errors.FieldViolation("stages[1]", "too many")],
        retry_after_s=1.5,
    )
    back = errors.from_status(error.to_status())
    assert type(back) is cls
    assert (back.message, back.reason, back.metadata) == (
        "stage 1 is full",
        "STAGE_FULL",
        {"stage": "1", "replica": "0"},
    )
    assert back.violations == error.violations
    assert back.retry_after_s == 1.5


def test_docstring_is_the_table() -> None:
    doc = errors.__doc__ or ""
    for cls in errors.TABLE.values():
        (line,) = [row for row in doc.splitlines() if f" {cls.__name__} " in row]
        words = line.split()
        assert words[2:5] == [cls.row.code.name, str(cls.row.http_status), cls.row.openai_type]
        assert words[5:] == ["exit", str(cls.row.exit_code)]


def test_every_code_but_ok_and_two_has_a_row() -> None:
    missing = set(grpc.StatusCode) - set(errors.TABLE)
    assert missing == {grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN, grpc.StatusCode.OUT_OF_RANGE}


def test_unknown_exceptions_show_only_their_type() -> None:
    error = errors.from_exception(ValueError("secret"))
    assert isinstance(error, errors.InternalError)
    assert "secret" not in error.message
    assert "ValueError" in error.message


def test_unknown_status_code_is_internal() -> None:
    status = errors.UnavailableError("x").to_status()
    status.code = 2
    assert isinstance(errors.from_status(status), errors.InternalError)


@pytest.mark.parametrize("letter", ["x", "ü", "😀"])
def test_texts_are_cut_by_bytes_and_at_letters(letter: str) -> None:
    text = letter * 5000
    error = errors.InvalidRequestError(text, metadata={"a": text}, violations=[errors.FieldViolation(text, text)])
    for cut, limit in (
        (error.message, errors.MAX_TEXT_BYTES),
        (error.metadata["a"], errors.MAX_NAME_BYTES),
        (error.violations[0].field, errors.MAX_NAME_BYTES),
        (error.violations[0].description, errors.MAX_TEXT_BYTES),
    ):
        assert limit - 8 < len(cut.encode()) <= limit
        assert set(cut) == {letter, "…"}
    fits = letter * (errors.MAX_TEXT_BYTES // len(letter.encode()))
    assert errors.InvalidRequestError(fits).message == fits
