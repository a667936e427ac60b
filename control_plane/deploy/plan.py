"""The way from the text of a deploy file to a plan."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from google.protobuf import json_format

from control_plane.deploy import layout, prefill_decode, stages, topologies
from control_plane.deploy.companions import check_companions, companion_plan
from control_plane.deploy.devices import Share, parallel_size, warn_shared
from control_plane.deploy.document import Value, read
from control_plane.deploy.faults import Argument, Faults, did_you_mean, nearest
from control_plane.deploy.graph import Graph, edge_message, plan_graph, reachable
from control_plane.deploy.kinds import INVALID, Text, check_keys
from control_plane.deploy.schema import (
    PIPELINE_NAME,
    PLATFORM_KEYS,
    PLATFORMS,
    SHORT_NAME,
    TOP_KEYS,
    UNUSED_TOP_KEYS,
)
from control_plane.deploy.stages import StageDraft
from control_plane.deploy.wiring import plan_connectors
from omni.v1 import pipeline_pb2, types_pb2

_SESSION_POLICIES: dict[str, types_pb2.SessionPolicy.ValueType] = {
    "": types_pb2.SESSION_POLICY_UNSPECIFIED,
    "rebind": types_pb2.SESSION_POLICY_REBIND,
    "strict": types_pb2.SESSION_POLICY_STRICT,
}

# Checked by rules of their own, not by the type table.
_STRUCTURE = ("stages", "edges", "connectors", "platforms")


@dataclasses.dataclass(frozen=True, slots=True)
class DeployResult:
    """A plan, and what is worth knowing about the file it came from."""

    pipeline: pipeline_pb2.Pipeline
    warnings: tuple[str, ...]
    """Each with its YAML path and line."""


def plan_pipeline(deploy_yaml: str, *, name: str = "", engine: str = "", platform: str = "") -> DeployResult:
    """Read, check and complete a deploy file.

    ``name`` goes before the file's ``pipeline`` key. ``engine`` replaces the engine of every stage. ``platform`` lays
    that section of ``platforms`` over the stages. ``generation`` of the plan stays 0: the store gives it.

    Raises ``InvalidRequestError`` (reason ``INVALID_DEPLOY``) with one violation per fault: its field is the YAML path,
    its description begins with the line.
    """
    faults = Faults()
    _check_arguments(name, engine, faults)
    documents = read(deploy_yaml, faults)
    if not documents:
        faults.error(Argument("deploy_yaml"), "empty: a deploy file has at least the key 'stages'")
        raise faults.exception()
    root = _aligner_alone(layout.combine(documents, faults), faults)
    _check_tree(root, faults)
    root = _with_platform(root, platform, faults)
    top = _check_top(root, faults)
    pipeline_name = name or top.get("pipeline", "")
    if not pipeline_name and root.at("pipeline").data is None:
        faults.error(root.at("pipeline"), "required: name the pipeline here or in the call")

    drafts, complete = stages.draft_stages(root, top, faults)
    _match_topology(root, top, pipeline_name, drafts, faults)
    graph = plan_graph(root, drafts, complete, faults)
    connectors = plan_connectors(root, graph, drafts, faults)
    async_chunk = bool(top.get("async_chunk", True))
    _complete(drafts, graph, engine, async_chunk, faults)
    check_companions(drafts, graph, async_chunk, faults)
    entrypoints = _entrypoints(root, top, drafts, graph, faults) if complete else {}
    for draft in drafts:
        draft.comprehends = draft.fields.get("is_comprehension", draft.stage_id == entrypoints.get("chat"))
    faults.stop_if_any()

    by_id = {draft.stage_id: draft for draft in drafts}
    pipeline = pipeline_pb2.Pipeline(
        name=pipeline_name,
        stages=[_stage_message(draft, faults) for draft in drafts],
        edges=[edge_message(edge, by_id[edge.pair[0]], async_chunk, faults) for edge in graph.edges],
        connectors=connectors,
        async_chunk=async_chunk,
        entrypoints=entrypoints,
        session_policy=_SESSION_POLICIES[top.get("session_policy", "")],
        source_sha256=_digest({"deploy_yaml": deploy_yaml, "name": name, "engine": engine, "platform": platform}),
    )
    return DeployResult(pipeline, faults.warnings)


def _check_arguments(name: str, engine: str, faults: Faults) -> None:
    for field, given, kind in (("name", name, PIPELINE_NAME), ("engine", engine, SHORT_NAME)):
        if given:
            _check_argument(field, given, kind, faults)


def _check_argument(field: str, given: str, kind: Text, faults: Faults) -> None:
    trial = Faults()
    if kind.check(Value(given, 0), trial) is INVALID:
        faults.error(Argument(field), f"expected {kind.accepts}")


def _aligner_alone(root: Value, faults: Faults) -> Value:
    """A file that holds nothing but ``forced_aligner`` becomes a pipeline of that one stage."""
    aligner = root.map.get("forced_aligner")
    if aligner is None or not isinstance(aligner.data, dict):
        return root
    if "stages" in root.map:
        faults.warn(aligner, "not used yet: stages are planned without it")
        return root
    faults.warn(aligner, "the file has no stages: the aligner alone is planned, as stage 0")
    number = Value(0, aligner.line, aligner.document, aligner, "stage_id")
    stage = aligner.replaced({"stage_id": number, **aligner.data})
    rest = {key: value for key, value in root.map.items() if key != "forced_aligner"}
    return root.replaced({**rest, "stages": aligner.replaced([stage])})


def _check_tree(root: Value, faults: Faults) -> None:
    """Types of everything as written, platform sections that are not asked for included."""
    _check_top(root, faults)
    stages.check_stages(root.at("stages"), faults)
    platforms = root.at("platforms")
    for section in platforms.map.values():
        if section.data is None:
            continue
        if not isinstance(section.data, dict):
            faults.error(section, "expected a mapping with the key 'stages'")
            continue
        flat = section.replaced({key: value for key, value in section.data.items() if key != "stages"})
        check_keys(flat, PLATFORM_KEYS, faults)
        inner = section.at("stages")
        if inner.data is not None and not isinstance(inner.data, list):
            faults.error(inner, "expected a list of stages")
        stages.check_stages(inner, faults)
        if isinstance(inner.data, list) and isinstance(root.at("stages").data, list):
            layout.overlay_stages(root.at("stages"), inner, faults, may_add=False)


def _check_top(root: Value, faults: Faults) -> dict[str, Any]:
    for key in ("stages", "edges"):
        value = root.at(key)
        if value.data is not None and not isinstance(value.data, list):
            faults.error(value, "expected a list")
        for item in value.items if key == "edges" else ():
            if not isinstance(item.data, dict):
                faults.error(item, "expected a mapping with 'from' and 'to'")
    for key in ("connectors", "platforms"):
        value = root.at(key)
        if value.data is not None and not isinstance(value.data, dict):
            faults.error(value, "expected a mapping")

    def unknown(name: str, item: Value) -> bool:
        if name == "stage_args":
            faults.error(item, "an older schema: its stages belong under `stages`, their engine_args one level up")
        return name == "stage_args"

    rest = root.replaced({key: value for key, value in root.map.items() if key not in _STRUCTURE})
    checked = check_keys(rest, TOP_KEYS, faults, unknown=unknown)
    value = root.at("stages")
    if value.data is None or value.data == []:
        faults.error(value, "required: a list of at least one stage")
    for key in UNUSED_TOP_KEYS:
        if key in checked:
            faults.warn(root.at(key), "not used yet")
    if checked.get("session_mode") == "duplex":
        faults.warn(root.at("session_mode"), "not used yet: sessions take turns")
    return checked


def _with_platform(root: Value, platform: str, faults: Faults) -> Value:
    if platform and platform not in PLATFORMS and platform not in root.at("platforms").map:
        names = [*PLATFORMS, *root.at("platforms").map]
        faults.error(Argument("platform"), f"unknown platform {platform[:60]!r}{did_you_mean(platform, names)}")
        return root
    return layout.apply_platform(root, platform, faults)


def _match_topology(root: Value, top: dict[str, Any], name: str, drafts: Sequence[StageDraft], faults: Faults) -> None:
    """Let a topology known by name say what its stages are: the one that ``pipeline`` names, or, for a file that says
    nothing of engines, edges and outputs itself, one whose name the pipeline's name begins with."""
    given = top.get("pipeline", "")
    bare = "edges" not in root.map and not any(
        key in draft.fields for draft in drafts for key in ("engine", "final_output", "final_output_type")
    )
    for candidate in dict.fromkeys((given, name)):
        found = topologies.find(candidate, len(drafts))
        if found is None or (found[0] != given and not bare):
            continue
        if found[0] != given:
            faults.warn(Argument("pipeline"), f"the name {candidate!r} is taken to mean the topology {found[0]!r}")
        for draft, known in zip(drafts, found[1], strict=True):
            draft.known = known
        return
    table = topologies.known()
    if given in table:
        text = f"{given!r} has {len(table[given])} stage(s), this file {len(drafts)}: nothing is derived from the name"
        faults.warn(root.at("pipeline"), text)
    elif bare and given and (near := nearest(given, table)):
        faults.warn(root.at("pipeline"), f"not a topology known by name (nearest: {near!r}): stages are a chain")


