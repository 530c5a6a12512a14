"""A real OpenAI server, found by entry point, for tests over HTTP.

On the CPU wheel `vllm serve` does not start; `python -m vllm.entrypoints.openai.api_server` takes the
same arguments.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from connector_patch.lab import platform
from connector_patch.lab.engine import FILL_S
from singleflight.stack import embedded
from tests.support import BLOCK

if TYPE_CHECKING:
    from singleflight.stack.embedded import Stack

START_TIMEOUT_S = 180
ANSWER_S = 60.0


class Unfinished(Exception):
    """An answer without the tokens asked for; its finish_reason."""


class Server:
    """Attributes: `url`, `log` (what the server has said so far), `process`."""

    def __init__(self, port: int, log: Path, process: subprocess.Popen[bytes]) -> None:
        self.url = f"http://{embedded.LOOPBACK}:{port}"
        self.log = log
        self.process = process

    def ask(self, path: str, body: dict[str, Any] | None = None, timeout_s: float = ANSWER_S) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return str(answer.read().decode())

    @staticmethod
    def completion(prompt: list[int]) -> dict[str, Any]:
        """The request's body: four greedy tokens, by id."""
        return {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def complete(self, prompt: list[int], timeout_s: float = ANSWER_S) -> list[int]:
        """The tokens. Unfinished: the server has said that it gives the request up."""
        choice = json.loads(self.ask("/v1/completions", self.completion(prompt), timeout_s))["choices"][0]
        if choice["finish_reason"] != "length":
            raise Unfinished(choice["finish_reason"])
        tokens: list[int] = choice["token_ids"]
        return tokens

    def counter(self, name: str, **labels: str) -> int:
        """A counter of the server's own Prometheus endpoint; 0 if it has not moved yet."""
        total = 0.0
        for line in self.ask("/metrics").splitlines():
            if line.startswith(f"{name}_total{{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rpartition(" ")[2])
        return int(total)

    def fill(self, prefix: list[int]) -> int:
        """Have these blocks in the store and nowhere else, proved by a load; how many requests that took."""
        asked, limit = 0, time.monotonic() + FILL_S
        while True:
            hits = self.counter("vllm:external_prefix_cache_hits")
            with contextlib.suppress(urllib.error.HTTPError):  # a load may fail where a put did
                self.complete([*prefix, 4])
            self.cold()
            asked += 1
            if self.counter("vllm:external_prefix_cache_hits") - hits == len(prefix):
                return asked
            assert time.monotonic() < limit, "the store does not keep what it is given"

    def cold(self) -> None:
        """Empty the local prefix cache; vLLM refuses while store jobs still read blocks."""
        limit = time.monotonic() + 30
        while not json.loads(self.ask("/reset_prefix_cache", {}))["success"]:
            assert time.monotonic() < limit, "the prefix cache could not be reset"


@contextlib.contextmanager
def serving(
    stack: Stack, singleflight: dict[str, Any] | None = None, env: dict[str, str] | None = None
) -> Iterator[Server]:
    """A server with our connector in attach mode against this stack; `singleflight` adds to its settings."""
    port = embedded.Ports().chosen().rpc
    transfer = {
        "kv_connector": "SingleFlightMooncakeStoreConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"singleflight": {"mode": "attach", **(singleflight or {})}},
    }
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(stack.model)]
    argv += ["--served-model-name", "tiny", "--host", embedded.LOOPBACK, "--port", str(port)]
    argv += ["--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK), "--max-model-len", "8192"]
    argv += [*platform.server_flags(), "--kv-transfer-config", json.dumps(transfer)]
    log = stack.folder / f"server-{port}.log"
    environment = stack.env(VLLM_LOGGING_LEVEL="INFO", VLLM_SERVER_DEV_MODE="1", **(env or {}))
    with embedded.spawned(argv, env=environment, log=log, stop_timeout_s=30) as process:
        running = Server(port, log, process)

        def answers() -> bool:
            try:
                running.ask("/health")
            except OSError:
                return False
            return True

        embedded.wait_until(answers, process, "the server", log, START_TIMEOUT_S)
        yield running
