"""Stages of the plan: checked keys, inherited ones, and what the file leaves to be derived."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from control_plane.deploy import devices as device_rules
from control_plane.deploy.document import Value
from control_plane.deploy.engine_keys import INHERITED_KEYS
from control_plane.deploy.faults import Faults, nearest
from control_plane.deploy.kinds import check_keys
from control_plane.deploy.schema import ALL_STAGE_KEYS, ENGINES, PLAN_KEYS, SAMPLING_KEYS
from control_plane.deploy.topologies import KnownStage
from omni.v1 import sampling_pb2

DEFAULT_ENGINE: Final = "vllm"
TOPOLOGY_ENGINE: Final = "vllm-omni"
"""Engine of stages that only name a known vLLM-Omni topology: plain vLLM cannot run their models."""

MAX_STAGES: Final = 256

_ENGINE_OUTPUT = {"hibari-vocoder": "audio", "hibari-acoustic": "", "diffusers": "image"}

_SIM_STAND_IN = {"video": "image", "action": "text"}


@dataclasses.dataclass(slots=True)
class StageDraft:
    """One stage on its way into the plan."""

    place: Value
    fields: dict[str, Any]
    """Checked keys, inherited ones included."""
    stage_id: int
    devices: list[str] = dataclasses.field(default_factory=list)
    known: KnownStage | None = None
    engine: str = DEFAULT_ENGINE
    final: bool = False
    final_type: str = ""
    comprehends: bool = False
    """It understands prompts."""
    connector_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options that its model reads from the connectors of its edges."""

    @property
    def num_replicas(self) -> int:
        """Local replicas."""
        return int(self.fields.get("num_replicas", 1))

    @property
    def makes_text(self) -> bool:
        """Its chunks are text, which the worker cuts."""
        if self.engine == "sim":
            said = self.fields.get("sim", {}).get("output") or self.final_type
            return bool(said == "text" or (not said and (self.comprehends or self.stage_id == 0)))
        return self.final_type == "text" or (not self.final_type and self.engine == DEFAULT_ENGINE)


def check_stages(stages: Value, faults: Faults) -> None:
    """Types of every key of every stage, base and platform sections alike."""
    for stage in stages.items:
        if not isinstance(stage.data, dict):
            faults.error(stage, "expected a mapping of stage keys")
            continue
        check_keys(stage, ALL_STAGE_KEYS, faults, required=("stage_id",))


def draft_stages(root: Value, inherited: dict[str, Any], faults: Faults) -> tuple[list[StageDraft], bool]:
    """Drafts in ascending order, and whether every stage has a good id (references can be checked only then)."""
    drafts: dict[int, StageDraft] = {}
    complete = True
    stages = root.at("stages")
    if len(stages.items) > MAX_STAGES:
        faults.error(stages, f"at most {MAX_STAGES} stages, got {len(stages.items)}")
        raise faults.exception()
    for stage in stages.items:
        if not isinstance(stage.data, dict):
            complete = False
            continue
        own = check_keys(stage, ALL_STAGE_KEYS, faults, required=("stage_id",))
        stage_id = own.get("stage_id")
        if stage_id is None:
            complete = False
            continue
        if stage_id in drafts:
            first = drafts[stage_id].place.at("stage_id")
            faults.error(
                stage.at("stage_id"), f"stage {stage_id} is given twice, first at {first.path} ({first.where})"
            )
            continue
        given = {key: value for key, value in inherited.items() if key in (*INHERITED_KEYS, "engine", "model")}
        drafts[stage_id] = StageDraft(stage, {**given, **own}, stage_id)
    return [drafts[stage_id] for stage_id in sorted(drafts)], complete


