"""The options of a connector in a deploy file, checked against the tables and translated into ours."""

from __future__ import annotations

from typing import Any, Final

from control_plane.deploy.connector_tables import (
    ALIASES,
    AUTO,
    KINDS,
    MODEL_KEY,
    MODEL_OPTIONS,
    OPTIONS,
    SAME_AS,
    older_options,
)
from control_plane.deploy.document import Value
from control_plane.deploy.faults import Faults, nearest, shorten
from control_plane.deploy.kinds import check_keys

_HOST_MEMORY: Final = "cpu"


def kind_of(name: str) -> str:
    """The kind that a class name or kind stands for; "" for an unknown one."""
    return name if name in KINDS else ALIASES.get(name, "")


def unknown_kind(name: str) -> str:
    """The message about an unknown class or kind."""
    near = nearest(name, [*KINDS, *ALIASES]) or next(
        (known for known in (*KINDS, *ALIASES) if known.lower() == name.lower()), ""
    )
    hint = f"; did you mean {near!r}?" if near else ""
    return f"unknown connector class {shorten(name)!r}{hint} (known: {', '.join((*KINDS, *ALIASES))})"


def check_options(kind: str, extra: Value, faults: Faults) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ``extra`` mapping of a connector, checked: its own options, under our names, and those that models read.

    Options that other systems have and ours has no use for are left out with a warning; others are faults, since the
    connector would refuse them when the worker starts.
    """
    model: dict[str, Any] = {}
    older = older_options(kind)
    names = [*OPTIONS[kind], *older, *MODEL_OPTIONS]

    def unknown(name: str, item: Value) -> bool:
        if name in MODEL_OPTIONS:
            model.update(check_keys(Value({name: item}, item.line), {name: MODEL_KEY}, faults))
        else:
            near = nearest(name, names)
            hint = f"; did you mean {near!r}?" if near else f"; known: {', '.join(OPTIONS[kind])}"
            faults.error(item, f"unknown option {shorten(name)!r} of connector {kind!r}{hint}")
        return True

    checked = check_keys(extra, {**OPTIONS[kind], **older}, faults, unknown=unknown)
    if kind == AUTO:
        return _check_choices(extra, checked, faults), model
    for name, target in SAME_AS[kind].items():
        if (value := checked.pop(name, None)) in (None, AUTO):
            continue
        if checked.setdefault(target, value) != value:
            faults.error(extra.at(name), f"{value} disagrees with {target} = {checked[target]}: they are the same")
    for name in [name for name in checked if name in older]:
        value = checked.pop(name)
        if name == "memory_pool_device":
            _check_memory(kind, extra.at(name), str(value), faults)
        else:
            faults.warn(extra.at(name), f"connector {kind!r} has no use for it")
    return checked, model


def _check_choices(extra: Value, checked: dict[str, Any], faults: Faults) -> dict[str, Any]:
    """What "auto" may choose from, by kind rather than class; and the options of those kinds."""
    among: list[str] = []
    places = extra.at("among").data if "among" in checked else []
    for place, name in zip(places if isinstance(places, list) else [], checked.get("among", ()), strict=False):
        kind = kind_of(name)
        if not kind:
            faults.error(place, unknown_kind(name))
        elif kind == AUTO:
            faults.error(place, "auto cannot be among its own choices")
        elif kind in among:
            faults.error(place, f"{kind!r} is there twice")
        else:
            among.append(kind)
    options: dict[str, Any] = {}
    if "options" in checked:
        for name, place in extra.at("options").map.items():
            kind = kind_of(name)
            if kind not in among:
                known = ", ".join(among) or "nothing"
                faults.error(place, f"options of {shorten(name)!r}, which is not in `among` ({known})")
            elif not isinstance(place.data, dict):
                faults.error(place, "expected a mapping of options")
            else:
                options[kind], _ = check_options(kind, place, faults)
    return {**({"among": among} if among else {}), **({"options": options} if options else {})}


def _check_memory(kind: str, place: Value, device: str, faults: Faults) -> None:
    """Pools are where their kind has them: device memory for ``cuda_ipc``, host memory for all others."""
    on_host = device == _HOST_MEMORY
    if kind == "cuda_ipc":
        if on_host:
            faults.warn(place, "the pool of 'cuda_ipc' is device memory; for host memory use 'shm'")
    elif kind in ("shm", "grpc") and not on_host:
        faults.error(place, f"expected one of cpu, got {device!r}: between GPUs of one host there is 'cuda_ipc'")
    elif not on_host:
        faults.warn(
            place,
            f"the pool of {kind!r} is host memory; between GPUs of one host 'cuda_ipc' hands over device memory",
        )
