"""What users name in their configuration and code: these names do not move."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

import pytest

NAMES = {
    "singleflight": ["__version__"],
    "singleflight.aio": [
        "FlightError",
        "FlightGroup",
        "FlightHandle",
        "FlightReset",
        "FlightTimeout",
        "LoadFailed",
        "Loader",
        "Outcome",
        "Policy",
        "Reason",
    ],
    "connector_patch.connector": ["SingleFlightMooncakeStoreConnector"],
    "connector_patch.plugin": ["NAME", "WRAPPER", "register"],
    "connector_patch.wrapper": ["SingleFlightConnector"],
    "connector_patch.command": ["main"],
}


@pytest.mark.parametrize("module", NAMES)
def test_every_public_name_can_be_imported(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []


def test_all_of_aio_is_on_the_list() -> None:
    assert sorted(importlib.import_module("singleflight.aio").__all__) == sorted(NAMES["singleflight.aio"])


def test_the_command_and_the_plug_in_are_installed_under_their_names() -> None:
    (command,) = entry_points(group="console_scripts", name="singleflight")
    (plugin,) = entry_points(group="vllm.general_plugins", name="kv_singleflight")
    assert command.value == "connector_patch.command:main"
    assert plugin.value == "connector_patch.plugin:register"
    assert callable(command.load())
    assert callable(plugin.load())


def test_the_connector_is_known_to_vllm_by_its_name() -> None:
    from connector_patch.plugin import NAME, WRAPPER

    assert NAME == "SingleFlightMooncakeStoreConnector"
    assert WRAPPER == "SingleFlightConnector"
