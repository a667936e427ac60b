"""``OmniTransferConfig`` from a deploy file: ours, and both forms of the reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from connectors.reference.base import stage_name
from connectors.reference.spec import ConnectorSpec, OmniTransferConfig
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

DEFAULT_SHM_THRESHOLD = 65536
_SHM = "SharedMemoryConnector"


class TransferConfigError(errors.InvalidRequestError, ValueError):
    """A file or dict that is not a good configuration; the message names the place."""


def load_omni_transfer_config(
    config_path: str | Path | None = None,
    config_dict: Mapping[str, Any] | None = None,
    default_shm_threshold: int = DEFAULT_SHM_THRESHOLD,
) -> OmniTransferConfig | None:
    """The connectors of a pipeline; None if neither a path nor a dict is given. The path wins if both are.

    Edges (``edges``, ``input_connectors``, ``output_connectors``, ``engine_input_source``) without a connector get
    ``default_connector``, else shared memory, where payloads below ``default_shm_threshold`` bytes travel in their
    handle. Raises ``TransferConfigError``, and ``FileNotFoundError`` for a path that leads nowhere.
    """
    if config_path is not None:
        path = Path(config_path)
        try:
            document = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise TransferConfigError(f"{path}: {error}", reason="MALFORMED_FILE") from error
        source = str(path)
    elif config_dict is not None:
        document, source = config_dict, "config"
    else:
        return None
    top = _mapping(document, source)
    config = _Reader(top, source, default_shm_threshold).read()
    _log.info("transfer config loaded", source=source, edges=len(config.connectors))
    return config


class _Reader:
    """One document. The older form has ``connectors`` and ``edges`` under ``runtime`` and calls stages
    ``stage_args``."""

    def __init__(self, top: Mapping[str, Any], source: str, shm_threshold: int) -> None:
        runtime = _mapping(top.get("runtime") or {}, f"{source}.runtime")
        self._source = source
        self._shm = ConnectorSpec(_SHM, {"shm_threshold_bytes": shm_threshold})
        self._named = {
            name: self._spec(value, f"connectors.{name}")
            for name, value in _mapping(
                top.get("connectors") or runtime.get("connectors") or {}, f"{source}.connectors"
            ).items()
        }
        self._stages = _list(top.get("stages") or top.get("stage_args") or [], f"{source}.stages")
        self._edges = _list(top.get("edges") or runtime.get("edges") or [], f"{source}.edges")
        default = top.get("default_connector") or runtime.get("default_connector")
        self._default = self._reference(default, "default_connector") if default else None
        self._found: dict[tuple[str, str], ConnectorSpec] = {}

    def read(self) -> OmniTransferConfig:
        implied: list[tuple[str, str]] = []
        for index, value in enumerate(self._stages):
            path = f"{self._source}.stages[{index}]"
            stage = _mapping(value, path)
            if "stage_id" not in stage:
                raise TransferConfigError(f"{path}.stage_id: required")
            stage_id = _stage(stage["stage_id"], f"{path}.stage_id")
            for other, reference, where in self._ends(stage, "input_connectors", "from_stage_", path):
                self._add((other, stage_id), reference, where)
            for other, reference, where in self._ends(stage, "output_connectors", "to_stage_", path):
                self._add((stage_id, other), reference, where)
            sources = _list(stage.get("engine_input_source") or [], f"{path}.engine_input_source")
            implied += [(_stage(start, f"{path}.engine_input_source"), stage_id) for start in sources]
        for index, value in enumerate(self._edges):
            path = f"{self._source}.edges[{index}]"
            edge = _mapping(value, path)
            ends = {key: _stage(edge[key], f"{path}.{key}") for key in ("from", "to") if key in edge}
            if len(ends) != 2:
                raise TransferConfigError(f"{path}: has no {'to' if 'from' in ends else 'from'}")
            if edge.get("connector"):
                self._add((ends["from"], ends["to"]), edge["connector"], f"{path}.connector")
            implied.append((ends["from"], ends["to"]))
        for key in implied:
            if key not in self._found:
                spec = self._default or self._shm
                self._found[key] = ConnectorSpec(spec.name, dict(spec.extra))
        return OmniTransferConfig(self._found, self._default)

    def _ends(self, stage: Mapping[str, Any], key: str, prefix: str, path: str) -> Iterator[tuple[str, Any, str]]:
        for name, reference in _mapping(stage.get(key) or {}, f"{path}.{key}").items():
            where = f"{path}.{key}.{name}"
            if not name.startswith(prefix) or name == prefix:
                raise TransferConfigError(f"{where}: must be {prefix}N")
            yield name.removeprefix(prefix), reference, where

    def _add(self, edge: tuple[str, str], reference: Any, where: str) -> None:
        """Both stages of an edge may say what joins them; they must say the same, each perhaps some options of its
        own."""
        spec = self._reference(reference, where)
        known = self._found.setdefault(edge, spec)
        if known.name != spec.name:
            raise TransferConfigError(
                f"{where}: {spec.name}, but the other end of {edge[0]}→{edge[1]} says {known.name}",
                reason="CONNECTOR_MISMATCH",
            )
        for option, value in spec.extra.items():
            if known.extra.setdefault(option, value) != value:
                raise TransferConfigError(
                    f"{where}.extra.{option}: {value!r}, but the other end of {edge[0]}→{edge[1]} says "
                    f"{known.extra[option]!r}",
                    reason="CONNECTOR_MISMATCH",
                )

    def _reference(self, value: Any, where: str) -> ConnectorSpec:
        if not isinstance(value, str):
            return self._spec(value, where)
        spec = self._named.get(value)
        if spec is None:
            known = ", ".join(self._named) or "none"
            raise TransferConfigError(f"{where}: no connector is called {value!r} (defined: {known})")
        return ConnectorSpec(spec.name, dict(spec.extra))

    @staticmethod
    def _spec(value: Any, where: str) -> ConnectorSpec:
        fields = _mapping(value, where)
        unknown = [key for key in fields if key not in ("name", "extra")]
        if unknown:
            raise TransferConfigError(f"{where}.{unknown[0]}: unknown; a connector has name and extra")
        name = fields.get("name")
        if not isinstance(name, str) or not name:
            raise TransferConfigError(f"{where}.name: required, a connector's class")
        return ConnectorSpec(name, dict(_mapping(fields.get("extra") or {}, f"{where}.extra")))


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TransferConfigError(f"{where}: must be a mapping with text keys, got {type(value).__name__}")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise TransferConfigError(f"{where}: must be a list, got {type(value).__name__}")
    return list(value)


def _stage(value: Any, where: str) -> str:
    try:
        return stage_name(value)
    except errors.InvalidRequestError as error:
        raise TransferConfigError(f"{where}: {error.message}") from None
