"""What `singleflight doctor` has vLLM itself answer. Every function here imports it."""

from __future__ import annotations


def registered_module(connector: str) -> str:
    """The module of the class that vLLM has by this name. ValueError if it knows none."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return KVConnectorFactory.get_connector_class_by_name(connector).__module__


def read_mooncake_config(path: str) -> None:
    """Have vLLM's own reader take the Mooncake JSON. OSError, ValueError or TypeError if it does not."""
    from vllm.distributed.mooncake_store import MooncakeStoreConfig

    MooncakeStoreConfig.from_file(path)
