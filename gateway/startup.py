"""Whether this gateway has ever seen what its pipelines plan. For launchers whose users wait for /health."""

from __future__ import annotations

from gateway.router import Router


class StartupGate:
    """Closed until every stage of every pipeline has had all its planned replicas at one moment; then open for good:
    replicas that are lost later are no reason to call a gateway ill. ``wait`` False: open from the start."""

    def __init__(self, router: Router, *, wait: bool) -> None:
        self._router = router
        self._open = not wait

    def missing(self) -> dict[str, dict[str, str]] | None:
        """None once it is open; else "routable of planned" for each stage of each pipeline that lacks replicas."""
        if self._open:
            return None
        found = lacking(self._router)
        self._open = bool(self._router.table.pipelines) and not found
        return None if self._open else found


def lacking(router: Router) -> dict[str, dict[str, str]]:
    """ "routable of planned" for each stage of each pipeline that has fewer replicas than its plan."""
    found: dict[str, dict[str, str]] = {}
    for name, graph in router.table.pipelines.items():
        for stage_id, stage in graph.stages.items():
            pool = router.pools.get((name, stage_id))
            routable = pool.routable if pool is not None else 0
            if routable < stage.num_replicas:
                found.setdefault(name, {})[str(stage_id)] = f"{routable} of {stage.num_replicas}"
    return found
