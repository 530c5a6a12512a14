"""Deliberately broken versions of the layer: the simulation is worth something if it notices each of them.

With `ours.py` the only module that knows our private names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from connector_patch import partial, worker
from connector_patch.attach import AttachScheduler
from connector_patch.connector import SingleFlightMooncakeStoreConnector
from connector_patch.mooncake import MooncakeStore
from connector_patch.partial import PartialLoads
from connector_patch.rules import Rules, Run
from connector_patch.windows import Windows
from singleflight.core.table import PendingBlockTable

Undo = list[tuple[Any, str, Any]]


def _set(undo: Undo, owner: Any, name: str, value: Any) -> Any:
    """Replace an attribute; returns what it was."""
    before = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    undo.append((owner, name, before))
    setattr(owner, name, value)
    return before


def publishes_at_allocation(undo: Undo) -> None:
    """A leader's blocks are published when its load is claimed, not when it lands."""

    def allocated(self: Any, request: Any, blocks: Any, external: int) -> None:
        stock(self, request, blocks, external)
        if load := self._store.planned(request.request_id):
            self._manager.cache_blocks(request, load.stop * self._block_size)

    stock = _set(undo, AttachScheduler, "allocated", allocated)


def failure_lands(undo: Undo) -> None:
    """A failed load lands like any other."""

    def output(self: Any, out: Any) -> None:
        failed, out.failed_recving = out.failed_recving, set()
        stock(self, out)
        out.failed_recving = failed

    stock = _set(undo, AttachScheduler, "output", output)


def keeps_blocks(undo: Undo) -> None:
    """Who falls back keeps the blocks it had."""

    def output(self: Any, out: Any) -> None:
        free, self._manager.free = self._manager.free, lambda _request: None
        stock(self, out)
        self._manager.free = free

    stock = _set(undo, AttachScheduler, "output", output)


def nobody_acknowledged(undo: Undo) -> None:
    """The worker is never asked to let anybody go."""

    def acknowledgements(self: Any) -> set[str]:
        stock(self)
        return set()

    stock = _set(undo, AttachScheduler, "acknowledgements", acknowledgements)


def ready_before_landing(undo: Undo) -> None:
    """A follower is reported as received once its own load has ended, though its flight has not landed."""

    def output(self: Any, out: Any) -> None:
        reported = set(out.finished_recving or ())
        stock(self, out)
        out.finished_recving = {*(out.finished_recving or ()), *reported} or None

    stock = _set(undo, AttachScheduler, "output", output)


def last_token_adopted(undo: Undo) -> None:
    """A prompt of whole blocks adopts all of them, the one with its last token too."""

    def run(self: Any, hashes: Any, start: int, stop: int) -> Any:
        return stock(self, hashes, start, min(stop + 1, len(hashes)))

    stock = _set(undo, PendingBlockTable, "run", run)


def reset_forgotten(undo: Undo) -> None:
    """A reset leaves the flights in the air as they are."""
    _set(undo, AttachScheduler, "reset", lambda self: None)


def discarded_published(undo: Undo) -> None:
    """A flight that a reset has discarded is published when it lands."""

    def reset(self: Any, now: float | None = None) -> Any:
        return []

    _set(undo, PendingBlockTable, "reset", reset)


def freed_in_air(undo: Undo) -> None:
    """A request counts as settled while its own load still writes into its blocks."""
    _set(undo, AttachScheduler, "_settled", lambda self, request_id: not self.table.waiting(request_id))


def leader_let_go(undo: Undo) -> None:
    """An aborted leader is let go at once, while its load runs on."""

    def finished(self: Any, request_id: str, aborted: bool = False) -> None:
        pending = self._pending.get(request_id)
        stock(self, request_id, aborted)
        if pending is not None:
            self._to_acknowledge.add(request_id)

    stock = _set(undo, AttachScheduler, "finished", finished)


def loads_again(undo: Undo) -> None:
    """A request whose load has failed looks up and loads again, and broken keys are not remembered."""

    def known(self: Any, request: Any, local: int) -> Any:
        self._no_load.clear()
        self.health.broken.clear()
        return stock(self, request, local)

    stock = _set(undo, Rules, "_known_answer", known)


def no_deadline(undo: Undo) -> None:
    """No deadline ever passes."""
    _set(undo, PendingBlockTable, "expire", lambda self, now: [])


def one_rank_acknowledges(undo: Undo) -> None:
    """Rank 0 acknowledges, the others do not."""

    def get_transfer_results(self: Any, finished: set[str]) -> Any:
        if self.connector_worker.rank == 0:
            return stock(self, finished)
        return super(SingleFlightMooncakeStoreConnector, self).get_transfer_results(finished)

    stock = _set(undo, SingleFlightMooncakeStoreConnector, "get_transfer_results", get_transfer_results)


