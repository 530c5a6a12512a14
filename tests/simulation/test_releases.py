"""A vLLM that is not as those we know: the connector passes through, with a reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .world import World

    Make = Callable[..., World]


def reason(w: World) -> str:
    """Why the connector passes through, once four requests for one prefix have been answered as by stock."""
    prompt = w.prompt("abcd", tail=2)
    w.store.put(prompt)
    requests = [w.add(prompt, tokens=3) for _ in range(4)]
    w.run()
    assert {w.status(request) for request in requests} == {"length"}
    assert w.gets == 4
    return str(w.loop.connector.passes_through)


@pytest.mark.parametrize("mode", ["attach", "park", "shadow"])
class TestCalls:
    """vLLM calls a connector otherwise than 0.30 to 0.33 do: nothing of ours is on."""

    def test_a_vllm_that_binds_no_manager(
        self, world: Make, mode: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Before 0.30; or a later one that gives its connectors something else."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

        from connector_patch.connector import SingleFlightMooncakeStoreConnector as Ours

        def instead(self: Any, manager: Any) -> None:
            self.bind_gpu_block_pool(manager.block_pool)

        monkeypatch.delattr(KVConnectorBase_V1, "bind_kv_cache_manager")
        monkeypatch.setattr(Ours, "bind_kv_cache_manager", instead)
        assert "binds no KVCacheManager" in reason(world(mode=mode, refused=True))

    def test_a_call_with_one_more_parameter(
        self, world: Make, mode: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is new reaches the stock code."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import (
            MooncakeStoreConnector,
        )

        from connector_patch.connector import SingleFlightMooncakeStoreConnector

        told: list[Any] = []
        today = MooncakeStoreConnector.get_num_new_matched_tokens

        def tomorrow(self: Any, request: Any, num_computed_tokens: int, ranges: Any = None) -> Any:
            told.append(ranges)
            return today(self, request, num_computed_tokens)

        monkeypatch.setattr(KVConnectorBase_V1, "get_num_new_matched_tokens", tomorrow)
        monkeypatch.setattr(MooncakeStoreConnector, "get_num_new_matched_tokens", tomorrow)
        w = world(mode=mode, refused=True)
        ours = w.loop.connector.get_num_new_matched_tokens
        w.loop.connector.get_num_new_matched_tokens = lambda *known: ours(*known, ranges="from 0 on")
        assert isinstance(w.loop.connector, SingleFlightMooncakeStoreConnector)
        assert "get_num_new_matched_tokens is not as in vLLM 0.30 to 0.33" in reason(w)
        assert set(told) == {"from 0 on"}

    def test_an_answer_of_another_kind(self, world: Make, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Such as ranges of tokens, not a number."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

        def tomorrow(self: Any, request: Any, num_computed_tokens: int) -> list[range]:
            raise NotImplementedError

        monkeypatch.setattr(KVConnectorBase_V1, "get_num_new_matched_tokens", tomorrow)
        assert "get_num_new_matched_tokens is not as" in reason(world(mode=mode, refused=True))


@pytest.mark.parametrize("mode", ["attach", "park"])
class TestFeatures:
    """What attach and park need, and shadow does not."""

    def test_a_vllm_that_cannot_report(self, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A failed load per request: before 0.31."""
        from vllm.v1.core.sched.scheduler import Scheduler

        from connector_patch import compat
        from connector_patch.config import Mode

        monkeypatch.delattr(Scheduler, "_handle_failed_recving")
        assert "cannot report a failed load per request" in str(compat.missing_feature(Mode(mode)))
        assert compat.missing_feature(Mode.SHADOW) is None

    def test_an_allocate_slots_of_another_signature(
        self, world: Make, mode: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        stock = KVCacheManager.allocate_slots

        def tomorrow(self: Any, request: Any, *args: Any, sparse: bool = False, **kwargs: Any) -> Any:
            return stock(self, request, *args, **kwargs)

        monkeypatch.setattr(KVCacheManager, "allocate_slots", tomorrow)
        assert "allocate_slots has another signature" in reason(world(mode=mode, refused=True))

    def test_deferred_loads(self, world: Make, mode: str) -> None:
        """vLLM 0.33 with HiSparse and asynchronous scheduling."""
        assert "a load may start later" in refusal(world, mode, cache={"hisparse_host_num_blocks": 8})

    def test_auxiliary_outputs(self, world: Make, mode: str) -> None:
        """They may cap what the connector has offered."""
        enabled = SimpleNamespace(enabled=True)
        assert "aux_output_config is on" in refusal(world, mode, config={"aux_output_config": enabled})


def refusal(
    world: Make, mode: str, config: Mapping[str, Any] | None = None, cache: Mapping[str, Any] | None = None
) -> str:
    """What compat.py says of a supported deployment with these changes."""
    from connector_patch import compat
    from connector_patch.config import Mode

    from . import ours
    from .engine import changed

    connector = world(mode=mode).loop.connector
    supported = (connector._vllm_config, connector._kv_cache_config)
    changes = (changed(supported[0], **(config or {})), changed(supported[1], **(cache or {})))
    with ours.beside("OtherConnector"):  # other tests of this process have loaded it
        assert compat.unsupported_setup(*supported, Mode(mode)) is None
        return str(compat.unsupported_setup(*changes, Mode(mode)))