def complete_engine(draft: StageDraft, override: str, faults: Faults) -> None:
    """Which engine runs the stage."""
    named = draft.fields.get("engine")
    draft.engine = override or named or (TOPOLOGY_ENGINE if draft.known else DEFAULT_ENGINE)
    if named and named not in ENGINES:
        near = nearest(named, ENGINES)
        hint = f"; did you mean {near!r}?" if near else ""
        faults.warn(draft.place.at("engine"), f"engine {named!r} is not one of the project's own{hint}")


def complete_devices(draft: StageDraft, faults: Faults) -> None:
    """Device ids, their count, and sizes that contradict each other."""
    value = draft.place.map.get("devices")
    parsed = device_rules.parse_devices(value, faults) if value is not None and value.data is not None else []
    needed = device_rules.ranks(draft.place, draft.fields, faults)
    draft.devices = parsed or []
    device_rules.check_counts(draft.place, draft.devices, draft.num_replicas, needed, faults)


def complete_output(draft: StageDraft, is_sink: bool, faults: Faults) -> None:
    """Whether clients get the stage's output, and what it is."""
    fields = draft.fields
    said, said_type = fields.get("final_output"), fields.get("final_output_type", "")
    known_type = draft.known.output if draft.known else ""
    draft.final = said if said is not None else bool(said_type or known_type or is_sink)
    if not draft.final:
        if said_type:
            faults.warn(draft.place.at("final_output_type"), "has no effect: final_output is false")
        if is_sink:
            faults.warn(draft.place.at("final_output"), "no edge leaves the stage either: its output goes nowhere")
        return
    draft.final_type = said_type or known_type or _guess_output(draft)
    if not draft.final_type:
        draft.final_type = "text"
        faults.warn(draft.place.at("final_output_type"), "not given and not known from the engine: taken as text")


def _guess_output(draft: StageDraft) -> str:
    sim = draft.fields.get("sim", {}).get("output", "")
    if sim in ("text", "audio", "image"):
        return str(sim)
    engine = draft.fields.get("engine", draft.engine)
    if engine in _ENGINE_OUTPUT:
        return _ENGINE_OUTPUT[engine]
    sampling = draft.fields.get("default_sampling_params", {})
    if "num_inference_steps" in sampling or "model_class_name" in draft.fields:
        return "image"
    return "text" if engine in ("vllm", "sim") else ""


def check_sampling(draft: StageDraft, faults: Faults) -> None:
    """Parameters that contradict each other."""
    params = draft.fields.get("default_sampling_params", {})
    low, high = params.get("min_tokens", 0), params.get("max_tokens")
    if high is not None and low > high:
        faults.error(
            draft.place.at("default_sampling_params").at("min_tokens"), f"{low} is more than max_tokens = {high}"
        )


def sampling_message(params: dict[str, Any]) -> sampling_pb2.SamplingParams:
    """Checked parameters as a message; those of single engines go to ``extra``."""
    message = sampling_pb2.SamplingParams()
    for name, value in params.items():
        if name not in SAMPLING_KEYS:
            message.extra.update({name: value})
        elif name == "stop":
            message.stop.extend([value] if isinstance(value, str) else value)
        elif name == "stop_token_ids":
            message.stop_token_ids.extend(value)
        else:
            setattr(message, name, value)
    return message


def engine_args(draft: StageDraft) -> dict[str, Any]:
    """What the engine gets: every key without a place of its own in the plan, in the structure it was written in.

    Only ``sim`` gets its options, and it makes what it can in place of outputs it has no likeness of.
    """
    own = {
        key: value for key, value in draft.fields.items() if key not in PLAN_KEYS and key not in ("engine_args", "sim")
    }
    args = {**own, **draft.fields.get("engine_args", {})}
    if draft.connector_options:
        args["connector_extra"] = dict(draft.connector_options)
    if draft.engine == "sim":
        sim = dict(draft.fields.get("sim", {}))
        if draft.final_type in _SIM_STAND_IN:
            sim.setdefault("output", _SIM_STAND_IN[draft.final_type])
        if sim:
            args["sim"] = sim
    return args
