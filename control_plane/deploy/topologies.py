"""Stage kinds and client outputs of vLLM-Omni pipelines known by name, whose deploy files do not say them.

All of these are chains: stage k feeds stage k + 1. ``A`` is an autoregressive stage, ``G`` a generator that runs once
for each input, ``D`` a diffusion stage; ``!x`` marks output of type x for the client.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Final

_LINES: Final = """
D!action:               Gr00tN1d7 cosmos3_policy pi0 pi05
D!video:                cosmos3_omni_deploy hunyuan_video_15 lingbot_world wan2_2_ti2v
D!image:                bagel_single_stage dreamzero generic_diffusion hunyuan_image3_dit lance
D!audio:                omnivoice
G!audio:                ming_flash_omni_tts
A!audio:                gepard moss_tts_nano voxcpm2
A!text:                 audex_thinker_only hunyuan_image3_ar mammoth_moda2_ar ming_flash_omni_thinker_only
A!text:                 qwen2_5_omni_thinker_only qwen3_omni_moe_thinker_only step_audio_2_asr
A!text D!image:         bagel bagel_think hunyuan_image_3_moe
A D!image:              glm_image mammoth_moda2 ming_flash_omni_image ming_image
A D!audio:              auk
A D!video:              minimax_h3_disaggregated
A G!audio:              arktts audex_tta audex_tts breeze cosyvoice3 fish_qwen3_omni glm_tts higgs_audio_v2
A G!audio:              higgs_multimodal_qwen3 indextts2 indextts2_5 ming_tts ming_tts_moe minimax_music3 moss_tts
A G!audio:              moss_tts_local moss_tts_realtime personaplex qwen3_tts voxtral_tts audio8_tts moss_ttsd
A!text G!audio:         audex_s2s covo_audio mimo_audio ming_flash_omni step_audio_2
A!text A G!audio:       qwen2_5_omni qwen3_omni_moe minicpmo_4_5 nemotron_voicechat joyai_vl_interaction
A!text A G!audio:       qwen3_omni_duplex
A A!text A G!audio:     aura_omni
"""


@dataclasses.dataclass(frozen=True, slots=True)
class KnownStage:
    """What a topology says of one stage."""

    kind: str
    output: str
    """Type of its output for the client; empty: none."""


@functools.cache
def known() -> dict[str, tuple[KnownStage, ...]]:
    """Topologies by pipeline name."""
    table = {}
    for line in _LINES.strip().splitlines():
        spec, _, names = line.partition(":")
        stages = tuple(KnownStage(part[0], part.partition("!")[2]) for part in spec.split())
        table.update(dict.fromkeys(names.split(), stages))
    return table


def find(name: str, num_stages: int) -> tuple[str, tuple[KnownStage, ...]] | None:
    """The topology that ``name`` is or is a variant of ("qwen3_tts_high_concurrency"), if it has that many stages."""
    table = known()
    names = [name, *sorted((n for n in table if name.startswith(n + "_")), key=len, reverse=True)]
    return next(((n, table[n]) for n in names if n in table and len(table[n]) == num_stages), None)
