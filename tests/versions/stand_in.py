"""A pytest plug-in: our connector wherever vLLM's own tests name the stock one.

SINGLEFLIGHT_STAND_IN says in which mode it starts where a test configures none; `stock` changes nothing.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "SINGLEFLIGHT_STAND_IN"
MODE = os.environ.get(VARIABLE, "stock")


def pytest_configure() -> None:
    if MODE == "stock":
        return
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import connector as stock

    from connector_patch import config, connector

    parse = config.parse

    def parsed(given: Any) -> config.Config:
        return parse({"mode": MODE} if given is None else given)

    config.parse = parsed
    stock.MooncakeStoreConnector = connector.SingleFlightMooncakeStoreConnector
