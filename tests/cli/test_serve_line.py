"""`singleflight doctor --model`: what attach mode would come to, told before a start.

The models are shapes without weights: folders with nothing but a config.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from singleflight.cli import serve_line
from singleflight.cli.doctor import Grade

COMMAND = [str(Path(sys.executable).parent / "singleflight")]
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "gemma3": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 16,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "deepseek": {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "jamba": {
        "model_type": "jamba",
        "architectures": ["JambaForCausalLM"],
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
}
ASK = """
import json, sys
from connector_patch import preview
for out, model, arguments, breaks in json.loads(sys.argv[1]):
    build = preview.initialize_model
    if breaks:
        preview.initialize_model = lambda *_: 1 / 0
    preview.main(out, model, *arguments)
    preview.initialize_model = build
"""
ASKED: dict[str, tuple[str, list[str], bool]] = {
    "llama": ("llama", ["--tensor-parallel-size", "2", "--served-model-name", "x", "--port", "0"], False),
    "llama, no prefix caching": ("llama", ["--no-enable-prefix-caching"], False),
    "llama, no hub": ("nobody/nothing", [], False),
    "llama, another connector": (
        "llama",
        ["--kv-transfer-config", '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'],
        False,
    ),
    "llama, misspelt": (
        "llama",
        [
            "--kv-transfer-config",
            '{"kv_connector": "SingleFlightMooncakeStoreConnector", "kv_role": "kv_both",'
            ' "kv_connector_extra_config": {"singleflight": {"mode": "atach"}}}',
        ],
        False,
    ),
    "llama, wrapped": (
        "llama",
        [
            "--kv-transfer-config",
            '{"kv_connector": "SingleFlightConnector", "kv_role": "kv_both", "kv_connector_extra_config":'
            ' {"connector": {"kv_connector": "MooncakeStoreConnector"}, "singleflight": {"mode": "attach"}}}',
        ],
        False,
    ),
    "llama, a stranger wrapped": (
        "llama",
        [
            "--kv-transfer-config",
            '{"kv_connector": "SingleFlightConnector", "kv_role": "kv_both", "kv_connector_extra_config":'
            ' {"connector": {"kv_connector": "ExampleConnector"}}}',
            "--disable-hybrid-kv-cache-manager",
        ],
        False,
    ),
    "llama, nothing wrapped": (
        "llama",
        ["--kv-transfer-config", '{"kv_connector": "SingleFlightConnector", "kv_role": "kv_both"}'],
        False,
    ),
    "gemma3": ("gemma3", [], False),
    "gemma3, not to be built": ("gemma3", [], True),
    "deepseek": ("deepseek", [], False),
    "jamba": ("jamba", ["--mamba-cache-mode", "align", "--enable-prefix-caching"], False),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The answers of one process to all that is asked here: what takes long is to import vLLM."""
    folder = tmp_path_factory.mktemp("models")
    for name, more in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(SHAPE | more))
    asked = []
    for i, (model, arguments, breaks) in enumerate(ASKED.values()):
        path = str(folder / model) if model in MODELS else model
        asked.append([str(folder / f"{i}.json"), path, ["--max-model-len", "256", *arguments], breaks])
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(asked)], env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: json.loads((folder / f"{i}.json").read_text()) for i, name in enumerate(ASKED)}


def test_a_plain_model_with_the_servers_own_arguments(told: dict[str, Any]) -> None:
    found = told["llama"]
    assert found["refusals"] == {"attach": None, "park": None, "shadow": None}
    assert found["kv_cache"].startswith("1 KV-cache group: FullAttentionSpec (4 layers, ")
    assert "Tensor parallelism" in found["uses"]
    assert found["unseen"] is None


def test_an_argument_that_attach_mode_does_not_go_with(told: dict[str, Any]) -> None:
    assert told["llama, no prefix caching"]["refusals"]["attach"] == "prefix caching is off"


def test_a_connector_that_is_wrapped(told: dict[str, Any]) -> None:
    found = told["llama, wrapped"]
    assert found["asked"] == "attach"
    assert found["refusals"] == {"attach": None, "park": None, "shadow": None}
    assert "SingleFlightConnector around MooncakeStoreConnector" in found["uses"]
    stranger = told["llama, a stranger wrapped"]
    assert "nobody has tried whether ExampleConnector" in stranger["refusals"]["shadow"]


def test_sliding_windows(told: dict[str, Any]) -> None:
    found = told["gemma3"]
    assert found["kv_cache"].startswith("2 KV-cache groups: ")
    assert "SlidingWindowSpec (2 layers" in found["kv_cache"]
    assert "Sliding-window layers beside full attention (Gemma 3, GPT-OSS)" in found["uses"]


