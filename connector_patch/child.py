"""`kv_connector_extra_config["connector"]`: the one connector that SingleFlightConnector wraps."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from singleflight.files import shown

from . import plugin

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

WHERE = "kv_connector_extra_config.connector"
SEVERAL = "MultiConnector"
EXAMPLE = '{"kv_connector": "LMCacheMPConnector"}'


def named(vllm_config: VllmConfig) -> tuple[type[KVConnectorBase_V1], VllmConfig]:
    """The child's class, and the configuration to make it with: ours, but for what `connector` says.

    Raises ValueError: what is wrong with `connector`, and what is accepted.
    """
    from vllm.config import KVTransferConfig

    ours = vllm_config.kv_transfer_config
    assert ours is not None
    kind, given = kind_of(ours.kv_connector_extra_config)
    try:
        transfer = KVTransferConfig(**{"engine_id": ours.engine_id, "kv_role": ours.kv_role, **given})
    except ValueError as error:
        raise ValueError(f"{WHERE}: is not accepted by vLLM ({_first_line(error)})") from None
    config = copy.copy(vllm_config)
    object.__setattr__(config, "kv_transfer_config", transfer)
    return kind, config


def kind_of(extra: Mapping[str, Any]) -> tuple[type[KVConnectorBase_V1], Mapping[str, Any]]:
    """The child's class, and what `connector` says. Raises ValueError as `named` does."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    given = _given(extra, [field.name for field in fields(KVTransferConfig)])
    name, module = given["kv_connector"], given.get("kv_connector_module_path")
    if name == SEVERAL and not module:
        raise ValueError(_put_it_outside(name))
    try:
        kind = KVConnectorFactory.get_connector_class(
            KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_module_path=module)
        )
    except Exception as error:  # whatever an import raises
        raise ValueError(
            f"{WHERE}.kv_connector: {shown.text(name)} cannot be had ({_first_line(error)}); give the name of"
            " one of vLLM's connectors, and kv_connector_module_path if it is somebody else's"
        ) from None
    if not (isinstance(kind, type) and issubclass(kind, KVConnectorBase_V1)):
        raise ValueError(f"{WHERE}.kv_connector: {shown.text(name)} is no connector of vLLM's version 1")
    if any(base.__name__ == SEVERAL for base in kind.__mro__):
        raise ValueError(_put_it_outside(kind.__name__))
    if any(getattr(base, "coalesces", False) for base in kind.__mro__):
        raise ValueError(
            f"{WHERE}.kv_connector: {kind.__name__} shares loads itself; use it alone, or give the connector"
            " whose loads are to be shared"
        )
    return kind, given


def trusted(extra: Mapping[str, Any]) -> bool:
    """Whether `trust` is set. Raises ValueError if it is no true or false."""
    found = extra.get("trust", False)
    if not isinstance(found, bool):
        raise ValueError(
            f"kv_connector_extra_config.trust: {shown.as_python(found)} is not accepted; give true or false"
        )
    return found


def _put_it_outside(name: str) -> str:
    return (
        f"{WHERE}.kv_connector: {name} is not accepted; put {plugin.WRAPPER} around the one connector whose"
        f" loads are to be shared, and list it in {name}"
    )


def _given(extra: Mapping[str, Any], accepted: list[str]) -> Mapping[str, Any]:
    if "connector" not in extra:
        raise ValueError(f"{WHERE}: is missing; give the connector to share the loads of, as {EXAMPLE}")
    given = extra["connector"]
    if not isinstance(given, Mapping):
        raise ValueError(f"{WHERE}: {shown.as_python(given)} is not accepted; give an object as {EXAMPLE}")
    for key in given:
        if key not in accepted:
            raise ValueError(
                f"{WHERE}.{shown.text(str(key))}: unknown key; accepted are those of --kv-transfer-config"
                f" ({', '.join(accepted)})"
            )
    name = given.get("kv_connector")
    if not isinstance(name, str) or not name:
        said = "is missing" if "kv_connector" not in given else f"{shown.as_python(name)} is not accepted"
        raise ValueError(f"{WHERE}.kv_connector: {said}; give a connector's name, as {EXAMPLE}")
    return given


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return shown.text(lines[0] if lines else type(error).__name__, 200)
