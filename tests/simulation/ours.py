"""All that the simulation knows of our private names; the rest of it knows `connector.mode` at most."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from connector_patch import compat, matrix
from singleflight.core.fit import ENOUGH
from singleflight.core.prefill import Work

if TYPE_CHECKING:
    from .setup import Setup


def set_clock(connector: Any, clock: Callable[[], float]) -> None:
    """Virtual time for our scheduler side, if the connector is ours."""
    for part in (getattr(connector, "layer", None), getattr(connector, "shadow", None)):
        if part is not None:
            part._clock = clock


def warm(connector: Any, setup: Setup) -> None:
    """Have it know what loads and prefills take, where load or compute is a choice. A short story has too few
    of them."""
    part = getattr(connector, "layer", None) or getattr(connector, "shadow", None)
    if part is None or part.chooser is None:
        return
    queue, speed = part.chooser.queue, part.chooser.steps.speed
    for blocks in (2, 8) * ENOUGH:
        queue._prices.observe(blocks, 1, 2 * setup.load_s + blocks * setup.load_block_s)
    queue._learned = math.inf  # no story is too long for them
    token_s = (setup.load_s / 4 + setup.load_block_s) / setup.block_size * (0.3, 1, 3)[setup.timing % 3]
    for _ in range(ENOUGH):
        speed.observe(Work.of(0, speed.substantial), 0, speed.substantial * token_s)
    speed._longest = 1000


def leftovers(connector: Any) -> list[str]:
    """What the layer still remembers; nothing, once every request is gone."""
    layer = getattr(connector, "layer", None)
    if layer is None:
        return []
    chooser = layer.chooser
    return [
        f"{type(holder).__name__}.{name} = {value!r}"
        for holder in (layer, layer.table, *((chooser, chooser.steps, chooser.queue) if chooser else ()))
        for name, value in vars(holder).items()
        if isinstance(value, dict | set) and value
    ]


def waits_for(connector: Any) -> str:
    """The table, for a message about somebody who waits."""
    layer = getattr(connector, "layer", None)
    return repr(layer.table) if layer is not None else "no layer"


def counters(connector: Any) -> dict[str, Any]:
    """The layer's own counts; empty if there is no layer."""
    layer = getattr(connector, "layer", None)
    return layer.table.stats.snapshot() if layer is not None else {}


def late(connector: Any, now: float) -> set[str]:
    """Who waits for another's flight though its deadline has passed. Reports come before the clock: deadlines
    wait until the worker has answered."""
    layer = getattr(connector, "layer", None)
    if layer is None:
        return set()
    return {r for r, member in layer.table._members.items() if member.waits_for and member.deadline <= now}


def wrong_waits(connector: Any) -> list[str]:
    """Who waits for a flight that has ended."""
    layer = getattr(connector, "layer", None)
    if layer is None:
        return []
    table = layer.table
    waiting = [(request, member) for request, member in table._members.items() if member.waits_for]
    wrong: list[str] = []
    for request, member in waiting:
        ended = [f"{flight!r}" for number, flight in member.waits_for.items() if number not in table._flights]
        wrong += [f"{request} waits for {flight}, which has ended" for flight in ended]
    return wrong


@contextlib.contextmanager
def no_refusal(wanted: bool) -> Iterator[None]:
    """Inside, compat.py refuses no configuration, if `wanted`."""
    before = compat.unsupported_setup
    if wanted:
        compat.unsupported_setup = lambda *_, **__: None  # type: ignore[assignment]
    try:
        yield
    finally:
        compat.unsupported_setup = before


@contextlib.contextmanager
def asked_first(wanted: bool) -> Iterator[None]:
    """Inside, the stock connector is wrapped as one that must be asked about each request, if `wanted`."""
    before = matrix.CHILDREN["MooncakeStoreConnector"]
    matrix.CHILDREN["MooncakeStoreConnector"] = replace(before, asked_first=wanted)
    try:
        yield
    finally:
        matrix.CHILDREN["MooncakeStoreConnector"] = before


@contextlib.contextmanager
def beside(other: str) -> Iterator[None]:
    """Inside, a connector of this class name may be beside ours."""
    before = matrix.READ
    matrix.READ = before | {other}  # type: ignore[misc]
    try:
        yield
    finally:
        matrix.READ = before  # type: ignore[misc]
