"""Checks of a stage that is split in prefill (makes KV) and decode (reads KV)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from control_plane.deploy.devices import parallel_size
from control_plane.deploy.faults import Faults
from control_plane.deploy.stages import StageDraft

_ROLES = {
    "is_prefill_only": ("kv_producer", "kv_both"),
    "is_decode_only": ("kv_consumer", "kv_both"),
}
_SAME = ("kv_connector", "kv_buffer_device", "kv_buffer_size")


def check_split(drafts: Sequence[StageDraft], faults: Faults) -> None:
    """Both halves are there, have KV transfer configured, and agree with each other."""
    prefill = [draft for draft in drafts if draft.fields.get("is_prefill_only")]
    decode = [draft for draft in drafts if draft.fields.get("is_decode_only")]
    for draft in prefill:
        if draft in decode:
            faults.error(draft.place.at("is_decode_only"), "a stage is prefill only or decode only, not both")
    halves = [("is_prefill_only", draft) for draft in prefill] + [("is_decode_only", draft) for draft in decode]
    for flag, draft in halves:
        _check_half(flag, draft, faults)
    for name, some, others in (("decode", prefill, decode), ("prefill", decode, prefill)):
        if some and not others:
            flag = "is_prefill_only" if some is prefill else "is_decode_only"
            faults.error(some[0].place.at(flag), f"there is no {name} stage that belongs to it")
    for producer in prefill:
        for consumer in decode:
            if producer is not consumer:
                _check_pair(producer, consumer, faults)


def _config(draft: StageDraft) -> dict[str, Any]:
    config: dict[str, Any] = draft.fields.get("kv_transfer_config", {})
    return config


def _check_half(flag: str, draft: StageDraft, faults: Faults) -> None:
    place = draft.place.at("kv_transfer_config")
    if place.data is None or place.data == {}:
        faults.error(place, f"required for stage {draft.stage_id}, which is {flag}")
        return
    role = _config(draft).get("kv_role")
    accepted = _ROLES[flag]
    if "kv_role" not in place.map:
        faults.error(place.at("kv_role"), f"required: {' or '.join(accepted)}")
    elif role is not None and role not in accepted:
        faults.error(place.at("kv_role"), f"an {flag} stage is {' or '.join(accepted)}, not {role}")


def _check_pair(producer: StageDraft, consumer: StageDraft, faults: Faults) -> None:
    ours, theirs = _config(producer), _config(consumer)
    place = consumer.place.at("kv_transfer_config")
    for key in _SAME:
        if key in ours and key in theirs and ours[key] != theirs[key]:
            faults.error(
                place.at(key), f"{theirs[key]} disagrees with {ours[key]} of prefill stage {producer.stage_id}"
            )
    quiet = Faults()  # contradictions inside one stage have been reported
    sizes = [parallel_size(draft.place, draft.fields, "tensor_parallel_size", quiet) for draft in (producer, consumer)]
    if sizes[0] != sizes[1]:
        faults.error(
            consumer.place.at("tensor_parallel_size"),
            f"{sizes[1]} disagrees with {sizes[0]} of prefill stage {producer.stage_id}",
        )
