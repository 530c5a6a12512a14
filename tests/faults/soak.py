"""Many requests on a real engine and a real store, while much goes wrong at random.

`python -m tests.faults.soak --requests 10000 --seed 1` prints one line of totals as JSON and exits with 1
if a token was wrong, a block was lost or a request was stuck. Prompts are walks over a few hundred prefixes
with partial overlap; the pool is far too small for them; Gets fail, raise, bring half, or hang and come
back late; requests are aborted at any moment; followers' deadlines are short enough to pass; the prefix
cache and the store are reset now and then; vLLM's failure policy changes half-way.

`--scheduling priority` gives each request one of four priorities, `async` is asynchronous scheduling (patched
on, since CPU turns it off), `chunked` a token budget of 96. With tensor parallelism Gets cannot be scripted
from here; `python -m tests.simulation` has two and three ranks."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from singleflight.stack.arms import arm
from singleflight.stack.embedded import Stack
from tests.faults import force_async
from tests.faults.checksums import Guard, WrongBlock, guard
from tests.faults.scripted_store import Fault, Get, fail_keys, hang, raise_, scripted, short_read

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine

BLOCK = 32
POOL = 320
"""GPU blocks. The prompts need ten times as many."""
ROOTS, BRANCHES, DEPTH = 24, 12, 10
TOGETHER = 48
"""Requests in the engine at a time."""
MAX_TOKENS = 3
ABORTED = 0.08
FAILING, HANGING, SLOW = 0.08, 0.04, 0.3
"""Shares of all Gets."""
STUCK_S = 60.0
SCHEDULING: dict[str, dict[str, Any]] = {
    "plain": {},
    "priority": {"scheduling_policy": "priority"},
    "async": {},
    "chunked": {"max_num_batched_tokens": 96, "max_num_seqs": 64, "enable_chunked_prefill": True},
}
PRIORITIES = 4
POLICY = {"deadline_base_s": 0.4, "deadline_per_token_s": 0.0001}


@dataclass
class Totals:
    requests: int
    seed: int
    mode: str = "attach"
    scheduling: str = "plain"
    finished: int = 0
    aborted: int = 0
    errors: int = 0
    wrong: int = 0
    leaked: int = 0
    stuck: int = 0
    longest_wait_s: float = 0.0
    fallbacks: dict[str, int] = field(default_factory=dict)
    gets: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    resets: int = 0
    resets_refused: int = 0
    """By vLLM, since loads were in the air."""
    flights: int = 0
    attached: int = 0
    blocks_checked: int = 0
    preemptions: int = 0
    seconds: float = 0.0
    first_wrong: str = ""

    @property
    def bad(self) -> bool:
        return bool(self.wrong or self.leaked or self.stuck)


def make_prompts(rng: random.Random) -> list[list[int]]:
    """Two prompts for each of ROOTS * BRANCHES prefixes: a shared trunk, a branch, a few tokens of their
    own."""
    prompts = []
    for root in range(ROOTS):
        trunk = [rng.randrange(3, 2048) for _ in range(DEPTH * BLOCK)]
        for _ in range(BRANCHES):
            shared = rng.randint(1, 7)
            branch = [rng.randrange(3, 2048) for _ in range(rng.randint(0, DEPTH - shared - 1) * BLOCK)]
            prefix = [*trunk[: shared * BLOCK], *branch] if root % 2 else trunk[: (shared + 2) * BLOCK]
            prompts += [[*prefix, *(rng.randrange(3, 2048) for _ in range(rng.randint(1, 20)))] for _ in "ab"]
    return prompts


class RandomFaults:
    """A fault for any number of Gets, which decides at each what happens. Called by receive threads."""

    def __init__(self, seed: int) -> None:
        self.met: Counter[str] = Counter()
        self.held: list[tuple[float, Fault]] = []
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self.enabled = True

    def act(self, get: Get, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> list[int]:
        with self._lock:
            dice = self._rng.random() if self.enabled else 1.0
            index, delay = self._rng.randrange(len(keys)), 0.0
            if dice < FAILING:
                kinds = {
                    "some keys": fail_keys(index),
                    "all keys": fail_keys(),
                    "exception": raise_(RuntimeError("soak: the wire is cut")),
                    "thread death": raise_(SystemExit()),
                    "short read": short_read(index),
                }
                kind = self._rng.choice(list(kinds))
                fault = kinds[kind]
            elif dice < FAILING + HANGING:
                kind, fault = "hang", hang()
                until = time.monotonic() + self._rng.uniform(0.02, 1.5)
                self.held.append((until, fault))
            else:
                kind, fault = "", None
                if dice < FAILING + HANGING + SLOW:
                    delay = self._rng.uniform(0.0, 0.2)
            if fault is not None:
                self.met[kind] += 1
        if fault is not None:
            return fault.act(get, keys, addresses, sizes)
        time.sleep(delay)  # a store that is not always fast: there is time to attach
        return get()

    def release(self, everything: bool = False) -> None:
        now = time.monotonic()
        with self._lock:
            for until, fault in self.held:
                if everything or until <= now:
                    fault.release.set()
            self.held = [(until, fault) for until, fault in self.held if not fault.release.is_set()]


@dataclass
class Live:
    prompt: int
    tokens: int
    arrived: float
    abort_at: float | None


class Soak:
    def __init__(
        self, engine: Engine, expected: list[list[int]], prompts: list[list[int]], totals: Totals
    ) -> None:
        self.engine, self.expected, self.prompts, self.totals = engine, expected, prompts, totals
        self.rng = random.Random(totals.seed)
        self.live: dict[str, Live] = {}
        self.arrived = 0
        self.last_end = time.monotonic()
        self.pausing = False

    def run(self, faults: RandomFaults, watching: Guard, progress: Progress) -> None:
        task = progress.add_task("soak", total=self.totals.requests)
        steps, half = 0, self.totals.requests // 2
        while self.arrived < self.totals.requests or self.live:
            self.engine.scheduler.recompute_kv_load_failures = self.arrived >= half
            while not self.pausing and self.arrived < self.totals.requests and len(self.live) < TOGETHER:
                self.arrive()
            self.abort_some()
            faults.release(everything=self.arrived >= self.totals.requests)
            for output in self.engine.step():
                if output.finished:
                    self.ended(output)
            steps += 1
            if self.rng.random() < 0.05:
                self.check(watching)
            if not self.live if self.pausing else self.rng.random() < 0.1:
                self.reset()
            progress.update(task, completed=self.arrived - len(self.live), description=self.describe())
            if time.monotonic() - self.last_end > STUCK_S:
                self.totals.stuck = len(self.live)
                return

    def arrive(self) -> None:
        """One request, or a cohort of up to eight with the same or a related prompt."""
        first = self.rng.randrange(len(self.prompts))
        for _ in range(min(self.rng.choice((1, 1, 2, 4, 8)), self.totals.requests - self.arrived)):
            prompt = min(first + self.rng.choice((0, 0, 1, 2, 5)), len(self.prompts) - 1)
            tokens, now = self.rng.randint(1, MAX_TOKENS), time.monotonic()
            doomed = self.rng.random() < ABORTED
            name = f"r{self.arrived}"
            self.live[name] = Live(prompt, tokens, now, now + self.rng.expovariate(4) if doomed else None)
            priority = self.rng.randrange(PRIORITIES) if self.totals.scheduling == "priority" else 0
            self.engine.add(name, self.prompts[prompt], tokens, priority)
            self.arrived += 1

    def abort_some(self) -> None:
        now = time.monotonic()
        names = [n for n, live in self.live.items() if live.abort_at is not None and live.abort_at <= now]
        if names:
            self.engine.llm.abort_request(names)
            self.totals.aborted += len(names)
            self.last_end = now
            for name in names:
                del self.live[name]

    def ended(self, output: Any) -> None:
        live = self.live.pop(output.request_id)
        self.last_end = time.monotonic()
        self.totals.longest_wait_s = max(self.totals.longest_wait_s, round(self.last_end - live.arrived, 3))
        answer = output.outputs[0]
        if answer.finish_reason == "error":
            self.totals.errors += 1
            return
        self.totals.finished += 1
        if list(answer.token_ids) != self.expected[live.prompt][: live.tokens]:
            self.totals.wrong += 1
            self.totals.first_wrong = self.totals.first_wrong or (
                f"{output.request_id}: prompt {live.prompt}, {list(answer.token_ids)}"
                f" instead of {self.expected[live.prompt][: live.tokens]}"
            )

    def check(self, watching: Guard) -> None:
        try:
            checked = watching.check()
        except WrongBlock as wrong:
            self.totals.wrong += 1
            self.totals.first_wrong = self.totals.first_wrong or str(wrong)
        else:
            self.totals.blocks_checked += checked.loaded + checked.computed

    def reset(self) -> None:
        """vLLM often refuses it while loads are in the air; the preemption of all that run is carried out all
        the same. To have some that succeed, arrivals sometimes pause until everything has drained."""
        if self.live and self.rng.random() < 0.3:
            self.pausing = True
            return
        self.pausing = False
        done = False
        with contextlib.suppress(RuntimeError):
            done = self.engine.scheduler.reset_prefix_cache(
                reset_running_requests=self.rng.random() < 0.5, reset_connector=self.rng.random() < 0.05
            )
        self.totals.resets += done
        self.totals.resets_refused += not done

    def describe(self) -> str:
        t = self.totals
        return f"finished {t.finished} aborted {t.aborted} errors {t.errors} wrong {t.wrong}"


def left_over(engine: Engine, baseline: int) -> int:
    """Blocks and records that should have gone with their requests."""
    layer = engine.connector.layer
    records = [v for part in (layer, layer.table) for v in vars(part).values() if isinstance(v, dict | set)]
    return abs(baseline - engine.free_blocks()) + sum(map(len, records))


def count_preemptions(engine: Engine, totals: Totals) -> None:
    stock = engine.scheduler._preempt_request

    def preempt(*arguments: Any, **keywords: Any) -> None:
        totals.preemptions += 1
        stock(*arguments, **keywords)

    engine.scheduler._preempt_request = preempt


def soak(totals: Totals, console: Console) -> None:
    prompts = make_prompts(random.Random(totals.seed))
    with Stack() as stack:
        os.environ.update(
            stack.env(
                VLLM_ENABLE_V1_MULTIPROCESSING="0",
                VLLM_MOONCAKE_LOAD_RECV_THREADS="4",
                VLLM_LOGGING_LEVEL="CRITICAL",
            )
        )
        console.print(f"what the {len(prompts)} prompts generate without a connector")
        with arm(stack, "none") as plain:
            plain.answer()
            names = {str(i): prompt for i, prompt in enumerate(prompts)}
            tokens = plain.ask("burst", prompts=names, max_tokens=MAX_TOKENS)["tokens"]
        expected = [tokens[str(i)] for i in range(len(prompts))]

        from connector_patch.lab.engine import Engine
        from connector_patch.plugin import NAME

        if totals.scheduling == "async":
            force_async.pytest_configure()
        engine = Engine(
            str(stack.model),
            NAME,
            {"singleflight": {"mode": totals.mode, **POLICY}},
            num_gpu_blocks_override=POOL,
            kv_transfer={"kv_connector_module_path": "connector_patch.connector"},
            **SCHEDULING[totals.scheduling],
        )
        # The store knows every prompt; from here on the pool can hold a tenth of them.
        engine.fill(names.values())
        engine.recorder.take()
        baseline = engine.free_blocks()
        started = time.monotonic()
        count_preemptions(engine, totals)
        faults = RandomFaults(totals.seed)
        everything = Fault(faults.act, times=sys.maxsize)
        running = Soak(engine, expected, prompts, totals)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress, scripted(engine, everything):
            with guard(engine) as watching:
                running.run(faults, watching, progress)
                faults.release(everything=True)
                running.check(watching)
            if not totals.stuck:
                try:
                    engine.cold()
                except (RuntimeError, TimeoutError):
                    totals.leaked += 1
        totals.seconds = round(time.monotonic() - started, 1)
        stats = engine.connector.layer.table.stats
        totals.fallbacks = {reason.value: n for reason, n in stats.fell_back.items() if n}
        totals.flights, totals.attached = stats.flights, stats.attached
        totals.faults = dict(faults.met)
        totals.gets = engine.recorder.take().gets
        totals.leaked += left_over(engine, baseline)
        engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mode", choices=("attach", "park"), default="attach")
    parser.add_argument("--scheduling", choices=SCHEDULING, default="plain")
    given = parser.parse_args()
    totals = Totals(given.requests, given.seed, given.mode, given.scheduling)
    soak(totals, Console(stderr=True))
    print(json.dumps(asdict(totals)))
    return int(totals.bad)


if __name__ == "__main__":
    sys.exit(main())
