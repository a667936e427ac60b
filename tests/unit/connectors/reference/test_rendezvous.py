"""Senders of one host find each other by a directory, and nothing of a dead one is left."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from connectors.reference.rendezvous import Rendezvous, Sender
from omnicore import errors

ROOT = Path(__file__).parents[4]
_ANNOUNCE = """
import sys
from pathlib import Path
from connectors.reference.rendezvous import Rendezvous
meeting = Rendezvous(Path(sys.argv[1]), "n")
meeting.announce("127.0.0.1:9")
print("ready", flush=True)
sys.stdin.read()
"""


def open_files() -> int:
    """Descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "senders"


def test_who_announces_is_seen_by_the_others_until_it_leaves(directory: Path) -> None:
    first, second = Rendezvous(directory, "n"), Rendezvous(directory, "n")
    assert second.senders() == []
    secret = first.announce("127.0.0.1:1")
    assert first.announced
    assert second.senders() == first.senders() == [Sender("127.0.0.1:1", secret)], "at once, however coarse file times"
    other = second.announce("127.0.0.1:2")
    assert {sender.secret for sender in first.senders()} == {secret, other}
    assert Rendezvous(directory, "another").senders() == []
    first.close()
    first.close()
    assert second.senders() == [Sender("127.0.0.1:2", other)]
    second.close()
    assert list((directory / "n").iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_who_looks_next(directory: Path) -> None:
    meeting = Rendezvous(directory, "n")
    process = subprocess.Popen(
        [sys.executable, "-c", _ANNOUNCE, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert [sender.endpoint for sender in meeting.senders()] == ["127.0.0.1:9"]
        process.kill()
        process.wait()
    meeting.forget()  # as who asks in vain does
    assert meeting.senders() == []
    assert list((directory / "n").iterdir()) == []


def test_files_are_this_users_alone(directory: Path) -> None:
    meeting = Rendezvous(directory, "n")
    meeting.announce("127.0.0.1:1")
    assert directory.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in (directory / "n").iterdir()] == [0o600]
    meeting.close()
    directory.chmod(0o755)
    with pytest.raises(errors.FailedPreconditionError) as refused:
        Rendezvous(directory, "n")
    assert refused.value.reason == "UNSAFE_DIRECTORY"
    link = directory.parent / "link"
    link.symlink_to(directory)
    with pytest.raises(errors.FailedPreconditionError):
        Rendezvous(link, "n")


def test_other_files_are_left_out(directory: Path) -> None:
    meeting = Rendezvous(directory, "n")
    mine = meeting.announce("127.0.0.1:1")
    (directory / "n" / "README").write_text("hello")
    assert [sender.secret for sender in meeting.senders()] == [mine]
    meeting.close()


def test_a_directory_that_is_gone_is_said_and_nobody_answers_there(directory: Path) -> None:
    meeting = Rendezvous(directory, "n")
    shutil.rmtree(directory)
    assert meeting.senders() == []
    with pytest.raises(errors.UnavailableError) as refused:
        meeting.announce("127.0.0.1:1")
    assert refused.value.reason == "DIRECTORY_UNUSABLE"


def test_a_directory_that_is_full_is_left_as_it_was(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    meeting, before = Rendezvous(directory, "n"), open_files()
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(errors.UnavailableError, match="No space left"):
            meeting.announce("127.0.0.1:1")
    assert not meeting.announced
    assert list((directory / "n").iterdir()) == []
    assert open_files() <= before
