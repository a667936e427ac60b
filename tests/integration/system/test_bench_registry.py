"""The benchmark of the registry runs, small; its figures are not judged here."""

from __future__ import annotations

from bench.registry import Effort, measure


async def test_it_measures_a_small_fleet() -> None:
    effort = Effort(window_s=0.5, victims=2, hung=1, in_flight=2, pause_s=0.0)
    figures = await measure((3, 6), effort)
    assert list(figures) == [3, 6]
    for size, found in figures.items():
        assert found["beats_per_s"] > 0, size
        for key in ("visible_ms_p99", "kill_ms_p99", "hang_ms_max", "register_per_s", "control_plane_mib"):
            assert found[key] > 0, key
