"""One tree out of what was written: old layouts flattened, documents and platform sections laid over each other.

Laying one mapping over another merges them key by key at every level; lists and scalars of the upper one replace those
of the lower one, and ``null`` takes a key away. ``stages`` are matched by ``stage_id``. Nothing is checked here beyond
what merging needs: ``plan`` checks the outcome, and every value still knows where it came from.
"""

from __future__ import annotations

from control_plane.deploy.document import Value, type_name
from control_plane.deploy.faults import Faults, did_you_mean, shorten
from control_plane.deploy.schema import ALL_STAGE_KEYS, PLATFORMS, STAGE_KEYS

_STRUCTURAL = frozenset(
    ("stage_id", "input_connectors", "output_connectors", "runtime", "engine_args", "engine_extras", "sim")
)
_RUNTIME_KEYS = ("devices", "num_replicas", "env")


def combine(documents: list[Value], faults: Faults) -> Value:
    """All documents as one mapping; the first is the base. Raises where there is nothing to plan."""
    for document in documents:
        if not isinstance(document.data, dict):
            faults.error(document, f"expected a mapping with the key 'stages', got {type_name(document)}")
    faults.stop_if_any()
    first, *others = (flatten(document, faults) for document in documents)
    base = first.map.get("base_config")
    if base is not None and base.data is not None:
        faults.error(
            base,
            f"the text of {type_name(base)} is needed: put it before this document, with a line '---' between them, "
            "or copy its keys in here (the control plane opens no files)",
        )
    root = first
    for other in others:
        root = overlay_root(root, other, faults)
    return root.replaced({key: value for key, value in root.map.items() if key != "base_config"})


def overlay_root(lower: Value, upper: Value, faults: Faults) -> Value:
    """A whole document over another one; stages that only the upper one has are added."""
    given = dict(upper.map)
    stages, platforms = given.pop("stages", None), given.pop("platforms", None)
    merged = dict(overlay(lower, upper.replaced(given)).map)
    if stages is not None:
        merged["stages"] = overlay_stages(lower.map.get("stages"), stages, faults, may_add=True)
    if platforms is not None:
        sections = dict(lower.at("platforms").map)
        for name, section in platforms.map.items():
            known = sections.get(name)
            sections[name] = section if known is None else overlay_root(known, section, faults)
        merged["platforms"] = platforms.replaced(sections) if isinstance(platforms.data, dict) else platforms
    return lower.replaced(merged)


def overlay(lower: Value, upper: Value) -> Value:
    """One value over another."""
    if not isinstance(lower.data, dict) or not isinstance(upper.data, dict):
        return upper
    merged = dict(lower.data)
    for key, value in upper.data.items():
        if value.data is None:
            merged.pop(key, None)
        else:
            merged[key] = overlay(merged[key], value) if key in merged else value
    return lower.replaced(merged)


def overlay_stages(lower: Value | None, upper: Value, faults: Faults, *, may_add: bool) -> Value:
    """Stages over stages, matched by ``stage_id``. Without ``may_add``, a stage that the lower one lacks is a fault."""
    if lower is None or not isinstance(lower.data, list) or not isinstance(upper.data, list):
        return upper if lower is None or may_add else lower
    merged = list(lower.data)
    places = {stage_id_of(stage): position for position, stage in reversed([*enumerate(merged)])}
    for stage in upper.data:
        stage_id = stage_id_of(stage)
        position = None if stage_id is None else places.get(stage_id)
        if position is not None:
            merged[position] = overlay(merged[position], stage)
        elif may_add:
            places[stage_id] = len(merged)
            merged.append(stage)
        elif stage_id is not None:
            known = shorten(", ".join(str(stage_id_of(other)) for other in lower.data), 200)
            faults.error(stage.at("stage_id"), f"there is no stage {stage_id}; known: {known}")
    return lower.replaced(merged)


def stage_id_of(stage: Value) -> int | None:
    """The stage's number if it has a proper one."""
    data = stage.map["stage_id"].data if "stage_id" in stage.map else None
    return data if isinstance(data, int) and not isinstance(data, bool) else None


