"""vLLM's own offloading to CPU memory: one worker's transfers in virtual time, and what its CPU memory holds.

Real: both connectors' scheduler sides and managers, and `OffloadingConnectorWorker` and
`SimpleCPUOffloadWorker`, whose CUDA copies are replaced (`offload_native.py`, `offload_simple.py`). As
theirs, the transfers of a direction follow each other; a store waits for the forwards launched before it,
and so does a load of OffloadingConnector. Neither reports a failed load: a copy that fails ends the worker.
What is left is one that hangs.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from .content import POISON, STALE
from .memory import Memory
from .violation import Violation

if TYPE_CHECKING:
    from .runner import Batch
    from .setup import Setup
    from .store import Store

LOAD, STORE = "load", "store"
Slot = tuple[int, int]
"""A chunk of CPU memory, and a block in it."""


@dataclass
class Load:
    """One request's part of a transfer to the GPU, as the rest of the simulation sees a Get."""

    request: str
    rank: int
    tokens: int
    blocks: list[int]
    transfer: Transfer = field(repr=False)
    fault: str | None = None
    stale: bool = False
    failed: bool = False
    late: bool = False

    @property
    def due(self) -> float:
        return self.transfer.due

    @due.setter
    def due(self, due: float) -> None:
        self.transfer.due = due


@dataclass
class Transfer:
    """One copy of blocks, in a direction."""

    number: int
    """The connector's own: a job, or an event."""
    direction: str
    copies: list[tuple[int, Slot]]
    """GPU block and where it is, or will be, in CPU memory."""
    after: list[Batch]
    """Forwards that it waits for."""
    loads: list[Load] = field(default_factory=list)
    due: float = float("inf")
    started: bool = False
    early: bool = False
    """It reads at its start, not at its end: both may be so."""
    read: list[list[int]] = field(default_factory=list)


@dataclass
class Lane:
    """A load that has started, where the rest of the simulation looks for one."""

    get: Load
    dead: bool = False


