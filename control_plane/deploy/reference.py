"""The key tables of ``docs/deploy-yaml.md``, written from the schema itself.

``python -m control_plane.deploy.reference docs/deploy-yaml.md`` puts them into the page; a test holds the page
against them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from control_plane.deploy.connector_tables import ALIASES, KINDS, MODEL_OPTIONS, OPTIONS
from control_plane.deploy.engine_keys import GROUPS, KV_TRANSFER_KEYS, OMNI_KV_KEYS, PARALLEL_KEYS
from control_plane.deploy.kinds import Key, ListOf, Map
from control_plane.deploy.schema import (
    COMPANION_KEYS,
    CONNECTOR_KEYS,
    DUPLEX_KEYS,
    EDGE_KEYS,
    PLATFORM_KEYS,
    SAMPLING_EXTRA_KEYS,
    SAMPLING_KEYS,
    SIM_KEYS,
    STAGE_KEYS,
    TOP_KEYS,
)
from control_plane.deploy.topologies import known

BEGIN: Final = "<!-- begin of generated tables: python -m control_plane.deploy.reference docs/deploy-yaml.md -->"
END: Final = "<!-- end of generated tables -->"


def render() -> str:
    """All tables, as Markdown."""
    parts = [
        _section("Top level", TOP_KEYS),
        _section("`stages[]`", STAGE_KEYS),
        _section("`stages[].default_sampling_params`", SAMPLING_KEYS),
        _section("`stages[].default_sampling_params`: parameters of single engines", SAMPLING_EXTRA_KEYS),
        _section("`stages[].companions`", COMPANION_KEYS),
        _section("`stages[].sim`", SIM_KEYS),
        _section("`edges[]`", EDGE_KEYS),
        _section("`connectors.NAME`", CONNECTOR_KEYS),
        _kinds(),
        *(_section(f"`connectors.NAME.extra` of kind `{kind}`", keys) for kind, keys in OPTIONS.items() if keys),
        _model_options(),
        _section("`platforms.NAME`", PLATFORM_KEYS),
        *(_section(f"`stages[]`: engine keys: {title.lower()}", keys) for title, keys in GROUPS.items()),
        _section("`stages[].parallel_config`", PARALLEL_KEYS),
        _section("`stages[].kv_transfer_config`", KV_TRANSFER_KEYS),
        _section("`stages[].omni_kv_config`", OMNI_KV_KEYS),
        _section("`duplex_session`", DUPLEX_KEYS),
        _topologies(),
    ]
    return "\n\n".join(parts)


def _section(title: str, keys: Mapping[str, Key]) -> str:
    rows = [f"| `{name}` | {_accepts(key)} | {key.default or '–'} | {key.meaning} |" for name, key in keys.items()]
    return "\n".join((f"### {title}", "", "| key | type | default | meaning |", "|---|---|---|---|", *rows))


def _accepts(key: Key) -> str:
    if isinstance(key.kind, Map):
        return "a mapping (table below)"
    if isinstance(key.kind, ListOf) and isinstance(key.kind.item, Map):
        return "a list of mappings (table below)"
    return key.kind.accepts.replace("|", "\\|")


def _model_options() -> str:
    names = ", ".join(f"`{name}`" for name in sorted(MODEL_OPTIONS))
    text = "Allowed with every kind, and given to the stages at both ends of the edge, in `engine_args.connector_extra`"
    return f"### `connectors.NAME.extra`: options of models\n\n{text}: {names}."


def _kinds() -> str:
    names = {kind: [name for name, target in ALIASES.items() if target == kind] for kind in KINDS}
    rows = [
        f"| `{kind}` | {', '.join(f'`{name}`' for name in names[kind]) or '–'} | {meaning} |"
        for kind, meaning in KINDS.items()
    ]
    head = ("### Connector kinds", "", "| kind | also called | what it is |", "|---|---|---|")
    return "\n".join((*head, *rows))


def _topologies() -> str:
    by_shape: dict[str, list[str]] = {}
    for name, stages in known().items():
        shape = " → ".join(f"{stage.kind} ({stage.output})" if stage.output else stage.kind for stage in stages)
        by_shape.setdefault(shape, []).append(name)
    rows = [f"| {shape} | {', '.join(f'`{name}`' for name in sorted(names))} |" for shape, names in by_shape.items()]
    head = ("### Topologies known by name", "", "| stages (output to the client) | names |", "|---|---|")
    return "\n".join((*head, *rows))


def put_into(page: str) -> str:
    """``page`` with its tables renewed."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{render()}\n\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(put_into(path.read_text(encoding="utf-8")), encoding="utf-8")
