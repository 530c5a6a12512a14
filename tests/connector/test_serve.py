"""A real OpenAI server, found by entry point, under concurrent HTTP load."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from singleflight.traces.reader import Options, read
from tests.server import Server, serving
from tests.support import BLOCK, STUCK_S

if TYPE_CHECKING:
    from singleflight.arms import Arm
    from singleflight.embedded import Stack

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(stack: Stack) -> Iterator[Server]:
    with serving(stack) as running:
        yield running


def test_the_entry_point_is_enough_and_attach_mode_is_on(server: Server) -> None:
    log = server.log.read_text()
    assert "kv-singleflight: attach mode is on." in log
    assert "passes through" not in log


def test_concurrent_clients_get_the_right_tokens_from_one_get(
    server: Server, stack: Stack, reference: Arm
) -> None:
    """The store node stands still until all have come: or the load could land before the second."""
    prefix = [3 + (17 * i) % 2000 for i in range(64 * BLOCK)]
    prompts = [[*prefix, *(50 + i for _ in range(8))] for i in range(8)]
    server.fill(prefix)
    gets = {"name": "vllm:mooncake_store_operation", "operation": "load_get"}
    attached = {"name": "vllm:singleflight_requests", "event": "attached"}
    before = server.counter(**gets)
    with ThreadPoolExecutor(len(prompts)) as clients:
        stack.store_node.send_signal(signal.SIGSTOP)
        try:
            answers = [clients.submit(server.complete, prompt) for prompt in prompts]
            limit = time.monotonic() + STUCK_S
            while server.counter(**attached) < len(prompts) - 1:
                assert time.monotonic() < limit, "not all have attached"
        finally:
            stack.store_node.send_signal(signal.SIGCONT)
        tokens = [answer.result() for answer in answers]
    plain = reference.ask("burst", prompts={str(i): p for i, p in enumerate(prompts)})["tokens"]
    assert tokens == [plain[str(i)] for i in range(len(prompts))]
    assert server.counter(**gets) - before == 1
    assert server.counter("vllm:singleflight_flights", event="led") >= 1
    assert server.counter(**attached) == len(prompts) - 1
    assert server.counter("vllm:singleflight_requests", event="ready") == len(prompts) - 1
    assert server.counter("vllm:singleflight_blocks", role="adopted") == 64 * (len(prompts) - 1)


def test_a_server_in_shadow_mode_says_on_its_metrics_what_it_loaded_twice_and_records(
    stack: Stack, tmp_path: Path
) -> None:
    """Clients need not overlap, but what is counted adds up to what the store was asked for."""
    trace = tmp_path / "trace.jsonl"
    prefix = [5 + (19 * i) % 2000 for i in range(64 * BLOCK)]
    prompts = [[*prefix, *(50 + i for _ in range(8))] for i in range(8)]
    gets = {"name": "vllm:mooncake_store_operation", "operation": "load_get"}
    with serving(stack, {"mode": "shadow", "record": {"path": str(trace)}}) as server:
        asked = server.fill(prefix)
        with ThreadPoolExecutor(len(prompts)) as clients:
            list(clients.map(server.complete, prompts))
        blocks = {
            kind: server.counter("vllm:singleflight_shadow_blocks", kind=kind)
            for kind in ("loaded", "removable", "lost")
        }
        cohorts = server.counter("vllm:singleflight_shadow_cohorts")
        assert blocks["loaded"] == 64 * server.counter(**gets) > 0
        assert blocks["loaded"] == cohorts + blocks["removable"] + blocks["lost"]
        assert server.counter("vllm:singleflight_shadow_bytes", kind="loaded") == 65536 * blocks["loaded"]
    assert len(read(str(trace), Options(block_size=BLOCK, recording=True))) == asked + len(prompts)
