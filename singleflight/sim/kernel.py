"""The numba twin of `model`: the same rules over arrays, tens of millions of block lookups a second on one
core.

What makes it fast without changing a rule:

- An instance at a time (R4), over its own small block ids.
- W is constant, so loads end in the order they were opened (R6): the open loads are the tail of an
  append-only log, and "is this block loading" is one comparison with the number of loads already ended. All
  loads of a request end together, so a time is kept a request, not a load.
- The LRU is a doubly linked list in an int32 array, closed by a sentinel node; where every block fits there
  is no list.
- A block's links and its last load sit in one 16-byte row: one cache line a lookup.

All compiled code is in this file because numba's cache watches the file a function is defined in, and no
other.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from singleflight.sim.columns import Columns, Layout
from singleflight.sim.config import PHASES, Config, Routing
from singleflight.sim.counts import Counts, Outcome

F = TypeVar("F", bound=Callable[..., Any])

_I64, _I32, _U8 = (types.Array(t, 1, "C", readonly=True) for t in (types.int64, types.int32, types.uint8))

PREV, NEXT, LOAD = 0, 1, 2  # columns of a block's row; the fourth pads it to 16 bytes
ABSENT = -1  # in NEXT: not cached
# Columns of `counts`, the fields of `Counts`.
REQUESTS, LOOKUPS, HITS, ATTEMPTS, REMOVABLE = 0, 1, 2, 3, 4
COHORTS, DUP_COHORTS, DUP_ATTEMPTS, MAX_FANIN, P99_FANIN = 5, 6, 7, 8, 9


def cache_dir() -> Path:
    """Where compiled code is kept: a folder of the user's, else a private temporary one. Never the package
    folder, which may be read-only and is not ours to leave files in."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    for path in (
        Path(base, "kv-singleflight", "numba"),
        Path(tempfile.gettempdir(), f"kv-singleflight-{os.getuid()}"),
    ):
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.stat().st_uid == os.getuid() and os.access(path, os.W_OK | os.X_OK):
                return path
        except OSError:
            continue
    return Path(tempfile.mkdtemp(prefix="kv-singleflight-"))


@contextmanager
def _our_cache() -> Iterator[None]:
    # numba reads its setting when a function is decorated; other users of numba in this process keep theirs.
    settings: Any = numba.config
    before = settings.CACHE_DIR
    if not before:
        settings.CACHE_DIR = str(cache_dir())
    try:
        yield
    finally:
        settings.CACHE_DIR = before


def _compiled(*signatures: Any) -> Callable[[F], F]:
    return cast("Callable[[F], F]", numba.njit(list(signatures), cache=True, nogil=True))