def apply_platform(root: Value, platform: str, faults: Faults) -> Value:
    """The section of ``platform`` over stages and top level. No section: the file as it is, with a note."""
    sections = root.at("platforms").map
    section = sections.get(platform) if platform else None
    if not platform:
        return root
    if section is None:
        if sections:
            has = ", ".join(sorted(sections))
            faults.warn(root.at("platforms"), f"no section for platform {platform!r} (there is {has}); nothing changed")
        return root
    given = {key: value for key, value in section.map.items() if key != "stages"}
    merged = dict(overlay(root, section.replaced(given)).map)
    stages = section.map.get("stages")
    if stages is not None and stages.data is not None and "stages" in merged:
        merged["stages"] = overlay_stages(merged["stages"], stages, faults, may_add=False)
    return root.replaced(merged)


def flatten(root: Value, faults: Faults) -> Value:
    """The same document with old layouts (``runtime``, known keys in ``engine_args``) moved to where they belong."""
    data = dict(root.map)
    if "stages" in data:
        data["stages"] = _flatten_stages(data["stages"], faults)
    sections = data.get("platforms")
    if sections is not None and isinstance(sections.data, dict):
        changed = {}
        for name, section in sections.data.items():
            inner = dict(section.map)
            if "stages" in inner:
                inner["stages"] = _flatten_stages(inner["stages"], faults)
            changed[name] = section.replaced(inner) if isinstance(section.data, dict) else section
            if name not in PLATFORMS:
                hint = did_you_mean(name, PLATFORMS)
                faults.warn(section, f"unknown platform: the section is used only if that name is asked for{hint}")
        data["platforms"] = sections.replaced(changed)
    return root.replaced(data)


def _flatten_stages(stages: Value, faults: Faults) -> Value:
    if not isinstance(stages.data, list):
        return stages
    return stages.replaced(
        [_flatten_stage(stage, faults) if isinstance(stage.data, dict) else stage for stage in stages.data]
    )


def _flatten_stage(stage: Value, faults: Faults) -> Value:
    data = dict(stage.map)
    runtime = data.pop("runtime", None)
    if runtime is not None and runtime.data is not None:
        if isinstance(runtime.data, dict):
            faults.warn(runtime, "old layout; write these keys one level up: " + ", ".join(runtime.data))
            for key, value in runtime.data.items():
                if key in _RUNTIME_KEYS:
                    _move(data, key, value, faults)
                else:
                    faults.error(value, f"unknown key {key[:60]!r}{did_you_mean(key, _RUNTIME_KEYS)}")
        else:
            faults.error(runtime, f"expected a mapping, got {type_name(runtime)}")
    free: dict[str, Value] = {}
    place: Value | None = None
    for block_name in ("engine_args", "engine_extras"):
        block = data.get(block_name)
        if block is None or not isinstance(block.data, dict):
            continue  # null, or a type that the schema reports
        del data[block_name]
        place = place or block
        moved = [key for key in block.data if key in ALL_STAGE_KEYS and key not in _STRUCTURAL]
        if moved and block_name == "engine_args":
            faults.warn(block, "old layout; write these keys one level up: " + ", ".join(moved))
        for key, value in block.data.items():
            if key in _STRUCTURAL and key in STAGE_KEYS:
                faults.error(value, f"{key!r} belongs to the stage itself, one level up")
            elif key in moved:
                _move(data, key, value, faults)
            else:
                _move(free, key, value, faults)
    if place is not None:
        data["engine_args"] = place.replaced(free)
    return stage.replaced(data)


def _move(data: dict[str, Value], key: str, value: Value, faults: Faults) -> None:
    """Put ``value`` where ``key`` belongs; saying something else in both places is a fault."""
    known = data.get(key)
    if known is None or known.data is None:
        data[key] = value
    elif isinstance(known.data, dict) and isinstance(value.data, dict):
        data[key] = overlay(value, known)
    elif known.plain() != value.plain():
        faults.error(value, f"{type_name(value)} disagrees with {known.path} ({type_name(known)}, {known.where})")
