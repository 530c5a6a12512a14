"""What happens at start-up: off, wrong configuration, and setups that attach mode passes through."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from connector_patch.config import Mode
from singleflight.cli import serve_line
from singleflight.stack import probe
from singleflight.stack.arms import OURS, arm
from singleflight.stack.embedded import EmbeddedError

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine
    from singleflight.stack.embedded import Stack


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


def test_found_by_module_path_its_statistics_are_found_by_name() -> None:
    """MultiConnector looks up the class of each child's statistics by name, in the front end. A child that no
    entry point has registered would end that with a ValueError."""
    said = (
        "import connector_patch.connector;"
        "from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector;"
        "stats = MultiConnector.build_kv_connector_stats({'SingleFlightMooncakeStoreConnector': {}});"
        "assert 'SingleFlightStats' in repr(type(stats['SingleFlightMooncakeStoreConnector']))"
    )
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", said], cwd=root, env={**os.environ, "VLLM_PLUGINS": ""})
    assert ran.returncode == 0


WITHOUT_PREFIX_CACHING = """
import sys
from connector_patch.lab.engine import Engine
from connector_patch.plugin import NAME

Engine(sys.argv[1], NAME, enable_prefix_caching=False).close()
"""


@pytest.mark.engine
def test_doctor_says_beforehand_what_an_engine_then_logs(stack: Stack, ours: Engine) -> None:
    """`singleflight doctor --model` for a supported and an unsupported engine."""

    def attach_mode(*arguments: str) -> str:
        line = [*("--dtype", "float32", "--block-size", "32", "--max-model-len", "8192"), *arguments]
        return {each.what: each.says for each in serve_line.findings(str(stack.model), line)}["attach mode"]

    assert ours.connector.passes_through is None
    assert attach_mode() == "would be on"
    env = stack.env(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="INFO")
    argv = [sys.executable, "-c", WITHOUT_PREFIX_CACHING, str(stack.model)]
    done = subprocess.run(
        argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240
    )
    (logged,) = [line for line in done.stdout.splitlines() if "passes through" in line]
    said = attach_mode("--no-enable-prefix-caching")
    assert said == "would pass through to the stock connector: prefix caching is off"
    assert logged.endswith(f"{said.replace('would pass', 'passes')}.")


def one_group(spec: Any) -> Any:
    """A KV cache configuration."""
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])


@pytest.mark.engine
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
            (
                {"speculative_config": SimpleNamespace(method="medusa")},
                "speculative decoding is on (medusa)",
            ),
            (
                {
                    "speculative_config": SimpleNamespace(method="mtp"),
                    "num_prefill_lookahead_tokens": 2,
                },
                "the drafter has several MTP modules, each of which reads one token further ahead",
            ),
            *(
                (
                    {"parallel_config": SimpleNamespace(prefill_context_parallel_size=2, **{other: 2})},
                    "prefill context parallelism is combined with another, where the store's keys are not"
                    " each rank's own",
                )
                for other in ("pipeline_parallel_size", "decode_context_parallel_size")
            ),
            ({"cache_config": SimpleNamespace(enable_prefix_caching=False)}, "prefix caching is off"),
            (
                {"kv_transfer_config": SimpleNamespace(kv_connector_extra_config={"load_async": False})},
                "load_async is false: vLLM's store worker asserts that it is true, and the engine ends at its"
                " first step",
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
        reason = compat.unsupported_setup(setup[0], two)
        said = "the model has 2 KV-cache groups, and they are not windowed ones beside full attention"
        assert reason == said

    def test_windows_and_speculation(self, setup: tuple[Any, Any]) -> None:
        from vllm.v1.kv_cache_interface import SlidingWindowSpec

        from connector_patch import compat

        (plain,) = setup[1].kv_cache_groups
        shape = {name: getattr(plain.kv_cache_spec, name) for name in ("block_size", "num_kv_heads")}
        shape |= {name: getattr(plain.kv_cache_spec, name) for name in ("head_size", "dtype")}
        windowed = SimpleNamespace(kv_cache_spec=SlidingWindowSpec(**shape, sliding_window=64))
        both: Any = SimpleNamespace(kv_cache_groups=[windowed, plain])
        config = SimpleNamespace(**{name: getattr(setup[0], name) for name in vars(setup[0])})
        assert compat.unsupported_setup(config, both) is None  # type: ignore[arg-type]
        config.speculative_config = SimpleNamespace(method="ngram")
        said = "speculative decoding is on (ngram), in a model of several KV-cache groups"
        assert compat.unsupported_setup(config, both) == said  # type: ignore[arg-type]

    def test_a_drafter_with_a_group_of_its_own(self, setup: tuple[Any, Any]) -> None:
        """Stock leaves out the last block of that group's hits alone."""
        from connector_patch import compat

        config = SimpleNamespace(**{name: getattr(setup[0], name) for name in vars(setup[0])})
        config.speculative_config = SimpleNamespace(method="eagle3")
        two = SimpleNamespace(kv_cache_groups=setup[1].kv_cache_groups * 2)
        assert compat.unsupported_setup(config, two) is not None  # type: ignore[arg-type]

    def test_a_sliding_window(self, setup: tuple[Any, Any]) -> None:
        from dataclasses import replace

        from connector_patch import compat

        spec = replace(setup[1].kv_cache_groups[0].kv_cache_spec, sliding_window=64)
        reason = compat.unsupported_setup(setup[0], one_group(spec))
        assert reason == "the KV-cache group is windowed (64 tokens), not plain full attention"

    @pytest.mark.parametrize(
        ("kind", "fields", "reason"),
        [
            ("HiddenStateCacheSpec", {}, "is HiddenStateCacheSpec"),
            ("SlidingWindowSpec", {"sliding_window": 64}, "is windowed (64 tokens)"),
            ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 32}, "has attention chunks (32 tokens)"),
            ("SinkFullAttentionSpec", {"sink_len": 4}, "is SinkFullAttentionSpec"),
            ("CrossAttentionSpec", {}, "is CrossAttentionSpec"),
        ],
    )
    def test_a_kind_of_kv_cache_nobody_tests(
        self, setup: tuple[Any, Any], kind: str, fields: dict[str, int], reason: str
    ) -> None:
        from vllm.v1 import kv_cache_interface

        from connector_patch import compat

        plain = setup[1].kv_cache_groups[0].kv_cache_spec
        shape = {name: getattr(plain, name) for name in ("block_size", "num_kv_heads", "head_size", "dtype")}
        spec = getattr(kv_cache_interface, kind)(**shape, **fields)
        said = f"the KV-cache group {reason}, not plain full attention"
        assert compat.unsupported_setup(setup[0], one_group(spec)) == said

    def test_recurrent_layers(self, setup: tuple[Any, Any]) -> None:
        from vllm.v1.kv_cache_interface import MambaSpec

        from connector_patch import compat

        spec = MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(setup[0].model_config.dtype,))
        said = "the KV-cache group is MambaSpec, not plain full attention"
        assert compat.unsupported_setup(setup[0], one_group(spec)) == said

    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_a_scheduler_of_somebody_elses(self, setup: tuple[Any, Any], asynchronous: bool) -> None:
        from vllm.config import SchedulerConfig
        from vllm.v1.core.sched.scheduler import Scheduler

        from connector_patch import compat

        class Theirs(Scheduler): ...

        config = SimpleNamespace(**{name: getattr(setup[0], name) for name in vars(setup[0])})
        config.scheduler_config = SchedulerConfig.default_factory(
            max_model_len=64, is_encoder_decoder=False, async_scheduling=asynchronous
        )
        assert compat.unsupported_setup(config, setup[1]) is None  # type: ignore[arg-type]
        config.scheduler_config.scheduler_cls = Theirs
        reason = compat.unsupported_setup(config, setup[1])  # type: ignore[arg-type]
        assert reason == f"the scheduler is {__name__}.{Theirs.__qualname__}, not vLLM's own"

    def test_multi_connector(self, setup: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

        from connector_patch import compat, matrix

        monkeypatch.setitem(sys.modules, matrix.MULTI_CONNECTOR, sys)
        # The simulation's second connector may be loaded in this process.
        monkeypatch.setattr(matrix, "READ", matrix.READ | {"OtherConnector"})
        assert compat.unsupported_setup(*setup) is None
        monkeypatch.delattr(KVConnectorBase_V1, "get_loaded_kv_cache_group_ids")
        assert "does not say whom it has chosen to load" in str(compat.unsupported_setup(*setup))
        assert compat.unsupported_setup(*setup, Mode.PARK) is None, "park mode need not know"

    def test_a_neighbour_that_keeps_blocks(
        self, setup: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is noticed by its class, which is loaded; without MultiConnector it is no matter."""
        from connector_patch import compat, matrix

        # One that is loaded in every process.
        monkeypatch.setattr(matrix, "READ", (matrix.READ | {"OtherConnector"}) - {"DecodeBenchConnector"})
        monkeypatch.delitem(sys.modules, matrix.MULTI_CONNECTOR, raising=False)
        assert compat.unsupported_setup(*setup) is None
        monkeypatch.setitem(sys.modules, matrix.MULTI_CONNECTOR, sys)
        assert str(compat.unsupported_setup(*setup)).startswith("DecodeBenchConnector is beside it")
        assert compat.unsupported_setup(*setup, Mode.PARK) is None

    def test_a_manager_that_caches_nothing(self, ours: Engine) -> None:
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        from connector_patch import compat

        manager = KVCacheManager.__new__(KVCacheManager)
        manager.enable_caching = False
        reason = compat.unsupported_manager(manager, ours.connector.connector_scheduler)
        assert reason == "prefix caching is off"

    def test_somebody_elses_wrapper(self, ours: Engine) -> None:
        """Ours is there already, which is what a second wrapper would look like."""
        from connector_patch import compat

        manager = ours.scheduler.kv_cache_manager
        assert "wrapped" in str(compat.unsupported_manager(manager, ours.connector.connector_scheduler))