def test_a_model_that_cannot_be_built_without_weights_is_presumed_from_its_configuration(
    told: dict[str, Any],
) -> None:
    certain, presumed = told["gemma3"], told["gemma3, not to be built"]
    assert presumed["refusals"] == certain["refusals"]
    assert presumed["kv_cache"] == certain["kv_cache"]
    assert "could not be built without its weights (ZeroDivisionError" in presumed["unseen"]


def test_latent_attention(told: dict[str, Any]) -> None:
    assert "MLAAttentionSpec (4 layers" in told["deepseek"]["kv_cache"]
    assert "MLA (DeepSeek, Kimi)" in told["deepseek"]["uses"]


def test_recurrent_layers(told: dict[str, Any]) -> None:
    assert "MambaSpec" in told["jamba"]["kv_cache"]
    assert "Mamba and other recurrent layers" in told["jamba"]["uses"]
    assert told["jamba"]["refusals"]["attach"] is not None


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("llama, no hub", "nobody/nothing is no folder here, and neither the Hugging Face hub nor its cache"),
        (
            "llama, another connector",
            "--kv-transfer-config names ExampleConnector; give SingleFlightMooncakeStoreConnector",
        ),
        (
            "llama, misspelt",
            "singleflight.mode: 'atach' is not accepted; give one of auto, off",
        ),
        ("llama, nothing wrapped", "kv_connector_extra_config.connector: is missing; give the connector to"),
    ],
)
def test_what_cannot_be_answered_is_one_sentence(told: dict[str, Any], name: str, sentence: str) -> None:
    assert list(told[name]) == ["error"]
    assert sentence in told[name]["error"]
    assert "\n" not in told[name]["error"]


class TestInWords:
    """The answer becomes lines of `singleflight doctor`."""

    PLAIN: ClassVar = {
        "asked": None,
        "objection": None,
        "refusals": {"attach": None, "park": None, "shadow": None},
        "uses": ["Chunked prefill"],
        "kv_cache": "1 KV-cache group: FullAttentionSpec (4 layers, blocks of 16)",
        "unseen": None,
    }

    def lines(self, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> dict[str, tuple[Grade, str]]:
        monkeypatch.setattr(serve_line, "_preview", lambda *_: self.PLAIN | changes)
        return {each.what: (each.grade, each.says) for each in serve_line.findings("m", [])}

    def test_everything_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lines = self.lines(monkeypatch)
        assert {lines[f"{mode} mode"] for mode in ("attach", "park", "shadow")} == {(Grade.OK, "would be on")}
        assert "auto mode" not in lines

    def test_what_was_not_looked_at_is_no_ok(self, monkeypatch: pytest.MonkeyPatch) -> None:
        grade, says = self.lines(monkeypatch, unseen="the moon")["KV cache"]
        assert grade is Grade.NOTE
        assert says.endswith("not looked at, and may change the answer: the moon")

    def test_pass_through_is_a_note_since_the_server_serves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lines = self.lines(monkeypatch, refusals={"attach": "it rains", "park": None, "shadow": None})
        says = "would pass through to the stock connector: it rains"
        assert lines["attach mode"] == (Grade.NOTE, says)

    @pytest.mark.parametrize(
        ("objection", "attach", "says"),
        [
            (None, None, "would choose attach, as the verdict says"),
            ("no verdict", None, "would choose shadow (counts, changes nothing): no verdict"),
            (
                None,
                "it rains",
                "would choose shadow (counts, changes nothing): the verdict says yes, but attach mode is not"
                " possible here: it rains",
            ),
        ],
    )
    def test_auto(
        self, monkeypatch: pytest.MonkeyPatch, objection: str | None, attach: str | None, says: str
    ) -> None:
        refusals = {"attach": attach, "park": None, "shadow": None}
        lines = self.lines(monkeypatch, asked="auto", objection=objection, refusals=refusals)
        assert lines["auto mode"][1] == says


def test_arguments_of_the_serve_line_without_a_model_are_refused() -> None:
    done = subprocess.run([*COMMAND, "doctor", "--port", "8000"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "'--port' is not accepted; arguments of `vllm serve` need --model MODEL" in done.stderr


def test_arguments_that_vllm_does_not_know_are_vllms_own_sentence(tmp_path: Path) -> None:
    (found,) = serve_line.findings(str(tmp_path), ["--no-such-argument"])
    assert found.grade is Grade.BAD
    assert "--no-such-argument" in found.says
