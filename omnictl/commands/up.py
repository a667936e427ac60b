"""``omnictl up``: a whole cluster on this machine, in the foreground."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omni.v1 import pipeline_pb2, pipeline_service_pb2
from omnicore import config as settings_checks
from omnicore.clock import SYSTEM_CLOCK
from omnicore.errors import InternalError, InvalidRequestError, OmniError
from omnicore.process import write_ready_file
from omnicore.supervise.directory_lock import DirectoryLock
from omnicore.supervise.signals import StopSignals, process_age_s
from omnicore.supervise.supervisor import Member, StartFailedError, Supervisor
from omnicore.tasks import together
from omnictl import ask, connect, context, failures, settings
from omnictl.commands.apply import request_of
from omnictl.commands.base import Commands, add_deploy_flags, file_label
from omnictl.commands.chat import add_question_flags, question_of
from omnictl.local.cluster import Addresses, ClusterConfig, LocalCluster, apply, connected
from omnictl.local.progress import View, default_view
from omnictl.parser import usage_error


def add(commands: Commands) -> None:
    """Add ``up``."""
    parser = commands.add(
        "up",
        run,
        description="Start a cluster on this machine: etcd, control plane, gateway and the workers of a deploy file.",
        examples=(
            "omnictl up examples/speech.yaml",
            "# the same pipeline in seconds, without its models",
            "omnictl up examples/speech.yaml --engine sim",
            "# start, ask one question, stop",
            'omnictl up examples/speech.yaml --ask "Why is the sky blue?" --audio answer.wav',
            "# in the background, until 'omnictl down'",
            "omnictl up examples/speech.yaml --detach",
        ),
        notes=(
            "Runs until Ctrl-C, which lets requests finish; a second Ctrl-C stops everything at once. Processes that\n"
            "end are started again; one that keeps ending stays down while the others go on. Nothing outlives omnictl."
        ),
        connects=False,
    )
    parser.add_argument("file", metavar="FILE", help='deploy file (YAML); "-" reads standard input')
    add_deploy_flags(parser)
    defaults = ClusterConfig()
    for flag, default, what in (
        ("--http", defaults.http, "where the gateway serves HTTP; port 0 takes any free one"),
        ("--grpc", defaults.grpc, "where the gateway serves gRPC"),
        ("--control-plane-listen", defaults.control_plane_listen, "where the control plane serves"),
    ):
        parser.add_argument(flag, metavar="ADDR", default=default, help=what)
    parser.add_argument("--etcd", metavar="ADDR[,ADDR]", default="", help="use this etcd instead of starting one")
    parser.add_argument(
        "--cluster", metavar="NAME", default=defaults.cluster, help='its name in etcd\'s keys (default "default")'
    )
    parser.add_argument("--data-dir", metavar="DIR", default="", help="keep etcd's data and logs there, over restarts")
    parser.add_argument("--ready-timeout", metavar="DURATION", default="15m", help="for loading a model")
    parser.add_argument("--drain-timeout", metavar="DURATION", default="30s", help="for requests after Ctrl-C")
    parser.add_argument("--ready-file", metavar="FILE", default="", help="write the addresses there (JSON) once ready")
    parser.add_argument("--run-dir", default="", help=argparse.SUPPRESS)  # where --detach already keeps its log
    parser.add_argument("-d", "--detach", action="store_true", help="go on in the background once ready")
    parser.add_argument("--ask", metavar="TEXT", help="ask this as soon as possible, print the answer, stop")
    question = parser.add_argument_group("Flags for --ask")
    add_question_flags(question)


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """One run of ``up``: what to start, what to ask, where things are kept."""

    config: ClusterConfig
    request: pipeline_service_pb2.ApplyPipelineRequest
    label: str
    question: ask.Question | None
    ready_file: str
    context_path: Path
    run_dir: Path
    lock: DirectoryLock | None
    """Of a run directory that is kept: no other ``up`` has it meanwhile."""
    started_s: float
    """When this process began, on the monotonic clock."""


async def run(args: argparse.Namespace) -> int:
    """Run the cluster until it is told to stop, or one question was answered."""
    if args.detach:
        if args.ask is not None or args.file == "-":
            raise usage_error("--detach: goes neither with --ask nor with standard input", "omnictl up")
        from omnictl.local import detach

        return await detach.start(args)
    plan = _prepare(args)
    members: dict[str, Member] = {}
    view = default_view(members, SYSTEM_CLOCK)

    def on_change(member: Member, text: str) -> None:
        if text:
            view.say(f"{time.strftime('%H:%M:%S')} {text}" if cluster.serving else text)
        view.changed(member)

    supervisor = Supervisor(plan.run_dir, on_change, members=members, guarded=True)
    cluster = LocalCluster(plan.config, supervisor)

    def stop_at_once() -> None:
        view.phase(False)  # gives the terminal its cursor back
        supervisor.kill_all()

    code, process_failed = InternalError.row.exit_code, False
    with StopSignals(stop_at_once) as stop:
        try:
            code = await _run_until_stopped(plan, cluster, view, stop)
            if cluster.serving:
                view.say("stopping: requests may finish; Ctrl-C again stops at once")
                view.phase(True)
        except OmniError as error:
            view.phase(False)
            _report(error)
            process_failed = isinstance(error, StartFailedError)
            code = error.exit_code if isinstance(error, StartFailedError) else error.row.exit_code
        finally:
            await cluster.stop()
            await supervisor.close()
            view.phase(False)
            went_well = code in (0, InvalidRequestError.row.exit_code) or code > 128
            _clean_up(plan, view, keep_logs=process_failed or not went_well)
    return code


async def _run_until_stopped(plan: _Plan, cluster: LocalCluster, view: View, stop: StopSignals) -> int:
    work = asyncio.create_task(_serve(plan, cluster, view))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        # Told to stop: fine while it served, an interruption while it started or answered.
        return 0 if cluster.serving else 128 + stopped.result()
    finally:
        for task in (work, stopped):
            task.cancel()
        await asyncio.wait({work, stopped})


async def _serve(plan: _Plan, cluster: LocalCluster, view: View) -> int:
    """Start everything and keep the context file while it serves. Returns only after a question, or wrong input."""
    view.phase(True)
    await cluster.start_control_plane()
    try:
        response = await apply(cluster.addresses.control_plane, plan.request)
    except InvalidRequestError as error:
        view.phase(False)
        for line in failures.violations_of(error, plan.label):
            print(line, file=sys.stderr)
        return error.row.exit_code
    for warning in response.warnings:
        view.say(f"warning: {plan.label}: {failures.one_line(warning)}")
    pipeline = response.pipeline
    if plan.question is not None:
        return await _answer(plan, cluster, pipeline, view)
    await together(cluster.start_gateway(), cluster.start_workers(pipeline))
    elsewhere = [stage.name for stage in pipeline.stages if stage.num_replicas == 0]
    if elsewhere:
        view.say(f"note: {pipeline.name} serves once workers elsewhere have joined: {', '.join(elsewhere)}")
    else:
        await cluster.wait_servable(pipeline.name)
    view.phase(False)
    with _context(plan, cluster.addresses, pipeline.name):
        cluster.serving = True
        took_s = SYSTEM_CLOCK.monotonic() - plan.started_s
        print(_banner(plan, cluster.addresses, pipeline, took_s), flush=True)
        write_ready_file(plan.ready_file, _ready(cluster.addresses, pipeline.name, plan.run_dir))
        await asyncio.Event().wait()
    return 0


async def _answer(plan: _Plan, cluster: LocalCluster, pipeline: pipeline_pb2.Pipeline, view: View) -> int:
    """Ask as soon as every stage has one replica, while the others may still load."""
    assert plan.question is not None
    question = dataclasses.replace(plan.question, pipeline=pipeline.name)
    starting = asyncio.create_task(together(cluster.start_gateway(), cluster.start_workers(pipeline)))
    asking = asyncio.create_task(_ask_when_servable(plan, cluster, question, view))
    try:
        await asyncio.wait({starting, asking}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()  # raises if something could not be started
        await asking
    finally:
        for task in (starting, asking):
            task.cancel()
        await asyncio.wait({starting, asking})
    return 0


async def _ask_when_servable(plan: _Plan, cluster: LocalCluster, question: ask.Question, view: View) -> None:
    await cluster.gateway_started.wait()
    await cluster.wait_servable(question.pipeline, plan.config.worker_ready_timeout_s)
    view.phase(False)
    asked_s = SYSTEM_CLOCK.monotonic() - plan.started_s
    view.say(f"{question.pipeline} is ready after {asked_s:.1f} s\n\n> {question.text}\n")
    text_to = sys.stderr if question.audio == "-" else sys.stdout
    async with connected(cluster.addresses.grpc) as channel:
        gateway = connect.Gateway(channel, cluster.addresses.grpc, settings.DEFAULT_TIMEOUT_S)
        answer = await ask.ask(gateway, question, text_to=text_to)
    view.say(f"\n{answer.summary(question.audio)}")
    since_start = [f"ready after {asked_s:.1f} s"]
    if answer.first_text_s is not None:
        since_start.append(f"first text after {asked_s + answer.first_text_s:.1f} s")
    if answer.first_audio_s is not None:
        since_start.append(f"first audio after {asked_s + answer.first_audio_s:.1f} s")
    view.say(f"since start: {', '.join(since_start)}")


def _prepare(args: argparse.Namespace) -> _Plan:
    """Check everything that can be checked before a process is started. Raises ``InvalidRequestError``."""
    for flag in ("http", "grpc", "control_plane_listen"):
        try:
            settings_checks.host_port(getattr(args, flag))
        except ValueError as error:
            raise usage_error(f"--{flag.replace('_', '-')}: {error}", "omnictl up") from None
    etcd = tuple(part.strip() for part in args.etcd.split(",") if part.strip())
    data_dir = Path(args.data_dir).expanduser().absolute() if args.data_dir else None
    config = ClusterConfig(
        http=args.http,
        grpc=args.grpc,
        control_plane_listen=args.control_plane_listen,
        etcd=etcd,
        etcd_data_dir=data_dir / "etcd" if data_dir else None,
        cluster=args.cluster,
        worker_ready_timeout_s=settings.seconds(args.ready_timeout, "--ready-timeout"),
        drain_timeout_s=settings.seconds(args.drain_timeout, "--drain-timeout"),
        insecure=getattr(args, "insecure", False),
    )
    request = request_of(args, args.file)
    question = question_of(args, "", args.ask) if args.ask is not None else None
    config.check()
    run_dir, lock = _run_dir(data_dir, args.run_dir)
    return _Plan(
        config=config,
        request=request,
        label=file_label(args.file),
        question=question,
        ready_file=args.ready_file,
        context_path=context.context_path(os.environ),
        run_dir=run_dir,
        lock=lock,
        started_s=SYSTEM_CLOCK.monotonic() - process_age_s(),
    )


def _run_dir(data_dir: Path | None, given: str) -> tuple[Path, DirectoryLock | None]:
    if data_dir is None and given:
        return Path(given), None
    if data_dir is None:
        return Path(tempfile.mkdtemp(prefix="omnictl-")), None
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        return data_dir, DirectoryLock(data_dir, "--data-dir")
    except OSError as error:
        raise InvalidRequestError(f"--data-dir: {data_dir}: {error.strerror}", reason="BAD_FILE") from error


@contextlib.contextmanager
def _context(plan: _Plan, addresses: Addresses, pipeline: str) -> Iterator[None]:
    """Later commands find this cluster while the block runs."""
    mine = context.Context(
        server=addresses.control_plane,
        gateway=addresses.grpc,
        gateway_http=addresses.http,
        etcd=addresses.etcdctl,
        pipeline=pipeline,
        run_dir=str(plan.run_dir),
        pid=os.getpid(),
    )
    previous = context.save(plan.context_path, mine)
    try:
        yield
    finally:
        context.release(plan.context_path, mine, previous)


def _ready(addresses: Addresses, pipeline: str, run_dir: Path) -> dict[str, Any]:
    return {
        "http": addresses.http,
        "grpc": addresses.grpc,
        "control_plane": addresses.control_plane,
        "etcd": list(addresses.etcd),
        "pipeline": pipeline,
        "run_dir": str(run_dir),
    }


def _banner(plan: _Plan, addresses: Addresses, pipeline: pipeline_pb2.Pipeline, took_s: float) -> str:
    etcdctl = addresses.etcdctl
    rows = [
        ("OpenAI API", f"{addresses.http}/v1"),
        ("gRPC", addresses.grpc),
        ("Control plane", addresses.control_plane),
        ("etcd", etcdctl or ",".join(addresses.etcd)),
        ("Logs", str(plan.run_dir / "logs")),
    ]
    lines = ["", f"{pipeline.name} is ready after {took_s:.1f} s", ""]
    lines += [f"  {name:<15} {text}" for name, text in rows]
    audio = any(stage.final_output and stage.final_output_type == "audio" for stage in pipeline.stages)
    lines += ["", f'  omnictl chat {pipeline.name} "Why is the sky blue?"{" --audio answer.wav" if audio else ""}']
    lines.append("  omnictl get replicas --watch")
    if etcdctl:
        lines.append(f"  etcdctl --endpoints {etcdctl} get --prefix /omni/v1/")
    return "\n".join([*lines, "", "Ctrl-C stops everything."])


def _report(error: OmniError) -> None:
    first, *rest = failures.render(error, "omnictl up").splitlines()
    print(first, file=sys.stderr)
    if isinstance(error, StartFailedError):
        for line in error.log_lines:
            print(f"  | {line}", file=sys.stderr)
    for line in rest:
        print(line, file=sys.stderr)


def _clean_up(plan: _Plan, view: View, *, keep_logs: bool) -> None:
    """Keep the logs of a run that went wrong, and nothing else."""
    if plan.lock is not None:
        plan.lock.release()
        return
    if not keep_logs:
        shutil.rmtree(plan.run_dir, ignore_errors=True)
        return
    shutil.rmtree(plan.run_dir / "etcd", ignore_errors=True)
    view.say(f"logs are kept in {plan.run_dir / 'logs'}")
