"""What replicas of downstream stages bring, and what a stage hop costs.

    python -m bench.stages [--quick]

* **Table**: a speech pipeline of simulated stages (thinker, talker, code2wav) with one and with two replicas of what
  follows the thinker, at 1 to 32 requests at a time: requests, TTFT, TPOT, audio; throughput for each device and each
  stage. A thinker has a device of its own, a talker shares one with its code2wav: two devices against three. The time
  of a stage is simulated; a talker works on four requests at a time, which is where one of them saturates.
* **Hop**: what each further stage adds to a request that computes nothing, p50 and p99 (as in ``bench.first_light``).
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from bench import first_light, harness
from bench.faults_load import Client, Outcome
from bench.faults_ours import Cluster

NAME = "speech"
CONFIGS: dict[str, dict[int, int]] = {"single": {0: 1, 1: 1, 2: 1}, "replica2": {0: 1, 1: 2, 2: 2}}
"""Replicas of each stage."""
DEVICES = {"single": 2, "replica2": 3}
CONCURRENCIES = (1, 2, 4, 8, 16, 24, 32)
TOKENS = 48
_BYTES_PER_SECOND = 24_000 * 2  # of the simulated audio: 16 bits
_SATURATED_SPEED_UP = 1.5
_EQUAL_TTFT = 0.1
_DEPLOY = """
pipeline: speech
async_chunk: true
stages:
  - stage_id: 0
    name: thinker
    engine: sim
    max_num_seqs: 64
    sim: {{output: text, ttft_ms: 40, tpot_ms: 5, tokens: {tokens}}}
    final_output: true
    final_output_type: text
    output_connectors: {{to_stage_1: shm}}
  - stage_id: 1
    name: talker
    engine: sim
    num_replicas: {replicas}
    max_num_seqs: 4
    sim: {{output: tensor, ttft_ms: 20, tpot_ms: 20, chunks: 4, chunk_bytes: 65536}}
    input_connectors: {{from_stage_0: shm}}
    output_connectors: {{to_stage_2: shm}}
  - stage_id: 2
    name: code2wav
    engine: sim
    num_replicas: {replicas}
    max_num_seqs: 64
    sim: {{output: audio, ttft_ms: 5, seconds_per_chunk: 0.1}}
    input_connectors: {{from_stage_1: shm}}
    final_output: true
    final_output_type: audio
edges:
  - {{from: 0, to: 1, chunk_by: sentence, window_size: 4}}
  - {{from: 1, to: 2, window_size: 4}}
connectors: {{shm: {{name: shm}}}}
entrypoints: {{chat: 0}}
"""


async def _ask(client: Client, number: int) -> Outcome:
    fields: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "default", "format": "pcm16"}}
    outcome = await client.ask(f"Speak about {number}.", stream=True, max_tokens=TOKENS, **fields)
    if outcome.error:
        raise RuntimeError(f"a request failed: {outcome.error}")
    return outcome


async def _cell(cluster: Cluster, client: Client, concurrency: int, seconds: float) -> dict[str, float]:
    """A closed loop of so many requests at a time; what was begun in time counts."""
    outcomes: list[Outcome] = []
    begin_s = time.monotonic()
    chunks = {stage_id: await asyncio.to_thread(cluster.chunks, stage_id) for stage_id in (0, 1)}

    async def one(number: int) -> None:
        while time.monotonic() < begin_s + seconds or not outcomes:
            outcomes.append(await _ask(client, number))

    async with asyncio.TaskGroup() as tasks:
        for number in range(concurrency):
            tasks.create_task(one(number))
    took_s = time.monotonic() - begin_s
    stages = {stage_id: await asyncio.to_thread(cluster.chunks, stage_id) - chunks[stage_id] for stage_id in (0, 1)}
    ttft = [(outcome.first_text_s - outcome.begun_s) * 1e3 for outcome in outcomes]
    audio_s = sum(len(outcome.audio) for outcome in outcomes) / _BYTES_PER_SECOND
    return {
        "requests_per_s": len(outcomes) / took_s,
        "ttft_ms_p50": statistics.median(ttft),
        "ttft_ms_p99": harness.percentile(ttft, 99),
        "first_audio_ms_p50": statistics.median((o.first_audio_s - o.begun_s) * 1e3 for o in outcomes),
        "tpot_ms": statistics.median((o.last_text_s - o.first_text_s) * 1e3 / (TOKENS - 1) for o in outcomes),
        "thinker_tokens_per_s": len(outcomes) * TOKENS / took_s,
        "thinker_sentences_per_s": stages[0] / took_s,
        "talker_chunks_per_s": stages[1] / took_s,
        "audio_s_per_s": audio_s / took_s,
    }


async def measure_table(
    concurrencies: Sequence[int], seconds: float, configs: Sequence[str] = tuple(CONFIGS)
) -> dict[str, float]:
    """Flat figures of every configuration and concurrency; configurations take turns."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="omniplane-bench-") as folder:
        async with _Both(Path(folder), configs) as both:
            for concurrency in concurrencies:
                for config, (cluster, client) in both.items():
                    found = await _cell(cluster, client, concurrency, seconds)
                    found["requests_per_s_per_device"] = found["requests_per_s"] / DEVICES[config]
                    figures |= {f"{config}_c{concurrency}_{name}": value for name, value in found.items()}
    if len(configs) < len(CONFIGS):
        return figures
    for concurrency in concurrencies:
        for ratio, name in (("speed_up", "requests_per_s"), ("ttft_ratio", "ttft_ms_p50")):
            one, two = (figures[f"{config}_c{concurrency}_{name}"] for config in CONFIGS)
            figures[f"c{concurrency}_{ratio}"] = two / one
    return figures


