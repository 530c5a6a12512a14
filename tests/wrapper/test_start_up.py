"""What may be wrapped, and what is said of what may not."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from tests.simulation import engine
from tests.simulation.setup import Setup
from tests.wrapper.fakes import CHILD, config, wrapper

WHERE = "kv_connector_extra_config.connector"


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({}, f"{WHERE}: is missing; give the connector to share the loads of, as"),
        (
            {"connector": "LMCacheMPConnector"},
            f"{WHERE}: 'LMCacheMPConnector' is not accepted; give an object",
        ),
        ({"connector": [CHILD]}, "is not accepted; give an object as"),
        ({"connector": {}}, f"{WHERE}.kv_connector: is missing; give a connector's name"),
        (
            {"connector": {"kv_connector": 3}},
            f"{WHERE}.kv_connector: 3 is not accepted; give a connector's name",
        ),
        ({"connector": {**CHILD, "kv_rank": 1}}, f"{WHERE}.kv_rank: unknown key; accepted are those of"),
        ({"connector": {**CHILD, "kv_role": "kv_all"}}, f"{WHERE}: is not accepted by vLLM ("),
        (
            {"connector": {"kv_connector": "NobodysConnector"}},
            f"{WHERE}.kv_connector: NobodysConnector cannot be had (Unsupported connector type",
        ),
        (
            {"connector": {"kv_connector": "X", "kv_connector_module_path": "no.such.module"}},
            f"{WHERE}.kv_connector: X cannot be had (No module named 'no'); give the name of one of vLLM's",
        ),
        (
            {"connector": {"kv_connector": "Path", "kv_connector_module_path": "pathlib"}},
            f"{WHERE}.kv_connector: Path is no connector of vLLM's version 1",
        ),
        (
            {"connector": {"kv_connector": "MultiConnector", "kv_connector_extra_config": {}}},
            f"{WHERE}.kv_connector: MultiConnector is not accepted; put SingleFlightConnector around the one",
        ),
        (
            {"connector": {"kv_connector": "SingleFlightConnector"}},
            f"{WHERE}.kv_connector: SingleFlightConnector shares loads itself; use it alone",
        ),
        (
            {"connector": {"kv_connector": "SingleFlightMooncakeStoreConnector"}},
            f"{WHERE}.kv_connector: SingleFlightMooncakeStoreConnector shares loads itself; use it alone",
        ),
        (
            {"connector": CHILD, "trust": "yes"},
            "kv_connector_extra_config.trust: 'yes' is not accepted; give true or false",
        ),
        (
            {"connector": CHILD, "singleflight": {"mode": "atach"}},
            "singleflight.mode: 'atach' is not accepted",
        ),
    ],
)
def test_bad_input_ends_the_start_up_with_one_sentence(extra: dict[str, Any], sentence: str) -> None:
    from connector_patch.wrapper import SingleFlightConnector

    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        SingleFlightConnector(config(extra), KVConnectorRole.SCHEDULER, engine._kv_cache_config(Setup()))
    assert "\n" not in str(error.value)


def test_the_same_sentence_where_vllm_asks_the_class_first() -> None:
    """It does before it makes a connector, where the model is on a GPU."""
    from connector_patch.wrapper import SingleFlightConnector

    for ask in (
        lambda: SingleFlightConnector.get_required_kvcache_layout(config({})),
        lambda: SingleFlightConnector.requires_piecewise_for_cudagraph({}),
    ):
        with pytest.raises(ValueError, match=f"{WHERE}: is missing"):
            ask()


def test_a_child_without_the_hybrid_manager_is_told_how_to_start() -> None:
    from connector_patch.wrapper import SingleFlightConnector

    extra = {"connector": {**CHILD, "kv_connector": "FakeWithoutGroups"}}
    with pytest.raises(ValueError, match="start with --disable-hybrid-kv-cache-manager"):
        SingleFlightConnector(config(extra), KVConnectorRole.SCHEDULER, engine._kv_cache_config(Setup()))


def bound(made: Any) -> Any:
    """As vLLM's scheduler binds it."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    cache = engine._kv_cache_config(Setup())
    manager = KVCacheManager(cache, max_model_len=64, scheduler_block_size=4, hash_block_size=4)
    made.bind_kv_cache_manager(manager)
    return made


@pytest.mark.parametrize("mode", ["attach", "park", "shadow"])
def test_an_unknown_connector_passes_through(mode: str) -> None:
    made = bound(wrapper(mode))
    assert made.mode.value == "off"
    assert made.passes_through.startswith("nobody has tried whether FakeChild keeps what a wrapped connector")
    made.child.answers["get_num_new_matched_tokens"] = (8, True)
    assert made.get_num_new_matched_tokens(SimpleNamespace(request_id="r1"), 4) == (8, True)


@pytest.mark.parametrize("mode", ["attach", "park", "shadow"])
def test_an_unknown_connector_that_is_trusted_is_wrapped(mode: str) -> None:
    made = bound(wrapper(mode, trust=True))
    assert (made.mode.value, made.passes_through) == (mode, None)


@pytest.mark.parametrize("mode", ["attach", "park"])
def test_several_groups_whose_windows_nobody_vouches_for(mode: str) -> None:
    """OffloadingConnector in our simulation leaves wrong KV in CPU memory there, in stock as well."""
    made = wrapper(mode, trust=True)
    made._kv_cache_config = engine._kv_cache_config(Setup(spec="window"))
    assert str(bound(made).passes_through).startswith("the model has 3 KV-cache groups, and nobody")


def test_a_drafter_that_reads_hidden_states() -> None:
    made = wrapper("attach", trust=True)
    made.child_config = engine.changed(
        made.child_config, speculative_config=SimpleNamespace(method="eagle", use_eagle=lambda: True)
    )
    assert str(bound(made).passes_through).startswith("the drafter reads hidden states")


def test_without_a_verdict_auto_counts_and_says_what_to_do() -> None:
    """The default mode."""
    made = bound(wrapper("auto", trust=True))
    assert made.mode.value == "shadow"
    assert "no verdict is named" in made.objection
