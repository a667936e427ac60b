"""Token files: what they may hold, how they rotate, and that they say nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from omnicore.errors import InvalidRequestError
from omnicore.tokens import TokenFile, bearer, sent

OLD, NEW = "o" * 32, "n" * 32


def test_first_is_sent_and_all_are_known(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# rotated in May\n\n{NEW}\r\n  {OLD}  \n")
    tokens = TokenFile("--token-file", str(path))
    assert tokens.first() == NEW
    assert tokens.holds(NEW)
    assert tokens.holds(OLD)
    assert not tokens.holds(OLD[:-1])
    assert not tokens.holds("")
    assert not tokens.holds("# rotated in May")
    assert not tokens.holds("ö" * 32)


def test_rotation_needs_no_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tokens"
    path.write_text(OLD)
    tokens = TokenFile("--token-file", str(path))
    path.write_text(f"{NEW}\n{OLD}\n")
    assert tokens.first() == NEW
    assert tokens.holds(OLD)
    path.write_text(f"{NEW}\n")
    assert not tokens.holds(OLD)
    with caplog.at_level(logging.ERROR):
        path.write_text("short\n")
        assert tokens.holds(NEW), "a bad file leaves the former tokens in force"
        path.unlink()
        assert tokens.holds(NEW)
    assert "line 1" in caplog.text or any("line 1" in str(vars(r).get("fields")) for r in caplog.records)
    for record in caplog.records:
        assert NEW not in str(vars(record))
        assert "short" not in str(vars(record).get("fields"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no token"),
        ("# only a comment\n", "holds no token"),
        ("tooshort\n", "line 1"),
        (f"{OLD}\ntwo words that are long\n", "line 2"),
        ("ü" * 20, "line 1"),
        ("x" * 1025, "line 1"),
    ],
)
def test_unusable_files_name_flag_and_line_but_not_the_content(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(content)
    with pytest.raises(InvalidRequestError, match=message) as raised:
        TokenFile("--admin-token-file", str(path))
    assert raised.value.message.startswith("--admin-token-file: ")
    for line in content.splitlines():
        assert len(line) < 8 or line.startswith("#") or line not in raised.value.message


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"--token-file: cannot read .*/none: No such file"):
        TokenFile("--token-file", str(tmp_path / "none"))
    with pytest.raises(InvalidRequestError, match="Is a directory"):
        TokenFile("--token-file", str(tmp_path))


def test_metadata() -> None:
    assert sent(bearer(OLD)) == OLD
    assert sent([("authorization", f"bearer  {OLD}")]) == OLD
    assert sent([("authorization", f"Basic {OLD}"), ("x", "y"), ("authorization", b"Bearer x")]) == ""
    assert sent(None) == ""
