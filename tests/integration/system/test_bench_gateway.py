"""The benchmarks of the gateway run, small; their figures are not judged here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench import gateway_report
from bench.faults import Plan, our_kill
from bench.gateway import Effort, measure
from bench.gateway_peers import PEERS
from bench.stages import measure_table

pytestmark = pytest.mark.timeout(180)  # a whole cluster starts, and a worker starts again


@pytest.mark.skipif(shutil.which("cc") is None, reason="its load generator is in C")
async def test_it_measures_our_gateway_beside_a_direct_connection(tmp_path: Path) -> None:
    effort = Effort(seconds=0.3, paced_seconds=0.3, rounds=1, concurrencies=(4,), quiet_wait_s=0)
    rows, _ = await measure(["ours"], ["paced"], effort, tmp_path, qps=[20])
    assert [(row["target"], row["qps"]) for row in rows] == [("direct", 0), ("ours", 0), ("direct", 20), ("ours", 20)]
    for row in rows:
        assert row["all"] > 0
        assert row["tokens"] == 64 * row["all"], row
        assert [row[kind] for kind in ("refused", "broken", "incomplete", "unanswered")] == [0, 0, 0, 0], row
    figures = gateway_report.figures(rows)
    assert figures["paced_qps20_ours_ttft_ms_p50"] > 0
    gateway_report.show(rows, figures)


def test_peers_that_are_not_installed_say_so(tmp_path: Path) -> None:
    for name in ("vllm-router", "sglang-router", "production-stack", "dynamo"):
        assert str(tmp_path) in PEERS[name].missing(tmp_path)


async def test_it_counts_what_clients_see_of_a_killed_worker(tmp_path: Path) -> None:
    plan = Plan(before_s=0.5, killed_s=0.5, killed_per_s=10, after_s=0.5)
    found = await our_kill(tmp_path / "run", plan)
    assert {"requests", "failed", "slower_ms", "unpicked_s"} <= found.keys()
    assert found["readmitted_s"] < float("inf")
    assert found["leftovers"] == {}


async def test_it_counts_throughput_by_device_and_stage() -> None:
    figures = await measure_table((1,), 0.1, ["replica2"])
    keys = ("requests_per_s_per_device", "ttft_ms_p50", "thinker_tokens_per_s", "talker_chunks_per_s", "audio_s_per_s")
    assert all(figures[f"replica2_c1_{key}"] > 0 for key in keys), figures
