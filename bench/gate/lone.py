"""What the twin's figures are measured on: lone prompts and lone loads, on the engine that is then compared.

Samples only; `figures` makes the twin's figures of them. Nothing here knows the workloads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.gate.replay import Replay

PROMPTS = (8, 40, 264, 1032, 2056, 4104)
"""Tokens of lone prompts that are computed."""
LOADS = (1, 8, 32, 128)
"""Blocks of lone loads."""
TOGETHER = 32
"""Blocks of each of as many loads at once as there are receive threads."""
TIMES = 2
BATCH = 16
PAUSE_S = 0.15
"""Before everything that is lone: caches and connections are then as an arrival meets them."""
APART = 10
"""Of these, before that load is asked for."""
DECODED = 160
"""Tokens that one request generates while another's load comes in; enough for the slowest link."""
NAMES = 900_000_000
"""Block names from here on are of this module."""
IDLE_S = 0.001
"""EngineCore sleeps so long after a step in which nothing ran while requests wait (vLLM 0.32, core.py)."""


class Steps:
    """Every engine step, timed and with what it computed.

    Args:
        transfers: how many loads' bytes are coming in.

    Attributes:
        ran: (prompt tokens, pairs of one with a token before it, requests whose prompt it computed, requests
            that decoded, tokens of their contexts, seconds) of each step that computed.
        loading: of each of them, whether a load's bytes were coming in when it began.
        idle_s: seconds of each of the others, sleep included.
    """

    def __init__(self, engine: Any, transfers: Callable[[], int]) -> None:
        self.ran: list[tuple[int, int, int, int, int, float]] = []
        self.idle_s: list[float] = []
        self._engine = engine
        self._scheduled: Any = None
        self._executed = False
        self._transfers = transfers
        self.loading: list[bool] = []
        core, schedule, step_fn = engine.core, engine.scheduler.schedule, engine.core.step_fn

        def scheduled(*arguments: Any, **named: Any) -> Any:
            self._scheduled = schedule(*arguments, **named)
            return self._scheduled

        def stepped() -> Any:
            outputs, self._executed = step_fn()
            return outputs, self._executed

        engine.scheduler.schedule = scheduled
        core.step_fn = stepped

    def step(self) -> list[Any]:
        """As EngineCore's loop does it; the outputs."""
        loading, started = self._transfers() > 0, time.perf_counter()
        outputs = self._engine.step()
        ran = time.perf_counter() - started
        if self._executed:
            self.ran.append((*_computed(self._scheduled), ran))
            self.loading.append(loading)
        elif self._engine.scheduler.has_requests():
            time.sleep(IDLE_S)
            self.idle_s.append(time.perf_counter() - started)
        return outputs

    def clear(self) -> None:
        self.ran.clear()
        self.loading.clear()
        self.idle_s.clear()

    def summed(self) -> dict[str, float]:
        return {
            "steps": len(self.ran),
            "step_s": sum(step[-1] for step in self.ran),
            "computed_tokens": sum(step[0] for step in self.ran),
            "loading_steps": sum(self.loading),
            "loading_step_s": sum(
                step[-1] for step, loading in zip(self.ran, self.loading, strict=True) if loading
            ),
            "idle_steps": len(self.idle_s),
            "idle_s": sum(self.idle_s),
        }


def _computed(scheduled: Any) -> tuple[int, int, int, int, int]:
    tokens = pairs = prompts = decoding = contexts = 0
    for request in scheduled.scheduled_new_reqs:
        count = scheduled.num_scheduled_tokens[request.req_id]
        tokens, prompts = tokens + count, prompts + 1
        pairs += count * request.num_computed_tokens + count * (count - 1) // 2
    known = scheduled.scheduled_cached_reqs
    for request_id, before in zip(known.req_ids, known.num_computed_tokens, strict=True):
        count = scheduled.num_scheduled_tokens[request_id]
        if count == 1:
            decoding, contexts = decoding + 1, contexts + before
        else:  # preempted, or a prompt longer than a step
            tokens, prompts = tokens + count, prompts + 1
            pairs += count * before + count * (count - 1) // 2
    return tokens, pairs, prompts, decoding, contexts


