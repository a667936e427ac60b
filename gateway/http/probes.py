"""GET /health, /ready, /metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from gateway.http.exchange import Exchange
from gateway.http.service import HttpService
from gateway.processes import together
from gateway.startup import lacking
from omnicore.clock import SYSTEM_CLOCK


class Probes:
    """What tells about the gateway and its metrics."""

    def __init__(self, service: HttpService) -> None:
        self._service = service
        self._started_s = SYSTEM_CLOCK.monotonic()
        service.siblings.answer("ready", self._answer_ready)
        service.siblings.answer("metrics", self._answer_metrics)

    async def health(self, exchange: Exchange) -> None:
        """The process works. Replicas that are missing do not make it ill: restarting it would not bring them. Only
        where it shall wait for the planned ones, it is not well before they were all there."""
        if (missing := self._service.startup.missing()) is not None:
            await exchange.json({"status": "starting", "missing": missing}, 503)
            return
        router = self._service.router
        ready = router.ready_pipelines()
        whole = bool(ready) and all(ready.values()) and not lacking(router)
        degraded = not whole or not self._service.metrics.control_plane_connected
        uptime_s = round(SYSTEM_CLOCK.monotonic() - self._started_s, 1)
        await exchange.json({"status": "ok", "degraded": degraded, "uptime_s": uptime_s})

    async def ready(self, exchange: Exchange) -> None:
        """200 if requests for at least one pipeline can be served, 503 otherwise and while shutting down. Of several
        processes: whether all that are there can; one that does not answer cannot."""
        siblings = self._service.siblings
        payload = self._readiness()
        if not siblings.place.alone:
            own, others = siblings.place.index, await siblings.ask("ready")
            answers = {own: payload, **others.given}
            payload = together.readiness(own, answers, siblings.place.count, others.silent)
        await exchange.json(payload, 200 if payload["ready"] else 503)

    async def _answer_ready(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return self._readiness()

    def _readiness(self) -> dict[str, Any]:
        """This process."""
        router, orchestrator = self._service.router, self._service.orchestrator
        ready = router.ready_pipelines()
        draining = orchestrator.admission.draining
        missing = self._service.startup.missing()
        return {
            "ready": any(ready.values()) and missing is None and not draining,
            **({"missing": missing} if missing is not None else {}),
            "draining": draining,
            "control_plane_connected": self._service.metrics.control_plane_connected,
            "stale": router.table.stale,
            "revision": router.table.revision,
            "inflight_requests": orchestrator.admission.inflight,
            "pipelines": {
                name: {
                    "ready": ready[name],
                    "routable_replicas": {
                        str(stage_id): router.pools[name, stage_id].routable for stage_id in sorted(graph.stages)
                    },
                }
                for name, graph in sorted(router.table.pipelines.items())
            },
        }

    async def metrics(self, exchange: Exchange) -> None:
        """Prometheus' text format. Of several processes: of all, each series with the label ``process``."""
        siblings = self._service.siblings
        text = self._service.metrics.scrape()
        if not siblings.place.alone:
            answers = await siblings.ask("metrics")
            others = {index: str(answer).encode() for index, answer in answers.given.items()}
            text = together.metrics({siblings.place.index: text, **others}, siblings.place.count)
        headers = ((b"content-type", CONTENT_TYPE_LATEST.encode()),)
        await exchange.respond(200, text, headers)

    async def _answer_metrics(self, _: Mapping[str, Any]) -> str:
        return self._service.metrics.scrape().decode()
