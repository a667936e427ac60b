"""``omnictl status``: the cluster at a glance, and whether it can serve."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from typing import Any

from omni.v1 import admin_service_pb2, inference_service_pb2
from omnicore.errors import OmniError, UnavailableError
from omnicore.tasks import together
from omnictl import connect, failures, output
from omnictl.commands.base import Commands, add_output_flag, settings_of
from omnictl.output import Column
from omnictl.settings import Settings


@dataclasses.dataclass(frozen=True, slots=True)
class _GatewayStatus:
    address: str
    http: str
    ready: bool
    detail: str
    models: list[inference_service_pb2.Model]

    def to_json(self) -> dict[str, Any]:
        return {
            "address": self.address,
            "http": self.http,
            "ready": self.ready,
            "detail": self.detail,
            "models": [output.to_dict(model) for model in self.models],
        }


def add(commands: Commands) -> None:
    """Add ``status``."""
    parser = commands.add(
        "status",
        _run,
        description="Show whether the cluster can serve, and what is missing.",
        examples=("omnictl status", "# wait until it serves", "until omnictl status > /dev/null; do sleep 1; done"),
        notes="Exit code 0 if everything can serve, 6 if not, or if no gateway is named that could be asked.",
    )
    add_output_flag(parser, ("text", "json", "yaml"))


async def _run(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    (address, cluster), gateway = await together(_cluster(settings), _gateway(settings))
    serves = cluster.store_healthy and gateway.ready and all(stage.routable > 0 for stage in cluster.stages)
    if args.output in ("json", "yaml"):
        control_plane = {"address": address, **output.to_dict(cluster)}
        value = {"serving": serves, "control_plane": control_plane, "gateway": gateway.to_json()}
        output.print_structured(value, args.output)
    else:
        print(_text(address, cluster, gateway))
    return 0 if serves else UnavailableError.row.exit_code


async def _cluster(settings: Settings) -> tuple[str, admin_service_pb2.GetClusterStatusResponse]:
    async with connect.control_plane(settings) as plane:
        response: admin_service_pb2.GetClusterStatusResponse = await plane.call(
            plane.admin.GetClusterStatus, admin_service_pb2.GetClusterStatusRequest()
        )
        return plane.address, response


async def _gateway(settings: Settings) -> _GatewayStatus:
    """What the gateway says of itself. One that does not answer is a finding, not an error."""
    http = settings.gateway_http
    if not settings.gateway:
        return _GatewayStatus("", http, False, "no address: pass --gateway or set OMNICTL_GATEWAY", [])
    try:
        async with connect.gateway(settings) as gateway:
            response: inference_service_pb2.ListModelsResponse = await gateway.call(
                gateway.inference.ListModels, inference_service_pb2.ListModelsRequest()
            )
            address = gateway.address
    except OmniError as error:
        return _GatewayStatus(",".join(settings.gateway), http, False, failures.one_line(error.message), [])
    models = list(response.models)
    unready = [model.id for model in models if not model.ready]
    detail = f"cannot serve {', '.join(unready)} now" if unready else "" if models else "no pipeline to serve"
    ready = len(unready) < len(models)
    if http:
        code, body = await asyncio.to_thread(_probe, f"{http}/ready", settings.timeout_s)
        if code != 200:
            # The body of a refusal says in JSON what the models said already; what else is wrong is only here.
            ready, detail = False, detail or f"/ready: {body}"
    return _GatewayStatus(address, http, ready, detail, models)


def _probe(url: str, timeout_s: float) -> tuple[int, str]:
    """HTTP status and first line of the body; status 0 if there was no answer."""
    import urllib.error  # only here: most commands speak no HTTP
    import urllib.request

    # No proxies: the address is the cluster's own.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as response:
            return response.status, ""
    except urllib.error.HTTPError as error:
        body = failures.one_line(error.read(500).decode(errors="replace"))
        return error.code, f"{error.code} {body}".strip()
    except OSError as error:
        return 0, failures.one_line(str(getattr(error, "reason", error)))


def _text(address: str, cluster: admin_service_pb2.GetClusterStatusResponse, gateway: _GatewayStatus) -> str:
    where = gateway.address
    if gateway.http:
        where += f", {gateway.http}"
    state = f"{'ready' if gateway.ready else 'not ready'} at {where}" if gateway.address else "not asked"
    store = "healthy" if cluster.store_healthy else "not answering: the cluster goes on with what it last knew"
    lines = [
        f"Cluster:        {cluster.cluster}",
        f"Control plane:  serving at {address}",
        f"                version {cluster.version or 'unknown'}, revision {cluster.revision}, "
        f"{output.plural(cluster.watchers, 'watcher')}",
        f"Store:          {store}",
        f"Gateway:        {state}" + (f" ({gateway.detail})" if gateway.detail else ""),
    ]
    if not cluster.stages:
        return "\n".join([*lines, "Pipelines:      none; apply one with 'omnictl apply -f FILE'"])
    columns: list[Column[admin_service_pb2.StageStatus]] = [
        Column("STAGE", lambda s: f"{s.stage.pipeline}/{s.stage.stage_id}"),
        Column("NAME", lambda s: s.name),
        Column("ROUTABLE", lambda s: str(s.routable)),
        Column("REGISTERED", lambda s: str(s.registered)),
        Column("PLANNED", lambda s: str(s.wanted)),
        Column("POLICY", lambda s: s.balancing_policy),
    ]
    return "\n".join([*lines, "", output.table(columns, cluster.stages)])