class HeldMemory(Memory):
    """GPU memory in which a block that is given away keeps its contents for stores: until somebody writes."""

    def __init__(self, blocks: int, block_size: int) -> None:
        super().__init__(blocks, block_size)
        self._held: dict[int, list[int]] = {}

    def poison(self, block: int) -> None:
        self._held.setdefault(block, self.blocks[block])
        super().poison(block)

    def start_load(self, blocks: Sequence[int]) -> None:
        super().start_load(blocks)
        for block in blocks:
            self._held.pop(block, None)

    def write(self, blocks: Sequence[int], first: int, contents: Sequence[int], who: str) -> None:
        super().write(blocks, first, contents, who)
        for position in range(first, first + len(contents)):
            self._held.pop(blocks[position // self.block_size], None)

    def held(self, block: int) -> list[int]:
        return list(self._held.get(block, self.blocks[block]))


class OffloadWorker:
    """One rank's memory, GPU and CPU, and the copies between them."""

    queued: tuple[()] = ()
    beside = None
    lost_saves = 0

    def __init__(self, setup: Setup, rank: int, store: Store, log: Callable[[str], None]) -> None:
        self.setup, self.rank, self.log = setup, rank, log
        self.memory = HeldMemory(setup.blocks + 1, setup.block_size)
        self.cpu: dict[Slot, list[int]] = {}
        self.shared = store
        """Its faults; what is in CPU memory is `cpu`."""
        self.attempts: Counter[str] = Counter()
        self.holding = setup.hold
        self.now = 0.0
        self.stored = False
        """A store has ended since somebody has looked."""
        self.ended: Callable[[Any], None] = lambda _load: None
        self.drain: Callable[[Sequence[Batch]], None] = lambda _batches: None
        """Have the GPU do these forwards now."""
        self._queues: dict[str, deque[Transfer]] = {LOAD: deque(), STORE: deque()}
        self._free: dict[str, float] = {LOAD: 0.0, STORE: 0.0}
        self._finished: list[Transfer] = []
        self._count = 0
        self._launched: list[Batch] = []
        self._launching: Batch | None = None

    # -- what the connectors' workers call ---------------------------------------------------------------

    @property
    def forward(self) -> Batch | None:
        return self._launching

    @forward.setter
    def forward(self, batch: Batch) -> None:
        """This batch is being launched."""
        self._launched = [b for b in self._launched if not b.done] + [batch]
        self._launching = batch

    def before_this(self) -> list[Batch]:
        """Forwards that the GPU has been given: with the v2 runner, that of this step too."""
        launching = None if self.setup.v2_runner else self._launching
        return [b for b in self._launched if not b.done and b is not launching]

    def with_this(self) -> list[Batch]:
        return [b for b in self._launched if not b.done]

    def submit(
        self,
        direction: str,
        number: int,
        copies: list[tuple[int, Slot]],
        after: list[Batch],
        requests: Iterable[tuple[str, list[int]]] = (),
    ) -> None:
        """Queue a transfer; `requests`: whose load it is, and into which blocks."""
        self._count += 1
        transfer = Transfer(number, direction, copies, after)
        for request, blocks in requests:
            tokens = len(blocks) * self.setup.block_size
            transfer.loads.append(Load(request, self.rank, tokens, blocks, transfer))
            self.memory.queue_load(request, blocks)
        self._queues[direction].append(transfer)

    def reported(self, direction: str) -> list[Transfer]:
        """What has ended since the last call."""
        ended = [t for t in self._finished if t.direction == direction]
        self._finished = [t for t in self._finished if t.direction != direction]
        return ended

    def asked(self) -> None:
        """The launch of this step is over."""
        self._launching = None

    def wait(self, numbers: Callable[[Transfer], bool]) -> None:
        """The worker waits until these transfers have ended, and those before them."""
        for queue in self._queues.values():
            last = max((i for i, t in enumerate(queue) if numbers(t)), default=-1)
            for _ in range(last + 1):
                transfer = queue[0]
                self.drain(transfer.after)
                self._start(transfer, self.now)
                self.log(f"rank {self.rank} waits for {transfer.direction} {transfer.number}")
                self._end(queue.popleft())

    # -- what the loop calls -----------------------------------------------------------------------------

    def pump(self, now: float) -> None:
        """Have the transfers come as far as they would until `now`."""
        self.now = now
        for direction, queue in self._queues.items():
            while queue:
                if not all(batch.done for batch in queue[0].after):
                    break
                self._start(queue[0], max(self._free[direction], 0.0) or now)
                if queue[0].due > now:
                    break
                self._free[direction] = queue[0].due
                self._end(queue.popleft())
            if not queue:
                self._free[direction] = 0.0

    def next_event(self) -> float:
        return min((q[0].due for q in self._queues.values() if q and q[0].started), default=float("inf"))

    def in_air(self) -> list[Load]:
        return [load for transfer in self._queues[LOAD] for load in transfer.loads]

    @property
    def lanes(self) -> list[Lane]:
        return [Lane(load) for load in self.in_air() if load.transfer.started]

    def _start(self, transfer: Transfer, now: float) -> None:
        if transfer.started:
            return
        transfer.started = True
        setup = self.setup
        self._count += 1
        draw = zlib.crc32(f"{setup.timing} {transfer.direction} {transfer.number} {self.rank}".encode())
        transfer.due = now + setup.load_s * (1 + draw % 3) + setup.load_block_s * len(transfer.copies)
        transfer.early = bool(draw % 2)
        for load in transfer.loads:
            self.attempts[load.request] += 1
            load.fault = self.shared.fault_of(load.request, self.rank)
        if transfer.loads and (self.holding or any(load.fault == "hang" for load in transfer.loads)):
            transfer.due = float("inf")
        if transfer.early:
            transfer.read = self._read(transfer)
        for load in transfer.loads:
            self.memory.start_load(load.blocks)
        self.log(f"{self._told(transfer)} starts" + (", and hangs" * (transfer.due == float("inf"))))

    def _end(self, transfer: Transfer) -> None:
        contents = transfer.read if transfer.early else self._read(transfer)
        stale = any(load.stale for load in transfer.loads)
        for (block, slot), content in zip(transfer.copies, contents, strict=True):
            if transfer.direction == LOAD:
                self.memory.blocks[block] = [STALE] * self.setup.block_size if stale else list(content)
            else:
                self.cpu[slot] = list(content)
        for load in transfer.loads:
            self.memory.end_load(load.blocks)
        self.stored |= transfer.direction == STORE
        self._finished.append(transfer)
        self.log(f"{self._told(transfer)} ends")
        for load in transfer.loads:
            self.ended(load)

    def _read(self, transfer: Transfer) -> list[list[int]]:
        nothing = [POISON] * self.setup.block_size
        if transfer.direction == LOAD:
            return [self.cpu.get(slot, nothing) for _, slot in transfer.copies]
        return [self.memory.held(block) for block, _ in transfer.copies]

    def _told(self, transfer: Transfer) -> str:
        whose = " of " + ", ".join(load.request for load in transfer.loads) if transfer.loads else ""
        blocks = [block for block, _ in transfer.copies]
        return f"{transfer.direction} {transfer.number}{whose} on rank {self.rank}, GPU blocks {blocks},"


class Tier(Protocol):
    """The scheduler side of one of the connectors: what it says is in CPU memory."""

    def put(self, blocks: dict[bytes, list[int]]) -> None:
        """Have these blocks of a prompt, in order, in CPU memory, as far as there is room."""

    def entries(self) -> Iterator[tuple[bytes, int, Slot]]:
        """Hash, KV-cache group and place of what it would have loaded."""

    def leftovers(self) -> list[str]:
        """What it still remembers or holds; nothing, once every request is gone."""


def check(tier: Tier, workers: Sequence[OffloadWorker], right: Callable[[bytes, int], list[int]]) -> None:
    """All that may be loaded is what its hash says. Raises Violation."""
    if not any(worker.stored for worker in workers):
        return
    for worker in workers:
        worker.stored = False
    for block_hash, group, slot in tier.entries():
        for worker in workers:
            if worker.cpu.get(slot) != right(block_hash, group):
                raise Violation(
                    f"CPU memory of rank {worker.rank} has wrong KV in {slot}: {worker.cpu.get(slot)}"
                )