def _complete(drafts: Sequence[StageDraft], graph: Graph, engine: str, async_chunk: bool, faults: Faults) -> None:
    """Derive what the stages do not say, and hold them against each other."""
    producers = {pair[0] for pair in graph.pairs}
    for draft in drafts:
        stages.complete_engine(draft, engine, faults)
        stages.complete_devices(draft, faults)
        stages.complete_output(draft, draft.stage_id not in producers, faults)
        stages.check_sampling(draft, faults)
        if draft.fields.get("async_chunk", async_chunk) != async_chunk:
            text = f"the pipeline says {str(async_chunk).lower()}: async_chunk holds for all stages"
            faults.error(draft.place.at("async_chunk"), text)
    prefill_decode.check_split(drafts, faults)
    warn_shared(
        [
            Share(draft.stage_id, draft.devices, draft.fields.get("gpu_memory_utilization", 0.0), draft.place)
            for draft in drafts
        ],
        faults,
    )


def _entrypoints(
    root: Value, top: dict[str, Any], drafts: Sequence[StageDraft], graph: Graph, faults: Faults
) -> dict[str, int]:
    """Where each task enters: as written, else chat (and speech, if there is audio) at the first source."""
    ids = [draft.stage_id for draft in drafts]
    consumers = {pair[1] for pair in graph.pairs}
    finals = {draft.stage_id: draft.final_type for draft in drafts if draft.final}
    place = root.at("entrypoints")
    written: dict[str, int] = top.get("entrypoints", {})
    entrypoints = {}
    for task, stage_id in written.items():
        if stage_id in ids:
            entrypoints[task] = stage_id
        else:
            faults.error(place.at(task), f"there is no stage {stage_id}; stages are {', '.join(map(str, ids))}")
    if not place.map:
        first = next((stage_id for stage_id in ids if stage_id not in consumers), None)
        if first is not None:
            wanted = {kind for stage_id, kind in finals.items() if stage_id in reachable(first, graph.pairs)}
            entrypoints = {"chat": first, **({"speech": first} if "audio" in wanted else {})}
    if drafts and not finals:
        faults.error(root.at("stages"), "no stage has final_output: clients would get nothing")
        return entrypoints
    for task, stage_id in entrypoints.items():
        outputs = reachable(stage_id, graph.pairs) & set(finals)
        if not outputs:
            faults.error(place.at(task), f"no stage with final_output can be reached from stage {stage_id}")
        elif task == "speech" and not any(finals[output] == "audio" for output in outputs):
            faults.error(place.at(task), f"no audio output can be reached from stage {stage_id}")
    used = {stage for stage_id in entrypoints.values() for stage in reachable(stage_id, graph.pairs)}
    for draft in drafts:
        if draft.stage_id not in used and not faults:
            faults.warn(draft.place, f"no entry point leads to stage {draft.stage_id}")
    return entrypoints


