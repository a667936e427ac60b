"""F4 and F6 of bench.faults: a downstream stage is lost with output half delivered, and everything restarts."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from bench.faults_load import Client, Outcome, count_errors, difference
from bench.faults_ours import SPEECH, SPEECH_TWO, STAGES, Cluster, Launcher, Unit, omnictl, until

STREAMS = 16
_TTFT_MS, _ITL_MS = 20, 20
_BUSY_ITL_MS = 10
"""At this pace two cores are nearly busy without any fault, and what is made again has to wait for them."""
_PATIENCE_S = 60.0
_RESTART_S = 120.0
_PAUSE_S = 2.0
"""As between two restarts."""
_NAMES = {1: "talker", 2: "code2wav"}
PARTS = tuple(f"{name} {how}" for name in _NAMES.values() for how in ("killed", "hung", "killed, busy"))
"""Of F4."""
RESTARTS = ("F6", "F6, one thinker")


async def _speak(client: Client) -> list[Outcome]:
    """All questions at once, each answered in text and audio."""
    fields: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "default", "format": "pcm16"}}
    return list(
        await asyncio.gather(
            *(client.ask(f"Speak about {number}, please.", stream=True, **fields) for number in range(STREAMS))
        )
    )


def _compared(found: Sequence[Outcome], wanted: Sequence[Outcome]) -> int:
    """How many are exactly as undisturbed; what differs counts as failed."""
    exact = 0
    for got, right in zip(found, wanted, strict=True):
        if not got.error and got.text != right.text:
            got.error = difference(got.text, right.text)
        if not got.error and got.audio != right.audio:
            got.error = _wrong_audio(got.audio, right.audio)
        exact += not got.error
    return exact


def _wrong_audio(got: bytes, right: bytes) -> str:
    same = next((at for at, (a, b) in enumerate(zip(got, right, strict=False)) if a != b), min(len(got), len(right)))
    return "wrong audio: shorter" if same == len(got) else f"wrong audio, {'longer' if same == len(right) else 'other'}"


async def lost_downstream(run_dir: Path) -> dict[str, dict[str, Any]]:
    """F4: a talker or a code2wav, killed or hung when half of the audio has come."""
    paced = await _lost_downstream(run_dir / "paced", _ITL_MS, ("killed", "hung"))
    busy = await _lost_downstream(run_dir / "busy", _BUSY_ITL_MS, ("killed",))
    return paced | {f"{part}, busy": result for part, result in busy.items()}


async def _lost_downstream(run_dir: Path, itl_ms: float, faults: Sequence[str]) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    async with (
        Cluster(run_dir, SPEECH, ttft_ms=_TTFT_MS, itl_ms=itl_ms) as cluster,
        Client(cluster.port, SPEECH, timeout_s=_PATIENCE_S) as client,
    ):
        await _speak(client)  # workers meet each other
        right = await _speak(client)
        if bad := [outcome.error for outcome in right if outcome.error or not outcome.audio]:
            raise RuntimeError(f"the undisturbed run failed: {bad}")
        normal_s = statistics.median(outcome.took_s for outcome in right)
        half = sum(len(outcome.audio) for outcome in right) / 2
        for stage_id, name in _NAMES.items():
            for how in faults:
                victim = cluster.of_stage(stage_id)[1]
                found = await _disturbed(client, half, cluster.kill if how == "killed" else cluster.freeze, victim)
                delivered = [len(outcome.audio) for outcome in found]
                result = {
                    "requests": len(found),
                    "exact": _compared(found, right),
                    "normal_ms": normal_s * 1e3,
                    "slower_ms": (max(outcome.took_s for outcome in found) - normal_s) * 1e3,
                    "audio_bytes": sum(delivered),
                    "audio_sha256": hashlib.sha256(b"".join(outcome.audio for outcome in right)).hexdigest()[:16],
                }
                result["failed"] = sum(bool(outcome.error) for outcome in found)
                result["errors"] = ", ".join(f"{n} × {kind}" for kind, n in count_errors(found).items())
                if how == "hung":
                    cluster.thaw(victim)
                result["leftovers"] = await cluster.leftovers()
                results[f"{name} {how}"] = result
                if how == "killed":
                    cluster.start(victim)
                    await cluster.ready(victim)
                await cluster.settled()
    return results


async def _disturbed(client: Client, half: float, fault: Callable[[Unit], None], victim: Unit) -> list[Outcome]:
    ended = len(client.outcomes)

    def half_delivered() -> bool:  # by those that have ended, too: on a busy machine some end before others begin
        return sum(len(outcome.audio) for outcome in [*client.outcomes[ended:], *client.running]) >= half

    running = asyncio.create_task(_speak(client))
    if not await until(half_delivered, _PATIENCE_S):
        raise RuntimeError("half of the audio never came")
    fault(victim)
    return await running


async def rolling_restarts(run_dir: Path) -> dict[str, dict[str, Any]]:
    """F6: with two of every stage, and with a thinker that nobody can stand in for."""
    two = await _rolling_restart(run_dir / "two", SPEECH_TWO, compare=True)
    one = await _rolling_restart(run_dir / "one", SPEECH, compare=False)
    return dict(zip(RESTARTS, (two, one), strict=True))


async def _rolling_restart(run_dir: Path, pipeline: str, *, compare: bool) -> dict[str, Any]:
    """Every replica, one after the other, under load. ``compare``: with other processes that use as much of the
    processors as the starts did."""
    async with (
        Cluster(run_dir, pipeline, ttft_ms=_TTFT_MS, itl_ms=_BUSY_ITL_MS) as cluster,
        Client(cluster.port, pipeline, timeout_s=_PATIENCE_S) as client,
    ):
        right = await _speak(client)
        normal_s = statistics.median(outcome.took_s for outcome in right)
        begin_s = time.monotonic()
        complaints: list[str] = []
        async with _load(client) as found, Launcher(cluster) as launcher:
            for stage_id in STAGES[pipeline]:
                complaints += await _restart_stage(run_dir, cluster.address, f"{pipeline}/{stage_id}")
            took_s = time.monotonic() - begin_s
        exact = sum(_compared(batch, right) for batch in found)
        outcomes = [outcome for batch in found for outcome in batch]
        errors = [f"{n} × {kind}" for kind, n in count_errors(outcomes).items()]
        result = {
            "requests": len(outcomes),
            "failed": sum(bool(outcome.error) for outcome in outcomes),
            "exact": exact,
            "normal_ms": normal_s * 1e3,
            "slower_ms": (max(outcome.took_s for outcome in outcomes) - normal_s) * 1e3,
            "restarts": launcher.restarts,
            "restarts_took_s": took_s,
            "start_cpu_s": statistics.median(launcher.starts_cpu_s),
            "errors": ", ".join([*errors, *complaints]),
        }
        if compare:
            async with _load(client) as beside:
                for cpu_s in launcher.starts_cpu_s:
                    await _burn(cpu_s)
                    await asyncio.sleep(_PAUSE_S)
            slowest_s = max(outcome.took_s for batch in beside for outcome in batch)
            result["beside_others_slower_ms"] = (slowest_s - normal_s) * 1e3
        return result | {"leftovers": await cluster.leftovers()}


async def _restart_stage(run_dir: Path, address: str, stage: str) -> list[str]:
    """What went wrong."""
    command = omnictl(run_dir, address, "restart", stage, "--reason", "bench")
    if not await until(lambda: command.process.poll() is not None, _RESTART_S):
        command.stop()
    if command.process.returncode == 0:
        return []
    return [f"omnictl {command.process.returncode}: {command.log_tail()[-300:]}"]


@contextlib.asynccontextmanager
async def _load(client: Client) -> AsyncIterator[list[list[Outcome]]]:
    """All questions at once, again and again; the batches so far, and in the end all of them."""
    stop = asyncio.Event()
    found: list[list[Outcome]] = []

    async def ask() -> None:
        while not stop.is_set():
            found.append(await _speak(client))

    running = asyncio.create_task(ask())
    try:
        yield found
    finally:
        stop.set()
        await running


async def _burn(cpu_s: float) -> None:
    """Another process uses so much of a processor, and nothing else."""
    code = f"import time\nwhile time.process_time() < {cpu_s}: pass"
    await (await asyncio.create_subprocess_exec(sys.executable, "-c", code)).wait()
