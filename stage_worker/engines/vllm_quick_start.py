"""Starts vLLM on a CPU without loading PyTorch's compiler.

``import vllm`` pulls in ``torch._inductor`` only to patch it, about a third of the import time, and modules all over
vLLM and transformers decorate functions with ``torch.compile``. An engine that runs eagerly uses none of that. So where
``enforce_eager`` is set, ``torch.compile`` becomes what ``disable=True`` makes it, and ``torch._inductor`` is a package
whose submodules load on demand but whose ``__init__`` never runs.

Must be entered before vLLM is imported, in a process that compiles nothing. Nothing here touches vLLM itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

_COMPILER = "torch._inductor"
_DECORATORS = ("disable", "allow_in_graph", "assume_constant_result")


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection inside; what was made by then is never scanned again.

    Importing vLLM and torch makes millions of objects that live as long as the process does, and the collector would
    walk them all again and again, while loading and in every full collection afterwards.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


@contextlib.contextmanager
def compiler_left_out() -> Iterator[None]:
    """Import vLLM inside. Does nothing if the compiler or vLLM is loaded already."""
    if _COMPILER in sys.modules or "vllm" in sys.modules:
        yield
        return
    import torch

    torch.compile = _decorator
    for name in _DECORATORS:
        setattr(torch.compiler, name, _decorator)
    # vLLM patches the compiler if it can be imported, and goes on if not: for this one import it cannot.
    sys.modules[_COMPILER] = None  # type: ignore[assignment]
    try:
        import vllm  # noqa: F401  loads vllm.env_override, which does the patching
    finally:
        del sys.modules[_COMPILER]
    _install_hollow_package(_COMPILER)
    yield


def _decorator(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Callable[..., Any]:
    """Stands for ``torch.compile(f)`` and ``@torch.compile(…)`` alike: returns the function as it is."""
    return function if function is not None else lambda inner: inner


def _install_hollow_package(name: str) -> None:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        return
    package = types.ModuleType(name)
    package.__spec__ = spec
    package.__file__ = spec.origin
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules[name] = package
    parent, _, child = name.rpartition(".")
    setattr(sys.modules[parent], child, package)
