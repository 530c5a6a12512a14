"""Microseconds per call and bytes per waiter of `singleflight.aio` beside PyPI's coalescers, by fan-in.

    for p in singleflight coalescer oneflight; do pip install --target /tmp/rivals/$p $p; done
    python bench/micro/aio_fan_in.py --rivals /tmp/rivals --out bench/results/aio_fan_in.json

Every sample is a process of its own: N tasks call for one key, the loader waits until all of them do, then
lands. One call's cost is everything from creating its task to having its result, divided by N; garbage
collection is off while it is timed. `cancel` is the same with every waiter cancelled, last come first,
instead. Bytes are Python's own count (tracemalloc) while all wait, the task included, since no waiter
exists without one; the arm `task` is what a task that awaits one shared event costs. Arms are interleaved;
reported are medians.

PyPI's `singleflight` has our import name, so its module is loaded from its file under another one.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.util
import json
import math
import platform
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

ARMS = ("ours", "ours, no deadline", "coalescer", "oneflight", "singleflight", "task")
CASES = {"land": (1, 10, 1_000, 100_000), "cancel": (1_000, 10_000, 100_000), "memory": (1_000,)}
CALLS = 4_000  # at least so many in a sample, so that small fan-ins are not all start-up


async def make(
    arm: str, rivals: Path, gate: asyncio.Event, stack: AsyncExitStack
) -> Callable[[], Awaitable[Any]]:
    async def load(*_: Any) -> str:
        await gate.wait()
        return "value"

    if arm.startswith("ours"):
        from singleflight.aio import FlightGroup

        async def load_keys(keys: Any) -> Any:
            await gate.wait()
            return dict.fromkeys(keys, "value")

        flights = await stack.enter_async_context(FlightGroup(load_keys))
        deadline = None if arm == "ours" else math.inf
        return lambda: flights.load(("key",), deadline=deadline)
    if arm == "task":
        return load
    if arm == "singleflight":
        file = rivals / "singleflight" / "singleflight" / "asynchronous.py"
        spec = importlib.util.spec_from_file_location("pypi_singleflight_asynchronous", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        other = module.SingleFlightAsync()
        return lambda: other.call(load, "key")
    sys.path.insert(0, str(rivals / arm))
    if arm == "coalescer":
        from coalescer import Coalescer

        group = Coalescer()
        return lambda: group.do("key", load)
    from oneflight import AsyncOneFlight

    one = AsyncOneFlight()
    return lambda: one.do("key", load)


async def sample(arm: str, fan_in: int, what: str, rivals: Path) -> float:
    """Microseconds (or bytes, for `memory`) for each call."""
    async with AsyncExitStack() as stack:
        gate = asyncio.Event()
        call = await make(arm, rivals, gate, stack)
        rounds = 1 if what == "memory" else max(1, CALLS // fan_in)
        warm_up = 1 if fan_in < CALLS else 0
        waiter_bytes = 0.0
        spent = 0.0  # seconds
        gc.collect()
        gc.disable()
        for turn in range(warm_up + rounds):
            gate.clear()
            if what == "memory" and turn == 1:
                tracemalloc.start()
            start = time.perf_counter()
            tasks = [asyncio.ensure_future(call()) for _ in range(fan_in)]
            for _ in range(3):
                await asyncio.sleep(0)  # until the last of them waits
            if what == "cancel":
                start = time.perf_counter()
                for task in reversed(tasks):
                    task.cancel()
            else:
                if what == "memory" and turn == 1:
                    waiter_bytes = tracemalloc.get_traced_memory()[0] / fan_in
                    tracemalloc.stop()
                gate.set()
            await asyncio.wait(tasks)
            if turn >= warm_up:
                spent += time.perf_counter() - start
        return waiter_bytes or spent / rounds / fan_in * 1e6


def measure(arm: str, fan_in: int, what: str, args: argparse.Namespace) -> float:
    command = [sys.executable, __file__, "--rivals", str(args.rivals), "--one", arm, str(fan_in), what]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rivals", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--what", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--out", type=Path, help="JSON file; what is not measured this time stays in it")
    parser.add_argument(
        "--one", nargs=3, metavar=("ARM", "FAN_IN", "WHAT"), help="one sample, in this process"
    )
    args = parser.parse_args()
    if args.one:
        arm, fan_in, what = args.one
        print(asyncio.run(sample(arm, int(fan_in), what, args.rivals)))
        return
    results: dict[str, dict[str, Any]] = {arm: {} for arm in ARMS}
    if args.out and args.out.exists():
        results |= json.loads(args.out.read_text())["results"]
    for what, fan_in in [(name, fan_in) for name in args.what for fan_in in CASES[name]]:
        repeats = {"memory": 1}.get(what, min(args.repeats, 3) if fan_in > CALLS else args.repeats)
        samples: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for _ in range(repeats):
            for arm in ARMS:
                # The others search their lists of waiters for each one that leaves: minutes to hours here.
                if (what, fan_in) == ("cancel", 100_000) and not arm.startswith("ours"):
                    continue
                samples[arm].append(measure(arm, fan_in, what, args))
        for arm, values in samples.items():
            median = round(statistics.median(values), 2) if values else None
            results[arm][f"{what} {fan_in}"] = median
            print(f"{what:8}{fan_in:>8}  {arm:20}{median}", flush=True)
    if args.out:
        about = {
            "unit": "microseconds per call (land, cancel), bytes per waiter (memory); medians",
            "repeats": f"{args.repeats}, at most 3 above {CALLS}",
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, shared",
        }
        args.out.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
