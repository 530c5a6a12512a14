"""What may be adopted in a model with windowed groups, against the rule said block by block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from connector_patch.compat import bytes_per_block
from connector_patch.windows import Windows

SIZE = 4
LONGEST = 14


@dataclass
class Block:
    is_null: bool


@dataclass
class Run:
    first: int
    end: int
    destination: list[tuple[Block, ...]]


Skipped = Callable[[int], int]


def sliding(tokens: int) -> Skipped:
    return lambda end: max(end * SIZE - tokens + 1, 0) // SIZE


def chunked(blocks: int) -> Skipped:
    return lambda end: end // blocks * blocks


def full(end: int) -> int:
    return 0


KINDS = st.one_of(st.integers(2, 40).map(sliding), st.integers(1, 6).map(chunked))


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Skipped], Run]:
    """A run through one to three flights, each of which has windows at its own end only."""
    groups = [full, *draw(st.lists(KINDS, min_size=1, max_size=2))]
    first = draw(st.integers(0, 5))
    destination: list[tuple[Block, ...]] = []
    for _ in range(draw(st.integers(1, 3))):
        start = first + len(destination)
        ends = start + draw(st.integers(1, 5))
        used = draw(st.integers(1, ends - start))  # another flight has the rest, or the prompts differ
        destination += [
            tuple(Block(i < skipped(ends)) for skipped in groups) for i in range(start, start + used)
        ]
    return groups, Run(first, first + len(destination), destination)


def windows(groups: list[Skipped]) -> Windows:
    return Windows({i: skipped for i, skipped in enumerate(groups) if skipped is not full}, 0, SIZE)


def fits(groups: list[Skipped], run: Run, end: int, hit: int) -> bool:
    """Whether the blocks before `end` are there, as far as a request needs them whose hit ends at `hit`."""
    return not any(
        run.destination[i - run.first][group].is_null
        for group, skipped in enumerate(groups)
        for i in range(max(skipped(hit), run.first), end)
    )


@given(runs())
def test_a_hit_of_the_run_alone_ends_where_its_windows_are_there(made: tuple[list[Skipped], Run]) -> None:
    groups, run = made
    right = max(end for end in range(run.first, run.end + 1) if fits(groups, run, end, end))
    assert windows(groups).standing(run) == right
    assert windows(groups).covered(run) == (right == run.end)


@given(runs(), st.integers(0, LONGEST))
def test_who_loads_the_rest_adopts_up_to_the_first_gap(made: tuple[list[Skipped], Run], more: int) -> None:
    groups, run = made
    hit = run.first + more
    adopted = windows(groups).adoptable(run, hit)
    if hit <= run.end and fits(groups, run, run.end, run.end):
        assert adopted == run.end
    else:
        most = min(run.end, hit)
        assert adopted == max(end for end in range(run.first, most + 1) if fits(groups, run, end, hit))


@given(st.lists(KINDS, min_size=1, max_size=2), st.integers(1, LONGEST), st.data())
def test_a_request_goes_on_earlier_only_if_its_table_has_all_that_it_reads_and_writes(
    kinds: list[Skipped], planned: int, data: st.DataObject
) -> None:
    end = data.draw(st.integers(0, planned))
    table = Run(0, planned, [tuple(Block(i < s(planned)) for s in kinds) for i in range(planned)])
    writes = fits(kinds, table, planned, end)  # what it has no use for at `end`, and blocks from there on
    assert Windows(dict(enumerate(kinds)), 0, SIZE).serve(planned, end) == writes


def test_without_windowed_groups_nothing_is_in_the_way() -> None:
    plain = Windows()
    run = Run(3, 9, [])
    assert not plain
    assert plain.covered(run)
    assert plain.adoptable(run, 12) == plain.standing(run) == 9
    assert plain.serve(9, 4)


def test_bytes_of_a_block_are_those_of_full_attention() -> None:
    """A block that was not loaded once more spared these at least."""

    def group(kind: str, layers: int) -> Any:
        spec = type(kind, (), {"page_size_bytes": 1000})()
        return SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"] * layers)

    two_ranks: Any = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2))
    full, windowed = group("FullAttentionSpec", 3), group("SlidingWindowSpec", 9)
    both: Any = SimpleNamespace(kv_cache_groups=[windowed, full])
    alone: Any = SimpleNamespace(kv_cache_groups=[windowed])
    assert bytes_per_block(two_ranks, both) == 2 * 3 * 1000
    assert bytes_per_block(two_ranks, alone) == 2 * 9 * 1000