def measure(replay: Replay, threads: int, links: Sequence[tuple[float | None, float]]) -> dict[str, Any]:
    """Samples, JSON-ready.

    Args:
        threads: receive threads.
        links: (Gbit/s, latency in s) of each link that the engine will be measured over.
    """
    from bench.gate.replay import own, prompt

    print("lone prompts and loads", flush=True)
    replay.mode("stock")
    replay.set_link(None, 0.0)
    prefix = prompt(range(NAMES, NAMES + max(LOADS)), replay.block)
    others = [
        prompt(range(NAMES + 1000 * (1 + i), NAMES + 1000 * (1 + i) + TOGETHER), replay.block)
        for i in range(threads)
    ]
    replay.engine.fill([*each, 5, 6, 7] for each in (prefix, *others))
    fresh = iter(range(10**6))

    def new(count: int) -> list[int]:
        return own(count, 7919 * next(fresh) + int(time.time()) % 10**5 * 10**4)

    added: list[tuple[int, float]] = []
    again: list[tuple[int, float]] = []

    def run(prompts: list[list[int]], output: int, cold: bool = True) -> None:
        if cold:
            replay.engine.cold()
            time.sleep(PAUSE_S)
        asked = len(replay.lookups)
        for number, each in enumerate(prompts):
            started = time.perf_counter()
            replay.engine.add(f"lone-{number}", each, output)
            added.append((len(each), time.perf_counter() - started))
        while replay.engine.llm.has_unfinished_requests():
            replay.steps.step()
        replay.engine.settle()
        if len(prompts) > 1:  # one after another is faster, and not what a lone request meets
            again.extend(replay.lookups[asked + 1 :])
            del replay.lookups[asked:]

    def decoding() -> dict[str, list[float]]:
        """Seconds of steps in which one request decodes, beside another's load that comes in, and apart; and
        of that load."""
        replay.engine.cold()
        replay.gets.clear()
        mark = len(replay.steps.ran)
        replay.engine.add("decodes", new(8), DECODED)
        while len(replay.steps.ran) < mark + APART:
            replay.steps.step()
        replay.engine.add("loads", [*prefix, *new(8)], 1)
        while replay.engine.llm.has_unfinished_requests():
            replay.steps.step()
        replay.engine.settle()
        loads = [round(ended - started, 5) for _, started, ended in replay.gets]
        took: dict[str, list[float]] = {"beside": [], "apart": [], "load": loads}
        for loading, step in zip(replay.steps.loading[mark:], replay.steps.ran[mark:], strict=True):
            if step[2] == 0:
                took["beside" if loading else "apart"].append(round(step[-1], 5))
        del replay.steps.ran[mark:], replay.steps.loading[mark:]
        return took

    for count in PROMPTS:  # the first of each size warms up
        run([new(count)], 4)
    run([[*prefix, *new(8)] for _ in range(BATCH)], 4)
    for samples in (replay.steps, replay.lookups, again, added):
        samples.clear()
    for _ in range(TIMES):
        for count in PROMPTS:
            run([new(count)], 4)
        run([new(8) for _ in range(BATCH)], 4)
        run([new(264) for _ in range(BATCH)], 4)
        run([[*prefix, *new(8)]], 4)
        for batch in (1, BATCH // 4, BATCH):
            run([[*prefix, *new(8)] for _ in range(batch)], 4, cold=False)
    found: dict[str, Any] = {"links": []}
    for gbit_s, latency_s in links:
        replay.set_link(gbit_s, latency_s)
        replay.gets.clear()
        for blocks in LOADS * (TIMES + 1):
            run([[*prefix[: blocks * replay.block], *new(8)]], 1)
        alone = [(blocks, round(ended - started, 6)) for blocks, started, ended in replay.gets]
        together = []
        for _ in range(TIMES if threads > 1 else 0):
            replay.gets.clear()
            run([[*each, *new(8)] for each in others], 1)
            first, last = min(g[1] for g in replay.gets), max(g[2] for g in replay.gets)
            together.append((sum(g[0] for g in replay.gets), round(last - first, 6)))
        found["links"].append(
            {
                "gbit_s": gbit_s,
                "latency_s": latency_s,
                "alone": alone,
                "together": together,
                "decoding": [decoding() for _ in range(TIMES + 1)],
                "threads": threads,
            }
        )
    found["steps"] = [(*step[:-1], round(step[-1], 6)) for step in replay.steps.ran]
    found["idle_s"] = [round(each, 6) for each in replay.steps.idle_s[:200]]
    found["lookups"] = [(blocks, round(seconds, 6)) for blocks, seconds in replay.lookups]
    found["again"] = [(blocks, round(seconds, 6)) for blocks, seconds in again]
    found["added"] = [(tokens, round(seconds, 6)) for tokens, seconds in added]
    return found
