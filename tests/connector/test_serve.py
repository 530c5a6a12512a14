"""A real OpenAI server, found by entry point, under concurrent HTTP load."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from connector_patch.catalogue import METRICS, Kind
from singleflight.traces.reader import Options, read
from tests.server import Server, serving
from tests.support import BLOCK, STUCK_S

if TYPE_CHECKING:
    from singleflight.stack.arms import Arm
    from singleflight.stack.embedded import Stack

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(stack: Stack) -> Iterator[Server]:
    with serving(stack) as running:
        yield running


def test_the_entry_point_is_enough_and_attach_mode_is_on(server: Server) -> None:
    log = server.log.read_text()
    assert "kv-singleflight: attach mode is on." in log
    assert "passes through" not in log


def test_before_the_first_request_every_series_is_at_zero(server: Server) -> None:
    """Or `increase()` would miss the first event of each kind."""
    said = server.ask("/metrics").splitlines()
    for metric in METRICS:
        suffix = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_count"}[metric.kind]
        for value in metric.figures.values():
            labels = [
                'engine="0"',
                'model_name="tiny"',
                *([f'{metric.label}="{value}"'] if metric.label else []),
            ]
            series = f"{metric.name}{suffix}{{{','.join(sorted(labels))}}}"
            assert f"{series} 0.0" in said


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
    assert server.counter("vllm:singleflight_blocks", role="spared") == 64 * (len(prompts) - 1)
    assert server.counter("vllm:singleflight_bytes", role="spared") == 65536 * 64 * (len(prompts) - 1)
    said = server.ask("/metrics")
    waits = 'vllm:singleflight_follower_wait_seconds_count{engine="0",model_name="tiny",outcome="ready"}'
    assert f"{waits} {len(prompts) - 1:.1f}" in said
    assert 'vllm:singleflight_followers{engine="0",model_name="tiny"} 0.0' in said
    info = r'vllm:singleflight_info\{asked="attach",attach_refused="",engine="0",mode="attach",.*\} 1\.0'
    assert re.search(info, said)
    ours = [line for line in server.log.read_text().splitlines() if "] kv-singleflight" in line]
    assert len(ours) == 1, "one line at start-up, and none for a request"


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