with _our_cache():

    @_compiled(
        types.int64(
            _I64,
            _I64,
            _I32,
            types.int32[::1],
            types.int32[::1],
            types.int32[::1],
            types.int64[::1],
            types.int32[::1],
        )
    )
    def _relabel(
        starts: Any, offsets: Any, blocks: Any, seen_by: Any, label: Any, local: Any, sizes: Any, dense: Any
    ) -> int:
        """Number each instance's blocks from 0 by first appearance. Returns the length of `dense`."""
        n_dense = 0
        for i in range(len(starts) - 1):
            first = n_dense
            for j in range(offsets[starts[i]], offsets[starts[i + 1]]):
                block = blocks[j]
                if seen_by[block] != i:
                    seen_by[block] = i
                    label[block] = n_dense - first
                    dense[n_dense] = block
                    n_dense += 1
                local[j] = label[block]
            sizes[i] = n_dense - first
        return n_dense

    @_compiled(types.int64[:, ::1](types.int64[:, ::1], types.int64))
    def _widened(hist: Any, width: int) -> Any:
        wider = np.zeros((2, width), np.int64)
        wider[:, : hist.shape[1]] = hist
        return wider

    @_compiled(
        types.int64[:, ::1](
            _I64, _I64, _U8, _I64, _I32, _I64, types.int64, types.int64, types.boolean,
            types.int32[:, ::1], types.int32[::1], types.int32[::1], types.int64[::1],
            types.int64[:, :, ::1],
        )
    )  # fmt: skip
    def _run(
        starts: Any, times: Any, steady: Any, offsets: Any, blocks: Any, sizes: Any,
        window: int, capacity: int, contiguous: bool,
        rows: Any, load_block: Any, load_fanin: Any, load_first: Any,
        counts: Any,
    ) -> Any:  # fmt: skip
        """Simulate one configuration.

        `load_block`, `load_fanin` (L,): the log of loads, instance after instance. `load_first` (R + 1,):
        the first load of each request in it. `counts` (N, 2, 10) must be zero on entry. Returns the fan-in
        histogram by phase, (2, F).
        """
        hist = np.zeros((2, 64), np.int64)  # of all instances
        own_hist = np.zeros((2, 64), np.int64)  # of this one
        opened = 0
        for i in range(len(starts) - 1):
            sentinel = np.int32(sizes[i])
            for b in range(sentinel):
                rows[b, NEXT] = ABSENT
                rows[b, LOAD] = -1
            rows[sentinel, PREV] = sentinel  # the least recently used block, once there is one
            recent = sentinel  # the most recently used one
            size = 0
            # With room for every block nothing is evicted, and then order decides nothing.
            ordered = sentinel > capacity
            ended = opened  # loads before this one have ended
            due = starts[i]  # the first request whose loads have not
            for r in range(starts[i], starts[i + 1]):
                now = times[r]
                load_first[r] = opened
                while due < r and times[due] + window <= now:  # R5, R6
                    due += 1
                    for k in range(ended, load_first[due]):  # R7
                        b = load_block[k]
                        after = rows[b, NEXT]
                        if not ordered:
                            rows[b, NEXT] = sentinel
                            continue
                        if after == ABSENT:
                            size += 1
                        elif b == recent:
                            continue
                        else:
                            before = rows[b, PREV]
                            rows[before, NEXT] = after
                            rows[after, PREV] = before
                        rows[b, PREV] = sentinel
                        rows[b, NEXT] = recent
                        rows[recent, PREV] = b
                        recent = b
                        if size > capacity:
                            size -= 1
                            victim = rows[sentinel, PREV]
                            before = rows[victim, PREV]
                            rows[before, NEXT] = sentinel
                            rows[sentinel, PREV] = before
                            rows[victim, NEXT] = ABSENT
                    ended = load_first[due]
                hits = 0
                removable = 0
                broken = False
                for j in range(offsets[r], offsets[r + 1]):
                    b = blocks[j]
                    after = rows[b, NEXT]
                    if after != ABSENT and not broken:  # R8
                        hits += 1
                        if ordered and b != recent:
                            before = rows[b, PREV]
                            rows[before, NEXT] = after
                            rows[after, PREV] = before
                            rows[b, PREV] = sentinel
                            rows[b, NEXT] = recent
                            rows[recent, PREV] = b
                            recent = b
                        continue
                    broken = contiguous  # R9
                    load = rows[b, LOAD]
                    if load >= ended:  # R10: still open, join
                        load_fanin[load] += 1
                        removable += 1
                    else:
                        rows[b, LOAD] = opened
                        load_block[opened] = b
                        load_fanin[opened] = 1
                        opened += 1
                c = counts[i, steady[r]]
                c[REQUESTS] += 1
                c[LOOKUPS] += offsets[r + 1] - offsets[r]
                c[HITS] += hits
                c[REMOVABLE] += removable
            load_first[starts[i + 1]] = opened
            # R11: cohorts by the leader's phase, open ones included.
            for r in range(starts[i], starts[i + 1]):
                phase = steady[r]
                alone = 0
                for k in range(load_first[r], load_first[r + 1]):
                    fanin = load_fanin[k]
                    if fanin == 1:
                        alone += 1
                        continue
                    if fanin >= own_hist.shape[1]:
                        own_hist = _widened(own_hist, 2 * fanin)
                        if own_hist.shape[1] > hist.shape[1]:
                            hist = _widened(hist, own_hist.shape[1])
                    own_hist[phase, fanin] += 1
                own_hist[phase, 1] += alone
            for phase in range(2):
                c = counts[i, phase]
                c[ATTEMPTS] = c[LOOKUPS] - c[HITS]
                for fanin in range(1, own_hist.shape[1]):
                    n = own_hist[phase, fanin]
                    if n > 0:
                        c[COHORTS] += n
                        c[MAX_FANIN] = fanin
                        if fanin > 1:
                            c[DUP_COHORTS] += n
                            c[DUP_ATTEMPTS] += n * fanin
                rank = (99 * c[COHORTS] + 99) // 100  # R12
                for fanin in range(1, c[MAX_FANIN] + 1):
                    n = own_hist[phase, fanin]
                    if rank > 0 and rank <= n:
                        c[P99_FANIN] = fanin
                    rank -= n
                    hist[phase, fanin] += n
                    own_hist[phase, fanin] = 0
        return hist


