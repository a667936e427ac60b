"""Which connector joins which stages."""

from __future__ import annotations

import dataclasses
from typing import Any

from connectors.reference.base import Stage, stage_name


@dataclasses.dataclass
class ConnectorSpec:
    """A connector's class and its options."""

    name: str
    """Class name, such as "SharedMemoryConnector", or kind."""
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of that class."""


@dataclasses.dataclass
class OmniTransferConfig:
    """The connectors of a pipeline."""

    connectors: dict[tuple[str, str], ConnectorSpec] = dataclasses.field(default_factory=dict)
    """By (from stage, to stage)."""
    default_connector: ConnectorSpec | None = None
    """For edges that have none of their own."""

    def __post_init__(self) -> None:
        self.connectors = {(stage_name(a), stage_name(b)): spec for (a, b), spec in self.connectors.items()}

    def get_connector_for_edge(self, from_stage: Stage, to_stage: Stage) -> ConnectorSpec | None:
        """The edge's connector, else the default one, which may be None."""
        return self.connectors.get((stage_name(from_stage), stage_name(to_stage)), self.default_connector)

    def has_connector_for_edge(self, from_stage: Stage, to_stage: Stage) -> bool:
        """Whether there is one."""
        return self.get_connector_for_edge(from_stage, to_stage) is not None
