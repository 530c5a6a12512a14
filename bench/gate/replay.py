"""One real engine that replays slices: `python -m bench.gate.replay JOB.json`, started by `measure`.

The job names the mode, how loads are slowed, and the slices: requests as (seconds, block names). A block of
the trace becomes a block of the tiny model, and everything is put into the store first. What happened goes
to the job's `out`: per slice the live counters, the arrivals and first tokens as they were.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

TAIL = [5, 6, 7, 8, 9, 10, 11, 12]
"""Tokens after the last block, so that every block of the trace is a full one and can be loaded."""
STUCK_S = 120.0
BASE = 2040
"""Below the tiny model's vocabulary of 2,048."""


def prompt(names: list[int], block: int) -> list[int]:
    """Tokens of a request: each block begins with its name's digits, so that no two blocks are alike."""
    return [
        token
        for name in names
        for token in (3 + name // BASE**2, 3 + name // BASE % BASE, 3 + name % BASE, *([7] * (block - 3)))
    ] + TAIL


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    from connector_patch.engine import BLOCK_SIZE, Engine
    from connector_patch.plugin import NAME

    engine = Engine(job["model"], NAME, {"singleflight": {"mode": job["mode"]}})
    pass_through = engine.gate.pass_through

    def delayed(keys: list[str], size: int) -> None:
        time.sleep(job["delay_s"])
        pass_through(keys, size)

    results = {}
    for name, requests in job["slices"].items():
        prompts = [prompt(names, BLOCK_SIZE) for _, names in requests]
        engine.gate.pass_through = pass_through
        engine.gate.bytes_per_s = None
        engine.fill(prompts)
        engine.gate.bytes_per_s = job["bytes_per_s"]
        engine.gate.pass_through = delayed
        before = counters(engine)
        windows = len(engine.connector.shadow.windows_s) if engine.connector.shadow else 0
        engine.recorder.take()
        arrived, first = replay(engine, [at for at, _ in requests], prompts)
        gets = engine.recorder.take()
        engine.gate.pass_through = pass_through
        engine.cold()
        results[name] = {
            "arrived_s": arrived,
            "first_token_s": first,
            "counters": {key: value - before[key] for key, value in counters(engine).items()},
            "store": gets.as_json(),
            "windows_s": list(engine.connector.shadow.windows_s)[windows:] if engine.connector.shadow else [],
        }
        Path(job["out"]).write_text(json.dumps(results))  # what there is, should the next slice fail
    engine.close()


def counters(engine: Any) -> dict[str, int]:
    """The live counters of the mode that is on."""
    connector = engine.connector
    if connector.shadow is not None:
        stats = connector.shadow.stats
        return {key: getattr(stats, key) for key in ("loads", "attempts", "cohorts", "removable", "lost")}
    stats = connector.attach.table.stats
    return {key: getattr(stats, key) for key in ("flights", "attached", "blocks_led", "blocks_adopted")}


def replay(engine: Any, due: list[float], prompts: list[list[int]]) -> tuple[list[float], list[float]]:
    """Add each request when it is due and step until all are done.

    Returns:
        When each was added, and when its first token came; seconds from the start.
    """
    arrived: list[float] = []
    first: dict[str, float] = {}
    started = time.perf_counter()
    while len(arrived) < len(due) or engine.llm.has_unfinished_requests():
        now = time.perf_counter() - started
        if now > due[-1] + STUCK_S:
            raise TimeoutError("the replay does not end")
        while len(arrived) < len(due) and due[len(arrived)] <= now:
            engine.add(f"r{len(arrived)}", prompts[len(arrived)], 1)
            arrived.append(time.perf_counter() - started)
        for output in engine.step():
            first.setdefault(output.request_id, time.perf_counter() - started)
        if not engine.llm.has_unfinished_requests():
            time.sleep(0.001)
    return arrived, [first[f"r{i}"] for i in range(len(due))]


if __name__ == "__main__":
    main()