def _stage_message(draft: StageDraft, faults: Faults) -> pipeline_pb2.Stage:
    fields = draft.fields
    stage = pipeline_pb2.Stage(
        stage_id=draft.stage_id,
        name=fields.get("name", f"stage-{draft.stage_id}"),
        engine=draft.engine,
        model=fields.get("model", ""),
        num_replicas=draft.num_replicas,
        devices=draft.devices,
        tensor_parallel_size=parallel_size(draft.place, fields, "tensor_parallel_size", faults),
        final_output=draft.final,
        final_output_type=draft.final_type,
        is_comprehension=draft.comprehends,
        default_sampling_params=stages.sampling_message(fields.get("default_sampling_params", {})),
        max_num_seqs=fields.get("max_num_seqs", 0),
        planned_balancing_policy=fields.get("balancing_policy", ""),
        companions=companion_plan(draft),
    )
    stage.engine_args.update(stages.engine_args(draft))
    stage.config_sha256 = _config_digest(stage)
    return stage


def _config_digest(stage: pipeline_pb2.Stage) -> str:
    """Over all that must be equal among replicas: not their number, their devices, the stage's display name, or what
    only gateways look at."""
    same = pipeline_pb2.Stage()
    same.CopyFrom(stage)
    for field in ("num_replicas", "devices", "name", "config_sha256", "planned_balancing_policy", "companions"):
        same.ClearField(field)
    return _digest(json_format.MessageToDict(same))


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
