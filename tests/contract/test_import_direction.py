"""The rooms of the project and the doors between them (docs/architecture.md): no other import is allowed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED = {"omni", "omnicore"}
ALLOWED: dict[str, set[str]] = {
    "omnicore": set(),
    "connectors": SHARED,
    "stage_worker": SHARED | {"connectors"},
    "control_plane": SHARED,
    "gateway": SHARED,
    "omnictl": SHARED,
    "omniplane": SHARED,
}
ROOMS = set(ALLOWED) | {"omni", "tests", "bench"}

# Third-party libraries that one module only may import, so that replacing one touches one file.
ONE_MODULE = {"vllm": {"stage_worker/engines/vllm_engine.py"}, "opentelemetry": {"omnicore/trace_export.py"}}

# Pure policy: decisions without I/O or time, so that they can be tested and reasoned about alone.
PURE = [
    "gateway/accounts.py",
    "gateway/balancers.py",
    "gateway/fair_queue.py",
    "gateway/graph.py",
    "gateway/pd.py",
    "gateway/validation.py",
    "stage_worker/chunking.py",
    "stage_worker/devices.py",
    "control_plane/keys.py",
    "control_plane/deploy",
]
IMPURE = {"grpc", "asyncio", "time", "socket", "starlette", "uvicorn", "subprocess", "threading"}


def _modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; say where it comes from"
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_room_imports_only_what_it_may(room: str) -> None:
    modules = _modules(room)
    assert modules, f"{room} has no modules"
    for path in modules:
        for name in _imports(path):
            top = name.split(".")[0]
            if top in ROOMS and top != room:
                assert top in ALLOWED[room], f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("library", sorted(ONE_MODULE))
def test_library_is_imported_in_one_module(library: str) -> None:
    users = {
        str(path.relative_to(ROOT))
        for room in ALLOWED
        for path in _modules(room)
        if any(name.split(".")[0] == library for name in _imports(path))
    }
    assert users <= ONE_MODULE[library]


def test_etcd_is_spoken_only_by_the_control_planes_client() -> None:
    for room in ALLOWED:
        for path in _modules(room):
            if any(name.startswith("omni.etcdwire") for name in _imports(path)):
                assert path.relative_to(ROOT).as_posix().startswith("control_plane/etcd/"), path


@pytest.mark.parametrize("name", PURE)
def test_policy_is_pure(name: str) -> None:
    path = ROOT / name
    paths = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    assert paths
    for module in paths:
        used = {imported.split(".")[0] for imported in _imports(module)} & IMPURE
        assert not used, f"{module.relative_to(ROOT)} imports {sorted(used)}"


def test_imports_between_modules_are_acyclic() -> None:
    graph: dict[str, set[str]] = {}
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for room in ALLOWED
        for path in _modules(room)
    }
    for name, path in names.items():
        targets = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in names:
                inner = {f"{node.module}.{alias.name}" for alias in node.names} & names.keys()
                targets |= inner or {node.module}
            elif isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names} & names.keys()
        graph[name] = targets - {name}

    state: dict[str, int] = {}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if state.get(name) == 2:
            return
        assert state.get(name) != 1, f"import cycle: {' → '.join([*trail[trail.index(name) :], name])}"
        state[name] = 1
        for target in sorted(graph[name]):
            visit(target, (*trail, name))
        state[name] = 2

    for name in sorted(graph):
        visit(name, ())
