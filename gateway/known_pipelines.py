"""The pipelines that a gateway knows, and whether it has heard of all of them yet."""

from __future__ import annotations

from gateway.graph import PipelineGraph


class KnownPipelines(dict[str, PipelineGraph]):
    """Name → graph. A gateway that has just started knows none: that is not the same as there being none."""

    heard = False
    """A control plane has told of all of them, at least once."""
