"""Who may call what: one table for all services. Pure.

A caller has roles: those that its certificate names, and those of the token that it sends (``omnicore.authorize``).
A method that is not listed here is an administrator's.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class Role(enum.StrEnum):
    """What a caller is, and what a server must be to be believed."""

    ADMIN = "admin"
    """Changes pipelines and replicas."""
    CONTROL_PLANE = "control-plane"
    """Controls workers."""
    GATEWAY = "gateway"
    """Follows the registry, sends requests to workers."""
    WORKER = "worker"
    """Registers, exchanges data with other workers."""
    CLIENT = "client"
    """Reads, and sends requests to gateways. Also who has a good certificate that names no role."""


EVERYONE: Final = frozenset(Role)
_ADMIN = frozenset({Role.ADMIN})
_WORKER = frozenset({Role.WORKER})
_REQUESTS = frozenset({Role.GATEWAY, Role.ADMIN})
_CLIENTS = frozenset({Role.CLIENT, Role.GATEWAY, Role.ADMIN})

SERVICES: Final[Mapping[str, frozenset[Role]]] = {
    "omni.v1.RegistryService": EVERYONE,
    "omni.v1.PipelineService": EVERYONE,
    "omni.v1.AdminService": _ADMIN,
    "omni.v1.InspectService": _ADMIN,
    "omni.v1.InferenceService": _CLIENTS,
    "omni.v1.RouterService": _CLIENTS,
    "omni.v1.StageService": _REQUESTS,
    "omni.v1.TransferService": _WORKER,
    "omni.v1.ReferenceTransferService": _WORKER,
    "grpc.health.v1.Health": EVERYONE,
    "grpc.reflection.v1alpha.ServerReflection": EVERYONE,
    "grpc.channelz.v1.Channelz": _ADMIN,
}
"""Who may call a service's methods, but for those in ``METHODS``."""

METHODS: Final[Mapping[str, frozenset[Role]]] = {
    "omni.v1.RegistryService/Register": _WORKER,
    "omni.v1.RegistryService/Heartbeat": _WORKER,
    "omni.v1.RegistryService/Deregister": _WORKER,
    "omni.v1.PipelineService/ApplyPipeline": _ADMIN,
    "omni.v1.PipelineService/DeletePipeline": _ADMIN,
    "omni.v1.AdminService/GetClusterStatus": EVERYONE,
    "omni.v1.InspectService/GetStoreStatus": EVERYONE,
    "omni.v1.InspectService/ListPulses": EVERYONE,
    "omni.v1.StageService/Control": frozenset({Role.CONTROL_PLANE}),
    "omni.v1.StageService/GetStageInfo": EVERYONE,
}


def allowed(method: str) -> frozenset[Role]:
    """The roles of which a caller of ``method`` ("/package.Service/Method") needs one."""
    name = method.removeprefix("/")
    return METHODS.get(name) or SERVICES.get(name.rpartition("/")[0], _ADMIN)
