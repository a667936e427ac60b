"""Starts vLLM on a CPU without loading PyTorch's compiler.

``import vllm`` pulls in ``torch._inductor`` only to patch it, and modules all over vLLM and transformers decorate
functions with ``torch.compile``. An engine that runs eagerly uses none of it. So where ``enforce_eager`` is set,
``torch.compile`` becomes what its ``disable=True`` makes it, and ``torch._inductor`` runs its ``__init__`` only if
something asks for more than one of its submodules; nothing is lost.

Must be entered before vLLM is imported, in a process that compiles nothing. Nothing here touches vLLM itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

_INDUCTOR = "torch._inductor"
_DECORATORS = ("disable", "allow_in_graph", "assume_constant_result")


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection inside, except what vLLM asks for; what was made by then is never scanned again.

    Importing vLLM and torch makes millions of objects that live as long as the process does, and the collector would
    walk them all again and again, while loading and in every full collection afterwards. Call ``gc.freeze()`` once the
    imports are done: vLLM collects several times while it loads a model.
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
def compiler_left_out(import_vllm: Callable[[], object]) -> Iterator[None]:
    """Import the rest of vLLM inside. Does nothing if the compiler or vLLM is loaded already."""
    if {_INDUCTOR, "vllm"} & set(sys.modules):
        yield
        return
    import torch

    torch.compile = _decorator
    for name in _DECORATORS:
        setattr(torch.compiler, name, _decorator)
    # vLLM patches the compiler if it can be imported, and goes on if not: for this one import it cannot.
    sys.modules[_INDUCTOR] = None  # type: ignore[assignment]
    try:
        import_vllm()  # the package itself loads vllm.env_override, which does the patching
    finally:
        del sys.modules[_INDUCTOR]
    _LazyPackage.install(_INDUCTOR)
    yield


def _decorator(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Callable[..., Any]:
    """Stands for ``torch.compile(f)`` and ``@torch.compile(…)`` alike: returns the function as it is."""
    return function if function is not None else lambda inner: inner


class _LazyPackage(types.ModuleType):
    """A package whose submodules can be imported, and whose own ``__init__`` runs when an attribute needs it."""

    @classmethod
    def install(cls, name: str) -> None:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.submodule_search_locations is None:
            return
        package = cls(name)
        package.__spec__ = spec
        package.__file__ = spec.origin
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules[name] = package
        parent, _, child = name.rpartition(".")
        setattr(sys.modules[parent], child, package)

    def __getattr__(self, attribute: str) -> Any:
        name = self.__name__
        if attribute.startswith("__"):
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        if sys.modules.get(name) is self:
            if importlib.util.find_spec(f"{name}.{attribute}") is not None:
                return importlib.import_module(f"{name}.{attribute}")
            del sys.modules[name]  # the import below then runs the package's own __init__
        return getattr(importlib.import_module(name), attribute)
