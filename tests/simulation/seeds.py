"""A story from a number: which engine, and what happens to it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from .groups import kinds
from .setup import Setup
from .story import (
    Abort,
    Action,
    Add,
    Break,
    Evict,
    Fault,
    Land,
    Lend,
    Mend,
    Pause,
    Put,
    Reset,
    Resume,
    Step,
    Story,
    Wait,
)

LONGEST = 10
"""Blocks of a prompt."""


def story(seed: int, mode: str, **fixed: object) -> Story:
    """The story of this seed; `fixed` fields of the set-up are as given, whatever the seed says."""
    random = Random(f"{seed} {mode}")
    setup = _setup(random, mode)
    setup = replace(setup, **fixed)  # type: ignore[arg-type]
    if setup.store != "mooncake":
        setup = replace(setup, **_of_offloading(random, setup) | fixed)  # type: ignore[arg-type]
    if (groups := len(kinds(setup))) > 1:
        setup = replace(setup, **_of_groups(random, setup, groups) | fixed)  # type: ignore[arg-type]
    if setup.drafts:
        setup = _with_room_for_drafts(setup)
    if setup.load_or_compute == "on":
        setup = replace(setup, **_of_choice(Random(f"{seed} {mode} choice"), setup) | fixed)  # type: ignore[arg-type]
    if setup.other:
        loads, fails = random.choice(["async", "async", "sync"]), random.random() < 0.4
        setup = replace(setup, other_loads=loads, other_fails=fails)
    return Story(setup, tuple(_actions(random, setup)))


def _setup(random: Random, mode: str) -> Setup:
    size = random.choice([2, 4, 4])
    asynchronous = random.random() < 0.35
    consumer = random.random() < 0.2
    options: dict[str, object] = {}
    if mode in ("attach", "park"):
        options = {
            "deadline_base_s": random.choice([0.05, 0.3, 2.0, 10.0]),
            "deadline_per_token_s": random.choice([0.0, 0.0125]),
            "max_handovers": random.choice([0, 1, 1, 3]),
            "join_patience": random.choice([0.0, 1.0, 1.0]),
            "on_deadline": random.choice(["recompute", "load"]),
            "max_blocks": random.choice([4, 262_144, 262_144, 262_144]),
        }
    return Setup(
        mode=mode,
        block_size=size,
        # The longest request alone takes LONGEST + 2 blocks.
        blocks=random.choice([LONGEST + 3, 16, 20, 30, 64]),
        ranks=random.choice([1, 1, 1, 2, 3]),
        lanes=random.choice([1, 1, 2, 4]),
        async_scheduling=asynchronous,
        late_forwards=random.random() < 0.6,
        v2_runner=random.random() < 0.4,
        lookup_async=random.random() < 0.3,
        role="kv_consumer" if consumer else "kv_both",
        save_decode=random.random() < 0.2,
        recompute=random.random() < 0.5,
        policy=random.choice(["fcfs", "fcfs", "priority"]),
        token_budget=random.choice([size, 3 * size, 64]),
        max_seqs=random.choice([1, 2, 4, 8]),
        long_prefill=random.choice([0, 0, 0, size, 2 * size + 1]),
        reserve_full=random.random() < 0.7,
        options=options,
        load_s=random.choice([0.005, 0.05, 0.2]),
        load_block_s=random.choice([0.0, 0.005, 0.05]),
        timing=random.randrange(1_000_000),
    )


def _with_room_for_drafts(setup: Setup) -> Setup:
    """A request needs room for its drafts, and vLLM keeps as much free beside its load. Whoever has less than
    one round of drafts to a step (and the slot that a draft model needs) is stuck, or asserts, in vLLM."""
    step = 1 + setup.drafts + (setup.drafter == "draft_model")
    return replace(
        setup,
        blocks=setup.blocks + 2 * -(-(step + setup.drafts) // setup.block_size),
        token_budget=max(setup.token_budget, step),
        long_prefill=max(setup.long_prefill, step) if setup.long_prefill else 0,
    )


def _of_offloading(random: Random, setup: Setup) -> dict[str, object]:
    """CPU memory from less than a prompt to more than all of them."""
    chunk = random.choice([1, 1, 2, 3]) if setup.store == "offloading" else 1
    return {
        "chunk": chunk,
        "cpu_blocks": random.choice([6, 12, 24, 64]),
        "lazy": setup.store == "simple" and random.random() < 0.3,
    }


def _of_groups(random: Random, setup: Setup, groups: int) -> dict[str, object]:
    """Windows from less than a block to more than any prompt."""
    size = setup.block_size
    chunked = setup.spec == "chunked"
    window = random.choice([1, 2, 3, 6, 20]) * size + (0 if chunked else random.choice([0, 1, 1 - size]))
    return {
        "window": max(window, 2),
        "retention": random.choice([0, 0, None]),
        "blocks": setup.blocks * groups,
    }


def _of_choice(random: Random, setup: Setup) -> dict[str, object]:
    """Whoever may compute what the store has does so now and then."""
    choice = {
        "compute_patience": random.choice([0.0, 0.5, 1.25]),
        "compute_decode_share": random.choice([0.001, 0.05, 1.0, 1.0]),
    }
    return {"warm": True, "options": {**setup.options, **choice}}


def _actions(random: Random, setup: Setup) -> list[Action]:
    """Bursts of requests for the same prefixes, and trouble between them."""
    stock = setup.mode in ("stock", "off", "shadow") or setup.wrapped
    paths = _paths(random)
    actions: list[Action] = [Put(random.choice(paths)) for _ in range(random.randrange(1, 5))]
    kinds = ["error", "key", "exception", "rubbish", "hang"] + ["short", "exit"] * (not stock)
    if setup.store != "mooncake":
        kinds = ["hang"]  # they report no failure (`offload.py`)
    names: list[str] = []
    # Some stories are all faults, some all operators, some quiet.
    share = [random.choice([0, 1, 1, 3]) for _ in range(6)]
    for _ in range(random.randrange(4, 26)):
        (what,) = random.choices(
            ["add", "abort", "fault", "damage", "land", "operator", "wait"], [6, *share]
        )  # fmt: skip
        if what == "add":
            letters = random.choice(paths)
            for _ in range(random.choice([1, 1, 2, 3, 5])):
                names.append(f"r{len(names) + 1}")
                actions.append(_request(random, setup, names[-1], letters))
        elif what == "abort" and names:
            actions.append(Abort(random.choice(names), in_step=random.random() < 0.3))
        elif what == "fault":
            rank = random.choice([None, random.randrange(setup.ranks)])
            actions.append(Fault(random.choice(kinds), rank))
        elif what == "damage" and setup.store == "mooncake":
            actions.append(_damage(random, setup, paths, stock))
        elif what == "land":
            actions.append(Land())
        elif what == "operator":
            actions.append(_operator(random))
        elif what == "wait":
            actions.append(Wait(random.choice([0.1, 0.5, 3.0, 20.0])))
        if setup.other and random.random() < 0.3:
            actions.append(Lend(random.choice(paths)))
        actions.append(Step(random.choice([1, 1, 1, 2, 3, 5, 9])))
    return actions


def _paths(random: Random) -> list[str]:
    """Prompts from a tree of prefixes; a letter names a block."""
    paths = [random.choice("ab")]
    for _ in range(7):
        stem = random.choice(paths)
        grown = stem + "".join(random.choice("abc") for _ in range(random.randrange(1, 5)))
        paths.append(grown[: LONGEST - 1])
    return paths


def _request(random: Random, setup: Setup, name: str, letters: str) -> Add:
    return Add(
        name,
        letters,
        tail=random.choice([0, 1, 1, setup.block_size - 1, setup.block_size]),
        mark=random.choice([0, 0, len(name)]),
        tokens=random.choice([1, 1, 2, 2 * setup.block_size]),
        priority=random.randrange(3) if setup.policy == "priority" else 0,
        salt=random.choice([None] * 9 + ["tenant"]),
        read_cache=random.random() > 0.04,
    )


def _damage(random: Random, setup: Setup, paths: list[str], stock: bool) -> Action:
    letters = random.choice(paths)
    block = random.randrange(len(letters))
    if random.random() < 0.5:
        groups = len(kinds(setup))
        return Evict(letters, block, random.choice([None, *range(groups)]) if groups > 1 else None)
    if random.random() < 0.3:
        return Mend()
    return Break(letters, block, "error" if stock else random.choice(["error", "short"]))


def _operator(random: Random) -> Action:
    draw = random.random()
    if draw < 0.3:
        return Pause(everything=random.random() < 0.3)
    if draw < 0.6:
        return Resume()
    return Reset(running=random.random() < 0.5, connector=random.random() < 0.6)
