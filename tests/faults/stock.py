"""The stock connector in situations of this suite, in a process of its own: the control group.

`python -m tests.faults.stock MODEL OUT` writes one JSON object: for each situation what happened. The
environment is that of `Stack.env`, with four receive threads and everything in one process.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from connector_patch.lab.engine import STOCK, Engine
from tests.faults.cohort import tailed
from tests.faults.computed import computed, hashes
from tests.faults.scripted_store import at_once, fail_keys, hang, scripted, unreadable
from tests.support import STUCK_S, blocks, store_prefixes, until_scheduled

LIVELOCK_STEPS = 100
SALT = 1500
"""Far from the salts that tests count up from: the store is the same."""


def livelock(engine: Engine) -> dict[str, Any]:
    """Eight requests, the first block of their prefix always fails, policy "recompute"; a hundred steps."""
    trunk = blocks(1, 2, 3, 4, salt=SALT)
    store_prefixes(engine, trunk)
    engine.scheduler.recompute_kv_load_failures = True
    names = [f"r{i}" for i in range(8)]
    finished: list[str] = []
    with scripted(engine, fail_keys(0, times=sys.maxsize)), at_once(engine):
        for name, prompt in tailed(trunk, *names).items():
            engine.add(name, prompt)
        for _ in range(LIVELOCK_STEPS):
            finished += [output.request_id for output in engine.step() if output.finished]
        engine.llm.abort_request(names)
        engine.settle()
    engine.scheduler.recompute_kv_load_failures = False
    return {"gets": engine.recorder.take().gets, "finished": finished}


def bad_key(engine: Engine) -> dict[str, dict[str, int]]:
    """One key of four cannot be read, policy "recompute": tokens that each request computes, by the place of
    the key. Not the first key: see `livelock`."""
    found = {}
    engine.scheduler.recompute_kv_load_failures = True
    for place in (1, 2, 3):
        trunk = blocks(1, 2, 3, 4, salt=SALT + 2 + place)
        store_prefixes(engine, trunk)
        bad = unreadable(hashes(engine, trunk)[place])
        with scripted(engine, bad), computed(engine) as counts:
            engine.burst(tailed(trunk, "r0", "r1", "r2"))
        found[str(place)] = dict(counts)
        engine.cold()
    engine.scheduler.recompute_kv_load_failures = False
    return found


def hung_get(engine: Engine) -> dict[str, Any]:
    """The first of seven Gets hangs: which requests finish nevertheless?"""
    trunk, other = hung_prefixes(SALT)
    store_prefixes(engine, trunk, other)
    get = hang()
    with scripted(engine, get):
        burst, _ = until_scheduled(engine, tailed(trunk, "leader"))
        get.reached.wait(STUCK_S)
        more = {**tailed(trunk, "same0", "same1", "same2"), **tailed(other, "other0", "other1", "other2")}
        for name, prompt in more.items():
            engine.add(name, prompt)
        steps = engine.collect(time.perf_counter(), burst)
        limit = time.monotonic() + STUCK_S
        while len(burst.tokens) < len(more) and time.monotonic() < limit:
            next(steps)
        finished = sorted(burst.tokens)
        get.release.set()
        for _ in steps:
            pass
    return {"gets": engine.recorder.take().gets, "finished": finished}


def hung_prefixes(salt: int) -> tuple[list[int], list[int]]:
    """The prefix whose first load hangs, and one that has nothing to do with it."""
    return blocks(1, 2, 3, 4, salt=salt + 1), blocks(11, 12, salt=salt + 1)


def main() -> None:
    model, out = sys.argv[1:]
    engine = Engine(model, STOCK)
    answers = {"livelock": livelock(engine), "hung get": hung_get(engine), "bad key": bad_key(engine)}
    Path(out).write_text(json.dumps(answers))
    engine.close()


if __name__ == "__main__":
    main()