class _Both(dict[str, tuple[Cluster, Client]]):
    """A cluster of each configuration; the one that has no requests costs its beats. Use as ``async with``."""

    def __init__(self, folder: Path, configs: Sequence[str]) -> None:
        super().__init__()
        self._folder = folder
        self._configs = configs

    async def __aenter__(self) -> _Both:
        for config in self._configs:
            replicas = CONFIGS[config]
            deploy = _DEPLOY.format(replicas=replicas[1], tokens=TOKENS)
            cluster = Cluster(self._folder / config, NAME, deploy=deploy, replicas=replicas)
            await cluster.__aenter__()
            self[config] = cluster, await Client(cluster.port, NAME, timeout_s=60).__aenter__()
            await _ask(self[config][1], 0)
        return self

    async def __aexit__(self, *error: object) -> None:
        for cluster, client in self.values():
            await client.__aexit__(*error)
            await cluster.__aexit__(*error)


_COLUMNS = (
    *("requests_per_s", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms", "first_audio_ms_p50"),
    *("audio_s_per_s", "thinker_sentences_per_s", "talker_chunks_per_s", "requests_per_s_per_device"),
)
_HEADS = (
    "config",
    "c",
    "req/s",
    "TTFT",
    "p99",
    "TPOT",
    "1st audio",
    "audio s/s",
    "sent./s",
    "chunks/s",
    "req/s/device",
)
_RATIOS = ("c", "req/s", "req/s/device", "TTFT")


def _lines(figures: dict[str, float], concurrencies: Sequence[int]) -> list[list[object]]:
    return [
        [config, str(concurrency), *(figures[f"{config}_c{concurrency}_{name}"] for name in _COLUMNS)]
        for concurrency in concurrencies
        for config in CONFIGS
    ]


def _ratios(figures: dict[str, float], concurrencies: Sequence[int]) -> list[list[object]]:
    per_device = DEVICES["single"] / DEVICES["replica2"]
    return [
        [str(c), figures[f"c{c}_speed_up"], figures[f"c{c}_speed_up"] * per_device, figures[f"c{c}_ttft_ratio"]]
        for c in concurrencies
    ]


async def main(quick: bool) -> None:
    """Measure, print, store."""
    concurrencies = (1, 8) if quick else CONCURRENCIES
    figures = await measure_table(concurrencies, 1.0 if quick else 4.0)
    hops = await first_light.hops(30 if quick else 500)
    hop_rows = [(label, hops[f"{key}_ms_p50"], hops[f"{key}_ms_p99"]) for key, label in first_light.HOP_LABELS.items()]
    hop_rows.append(("added per stage hop", hops["added_per_hop_ms_p50"], hops["added_per_hop_ms_p99"]))
    lines, ratios = _lines(figures, concurrencies), _ratios(figures, concurrencies)
    print(harness.machine_line())
    harness.report("stages", "simulated speech; times in ms", _HEADS, lines)
    harness.report("stages", "two replicas / one", _RATIOS, ratios)
    harness.report("stages", "one request at a time, no compute, ms", ["path", "p50", "p99"], hop_rows)
    most = max(concurrencies)
    speed_up, ttft = figures[f"c{most}_speed_up"], figures["c8_ttft_ratio"]
    print(f"two replicas / one at {most}: {speed_up:.2f} × the requests (wanted: > {_SATURATED_SPEED_UP})")
    met = "within" if abs(ttft - 1) <= _EQUAL_TTFT else "NOT within"
    print(f"TTFT of two replicas / one at 8: {ttft:.2f} ({met} {_EQUAL_TTFT:.0%})")
    print(f"wrote {harness.store('stages', figures | hops, quick)}")
    if not quick:
        table = [f"{harness.machine_line()}.", "", *harness.markdown(_HEADS, lines), ""]
        table += [*harness.markdown(_RATIOS, ratios), "", *harness.markdown(["path, ms", "p50", "p99"], hop_rows)]
        harness.write_table(harness.DOCS / "performance.md", "stages", table)


if __name__ == "__main__":
    uvloop.run(main(harness.arguments((__doc__ or "").splitlines()[0]).quick))
