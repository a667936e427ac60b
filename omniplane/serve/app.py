"""``omniplane serve``: flags in, processes started, kept running and stopped."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from omnicore import config as configuration
from omnicore import process
from omnicore.clock import SYSTEM_CLOCK, Clock
from omnicore.errors import TABLE, InvalidRequestError, OmniError
from omnicore.log import get_logger
from omnicore.supervise.restart import RestartPolicy
from omnicore.supervise.signals import StopSignals
from omnicore.supervise.supervisor import Member, StartFailedError, State, Supervisor
from omniplane.serve import launchers
from omniplane.serve.config import ServeConfig
from omniplane.serve.launchers import Launcher
from omniplane.serve.overlay import StageKeys, split_stage_flags
from omniplane.serve.planning import DeployFileError

_log = get_logger(__name__)

# A process that keeps dying is tried again after so long, then ever more seldom: what it lacks may come back.
_CRASH_LOOP_DELAY_S = 30.0

_PROGRAM = "omniplane serve"
_EPILOG = """\
Any key of a stage can be given as --stage-N-KEY VALUE, such as --stage-1-max-num-seqs 8; it goes before the file.

examples:
  # scenario A: everything on this machine
  omniplane serve ByteDance-Seed/BAGEL-7B-MoT --omni --deploy-config examples/deploy/bagel_two_gpu.yaml
  # scenario B: a head with two replicas of stage 0 ...
  omniplane serve ByteDance-Seed/BAGEL-7B-MoT --omni --stage-id 0 --omni-dp-size-local 2 -oma 10.0.0.5 -omp 9000 \\
      --host 10.0.0.5 --deploy-config examples/deploy/bagel_dp_local_2.yaml --insecure
  # ... and two of stage 1 elsewhere
  omniplane serve ByteDance-Seed/BAGEL-7B-MoT --omni --headless --stage-id 1 --omni-dp-size-local 2 -oma 10.0.0.5 \\
      -omp 9000 --insecure
  # a try without models
  omniplane serve --omni --deploy-config examples/deploy/bagel_two_gpu.yaml --engine sim
"""


def main(argv: Sequence[str]) -> int:
    """Serve until a signal: 0. Wrong flags or a wrong deploy file: 2. A start that fails: the code of its error."""
    try:
        config, flags = parse(argv)
    except InvalidRequestError as error:
        return configuration.wrong_use(_PROGRAM, error.message)
    config.begin("serve")
    for warn, text in config.notes():
        (_log.warning if warn else _log.info)(text)
    return process.run(_run(config, flags))


def parse(argv: Sequence[str]) -> tuple[ServeConfig, StageKeys]:
    """The configuration and the keys of single stages that a command line means. Raises ``InvalidRequestError`` for
    flags that do not go together; ends the process, as all services do, for a flag that is wrong by itself."""
    words, flags = split_stage_flags(argv)
    if words and not words[0].startswith("-"):
        words = ["--model", *words]
    config = configuration.parse(
        ServeConfig, words, program=_PROGRAM, component="serve", usage="[MODEL]", epilog=_EPILOG
    )
    config.check()
    return config, flags


async def _run(config: ServeConfig, flags: StageKeys) -> int:
    run_dir = Path(tempfile.mkdtemp(prefix="omniplane-serve-"))
    launcher: Launcher | None = None

    def on_change(member: Member, text: str) -> None:
        _tell(member, text)
        if launcher is not None:
            launcher.changed(member)

    def policy(clock: Clock) -> RestartPolicy:
        return RestartPolicy(clock, crash_loop_delay_s=_CRASH_LOOP_DELAY_S)

    supervisor = Supervisor(run_dir, on_change, clock=SYSTEM_CLOCK, policy=policy, own_logs=False, guarded=True)
    with StopSignals(supervisor.kill_all) as stop:
        try:
            launcher = launchers.choose(config, flags, supervisor)
            launcher.check()
            return await _until_stopped(config, launcher, stop)
        except DeployFileError as error:
            for line in error.lines:
                print(line, file=sys.stderr)
            return error.row.exit_code
        except StartFailedError as error:
            print(f"error: {error.message}", file=sys.stderr)
            return error.process_code if error.process_code in _OWN_CODES else error.row.exit_code
        except OmniError as error:
            print(f"error: {error.message}", file=sys.stderr)
            return error.row.exit_code
        finally:
            if launcher is not None:
                await launcher.stop()
            await supervisor.close()
            shutil.rmtree(run_dir, ignore_errors=True)


_OWN_CODES = frozenset(error.row.exit_code for error in TABLE.values())


async def _until_stopped(config: ServeConfig, launcher: Launcher, stop: StopSignals) -> int:
    work = asyncio.create_task(_serve(config, launcher), name="serve")
    stopped = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
            _log.info("every replica has left")
        else:
            _log.info("stopping: requests may finish", signal=stopped.result().name)
        return 0
    finally:
        for task in (work, stopped):
            task.cancel()
        await asyncio.wait({work, stopped})


async def _serve(config: ServeConfig, launcher: Launcher) -> None:
    ready = await launcher.start()
    process.write_ready_file(config.ready_file, ready)
    shown = {key: value for key, value in ready.items() if key in ("http", "grpc", "control_plane", "pipeline")}
    _log.info("serving", **shown, replicas=len(ready["replicas"]))
    await launcher.ended()


def _tell(member: Member, text: str) -> None:
    if not text:
        return
    level = _log.error if member.state in (State.CRASH_LOOP, State.FAILED) else _log.warning
    for line in text.splitlines():
        level(line, state=member.state.value)
