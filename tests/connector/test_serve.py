"""A real OpenAI server, found by entry point, under concurrent HTTP load.

On the CPU wheel `vllm serve` does not start; `python -m vllm.entrypoints.openai.api_server` takes the
same arguments.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from singleflight import embedded

if TYPE_CHECKING:
    from singleflight.arms import Arm
    from singleflight.embedded import Stack

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK = 32
START_TIMEOUT_S = 180


class Server:
    def __init__(self, port: int, log: Any) -> None:
        self.url = f"http://{embedded.LOOPBACK}:{port}"
        self.log = log

    def ask(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())

    def complete(self, prompt: list[int]) -> list[int]:
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = json.loads(self.ask("/v1/completions", body))
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens

    def counter(self, name: str, **labels: str) -> int:
        """A counter of the server's own Prometheus endpoint; 0 if it has not moved yet."""
        total = 0.0
        for line in self.ask("/metrics").splitlines():
            if line.startswith(f"{name}_total{{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rpartition(" ")[2])
        return int(total)

    def cold(self) -> None:
        """Empty the local prefix cache; vLLM refuses while store jobs still read blocks."""
        limit = time.monotonic() + 30
        while not json.loads(self.ask("/reset_prefix_cache", {}))["success"]:
            assert time.monotonic() < limit, "the prefix cache could not be reset"


@pytest.fixture(scope="module")
def server(stack: Stack) -> Iterator[Server]:
    port = embedded.Ports().chosen().rpc
    transfer = {
        "kv_connector": "SingleFlightMooncakeStoreConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"singleflight": {"mode": "attach"}},
    }
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(stack.model)]
    argv += ["--served-model-name", "tiny", "--host", embedded.LOOPBACK, "--port", str(port)]
    argv += ["--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK), "--max-model-len", "8192"]
    argv += ["--kv-transfer-config", json.dumps(transfer)]
    log = stack.folder / "server.log"
    env = stack.env(VLLM_LOGGING_LEVEL="INFO", VLLM_SERVER_DEV_MODE="1")
    with embedded.spawned(argv, env=env, log=log, stop_timeout_s=30) as process:
        running = Server(port, log)

        def answers() -> bool:
            try:
                running.ask("/health")
            except OSError:
                return False
            return True

        embedded.wait_until(answers, process, "the server", log, START_TIMEOUT_S)
        yield running


def test_the_entry_point_is_enough_and_attach_mode_is_on(server: Server) -> None:
    log = server.log.read_text()
    assert "kv-singleflight: attach mode is on." in log
    assert "passes through" not in log


def test_concurrent_clients_get_the_right_tokens_from_one_get(server: Server, reference: Arm) -> None:
    prefix = [3 + (17 * i) % 2000 for i in range(64 * BLOCK)]
    prompts = [[*prefix, *(50 + i for _ in range(8))] for i in range(8)]
    server.complete([*prefix, 4])
    server.cold()
    gets = {"name": "vllm:mooncake_store_operation", "operation": "load_get"}
    before = server.counter(**gets)
    with ThreadPoolExecutor(len(prompts)) as clients:
        tokens = list(clients.map(server.complete, prompts))
    plain = reference.ask("burst", prompts={str(i): p for i, p in enumerate(prompts)})["tokens"]
    assert tokens == [plain[str(i)] for i in range(len(prompts))]
    # Eight clients need not arrive within one load; but each block is loaded at most once, since whoever
    # comes later finds it pending or local.
    assert server.counter(**gets) - before == 1
    assert server.counter("vllm:singleflight_flights", event="led") >= 1
    attached = server.counter("vllm:singleflight_requests", event="attached")
    assert attached >= 1
    assert server.counter("vllm:singleflight_requests", event="ready") == attached
    assert server.counter("vllm:singleflight_blocks", role="adopted") == 64 * attached
