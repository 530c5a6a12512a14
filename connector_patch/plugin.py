"""The `vllm.general_plugins` entry point: makes the connectors known to vLLM by their names."""

from __future__ import annotations

NAME = "SingleFlightMooncakeStoreConnector"
WRAPPER = "SingleFlightConnector"
MODULES = {NAME: "connector_patch.connector", WRAPPER: "connector_patch.wrapper"}


def register() -> None:
    """Called by vLLM in every one of its processes; a second call is fine."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name, module in MODULES.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, name)
