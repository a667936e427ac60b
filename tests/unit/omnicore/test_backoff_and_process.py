"""Back-off grows to its limit; ready files appear whole; processes end as they mean to."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

from omnicore.backoff import Backoff
from omnicore.process import write_ready_file


def test_backoff_doubles_to_its_limit_within_jitter() -> None:
    backoff = Backoff(initial_s=0.1, max_s=1.0, rng=random.Random(1))
    expected = [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    for base in expected:
        assert 0.5 * base <= backoff.next_delay_s() <= 1.5 * base
    backoff.reset()
    assert backoff.next_delay_s() <= 0.15


def test_ready_file_is_complete_json(tmp_path: Path) -> None:
    target = tmp_path / "ready.json"
    write_ready_file(str(target), {"address": "127.0.0.1:1"})
    assert json.loads(target.read_text()) == {"pid": os.getpid(), "address": "127.0.0.1:1"}
    assert list(tmp_path.iterdir()) == [target]
    write_ready_file("", {"ignored": True})


def test_a_library_that_crashes_at_the_end_does_not_change_the_exit_code() -> None:
    program = """
import atexit, ctypes, sys
from omnicore import process
libc = ctypes.CDLL(None)
libc.on_exit(ctypes.c_void_p(16), None)  # a finalizer that nobody can call
if sys.argv[1] == "skip":
    process.skip_native_finalizers()
atexit.register(lambda: print("Python ends in good order"))
libc.printf(b"of C, ")
print("of Python, ", end="")
sys.exit(3)
"""
    for skip, code in (("skip", 3), ("no", -signal.SIGSEGV)):
        done = subprocess.run([sys.executable, "-c", program, skip], capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stderr
        assert "of Python, Python ends in good order\n" in done.stdout
        assert code < 0 or "of C, " in done.stdout