def lay_out(columns: Columns, instances: int, routing: Routing, warmup: tuple[int, int]) -> Layout:
    """Regroup a trace by the instance that serves each request (R3), trace order kept within one (R1).

    Costs one pass over the lookups; every window, capacity and lookup of the same instances and routing
    shares it.
    """
    instance = columns.instance_of(instances, routing)
    source = np.argsort(instance, kind="stable")
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(instance, minlength=instances))])
    first = columns.offsets[:-1][source]
    size = np.diff(columns.offsets)[source]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(size)])
    blocks = columns.blocks[np.repeat(first - offsets[:-1], size) + np.arange(columns.n_lookups)]
    n_blocks = len(columns.hashes)
    sizes = np.empty(instances, np.int64)
    dense = np.empty(columns.n_lookups, np.int32)
    label = np.empty(n_blocks, np.int32)
    local = np.empty_like(blocks)
    n_dense = _relabel(starts, offsets, blocks, np.full(n_blocks, -1, np.int32), label, local, sizes, dense)
    steady = columns.steady(warmup)[source]
    return Layout(
        starts, source, columns.times[source], steady, offsets, local, sizes, dense[:n_dense].copy()
    )


class Kernel:
    """Runs configurations over one layout; its working memory is kept from one to the next.

    After `run`, the log of the loads just simulated, in the order opened, instance after instance:

    Attributes:
        load_block: (n_loads,) int32, local id of the block.
        load_fanin: (n_loads,) int32, members of the cohort.
        load_first: (R + 1,) int64, request r of the layout opened the loads load_first[r] to load_first[r +
            1].
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        n_lookups = len(layout.blocks)
        self._rows = np.empty((int(layout.sizes.max()) + 1, 4), np.int32)
        self.load_block = np.empty(n_lookups, np.int32)
        self.load_fanin = np.empty(n_lookups, np.int32)
        self.load_first = np.zeros(len(layout.times) + 1, np.int64)

    def run_arrays(
        self, window: int, capacity: int, contiguous: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Simulate one configuration.

        Args:
            window: W, ms. capacity: C, blocks. contiguous: `contiguous_prefix` rather than
                `independent_blocks`.

        Returns:
            counts, (N, 2, 10): instance, phase (warmup, steady), the fields of `Counts` in order;
            hist, (2, F): phase, fan-in, the number of cohorts.
        """
        at = self.layout
        counts = np.zeros((len(at.sizes), 2, len(Counts._fields)), np.int64)
        hist = _run(
            at.starts, at.times, at.steady, at.offsets, at.blocks, at.sizes, window, capacity, contiguous,
            self._rows, self.load_block, self.load_fanin, self.load_first, counts,
        )  # fmt: skip
        return counts, hist


def outcome(config: Config, counts: NDArray[np.int64], hist: NDArray[np.int64]) -> Outcome:
    """Put what `Kernel.run_arrays` returns into the form the model returns."""
    instances = tuple(
        {phase: Counts(*row) for phase, row in zip(PHASES, rows, strict=True)} for rows in counts.tolist()
    )
    fanin = {
        phase: {f: n for f, n in enumerate(row) if n}
        for phase, row in zip(PHASES, hist.tolist(), strict=True)
    }
    return Outcome(config, instances, fanin)


def simulate(columns: Columns, config: Config) -> Outcome:
    """Simulate one configuration, as `model.simulate` does."""
    kernel = Kernel(lay_out(columns, config.instances, config.routing, config.warmup))
    return outcome(
        config, *kernel.run_arrays(config.w_eff_ms, config.capacity, config.lookup == "contiguous_prefix")
    )
