"""What happens at start-up: off, wrong configuration, and setups that attach mode passes through."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from singleflight import probe
from singleflight.arms import OURS, arm
from singleflight.embedded import EmbeddedError

if TYPE_CHECKING:
    from connector_patch.engine import Engine
    from singleflight.embedded import Stack


@pytest.mark.engine
def test_off_costs_exactly_what_stock_costs(stack: Stack) -> None:
    """N requests, N of everything: off is the stock connector."""
    with arm(stack, OURS, {"singleflight": {"mode": "off"}}) as off:
        off.answer()
        asked = {name.replace("probe", "off"): p for name, p in probe.prompts(4).items()}
        off.ask("fill", prompts=[[*asked["off-0"][: probe.BLOCK_SIZE], 3]])
        counts = off.ask("burst", prompts=asked, barrier=True)["counts"]
    block = counts.pop("bytes")
    assert block % 4 == 0
    assert counts == dict.fromkeys(counts, 4)


@pytest.mark.engine
def test_wrong_configuration_ends_the_start_up_with_its_sentence(stack: Stack) -> None:
    with (
        arm(stack, OURS, {"singleflight": {"mode": "atach"}}) as wrong,
        pytest.raises(EmbeddedError) as error,
    ):
        wrong.answer()
    assert "singleflight.mode: 'atach' is not accepted; give one of auto, off, attach, park" in str(
        error.value
    )


class TestPassThrough:
    """Every setup outside the tested one is stock behaviour, with a reason."""

    @pytest.fixture
    def setup(self, ours: Engine) -> tuple[Any, Any]:
        """The running engine's configuration, which is supported; tests change one thing in a copy."""
        connector = ours.connector
        return connector._vllm_config, connector._kv_cache_config

    def test_the_tested_setup_is_supported(self, ours: Engine, setup: tuple[Any, Any]) -> None:
        from connector_patch import compat

        assert compat.missing_feature() is None
        assert compat.unsupported_setup(*setup) is None
        assert ours.connector.passes_through is None

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"speculative_config": object()}, "speculative decoding is on"),
            (
                {"parallel_config": SimpleNamespace(decode_context_parallel_size=2)},
                "decode_context_parallel_size is 2, not 1",
            ),
            (
                {"parallel_config": SimpleNamespace(pipeline_parallel_size=2)},
                "pipeline_parallel_size is 2, not 1",
            ),
            ({"cache_config": SimpleNamespace(enable_prefix_caching=False)}, "prefix caching is off"),
            (
                {"kv_transfer_config": SimpleNamespace(kv_connector_extra_config={"load_async": False})},
                "load_async is false",
            ),
        ],
    )
    def test_a_setting_nobody_tests(
        self, setup: tuple[Any, Any], change: dict[str, Any], reason: str
    ) -> None:
        from connector_patch import compat

        config = SimpleNamespace(**{name: getattr(setup[0], name) for name in vars(setup[0])})
        vars(config).update(change)
        assert compat.unsupported_setup(config, setup[1]) == reason  # type: ignore[arg-type]

    def test_two_kv_cache_groups(self, setup: tuple[Any, Any]) -> None:
        from connector_patch import compat

        two = SimpleNamespace(kv_cache_groups=setup[1].kv_cache_groups * 2)
        assert compat.unsupported_setup(setup[0], two) == "the model has 2 KV-cache groups, not one"

    def test_a_sliding_window(self, setup: tuple[Any, Any]) -> None:
        from dataclasses import replace

        from connector_patch import compat

        spec = replace(setup[1].kv_cache_groups[0].kv_cache_spec, sliding_window=64)
        windowed = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
        assert "windowed" in str(compat.unsupported_setup(setup[0], windowed))

    def test_multi_connector(self, setup: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        import sys

        from connector_patch import compat

        monkeypatch.setitem(sys.modules, compat.MULTI_CONNECTOR, sys)
        assert compat.unsupported_setup(*setup) == "MultiConnector is in use"
        assert compat.unsupported_setup(*setup, adopting=False) is None, "park mode need not know"

    def test_an_allocate_slots_of_another_signature(
        self, monkeypatch: pytest.MonkeyPatch, ours: Engine
    ) -> None:
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        from connector_patch import compat

        def allocate_slots(self: Any, request: Any, num_new_tokens: int) -> None: ...

        monkeypatch.setattr(KVCacheManager, "allocate_slots", allocate_slots)
        assert "another signature than 0.32" in str(compat.missing_feature())

    def test_a_vllm_without_the_binding(self, monkeypatch: pytest.MonkeyPatch, ours: Engine) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

        from connector_patch import compat

        monkeypatch.delattr(KVConnectorBase_V1, "bind_kv_cache_manager")
        assert "no bind_kv_cache_manager" in str(compat.missing_feature())

    def test_somebody_elses_wrapper(self, ours: Engine) -> None:
        """Ours is there already, which is what a second wrapper would look like."""
        from connector_patch import compat

        manager = ours.scheduler.kv_cache_manager
        assert "wrapped" in str(compat.unsupported_manager(manager, ours.connector.connector_scheduler))
