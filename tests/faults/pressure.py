"""A small pool without an engine of its own, and a run that notices a deadlock."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine

EMPTY_STEPS = 200
"""Steps in a row in which nothing is computed and no load is in the air: a deadlock."""


@contextlib.contextmanager
def pool_of(engine: Engine, count: int) -> Iterator[Callable[[int], None]]:
    """Only `count` blocks for everybody; the rest is held back. Call the result to change the count."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    held: list[Any] = []

    def squeeze(count: int) -> None:
        difference = pool.get_num_free_blocks() - count
        if difference > 0:
            held.extend(pool.get_new_blocks(difference))
        elif difference < 0:
            pool.free_blocks(held[difference:])
            del held[difference:]

    squeeze(count)
    try:
        yield squeeze
    finally:
        pool.free_blocks(held)


def free(engine: Engine) -> int:
    return int(engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def run(engine: Engine, prompts: Mapping[str, Sequence[int]], max_tokens: int = 4) -> dict[str, list[int]]:
    """Add all at once and step to the end; a deadlock is a failure."""
    for request_id, prompt in prompts.items():
        engine.add(request_id, prompt, max_tokens)
    return to_the_end(engine)


def to_the_end(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    empty = 0
    while engine.llm.has_unfinished_requests():
        before = progress(engine)
        for output in engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        idle = progress(engine) == before and not loading(engine)
        empty = empty + 1 if idle else 0
        assert empty < EMPTY_STEPS, f"deadlock: {engine.connector.layer.table!r}"
    return tokens


def progress(engine: Engine) -> tuple[int, ...]:
    requests = engine.scheduler.requests.values()
    return len(requests), sum(r.num_computed_tokens for r in requests), sum(r.num_tokens for r in requests)


def loading(engine: Engine) -> bool:
    return bool(engine.connector.layer._loads)


def request_named(engine: Engine, name: str) -> Any:
    (request,) = (r for i, r in engine.scheduler.requests.items() if i.startswith(f"{name}-") or i == name)
    return request