def short_read_lands(undo: Undo) -> None:
    """A Get that brings too few bytes counts as complete."""
    _set(undo, worker, "SHORT_READ", 0)


def thread_lost(undo: Undo) -> None:
    """What ends a receive thread is not reported."""

    def handle(self: Any, request: Any) -> None:
        self._in_hand = request
        self._store.forget()
        self._handle(request)

    _set(undo, worker.Receiver, "handle", handle)


def one_block_too_many_is_there(undo: Undo) -> None:
    """Of a load that failed in part, the first missing block lands too."""

    def there(self: Any, out: Any) -> Any:
        return {request: blocks + 1 for request, blocks in stock(self, out).items()}

    stock = _set(undo, MooncakeStore, "there", there)


def other_ranks_are_not_asked(undo: Undo) -> None:
    """What is there of a failed load is what the first rank says."""

    def aggregate(self: Any, other: Any) -> Any:
        there = dict(self.there)
        stock(self, other)
        self.there = there or self.there
        return self

    stock = _set(undo, PartialLoads, "aggregate", aggregate)


def reserves_for_nobody(undo: Undo) -> None:
    """vLLM goes on reserving blocks for those who fell back."""
    _set(undo, AttachScheduler, "_claimed_in_vain", lambda self: 0)


def load_of_pass_lost(undo: Undo) -> None:
    """A load planned in the very pass that names its request as preempted is thrown away, as in stock."""
    _set(undo, Rules, "still_preempted", lambda self, preempted: preempted)


def waits_for_what_has_ended(undo: Undo) -> None:
    """Followers of a failed flight are not let go."""

    def fail(self: Any, generation: int, *_: Any, **__: Any) -> list[Any]:
        flight = self._flights.pop(generation, None)
        if flight is not None:
            self._unlist(flight, flight.hashes)
            self._leads.pop(flight.leader, None)
        return []

    _set(undo, PendingBlockTable, "fail", fail)


def adopts_what_is_not_proved(undo: Undo) -> None:
    """With EAGLE a run is adopted to its last block, whatever follows."""
    _set(undo, Run, "before", lambda self, end: self)


def adopts_unchosen(undo: Undo) -> None:
    """Beside another connector: blocks are adopted though that one was chosen to load."""

    def join(self: Any, request: Any, *how: Any) -> Any:
        answer = stock(self, request, *how)
        self.chosen(request.request_id)
        return answer

    stock = _set(undo, AttachScheduler, "_join", join)


def adopts_without_windows(undo: Undo) -> None:
    """What is adopted of a run is not asked for its windows."""
    _set(undo, Windows, "covered", lambda self, run: True)
    _set(undo, Windows, "adoptable", lambda self, run, end: run.end)


def goes_on_without_windows(undo: Undo) -> None:
    """A request whose load has failed in part goes on where its table has no windows."""
    _set(undo, Windows, "serve", lambda self, planned, end: True)


def windows_are_not_asked_for(undo: Undo) -> None:
    """What is there of a failed load is told by the keys of the full-attention group alone."""

    def keys(thread: Any, request: Any) -> list[list[str]]:
        return [[key for key in block if "@group:1@" in key] for block in stock(thread, request)]

    stock = _set(undo, partial, "_keys", keys)


ATTACH: tuple[Callable[[Undo], None], ...] = (
    publishes_at_allocation,
    failure_lands,
    keeps_blocks,
    nobody_acknowledged,
    ready_before_landing,
    last_token_adopted,
    reset_forgotten,
    discarded_published,
    freed_in_air,
    leader_let_go,
    no_deadline,
    one_rank_acknowledges,
    short_read_lands,
    thread_lost,
    one_block_too_many_is_there,
    other_ranks_are_not_asked,
    reserves_for_nobody,
    load_of_pass_lost,
    waits_for_what_has_ended,
    adopts_what_is_not_proved,
    adopts_unchosen,
    adopts_without_windows,
    goes_on_without_windows,
    windows_are_not_asked_for,
)
FIXED: dict[str, dict[str, object]] = {
    "adopts_what_is_not_proved": {"drafts": 2, "drafter": "eagle"},
    "adopts_unchosen": {"other": "before"},
    "adopts_without_windows": {"spec": "window"},
    "goes_on_without_windows": {"spec": "window"},
    "windows_are_not_asked_for": {"spec": "window"},
}
"""Fields of the set-up in which one can be noticed, where that is not every one."""
PARK: tuple[Callable[[Undo], None], ...] = (loads_again, waits_for_what_has_ended, no_deadline)


@contextlib.contextmanager
def broken(mutation: Callable[[Undo], None]) -> Iterator[None]:
    """Inside, the layer is broken in this way."""
    undo: Undo = []
    mutation(undo)
    try:
        yield
    finally:
        for owner, name, value in reversed(undo):
            setattr(owner, name, value)
