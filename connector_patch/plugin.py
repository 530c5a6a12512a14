"""The `vllm.general_plugins` entry point: makes the connector known to vLLM by its name."""

from __future__ import annotations

NAME = "SingleFlightMooncakeStoreConnector"


def register() -> None:
    """Called by vLLM in every one of its processes; a second call is fine."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "connector_patch.connector", NAME)
