"""Each check can fail: here is what it is for, done on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from .violation import Crash, Stuck, Violation

if TYPE_CHECKING:
    from .world import World

    Make = Callable[..., World]


def loading(world: Make, **fields: object) -> tuple[World, str]:
    """A world with one load in the air, of three blocks."""
    w = world(**{"mode": "attach", "hold": True, **fields})
    prompt = w.prompt("abc")
    w.store.put(prompt)
    name = w.add(prompt)
    w.step(2)
    return w, name


def test_a_wrong_slot_is_seen_when_it_is_read(world: Make) -> None:
    w = world(mode="stock")
    name = w.add(w.prompt("ab"), tokens=9)
    w.step(3)
    (blocks,) = w.scheduler.kv_cache_manager.get_block_ids(name)
    w.workers[0].memory.blocks[blocks[2]][0] ^= 1
    with pytest.raises(Violation, match="r1 reads a wrong slot on rank 0: token 8"):
        w.run()


def test_and_would_be_heard_in_the_tokens(world: Make) -> None:
    w = world(mode="stock")
    w.loop.runner.strict = False
    w.loop.checks.cache = lambda: None
    name = w.add(w.prompt("ab"), tokens=9)
    w.step(3)
    (blocks,) = w.scheduler.kv_cache_manager.get_block_ids(name)
    w.workers[0].memory.blocks[blocks[2]][0] ^= 1
    with pytest.raises(Violation, match="r1 says"):
        w.run()


def test_the_right_token_after_a_wrong_prefix_is_wrong(world: Make) -> None:
    w = world(mode="stock")
    w.store.put(w.prompt("ab"))
    held = w.loop.store.held
    _, second = list(held)
    other = w.loop.hashes.of_prompt(w.prompt("cb"), None, 4)
    held[second] = list(other.values())[1]
    w.add(w.prompt("ab"))
    with pytest.raises(Violation, match="r1 reads a wrong slot on rank 0: token 4"):
        w.run()


def test_a_wrong_entry_of_the_prefix_cache(world: Make) -> None:
    w, name = loading(world)
    request = w.scheduler.requests[name]
    w.scheduler.kv_cache_manager.cache_blocks(request, 8)
    with pytest.raises(Violation, match="in the prefix cache but wrong on rank 0: slot 0 holds in the air"):
        w.step()


def test_a_block_freed_in_mid_load(world: Make) -> None:
    w, name = loading(world)
    with pytest.raises(Violation, match="is freed while the load of r1 may still write to it"):
        w.scheduler.kv_cache_manager.free(w.scheduler.requests[name])


def test_two_loads_into_one_block(world: Make) -> None:
    w, _ = loading(world)
    with pytest.raises(Violation, match="is loaded into by r1 and r2"):
        w.workers[0].memory.queue_load("r2", [1])


def test_a_save_of_the_wrong_block(world: Make) -> None:
    w = world(mode="attach")
    w.add(w.prompt("ab"), tokens=1)
    w.step()
    w.workers[0].memory.blocks[1][2] = 77
    w.loop.checks.cache = lambda: None
    with pytest.raises(Violation, match="saves block 1 under a key it does not fit"):
        w.run()


def test_a_lost_block(world: Make) -> None:
    w = world(mode="attach", blocks=20)
    w.loop.pool.get_new_blocks(2)
    w.add(w.prompt("ab"))
    with pytest.raises(Violation, match="2 blocks are lost"):
        w.run()


def test_what_the_layer_remembers(world: Make) -> None:
    w = world(mode="attach")
    w.add(w.prompt("ab"))
    w.loop.connector.layer.table._leads["gone"] = None
    with pytest.raises(Violation, match="the layer remembers"):
        w.run()


def test_a_wrong_token(world: Make) -> None:
    w = world(mode="attach")
    w.add(w.prompt("ab"), tokens=2)
    w.step(2)
    w.requests["r1"].said[0] += 1
    with pytest.raises(Violation, match="r1 says"):
        w.run()


def test_an_error_without_a_failed_load(world: Make) -> None:
    from vllm.v1.request import RequestStatus

    w, name = loading(world)
    w.scheduler.finish_requests(name, RequestStatus.FINISHED_ERROR)
    w.requests[name].ended = "error"
    with pytest.raises(Violation, match="no load of its own has failed"):
        w.run()


def test_who_is_stuck_is_named(world: Make) -> None:
    w, _ = loading(world)
    w.add(w.prompt("abc"))
    w.step()
    w.land = lambda request=None: None
    with pytest.raises(Stuck, match=r"(?s)r1: WAITING_FOR_REMOTE_KVS.*in the air.*PendingBlockTable"):
        w.run(max_steps=30)


def test_an_exception_of_the_engine_is_a_crash(world: Make) -> None:
    w, _ = loading(world)
    w.loop.connector.build_connector_meta = lambda output: 1 // 0
    with pytest.raises(Crash, match="ZeroDivisionError"):
        w.step()
