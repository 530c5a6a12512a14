"""Scenarios that stock and shadow mode go through alike, in a process of their own.

`python -m tests.connector.watched MODEL OUT CONNECTOR EXTRA` writes one JSON object: for each scenario what
the scheduler was answered, what was loaded, what came out, and (in shadow mode) what was counted. The
environment is that of `Stack.env`, everything in one process.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from connector_patch import compat
from connector_patch.lab.engine import Burst, Engine
from tests.faults.scripted_store import fail_keys, hang, scripted
from tests.support import blocks, store_prefixes, until_scheduled

SALT = 2500
"""Far from the salts that tests count up from: the store is the same."""


class Transcript:
    """What vLLM asked the connector and what it was told, by request. Steps in which nothing happens to a
    request leave no line, since how many there are is up to the clock."""

    def __init__(self, engine: Engine) -> None:
        self.lines: dict[str, list[Any]] = defaultdict(list)
        connector = self._connector = engine.connector
        self._match = connector.get_num_new_matched_tokens
        self._meta = connector.build_connector_meta
        self._output = connector.update_connector_output
        self._finished = connector.request_finished_all_groups
        connector.get_num_new_matched_tokens = self.match
        connector.build_connector_meta = self.meta
        connector.update_connector_output = self.output
        connector.request_finished_all_groups = self.finished

    def take(self) -> dict[str, list[Any]]:
        lines, self.lines = dict(self.lines), defaultdict(list)
        return lines

    def _say(self, request_id: str, *line: Any) -> None:
        self.lines[request_id.rpartition("-")[0]].append(line)

    def match(self, request: Any, local: int) -> Any:
        answer = self._match(request, local)
        self._say(request.request_id, "match", local, answer)
        return answer

    def meta(self, scheduler_output: Any) -> Any:
        meta = self._meta(scheduler_output)
        for job in meta.requests:
            load = job.load_spec and (job.load_spec.vllm_cached_tokens, job.load_spec.kvpool_cached_tokens)
            held = [len(group) for group in job.block_ids]
            self._say(job.req_id, type(meta).__name__, load, job.can_save, job.token_len_chunk, held)
        return meta

    def output(self, out: Any) -> None:
        before = set(out.finished_recving or ())
        self._output(out)
        assert before == set(out.finished_recving or ())
        for request_id in before:
            self._say(request_id, "received")

    def finished(self, request: Any, block_ids: Any) -> Any:
        answer = self._finished(request, block_ids)
        self._say(request.request_id, "finished", [len(group) for group in block_ids], answer)
        return answer


def tails(trunk: list[int], *names: str) -> dict[str, list[int]]:
    return {name: [*trunk, *(7 + i for _ in range(4))] for i, name in enumerate(names)}


def same_prefix(engine: Engine) -> Burst:
    """Eight requests, one cold prefix of four blocks, no Get before all are scheduled."""
    trunk = blocks(1, 2, 3, 4, salt=SALT)
    store_prefixes(engine, trunk)
    return engine.burst(tails(trunk, *"abcdefgh"), barrier=True)


def partial_overlap(engine: Engine) -> Burst:
    """A loads blocks 1-4, B 1-8 while A's load hangs."""
    trunk = blocks(*range(1, 9), salt=SALT + 1)
    store_prefixes(engine, trunk)
    prompts = {"a": [*trunk[: len(trunk) // 2], 7], "b": [*trunk, 8]}
    return engine.burst(prompts, barrier=True)


def one_after_the_other(engine: Engine) -> Burst:
    """The same prefix again, once it is cold again: no overlap."""
    trunk = blocks(1, 2, 3, 4, salt=SALT + 2)
    store_prefixes(engine, trunk)
    first = engine.burst(tails(trunk, "a"))
    engine.cold()
    second = engine.burst(tails(trunk, "b"))
    return Burst({**first.tokens, **second.tokens})


def aborted(engine: Engine) -> Burst:
    """Four on one prefix; the first and the third are aborted while the first's Get hangs. Loads run on."""
    trunk = blocks(1, 2, 3, 4, salt=SALT + 3)
    store_prefixes(engine, trunk)
    engine.gate.open.clear()
    burst, steps = until_scheduled(engine, tails(trunk, *"abcd"))
    engine.llm.abort_request(["a", "c"])
    engine.step()
    engine.gate.open.set()
    for _ in steps:
        pass
    engine.settle()
    return burst


def failed(engine: Engine) -> Burst:
    """Two on one prefix. The first's Get fails for its second key; the second's Get succeeds."""
    trunk = blocks(1, 2, 3, 4, salt=SALT + 4)
    store_prefixes(engine, trunk)
    engine.scheduler.recompute_kv_load_failures = True
    with scripted(engine, hang(then=fail_keys(1))) as store:
        burst, steps = until_scheduled(engine, tails(trunk, *"ab"))
        store.faults[0].release.set()
        for _ in steps:
            pass
    engine.scheduler.recompute_kv_load_failures = False
    return burst


def reset(engine: Engine) -> Burst:
    """Three on one prefix; the operator resets the caches while the first's Get hangs."""
    trunk = blocks(1, 2, 3, 4, salt=SALT + 5)
    store_prefixes(engine, trunk)
    engine.scheduler.recompute_kv_load_failures = True
    engine.gate.open.clear()
    burst, steps = until_scheduled(engine, tails(trunk, *"abc"))
    assert engine.scheduler.reset_connector_cache() is True
    engine.gate.open.set()
    # All have failed before the next step: who is told first is else a matter of the receive thread's speed.
    engine.worker_connector.connector_worker.recv_request_queue.join()
    for _ in steps:
        pass
    engine.scheduler.recompute_kv_load_failures = False
    return burst


SCENARIOS: tuple[Callable[[Engine], Burst], ...] = (
    same_prefix,
    partial_overlap,
    one_after_the_other,
    aborted,
    failed,
    reset,
)


def counted(engine: Engine) -> dict[str, int] | None:
    shadow = getattr(engine.connector, "shadow", None)
    if shadow is None:
        return None
    stats = shadow.stats
    fan_in = {f"fan_in_{members}": cohorts for members, cohorts in stats.fan_in.items()}
    return {**{name: getattr(stats, name) for name in stats.__slots__ if name != "fan_in"}, **fan_in}


def main() -> None:
    model, out, connector, extra = sys.argv[1:]
    engine = Engine(model, connector, json.loads(extra))
    assert engine.scheduler.reset_connector_cache()  # the other arm has stored the same blocks
    transcript = Transcript(engine)
    told: dict[str, Any] = {}
    for scenario in SCENARIOS:
        before = counted(engine) or {}
        free = engine.free_blocks()
        burst = scenario(engine)
        now = counted(engine)
        told[scenario.__name__] = {
            "answers": {k: v for k, v in transcript.take().items() if not k.startswith("fill")},
            "loaded": engine.recorder.take().as_json(),
            "tokens": burst.tokens,
            "counted": now and {k: n - before.get(k, 0) for k, n in now.items() if n != before.get(k, 0)},
        }
        engine.cold()
        told[scenario.__name__]["blocks_lost"] = free - engine.free_blocks()
    if (shadow := getattr(engine.connector, "shadow", None)) is not None:
        told["left"] = len(shadow._loads) + len(shadow._fan_in)
        told["block_bytes"] = compat.bytes_per_block(
            engine.connector._vllm_config, engine.connector._kv_cache_config
        )
        told["windows"] = shadow.windows_seen
    Path(out).write_text(json.dumps(told))
    engine.close()


if __name__ == "__main__":
    main()
