"""The guard over the prefix cache's content notices what it is for, and nothing incomplete is ever shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from connector_patch.lab import memory
from singleflight.core.flight import State
from tests.faults.checksums import WrongBlock, content, guard, regions, shown
from tests.faults.scripted_store import fail_keys, scripted
from tests.support import blocks, expect_equal, finish, store_prefixes, until_scheduled

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine
    from singleflight.stack.arms import Arm

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("loaded", [True, False], ids=["a loaded block", "a computed block"])
def test_the_guard_notices_one_block_that_is_not_its_own(engine: Engine, salt: int, loaded: bool) -> None:
    """Hazards E6, F5: the prefix cache shows four blocks, loaded or computed here. All are right. Then a
    quarter of one of them is overwritten, as by a transfer that came late, and the guard names it."""
    trunk = blocks(*range(1, 5), salt=salt)
    if loaded:
        store_prefixes(engine, trunk)
    with guard(engine) as watching:
        engine.burst({"r": [*trunk, 7]}, max_tokens=1)
        engine.settle()
        checked = watching.check()
        assert (checked.loaded, checked.computed) == ((4, 0) if loaded else (0, 4))
        block_id = next(block_id for _, block_id in shown(engine))
        before = content(engine, block_id)
        address, size = next(regions(engine, block_id))
        memory.fill(address, 0x3F, size // 4)
        with pytest.raises(WrongBlock, match=f"block {block_id} "):
            watching.check()
        memory.write(address, before[:size])


def test_one_bit_of_a_loaded_block_is_noticed(engine: Engine, salt: int) -> None:
    """What was loaded is compared byte for byte: rounding is no excuse for it."""
    trunk = blocks(1, 2, salt=salt)
    store_prefixes(engine, trunk)
    with guard(engine) as watching:
        engine.burst({"r": [*trunk, 7]}, max_tokens=1)
        block_id = next(iter(watching.loaded))
        address, _ = next(regions(engine, block_id))
        low_byte = memory.read(address, 1)
        memory.fill(address, low_byte[0] ^ 1, 1)
        with pytest.raises(WrongBlock, match="loaded"):
            watching.check()
        memory.fill(address, low_byte[0], 1)


def test_of_a_load_that_failed_in_part_only_what_is_there_is_shown(
    engine: Engine, reference: Arm, salt: int, policy: str
) -> None:
    """taco-project/FlexKV#232, hazard E6: of four blocks the third fails. At no step does the prefix cache
    show a block that the store does not confirm; of this load it shows the first two, in the step in which
    the load ends and not before."""
    trunk = blocks(*range(1, 5), salt=salt)
    store_prefixes(engine, trunk)
    prompts = {f"r{i}": [*trunk, *(7 + i for _ in range(4))] for i in range(3)}
    engine.gate.open.clear()
    with scripted(engine, fail_keys(2)), guard(engine) as watching:
        burst, steps = until_scheduled(engine, prompts)
        (flight,) = engine.connector.layer.table._flights.values()
        destination = [block.block_id for block in flight.destination]
        landed: set[int] | None = None
        engine.gate.open.set()
        for _ in steps:
            here = {block_id for _, block_id in shown(engine)}.intersection(destination)
            if landed is None and flight.state is State.LANDED:
                landed = here
            assert landed is not None or not here
            watching.check()
    assert landed == set(destination[:2])
    tokens = finish(engine, burst, iter(()))
    if policy == "fail":
        assert tokens.pop("r0") == []
        prompts.pop("r0")
    expect_equal(reference, prompts, tokens)
