"""Starts vLLM on a CPU in about two thirds of the time, nearly all of which is importing Python modules.

* The compiler: ``import vllm`` pulls in ``torch._inductor`` only to patch it, and modules all over vLLM and
  transformers decorate functions with ``torch.compile``. An engine that runs eagerly uses none of it. So where
  ``enforce_eager`` is set, ``torch.compile`` becomes what its ``disable=True`` makes it, and ``torch._inductor`` runs
  its ``__init__`` only if something asks for more than one of its submodules.
* The API servers: modules of the engine name classes and types of vLLM's own HTTP servers, which brings in ``openai``,
  ``fastapi`` and 700 more modules. Nothing of them runs here, so these names are empty classes and types while vLLM is
  imported. Not where a reasoning parser is configured, which would use them.
* Source lines: PyTorch reads source files to note who registers an operator; it only needs file and line.
* transformers reads all its model files to know what they define: ``transformers_scan`` keeps the outcome.

Must be entered before vLLM is imported, in a process that compiles nothing. ``quick_start: false`` leaves all as it is.
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

from typing_extensions import TypedDict

_INDUCTOR = "torch._inductor"
_SERVER_MODULES = ("vllm.entrypoints.mcp.tool_server", "vllm.parser.engine.adapters")
"""Used by the engine for an annotation and for an ``isinstance`` of reasoning parsers only."""
_OPENAI_MODULES = (
    "openai.types.chat",
    "openai.types.chat.chat_completion_content_part_input_audio_param",
    "openai.types.responses",
)
"""Types of chats, which vLLM reads only if it is given chats: they name dictionaries."""
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

    torch._library.utils.get_source = _source
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


@contextlib.contextmanager
def api_servers_left_out(import_engine: Callable[[], object]) -> Iterator[None]:
    """Run ``import_engine`` without them; after the block, whoever imports these modules gets the real ones."""
    stand_ins: dict[str, types.ModuleType] = {
        **{name: _StandIn(name, _empty_class) for name in _SERVER_MODULES},
        **{name: _StandIn(name, _empty_typed_dict) for name in _OPENAI_MODULES},
    }
    stand_ins = {name: module for name, module in stand_ins.items() if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        import_engine()
        yield
    finally:
        for name, module in stand_ins.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
            parent, _, child = name.rpartition(".")
            if getattr(sys.modules.get(parent), child, None) is module:
                delattr(sys.modules[parent], child)


def _source(stacklevel: int) -> str:
    """File and line of a caller, as ``torch._library.utils.get_source`` tells them, without reading the file."""
    frame = sys._getframe(stacklevel)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class _StandIn(types.ModuleType):
    """A module that has anything that is asked of it, made by ``make``."""

    def __init__(self, name: str, make: Callable[[str], Any]) -> None:
        super().__init__(name)
        self._make = make

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {attribute!r}")
        setattr(self, attribute, found := self._make(attribute))
        return found


def _empty_class(name: str) -> type:
    return type(name, (), {})


def _empty_typed_dict(name: str) -> type:
    return types.new_class(name, (TypedDict,), {"total": False})


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
