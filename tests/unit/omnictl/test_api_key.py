"""``omnictl api-key``: a key is shown once, the file never holds it, and gateways can read what was written."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from omnicore import api_keys
from omnicore.api_keys import KeyRole, Priority
from omnictl.cli import main


def test_create_appends_a_line_that_finds_the_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.jsonl"
    words = ["api-key", "create", "alice", "--file", str(path)]
    assert main([*words, "--role", "admin", "--role", "read", "--priority", "low", "--max-concurrent", "3"]) == 0
    out, err = capsys.readouterr()
    key = out.strip()
    assert key.startswith("omni_")
    assert key not in path.read_text() + err
    assert path.stat().st_mode & 0o777 == 0o600
    found = api_keys.parse("f", path.read_bytes()).find(key.encode())
    assert found is not None
    assert (found.id, found.priority, found.max_concurrent) == ("alice", Priority.LOW, 3)
    assert found.roles == {KeyRole.ADMIN, KeyRole.READ}

    before = path.read_bytes()
    assert main(words) == 2, "an id is given once"
    told = f"error: {path}: not added, its id 'alice' is in line 1 already; choose another, or take that line out"
    assert capsys.readouterr().err.splitlines()[0] == told
    assert path.read_bytes() == before


def test_hash_takes_a_key_of_yours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, key = tmp_path / "keys.jsonl", "sk-" + "z" * 40
    path.write_text("# ours")  # no line end
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{key}\n"))
    assert main(["api-key", "hash", "bob", "--file", str(path), "--expires", "2001-01-31"]) == 0
    assert api_keys.parse("f", path.read_bytes()).find(key.encode()) is not None
    monkeypatch.setattr("sys.stdin", io.StringIO("hunter2\n"))
    capsys.readouterr()
    assert main(["api-key", "hash", "eve"]) == 2
    said = capsys.readouterr()
    assert "32 to 512 visible ASCII characters" in said.err
    assert "hunter2" not in said.err + said.out

    assert main(["api-key", "list", "--file", str(path), "-o", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["keys"]
    assert (row["id"], row["state"], row["expires"]) == ("bob", "expired", "2001-01-31T00:00:00Z")
    assert main(["api-key", "list", "--file", str(path)]) == 0
    assert "REQUESTS/MIN" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["create", "a b"], "ID: must be 1 to 64 letters"),
        (["create", "a", "--expires", "soon"], "--expires: must be a date"),
        (["create", "a", "--max-concurrent", "-1"], "--max-concurrent"),
        (["create", "a", "--role", "root"], "--role: 'root' is not accepted"),
        (["create", "a", "--file", "/"], "cannot write /"),
    ],
)
def test_wrong_input(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["api-key", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["api-key", "list", "--file", str(tmp_path / "none")]) == 4
    first, hint = capsys.readouterr().err.splitlines()
    assert "there is no file" in first
    assert hint == "hint: 'omnictl api-key create ID --file FILE' makes one"
