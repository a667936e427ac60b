"""``omniplane SERVICE [flags]``: runs one service in the foreground."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable, MutableMapping, Sequence

# Services are named, not imported: each process loads only its own, and none depends on another.
SERVICES: dict[str, tuple[str, str]] = {
    "control-plane": ("control_plane.app", "registration, liveness, pipelines and admin verbs, over etcd"),
    "gateway": ("gateway.app", "OpenAI HTTP and gRPC, routed over the stage graph"),
    "stage-worker": ("stage_worker.app", "one replica of one stage"),
    "serve": ("omniplane.serve.app", "whole pipelines, heads and headless replicas, with vLLM-Omni's command line"),
    "etcd": ("control_plane.etcd.server", "a private single-node etcd, for one machine"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service that the first argument names; returns its exit code, 2 for an unknown one."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(_usage())
        return 0 if args else 2
    if args[0] == "--version":
        from importlib.metadata import version

        print(f"omniplane {version('omniplane')}")
        return 0
    if args[0] not in SERVICES:
        print(f"error: unknown service {args[0]!r}; known: {', '.join(SERVICES)}", file=sys.stderr)
        return 2
    try:
        return _load(args[0], os.environ)(args[1:])
    except KeyboardInterrupt:
        return 130  # Ctrl-C before the service took signals; 128 + SIGINT, as shells have it


def _load(service: str, environ: MutableMapping[str, str]) -> Callable[[Sequence[str]], int]:
    """Import a service, at no more cost than need be to what serves already on this machine."""
    # As soon as they are there, the threads of numpy's OpenBLAS wait for work in a loop, each for 2^26 ticks of a
    # processor: a fifth of what the start of a worker takes. With 2^4 they go to sleep.
    environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    gc.disable()  # what imports make is there to stay: looking through it again and again finds nothing
    try:
        main: Callable[[Sequence[str]], int] = importlib.import_module(SERVICES[service][0]).main
    finally:
        gc.enable()
    return main


def _usage() -> str:
    rows = "\n".join(f"  {name:14} {text}" for name, (_, text) in SERVICES.items())
    return f"usage: omniplane SERVICE [flags]\n\nservices:\n{rows}\n\nomniplane SERVICE --help lists the flags of one."
