"""CPU time of the scheduler's thread, by what it is spent on: a cost that other processes cannot move.

Wall time on a busy machine is mostly waiting for a core; this is not. Stock and ours are wrapped alike, from
outside, so that nothing is added to what is measured but two readings of a clock a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, MutableSequence
from typing import Any

COUNTS = ("busy_ns", "busy_steps", "idle_ns", "idle_steps", "connector_ns", "lookup_ns", "lookups")
"""What `count` adds to, in this order. Connector and lookups are parts of the steps."""
LOOKUP = "get_num_new_matched_tokens"
OF_REQUESTS = (
    LOOKUP,
    "update_state_after_alloc",
    "get_loaded_kv_cache_group_ids",
    "request_finished_all_groups",
)
"""What the scheduler asks the connector about one request; vLLM 0.31 asks less."""
OF_STEPS = ("build_connector_meta", "update_connector_output", "get_kv_connector_stats", "take_events")
"""What it calls in every step."""


def count(
    scheduler: Any,
    connector: Any,
    counts: MutableSequence[int],
    now: Callable[[], int] = time.thread_time_ns,
) -> None:
    """Add up what steps cost, and the connector within them.

    A step is `schedule` and `update_from_output`; the model runs between them. It is idle where no token is
    scheduled, no request is asked about and no load has landed. How many of those there are depends on how
    long loads take, so they are counted apart.

    Args:
        scheduler, connector: instances, or their classes before there is one.
        counts: as long as COUNTS.
        now: the thread's CPU time, ns.
    """
    busy, busy_steps, idle, idle_steps, inside, in_lookups, lookups = range(len(COUNTS))
    stepping = asked = False

    def timed(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            nonlocal asked
            if not stepping:  # the worker's side
                return stock(*args, **named)
            begun = now()
            result = stock(*args, **named)
            took = now() - begun
            counts[inside] += took
            asked = asked or name in OF_REQUESTS
            if name == LOOKUP:
                counts[in_lookups] += took
                counts[lookups] += 1
            return result

        return call

    def step(stock: Callable[..., Any], steps: int, nothing: Callable[..., bool]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            nonlocal stepping, asked
            stepping, asked, begun = True, False, now()
            try:
                result = stock(*args, **named)
            finally:
                stepping = False
            is_idle = not asked and nothing(result, *args)
            counts[idle if is_idle else busy] += now() - begun
            counts[idle_steps if is_idle else busy_steps] += steps
            return result

        return call

    def nothing_scheduled(output: Any, *args: Any) -> bool:
        return bool(output.total_num_scheduled_tokens == 0)

    def nothing_happened(result: Any, *args: Any) -> bool:
        # `self` comes first where these are classes.
        scheduled, output = args[-2:]
        landed = getattr(getattr(output, "kv_connector_output", None), "finished_recving", None)
        return not landed and nothing_scheduled(scheduled)

    for name in (*OF_REQUESTS, *OF_STEPS):
        if hasattr(connector, name):
            setattr(connector, name, timed(name, getattr(connector, name)))
    scheduler.schedule = step(scheduler.schedule, 1, nothing_scheduled)
    scheduler.update_from_output = step(scheduler.update_from_output, 0, nothing_happened)
