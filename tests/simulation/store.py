"""The store that all workers share, and what can go wrong with a Get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .content import RUBBISH, STALE
from .groups import group_of
from .memory import Memory
from .violation import Violation

KINDS = ("error", "key", "short", "exception", "exit", "rubbish", "hang")
"""All keys answer with a code; one does; one brings too few bytes; the call raises an Exception; it raises
what is none; all keys fail after something has been written; it does not return until it is released."""

NO_KEY, BROKEN = -704, -800


def hash_of(key: str) -> str:
    """The block hash in a key, hex."""
    return key.rsplit("@", 1)[-1]


@dataclass
class Fault:
    """One Get's fault: of the next request to start a Get, on the ranks named (None: on all)."""

    kind: str
    rank: int | None = None
    request: str | None = None

    def hits(self, request: str, rank: int) -> bool:
        return self.request == request and self.rank in (None, rank)


@dataclass
class Get:
    """One load on one rank, from its place in the queue to its end."""

    request: str
    rank: int
    tokens: int
    keys: list[str]
    """Of every KV-cache group, as are the blocks."""
    blocks: list[int]
    due: float = 0.0
    fault: str | None = None
    found: dict[str, list[int]] = field(default_factory=dict)
    """What was under its keys at its start, if it is to bring that, whatever becomes of the store."""
    late: bool = False
    """It ends between the worker's two questions: its failure is reported a step before its end."""
    stale: bool = False
    """The caches have been reset since it was queued."""
    failed: bool = False


@dataclass
class Store:
    """Keys and what is stored under them; `block_size` tokens each."""

    block_size: int
    held: dict[str, list[int]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    """Not over yet, first come first served."""
    broken: dict[str, str] = field(default_factory=dict)
    """Hash (hex) -> `error` or `short`, for every Get of it from now on."""
    known: set[str] = field(default_factory=set)
    """Hashes (hex) of all that has ever been under a key."""

    def put(self, key: str, contents: list[int]) -> None:
        self.held[key] = contents
        self.known.add(hash_of(key))

    def fault_of(self, request: str, rank: int) -> str | None:
        """The fault of a Get that starts now; whoever starts first takes the oldest fault nobody has."""
        for fault in self.faults:
            if fault.request is None:
                fault.request = request
            if fault.hits(request, rank):
                return fault.kind
        return None

    def over(self, request: str) -> None:
        """All ranks have ended this request's load: its faults are used up."""
        self.faults = [fault for fault in self.faults if fault.request != request]


class RankStore:
    """The store as one worker's threads call it. Addresses are block ids x `block_size`, sizes are tokens."""

    def __init__(
        self, store: Store, memory: Memory, rank: int, right: Callable[[bytes, int], list[int]], strict: bool
    ) -> None:
        self._store, self._memory, self._rank, self._right, self._strict = store, memory, rank, right, strict
        self.get: Get | None = None
        """The load that is being carried out."""
        self.violation: Violation | None = None

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        return [int(key in self._store.held) for key in keys]

    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        get = self.get
        assert get is not None
        if get.fault == "exception":
            get.failed = True
            raise RuntimeError("the wire is cut")
        if get.fault == "exit":
            get.failed = True
            raise SystemExit("the thread is told to go")
        answers = []
        for i, (key, (address,), (size,)) in enumerate(zip(keys, addresses, sizes, strict=True)):
            block = address // self._store.block_size
            last = i == len(keys) - 1
            kind = self._store.broken.get(hash_of(key))
            if get.fault in ("error", "rubbish") or (get.fault == "key" and last):
                kind = "error"
            elif get.fault == "short" and last:
                kind = "short"
            contents = get.found.get(key) or self._store.held.get(key)
            if contents is None or kind == "error":
                self._memory.blocks[block] = [RUBBISH] * size
                answers.append(BROKEN if contents is not None else NO_KEY)
            elif kind == "short":
                self._memory.blocks[block] = contents[: size // 2] + [RUBBISH] * (size - size // 2)
                answers.append(size // 2)
            else:
                self._memory.blocks[block] = [STALE] * size if get.stale else list(contents)
                answers.append(size)
            get.failed |= answers[-1] < size
        return answers

    def batch_put_from_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], _config: object
    ) -> list[int]:
        for key, (address,) in zip(keys, addresses, strict=True):
            block = address // self._store.block_size
            right = self._right(bytes.fromhex(hash_of(key)), group_of(key))
            wrong = self._memory.difference(block, right)
            if wrong is not None and self._strict:
                # Not raised here: the send thread takes any exception for a failed save.
                self.violation = Violation(
                    f"rank {self._rank} saves block {block} under a key it does not fit: {wrong}"
                )
            self._store.put(key, list(self._memory.blocks[block]))
        return [0] * len(keys)
