"""omnictl as its users run it: a process with flags, an environment and a terminal's signals."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import SIMULATED

ROOT = Path(__file__).parents[3]
SPEECH = str(ROOT / "examples" / "speech.yaml")
POLL_S = 0.05
# A cluster starts in 3 s on an idle machine; tests must also pass on a busy one.
START_S = 90.0


def wait_for(condition: Callable[[], Any], timeout_s: float = 30.0, what: str = "condition") -> Any:
    """The first true value of ``condition()``; fails the test after ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: not within {timeout_s:g} s")
        time.sleep(POLL_S)
    return value


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Cli:
    """Runs omnictl with its context file in ``directory``."""

    def __init__(self, directory: Path, environ: Mapping[str, str] | None = None) -> None:
        self.directory = directory
        self.context = directory / "context.json"
        known = {k: v for k, v in os.environ.items() if not k.startswith(("OMNICTL_", "OMNI_"))}
        # The run directories of `up` go here, so that a test sees what is left of them.
        (directory / "tmp").mkdir(exist_ok=True)
        self.environ = known | {
            **SIMULATED,
            "OMNICTL_CONTEXT": str(self.context),
            "TMPDIR": str(directory / "tmp"),
            **(environ or {}),
        }

    def known(self) -> dict[str, Any]:
        """The current context."""
        value = json.loads(self.context.read_text())
        found: dict[str, Any] = value["contexts"][value["current"]]
        return found

    def path_with_omnictl(self) -> str:
        """A PATH on which ``omnictl`` is this project's."""
        directory = self.directory / "bin"
        directory.mkdir(exist_ok=True)
        program = directory / "omnictl"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m omnictl "$@"\n')
        program.chmod(0o755)
        return f"{directory}:{self.environ['PATH']}"

    def run(self, *argv: str, input: str | None = None, timeout_s: float = 40.0) -> Done:
        """Run to the end. A traceback on standard error fails the test, whatever the command was."""
        done = subprocess.run(
            [sys.executable, "-m", "omnictl", *argv],
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=self.environ,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Done(done.returncode, done.stdout, done.stderr)

    def ok(self, *argv: str, input: str | None = None) -> str:
        """Run to the end, which must be a good one; returns standard output."""
        done = self.run(*argv, input=input)
        assert done.code == 0, f"omnictl {' '.join(argv)}: exit code {done.code}\n{done.err}"
        return done.out

    @contextlib.contextmanager
    def spawn(self, *argv: str) -> Iterator[Running]:
        """A command that goes on; killed at the end of the block, if it still runs."""
        number = len(list(self.directory.glob("*.out")))
        out, err = self.directory / f"{number}.out", self.directory / f"{number}.err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "omnictl", *argv],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=self.environ,
                start_new_session=True,
            )
        running = Running(process, out, err)
        try:
            yield running
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            print(f"----- omnictl {' '.join(argv)} (exit code {process.returncode}) -----\n{running.err}{running.out}")


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """A command that goes on."""

    process: subprocess.Popen[bytes]
    out_path: Path
    err_path: Path

    @property
    def out(self) -> str:
        return self.out_path.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self.err_path.read_text(errors="replace")

    def wait_out(self, text: str, timeout_s: float = 30.0) -> str:
        """Standard output, once it contains ``text``."""

        def found() -> bool:
            if text in self.out:
                return True
            if self.process.poll() is not None and text not in self.out:
                pytest.fail(f"ended with {self.process.returncode} before it printed {text!r}:\n{self.err}{self.out}")
            return False

        wait_for(found, timeout_s, f"{text!r} in standard output")
        return self.out

    def wait_err(self, text: str, timeout_s: float = 30.0) -> str:
        """Standard error, once it contains ``text``."""
        wait_for(lambda: text in self.err, timeout_s, f"{text!r} in standard error")
        return self.err

    def end(self, sig: signal.Signals = signal.SIGTERM, timeout_s: float = 40.0) -> int:
        """Send ``sig`` and return the exit code."""
        self.process.send_signal(sig)
        return self.process.wait(timeout_s)


def processes_of(directory: Path) -> dict[int, str]:
    """Living processes whose command line mentions ``directory``, but for zombies, which have none."""
    found: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if str(directory) in command:
                found[int(entry.name)] = command
    return found
