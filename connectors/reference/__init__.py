"""vLLM-Omni's connector interface over our connectors: for programs that were written against it.

Synchronous calls from any thread, class names and options as there. Nothing else in this repository uses it; it may
import the rest of ``connectors`` and nothing more. docs/reference-facade.md tells what is the same and what is not.
"""

from connectors.reference.base import OmniConnectorBase
from connectors.reference.classes import (
    CudaIpcConnector,
    GrpcConnector,
    MooncakeConnector,
    MooncakeStoreConnector,
    MooncakeTransferEngineConnector,
    MoriTransferEngineConnector,
    NixlConnector,
    SharedMemoryConnector,
    YuanrongConnector,
    YuanrongTransferEngineConnector,
)
from connectors.reference.factory import OmniConnectorFactory
from connectors.reference.load import TransferConfigError, load_omni_transfer_config
from connectors.reference.received import ManagedBuffer
from connectors.reference.spec import ConnectorSpec, OmniTransferConfig
from connectors.reference.stages import get_connectors_config_for_stage, resolve_connector_spec

__all__ = [
    "ConnectorSpec",
    "CudaIpcConnector",
    "GrpcConnector",
    "ManagedBuffer",
    "MooncakeConnector",
    "MooncakeStoreConnector",
    "MooncakeTransferEngineConnector",
    "MoriTransferEngineConnector",
    "NixlConnector",
    "OmniConnectorBase",
    "OmniConnectorFactory",
    "OmniTransferConfig",
    "SharedMemoryConnector",
    "TransferConfigError",
    "YuanrongConnector",
    "YuanrongTransferEngineConnector",
    "get_connectors_config_for_stage",
    "load_omni_transfer_config",
    "resolve_connector_spec",
]
