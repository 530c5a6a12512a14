"""One real engine, measured: `python -m bench.gate.replay JOB.json`, started by `measure`.

Stock and attach take turns in it: the connector is ours in attach mode, and for a stock round its layer is
taken out, so that every call goes to the stock code, watched by shadow mode's counter. Scheduler and worker
share the process, and requests are added between steps when they are due, as EngineCore takes them from its
queue.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.ab.link import Link
from bench.gate import lone
from bench.gate.workloads import OWN, Arrival
from singleflight.stack import demo

STUCK_S = 120.0
BASE = 2040
"""Below the tiny model's vocabulary of 2,048."""


def prompt(names: Sequence[int], block: int) -> list[int]:
    """Tokens of blocks: each begins with its name's digits, so that no two blocks are alike."""
    return [
        token
        for name in names
        for token in (3 + name // BASE**2, 3 + name // BASE % BASE, 3 + name % BASE, *([7] * (block - 3)))
    ]


class Watched:
    """A receive thread's store; the time each Get takes, delayed as the workload says, is written down."""

    def __init__(self, store: Any, seconds: list[tuple[int, float, float]], coming: set[int]) -> None:
        self._store = store
        self._seconds = seconds
        self._coming = coming

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def batch_get_into_multi_buffers(self, keys: list[str], addresses: Any, sizes: Any) -> Any:
        started = time.perf_counter()
        answers = self._store.batch_get_into_multi_buffers(keys, addresses, sizes)
        self._coming.discard(threading.get_ident())
        self._seconds.append((len(keys), started, time.perf_counter()))
        return answers


class Replay:
    """The engine, and rounds on it.

    Attributes:
        gets: (blocks, started, ended) of each Get since a round began, perf_counter seconds.
        lookups: (blocks asked about, seconds) of each lookup. steps: what each step did.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        from connector_patch.lab.engine import BLOCK_SIZE, Engine
        from connector_patch.mooncake import MooncakeStore
        from connector_patch.plugin import NAME

        setup = job["setup"]
        self.engine = Engine(
            job["model"],
            NAME,
            num_gpu_blocks_override=setup["kv_blocks"],
            max_num_seqs=setup["seats"],
            kv_transfer={"kv_connector_module_path": "connector_patch.connector"},
        )
        self.block = BLOCK_SIZE
        self.link = Link(**job["link"])
        self.connector = self.engine.connector
        if self.connector.passes_through is not None:
            raise RuntimeError(self.connector.passes_through)
        self.layer = self.connector.layer
        self._watched_store = MooncakeStore(self.connector.connector_scheduler)
        self._latency_s = 0.0
        self._round = 0
        self.gets: list[tuple[int, float, float]] = []
        self.lookups: list[tuple[int, float]] = []
        self._coming: set[int] = set()
        """Receive threads whose bytes are coming in."""
        self.steps = lone.Steps(self.engine, lambda: len(self._coming))
        gate = self.engine.gate
        pass_through = gate.pass_through

        def delayed(keys: list[str], size: int) -> None:
            time.sleep(self._latency_s)
            self._coming.add(threading.get_ident())
            pass_through(keys, size)

        gate.pass_through = delayed
        for thread in self.engine.worker_connector.connector_worker.kv_recv_threads:
            thread.store = Watched(thread.store, self.gets, self._coming)
        client = self.connector.connector_scheduler.client
        lookup = client.lookup

        def timed(request_id: str, tokens: int, hashes: Any, *more: Any, **named: Any) -> Any:
            started = time.perf_counter()
            answer = lookup(request_id, tokens, hashes, *more, **named)
            self.lookups.append((len(hashes), time.perf_counter() - started))
            return answer

        client.lookup = timed

    def mode(self, name: str) -> None:
        """`stock` or `attach`, which starts with nothing learned of load times, as a server does."""
        from connector_patch.shadow import Shadow
        from singleflight.core.estimate import Forecast

        if name == "stock":
            self.connector.layer = None
            policy = self.connector.singleflight.policy
            self.connector.shadow = Shadow(self._watched_store, policy.max_blocks)
            return
        self.connector.layer, self.connector.shadow = self.layer, None
        self.layer.table.forecast = Forecast(self.layer.table.forecast.lanes)

    def set_link(self, gbit_s: float | None, latency_s: float) -> None:
        self.link.shape(gbit_s)
        self._latency_s = latency_s

    def store(self, workloads: dict[str, Any]) -> None:
        """Have all blocks of these in the store, at full speed."""
        self.set_link(None, 0.0)
        for name, workload in workloads.items():
            print(f"storing {name}", flush=True)
            kinds = sorted({tuple(arrival["blocks"]) for arrival in workload["arrivals"]})
            kinds = [a for a, b in zip(kinds, [*kinds[1:], ()], strict=True) if b[: len(a)] != a]
            self.engine.fill([*prompt(each, self.block), *range(3, 3 + OWN)] for each in kinds)

    def round(self, name: str, workload: dict[str, Any], mode: str) -> dict[str, Any]:
        """One workload in one mode, from a cold local cache."""
        self._round += 1
        arrivals = [Arrival(**each) for each in workload["arrivals"]]
        # What is computed is new in every round, or the store would have it from the round before.
        seed = 31 * os.getpid() + self._round
        prompts = [
            [*prompt(each.blocks, self.block), *own(each.computed, 1000 * seed + number)]
            for number, each in enumerate(arrivals)
        ]
        self.engine.cold()
        self.mode(mode)
        self.set_link(workload["gbit_s"], workload["latency_s"])
        self.engine.recorder.take()
        self.gets.clear()
        self.lookups.clear()
        self.steps.clear()
        before = self.layer.table.stats.snapshot()
        gc.collect()
        gc.disable()
        try:
            added, first = self.replay(arrivals, prompts)
        finally:
            gc.enable()
        self.engine.settle()
        return {
            "workload": name,
            "mode": mode,
            "load_average": os.getloadavg()[0],
            "added_s": _rounded(added),
            "ttft_s": _rounded(token - each.at_s for token, each in zip(first, arrivals, strict=True)),
            "counts": {
                **{
                    key: value
                    for key, value in self.engine.recorder.take().as_json().items()
                    if key in ("gets", "keys", "bytes")
                },
                **self.counted(mode, before),
                "lookups": len(self.lookups),
                "lookup_s": sum(seconds for _, seconds in self.lookups),
                "get_s": sum(ended - started for _, started, ended in self.gets),
                **self.steps.summed(),
            },
        }

    def counted(self, mode: str, before: dict[str, Any]) -> dict[str, int]:
        """What shadow mode, or attach mode's table, has counted in this round."""
        if mode == "stock":
            stats = self.connector.shadow.stats
            return {key: getattr(stats, key) for key in ("attempts", "removable", "lost")}
        after = self.layer.table.stats.snapshot()
        keys = ("blocks_led", "blocks_adopted", "attached", "alone", "overtook")
        fell_back = sum(after["fell_back"].values()) - sum(before["fell_back"].values())
        return {"fell_back": fell_back, **{key: after[key] - before[key] for key in keys}}

    def replay(self, arrivals: list[Arrival], prompts: list[list[int]]) -> tuple[list[float], list[float]]:
        """When each request was added, and when its first token came; seconds from the start.

        Raises:
            TimeoutError: the requests do not end.
        """
        added: list[float] = []
        first: dict[str, float] = {}
        started = time.perf_counter()
        while len(added) < len(arrivals) or self.engine.llm.has_unfinished_requests():
            now = time.perf_counter() - started
            if now > arrivals[-1].at_s + STUCK_S:
                raise TimeoutError("the replay does not end")
            while len(added) < len(arrivals) and arrivals[len(added)].at_s <= now:
                number = len(added)
                self.engine.add(f"r{number}", prompts[number], arrivals[number].output)
                added.append(time.perf_counter() - started)
            if not self.engine.llm.has_unfinished_requests():
                time.sleep(min(max(arrivals[len(added)].at_s - (time.perf_counter() - started), 0.0), 0.001))
                continue
            for output in self.steps.step():
                first.setdefault(output.request_id, time.perf_counter() - started)
        return added, [first[f"r{number}"] for number in range(len(arrivals))]


def own(count: int, seed: int) -> list[int]:
    """Tokens that no other request has: its first three are the seed's digits."""
    digits = [3 + seed // BASE**2 % BASE, 3 + seed // BASE % BASE, 3 + seed % BASE]
    return [*digits, *(3 + (seed + 7 * i) % 2000 for i in range(count - 3))]


def _rounded(seconds: Any) -> list[float]:
    return [round(each, 5) for each in seconds]


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    out = Path(job["out"])
    started = time.perf_counter()
    replay = Replay(job)
    print(f"engine started in {time.perf_counter() - started:.1f} s", flush=True)
    replay.store(job["store"])
    result = {"setup": job["setup"], "start": job["start"], "lone": {}, "rounds": []}
    result["lone"] = lone.measure(replay, job["setup"]["threads"], job["links"])
    for name, mode in job["rounds"]:
        print(f"{mode}: {name}", flush=True)
        result["rounds"].append(replay.round(name, job["workloads"][name], mode))
        text = json.dumps(result)
        demo.replace_file(out, lambda scratch, text=text: scratch.write_text(text))
    print(f"ended after {time.perf_counter() - started:.1f} s", flush=True)
    replay.engine.close()
    sys.stdout.flush()
    os._exit(0)  # without the interpreter's own end, at which a library prints pages about leaks


if __name__ == "__main__":
    main()
