"""``omnictl up --detach``: the same command in a session of its own, until it says that it is ready."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

from omnicore.supervise.process import end_text

_POLL_S = 0.1


async def start(args: argparse.Namespace, argv: list[str] | None = None) -> int:
    """Start ``omnictl up`` with the flags of ``args`` in the background; returns once it is ready or has failed.

    What it prints until then is printed here; later output goes to ``omnictl.log`` in its run directory. ``argv`` is
    the command line, the process's own by default.
    """
    words = [word for word in (sys.argv[1:] if argv is None else argv) if word not in ("-d", "--detach")]
    directory = Path(args.data_dir) if args.data_dir else Path(tempfile.mkdtemp(prefix="omnictl-"))
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "omnictl.log"
    ready = Path(args.ready_file) if args.ready_file else directory / "omnictl.ready.json"
    ready.unlink(missing_ok=True)
    flags = ["--ready-file", str(ready), "--run-dir", str(directory)]
    # Opened before it starts: a run that failed may have removed its directory by the time we look.
    with log.open("ab") as stream, log.open("rb") as reader:
        reader.seek(0, os.SEEK_END)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "omnictl", *words, *flags),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        try:
            while process.returncode is None and not ready.exists():
                await asyncio.sleep(_POLL_S)
                _show(reader)
        except asyncio.CancelledError:
            # Ctrl-C before it was ready: nothing must stay behind.
            if process.returncode is None:
                process.terminate()
                await process.wait()
            raise
        _show(reader)
    if process.returncode is not None:
        if process.returncode < 0:
            print(f"error: omnictl up {end_text(process.returncode)}", file=sys.stderr)
        return process.returncode if process.returncode >= 0 else 128 - process.returncode
    print(f"It goes on in the background (pid {process.pid}); 'omnictl down' stops it. Log: {log}")
    return 0


def _show(log: BinaryIO) -> None:
    """Print what was logged since the last time."""
    text = log.read().decode(errors="replace").replace("\n\nCtrl-C stops everything.", "")
    print(text, end="", file=sys.stderr, flush=True)
