"""The numba twin of `model`: the same rules over arrays, the same numbers to the last bit.

The functions follow the modules of the specification, in this order: `pool`, `link` and `threads`, `store`,
the core's estimate, breaker and table, `modes`, `engine`. What they all change is in one `World`, and its
single numbers in two arrays. All compiled code is in this file, see `sim.kernel`.

Where the specification has dicts and sets, lists are linked through arrays; no result depends on the order of
a set. The table's `whole` is an optimization of its own, and so are its statistics; neither is here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from singleflight.core.fit import ENOUGH, OUTLIER, WINDOW
from singleflight.core.table import FORGETTING
from singleflight.sim.kernel import _our_cache
from singleflight.twin.arrivals import Arrivals
from singleflight.twin.figures import Figures
from singleflight.twin.instance import Instance, Mode
from singleflight.twin.outcome import Gets, Outcome
from singleflight.twin.prompts import Prompts, room

F = TypeVar("F", bound=Callable[..., Any])
Array = Any  # of one dimension

STOCK, ATTACH, PARK = 0, 1, 2
MODE: dict[Mode, int] = {"stock": STOCK, "attach": ATTACH, "park": PARK}

# Where a receive thread is, and a flight; the breaker.
IDLE, LATENCY, TRANSFER = 0, 1, 2
LOADING, OVERDUE = 0, 1
CLOSED, OPEN, HALF_OPEN = 0, 1, 2
NONE = -1
ASK_AGAIN = -1
NOTHING, UNASKED = -1, -2  # names of blocks, as in `pool`

# World.f: single numbers of float64.
(
    NOW, LINK_AT, BROUGHT, LOOKUP_FREE_AT, MEAN_BLOCKS, MEAN_S, VARIANCE, COVARIANCE, SLOWEST, NEXT_DEADLINE,
    BREAKER_UNTIL, ASKED_AT, SLOWDOWN, LOOKUP_SHARE, MADE_AT,
) = range(15)  # fmt: skip
# World.i: of int64.
(
    FREE, ACTIVE, QUEUE_HEAD, QUEUE_TAIL, N_GETS, N_ENDED, SEEN, PENDING, IN_AIR, FLIGHTS, FLIGHT_FIRST,
    FLIGHT_LAST, WAIT_FIRST, NODE_FREE, BREAKER, IN_A_ROW, EARLY_FIRST, EARLY_LAST, N_TOUCHED, N_SEGMENTS,
    ARRIVED, N_LOADING, HOLDING, RESERVED, SEATS, DECODING, CONTEXT, CUT, SEATED, N_WAITING, N_READY, N_ENDS,
    BUDGET, TOKENS, PAIRS, BEFORE, N_COMPUTED, N_FIRST, STEPS, FELL_BACK, FULL,
) = range(41)  # fmt: skip


# World.r: of a request, int64.
(
    R_FIRST,
    R_PROMPT,
    R_OUTPUT,
    R_NAMED,
    R_ASKED,
    R_FOOTPRINT,
    R_FULL,
    R_HELD,
    R_N_HELD,
    R_COMPUTED,
    R_PLACE,
    R_ANSWER,
    R_MEMBER,
    R_HANDOVERS,
    R_NODE,
    R_WAIT_NEXT,
    R_WAIT_PREV,
    R_NO_LOAD,
    R_PENDING,
    R_STARTS_AGAIN,
    R_SERVED,
    R_LOAD,
    R_LOAD_START,
    R_LOAD_STOP,
    R_FLIGHT,
    R_EARLY,
    R_EARLY_NEXT,
    R_EARLY_PREV,
    R_TOUCHED,
    R_LOCAL,
    R_ADOPTED,
    R_LOADED,
    R_REMOVABLE,
    R_COMPUTED_TOKENS,
    R_LOOKUPS,
) = range(35)
# World.rf: float64.
(
    R_AT_ENGINE,
    R_TAKING,
    R_ANSWER_AT,
    R_DEADLINE,
    R_PARK_DEADLINE,
    R_LOAD_STARTED,
    R_LOAD_ENDED,
    R_FIRST_TOKEN,
    R_ADMITTED,
) = range(9)
# World.u: of a name.
(
    U_FIRST,
    U_LAST,
    U_FLIGHT,
    U_INDEX,
    U_LOADING_BY,
) = range(5)
# World.b: of a GPU block; the last row is the sentinel of the queue of free ones.
(
    B_NEXT,
    B_PREV,
    B_NAME,
    B_HOLDERS,
    B_SAME_NEXT,
    B_SAME_PREV,
) = range(6)
# World.t: of a receive thread.
(
    T_PHASE,
    T_GET,
) = range(2)
# World.tf.
(
    T_UNTIL,
    T_COMPLETE_AT,
) = range(2)
# World.g: of a Get.
(
    G_REQUEST,
    G_BLOCKS,
) = range(2)
# World.gf.
(
    G_QUEUED,
    G_STARTED,
    G_ENDED,
    G_REPORTED,
) = range(4)
# World.fl: of a flight.
(
    F_LEADER,
    F_START,
    F_LENGTH,
    F_WORK,
    F_STATE,
    F_MISS,
    F_NEXT,
    F_PREV,
    F_FIRST,
    F_LAST,
) = range(10)
# World.n: of a node: a follower waits for a flight.
(
    N_REQUEST,
    N_FLIGHT,
    N_NEXT,
    N_PREV,
    N_OTHER,
) = range(5)
# World.q: rows with room for all requests: heaps, lists, seats.
(
    Q_WAITING,
    Q_LATER,
    Q_READY,
    Q_ENDS,
    Q_SEAT_REQUEST,
    Q_ENDED,
    Q_TOUCHED,
    Q_OVER,
    Q_STEP_FIRST,
) = range(9)
# World.s: rows with room for the longest prompt: a hit, and the segments of a run.
(
    S_HIT,
    S_FLIGHT,
    S_START,
    S_LENGTH,
) = range(4)


class World(NamedTuple):
    """Configuration, trace, state and results. Tables have a row for each thing, and the columns above."""

    mode: int
    lookup_async: bool
    recompute: bool
    synchronous_launch: bool
    size: int
    max_num_seqs: int
    max_tokens: int
    latency: float
    block_bytes: float
    rate: float
    total: float
    lookup_latency: float
    lookup_per_block: float
    lookup_again: float
    prefill_rate: float
    attention: float
    step_overhead: float
    decode_per_request: float
    prefill_context: float
    loading_slowdown: float
    computing_slowdown: float
    decode_context: float
    idle_step: float
    per_lookup: float
    per_block: float
    base_s: float
    per_block_s: float
    learned_factor: float
    max_handovers: int
    max_blocks: int
    patience: float
    breaker_failures: int
    breaker_pause: float
    # Constants of the core. They come with the call: numba's cache would not notice that they have changed.
    enough: int
    outlier: float
    window: int
    forgetting: float

    f: Array
    i: Array
    r: Array
    rf: Array
    u: Array
    b: Array
    t: Array
    tf: Array
    g: Array
    gf: Array
    fl: Array
    n: Array
    q: Array
    s: Array
    names: Array  # of all prompts, one after the other
    stored_from: Array  # of a name
    f_started: Array  # of a flight
    held: Array  # GPU blocks of all requests, one after the other
    step_computed: Array  # names


with _our_cache():
    compiled = cast("Callable[[F], F]", numba.njit(cache=True, nogil=True))

    # -- heaps of int64 ----------------------------------------------------------------------------------

    @compiled
    def _push(heap: Array, n: int, key: int) -> None:
        at = n
        while at > 0:
            above = (at - 1) >> 1
            if heap[above] <= key:
                break
            heap[at] = heap[above]
            at = above
        heap[at] = key

    @compiled
    def _pop(heap: Array, n: int) -> int:
        """The least of n; n - 1 are left."""
        least, key = heap[0], heap[n - 1]
        at, n = 0, n - 1
        while 2 * at + 1 < n:
            below = 2 * at + 1
            if below + 1 < n and heap[below + 1] < heap[below]:
                below += 1
            if heap[below] >= key:
                break
            heap[at] = heap[below]
            at = below
        heap[at] = key
        return least

    # -- pool --------------------------------------------------------------------------------------------

    @compiled
    def _unlink(w: World, block: int) -> None:
        """Out of the queue of free blocks, whose ends are one sentinel."""
        before, after = w.b[block, B_PREV], w.b[block, B_NEXT]
        w.b[before, B_NEXT] = after
        w.b[after, B_PREV] = before
        w.i[FREE] -= 1

    @compiled
    def _link_after(w: World, before: int, block: int) -> None:
        after = w.b[before, B_NEXT]
        w.b[before, B_NEXT] = block
        w.b[block, B_PREV] = before
        w.b[block, B_NEXT] = after
        w.b[after, B_PREV] = block
        w.i[FREE] += 1

    @compiled
    def _hit(w: World, request: int) -> int:
        """How many blocks are cached, which are then in row S_HIT."""
        first = w.r[request, R_FIRST]
        for k in range(w.r[request, R_ASKED]):
            block = w.u[w.names[first + k], U_FIRST]
            if block == NONE:
                return k
            w.s[S_HIT, k] = block
        return w.r[request, R_ASKED]

    @compiled
    def _hold(w: World, block: int) -> None:
        if w.b[block, B_HOLDERS] == 0:
            _unlink(w, block)
        w.b[block, B_HOLDERS] += 1

    @compiled
    def _take(w: World) -> int:
        block = w.b[len(w.b) - 1, B_NEXT]
        _unlink(w, block)
        name = w.b[block, B_NAME]
        w.b[block, B_NAME] = NOTHING
        if name >= 0:
            before, after = w.b[block, B_SAME_PREV], w.b[block, B_SAME_NEXT]
            if before == NONE:
                w.u[name, U_FIRST] = after
            else:
                w.b[before, B_SAME_NEXT] = after
            if after == NONE:
                w.u[name, U_LAST] = before
            else:
                w.b[after, B_SAME_PREV] = before
        w.b[block, B_HOLDERS] = 1
        return block

    @compiled
    def _cache(w: World, block: int, name: int) -> None:
        if w.b[block, B_NAME] != NOTHING:
            return
        w.b[block, B_NAME] = name
        if name >= 0:
            last = w.u[name, U_LAST]
            w.b[block, B_SAME_PREV] = last
            w.b[block, B_SAME_NEXT] = NONE
            if last == NONE:
                w.u[name, U_FIRST] = block
            else:
                w.b[last, B_SAME_NEXT] = block
            w.u[name, U_LAST] = block

    @compiled
    def _give_back(w: World, request: int) -> None:
        sentinel = len(w.b) - 1
        first, n = w.r[request, R_HELD], w.r[request, R_N_HELD]
        front = sentinel  # the nameless ones go to the front, tail first
        for k in range(n - 1, -1, -1):
            block = w.held[first + k]
            w.b[block, B_HOLDERS] -= 1
            if w.b[block, B_HOLDERS] > 0:
                continue
            if w.b[block, B_NAME] == NOTHING:
                _link_after(w, front, block)
                front = block
            else:
                _link_after(w, w.b[sentinel, B_PREV], block)
        w.r[request, R_N_HELD] = 0

    # -- link and threads --------------------------------------------------------------------------------

    @compiled
    def _speed(w: World) -> float:
        return (w.rate if w.i[ACTIVE] == 1 else min(w.rate, w.total / w.i[ACTIVE])) / w.f[SLOWDOWN]

    @compiled
    def _slow(w: World, slowdown: float) -> None:
        """The Gets of all that has ended are told of by now."""
        if w.i[ACTIVE] > 0:
            w.f[BROUGHT] += (w.f[NOW] - w.f[LINK_AT]) * _speed(w)
            w.f[LINK_AT] = w.f[NOW]
        w.f[SLOWDOWN] = slowdown

    @compiled
    def _next_end(w: World) -> tuple[float, int]:
        found = NONE
        for t in range(len(w.t)):
            if w.t[t, T_PHASE] == TRANSFER and (
                found == NONE or w.tf[t, T_COMPLETE_AT] < w.tf[found, T_COMPLETE_AT]
            ):
                found = t
        if found == NONE:
            return math.inf, NONE
        left = w.tf[found, T_COMPLETE_AT] - w.f[BROUGHT]
        return w.f[LINK_AT] + max(left, 0.0) / _speed(w), found

    @compiled
    def _next_byte(w: World) -> tuple[float, int]:
        found, at = NONE, math.inf
        for t in range(len(w.t)):
            if w.t[t, T_PHASE] == LATENCY and w.tf[t, T_UNTIL] < at:
                found, at = t, w.tf[t, T_UNTIL]
        return at, found

    @compiled
    def _take_gets(w: World, now: float) -> None:
        for t in range(len(w.t)):
            if w.i[QUEUE_HEAD] == w.i[QUEUE_TAIL]:
                return
            if w.t[t, T_PHASE] == IDLE:
                get = w.i[QUEUE_HEAD]
                w.i[QUEUE_HEAD] += 1
                w.gf[get, G_STARTED] = now
                w.t[t, T_GET] = get
                w.t[t, T_PHASE] = LATENCY
                w.tf[t, T_UNTIL] = now + w.latency

    @compiled
    def _advance(w: World, until: float) -> None:
        """Gets that have ended are added to row Q_ENDED."""
        while True:
            end, thread = _next_end(w)
            byte, waiting = _next_byte(w)
            if min(end, byte) > until:
                return
            if thread != NONE and end <= byte:
                get = w.t[thread, T_GET]
                w.f[BROUGHT] = w.tf[thread, T_COMPLETE_AT]
                w.f[LINK_AT] = end
                w.i[ACTIVE] -= 1
                w.t[thread, T_PHASE] = IDLE
                w.gf[get, G_ENDED] = end
                w.q[Q_ENDED, w.i[N_ENDED]] = get
                w.i[N_ENDED] += 1
                _take_gets(w, end)
            else:
                if w.i[ACTIVE] > 0:
                    w.f[BROUGHT] += (byte - w.f[LINK_AT]) * _speed(w)
                else:
                    w.f[BROUGHT] = 0.0
                w.f[LINK_AT] = byte
                w.t[waiting, T_PHASE] = TRANSFER
                w.tf[waiting, T_COMPLETE_AT] = (
                    w.f[BROUGHT] + w.g[w.t[waiting, T_GET], G_BLOCKS] * w.block_bytes
                )
                w.i[ACTIVE] += 1

    # -- store -------------------------------------------------------------------------------------------

    @compiled
    def _ask(w: World, request: int, local: int) -> int:
        n = w.r[request, R_ASKED]
        if n == 0:
            return 0
        if w.rf[request, R_ANSWER_AT] < 0.0:
            w.r[request, R_LOOKUPS] += 1
            cost = w.f[LOOKUP_SHARE] * w.lookup_latency + n * w.lookup_per_block
            w.f[LOOKUP_SHARE] = w.lookup_again
            stored = n
            first = w.r[request, R_FIRST]
            for k in range(n):
                if w.stored_from[w.names[first + k]] > w.f[NOW]:
                    stored = k
                    break
            if not w.lookup_async:
                w.f[NOW] += cost
                return max(stored - local, 0)
            w.f[LOOKUP_FREE_AT] = max(w.f[LOOKUP_FREE_AT], w.f[NOW]) + cost
            w.rf[request, R_ANSWER_AT] = w.f[LOOKUP_FREE_AT]
            w.r[request, R_ANSWER] = stored
        if w.f[NOW] < w.rf[request, R_ANSWER_AT]:
            return ASK_AGAIN
        w.rf[request, R_ANSWER_AT] = -1.0
        return max(w.r[request, R_ANSWER] - local, 0)

    # -- core: estimate ----------------------------------------------------------------------------------

    @compiled
    def _seconds(w: World, blocks: int) -> float:
        """-1.0: too little has been seen."""
        if w.i[SEEN] < w.enough:
            return -1.0
        slope = w.f[COVARIANCE] / w.f[VARIANCE] if w.f[VARIANCE] != 0.0 else 0.0
        slope = min(max(slope, 0.0), w.f[MEAN_S] / w.f[MEAN_BLOCKS])
        return w.f[MEAN_S] + slope * (blocks - w.f[MEAN_BLOCKS])

    @compiled
    def _observe(w: World, blocks: int, seconds: float) -> None:
        expected = _seconds(w, blocks)
        if w.i[SEEN] >= w.enough and expected != 0.0:
            seconds = min(seconds, w.outlier * expected)
        w.i[SEEN] += 1
        weight = 1 / min(w.i[SEEN], w.window)
        off_blocks, off_s = blocks - w.f[MEAN_BLOCKS], seconds - w.f[MEAN_S]
        w.f[MEAN_BLOCKS] += weight * off_blocks
        w.f[MEAN_S] += weight * off_s
        w.f[VARIANCE] = (1 - weight) * (w.f[VARIANCE] + weight * off_blocks * off_blocks)
        w.f[COVARIANCE] = (1 - weight) * (w.f[COVARIANCE] + weight * off_blocks * off_s)

    @compiled
    def _work(w: World, blocks: int) -> int:
        """-1: these would queue first."""
        if w.i[IN_AIR] >= len(w.t):
            return NONE
        work = blocks
        flight = w.i[FLIGHT_FIRST]
        while flight != NONE:
            work += min(w.fl[flight, F_LENGTH], blocks)
            flight = w.fl[flight, F_NEXT]
        return work

    @compiled
    def _remaining(w: World, flight: int, now: float) -> float:
        blocks = w.fl[flight, F_WORK] if w.fl[flight, F_WORK] > 0 else w.fl[flight, F_LENGTH]
        expected = 0.0
        if w.i[SEEN] >= w.enough:
            expected = _seconds(w, blocks)
        return max(expected - (now - w.f_started[flight]), 0.0)

    @compiled
    def _worth_joining(w: World, blocks: int, now: float, then: int) -> bool:
        """Of the flights in the segments."""
        if w.patience == 0.0:
            return True
        work = _work(w, blocks)
        if work == NONE or w.i[SEEN] < w.enough:
            return True
        alone = _seconds(w, work)
        wait = _remaining(w, w.s[S_FLIGHT, 0], now)
        for s in range(1, w.i[N_SEGMENTS]):
            wait = max(wait, _remaining(w, w.s[S_FLIGHT, s], now))
        if then > 0:
            wait += _seconds(w, then)
        return wait <= w.patience * alone

    # -- core: breaker -----------------------------------------------------------------------------------

    @compiled
    def _allows(w: World, now: float) -> bool:
        if w.i[BREAKER] == OPEN and now >= w.f[BREAKER_UNTIL]:
            w.i[BREAKER] = HALF_OPEN
        return w.i[BREAKER] != OPEN

    @compiled
    def _strike(w: World, now: float) -> None:
        if w.breaker_failures == 0:
            return
        w.i[IN_A_ROW] += 1
        if w.i[BREAKER] == HALF_OPEN or w.i[IN_A_ROW] >= w.breaker_failures:
            w.i[BREAKER] = OPEN
        if w.i[BREAKER] == OPEN:
            w.f[BREAKER_UNTIL] = now + w.breaker_pause

    @compiled
    def _landed_in_time(w: World) -> None:
        w.i[IN_A_ROW] = 0
        w.i[BREAKER] = HALF_OPEN if w.i[BREAKER] == OPEN else CLOSED

    # -- core: table -------------------------------------------------------------------------------------

    @compiled
    def _budget_s(w: World, blocks: int) -> float:
        return max(w.base_s + w.per_block_s * blocks, w.learned_factor * w.f[SLOWEST])

    @compiled
    def _outlived_at(w: World, flight: int) -> float:
        return w.f_started[flight] + _budget_s(w, w.fl[flight, F_LENGTH])

    @compiled
    def _may_join(w: World, request: int, now: float) -> bool:
        if w.r[request, R_MEMBER] == 0:
            return True
        return w.r[request, R_HANDOVERS] <= w.max_handovers and now < w.rf[request, R_DEADLINE]

    @compiled
    def _find_run(w: World, request: int, start: int, stop: int) -> int:
        """Into the segments; returns how many blocks they have."""
        first = w.r[request, R_FIRST]
        n, k = 0, start
        while k < stop:
            flight = w.u[w.names[first + k], U_FLIGHT]
            if flight == NONE:
                break
            index = w.u[w.names[first + k], U_INDEX]
            length = 1
            while (
                k + length < stop
                and w.u[w.names[first + k + length], U_FLIGHT] == flight
                and w.u[w.names[first + k + length], U_INDEX] == index + length
            ):
                length += 1
            w.s[S_FLIGHT, n] = flight
            w.s[S_START, n] = index
            w.s[S_LENGTH, n] = length
            n += 1
            k += length
        w.i[N_SEGMENTS] = n
        return k - start

    @compiled
    def _unlist(w: World, flight: int) -> None:
        first = w.r[w.fl[flight, F_LEADER], R_FIRST] + w.fl[flight, F_START]
        for k in range(w.fl[flight, F_LENGTH]):
            name = w.names[first + k]
            if w.u[name, U_FLIGHT] == flight and w.u[name, U_INDEX] == k:
                w.u[name, U_FLIGHT] = NONE
                w.i[PENDING] -= 1

    @compiled
    def _judge_flights(w: World, now: float) -> None:
        """Rules._judge: each that has just become overdue is a strike."""
        if now < w.f[NEXT_DEADLINE]:
            return
        overdue = 0
        flight = w.i[FLIGHT_FIRST]
        while flight != NONE:
            if w.fl[flight, F_STATE] == LOADING and _outlived_at(w, flight) <= now:
                w.fl[flight, F_STATE] = OVERDUE
                _unlist(w, flight)
                overdue += 1
            flight = w.fl[flight, F_NEXT]
        for _ in range(overdue):
            _strike(w, now)

    @compiled
    def _table_lead(w: World, request: int, start: int, stop: int, now: float, miss: int) -> int:
        """The flight; -1: it is not registered."""
        length = stop - start
        work = _work(w, length)
        if not _may_join(w, request, now) or w.i[PENDING] + length > w.max_blocks:
            return NONE
        flight = w.i[FLIGHTS]
        w.i[FLIGHTS] += 1
        w.fl[flight, F_LEADER] = request
        w.fl[flight, F_START] = start
        w.fl[flight, F_LENGTH] = length
        w.f_started[flight] = now
        w.fl[flight, F_WORK] = work
        w.fl[flight, F_STATE] = LOADING
        w.fl[flight, F_MISS] = miss
        w.fl[flight, F_FIRST] = w.fl[flight, F_LAST] = NONE
        last = w.i[FLIGHT_LAST]
        w.fl[flight, F_PREV] = last
        w.fl[flight, F_NEXT] = NONE
        if last == NONE:
            w.i[FLIGHT_FIRST] = flight
        else:
            w.fl[last, F_NEXT] = flight
        w.i[FLIGHT_LAST] = flight
        w.i[IN_AIR] += 1
        w.f[NEXT_DEADLINE] = min(w.f[NEXT_DEADLINE], _outlived_at(w, flight))
        expected = _remaining(w, flight, now)
        first = w.r[request, R_FIRST] + start
        for k in range(length):
            name = w.names[first + k]
            holder = w.u[name, U_FLIGHT]
            if holder == NONE:
                w.i[PENDING] += 1
            elif holder == flight or _remaining(w, holder, now) <= expected:
                continue
            w.u[name, U_FLIGHT] = flight
            w.u[name, U_INDEX] = k
        return flight

    @compiled
    def _table_attach(w: World, request: int, now: float, deadline: float) -> None:
        """To the segments. `deadline` below 0: by their budget."""
        if w.r[request, R_MEMBER] == 0:
            if deadline < 0.0:
                deadline = now + _budget_s(w, _segments_size(w))
            w.r[request, R_MEMBER] = 1
            w.rf[request, R_DEADLINE] = deadline
            w.r[request, R_HANDOVERS] = 0
        for s in range(w.i[N_SEGMENTS]):
            flight = w.s[S_FLIGHT, s]
            node = w.r[request, R_NODE]
            while node != NONE and w.n[node, N_FLIGHT] != flight:
                node = w.n[node, N_OTHER]
            if node != NONE:
                continue
            node = w.i[NODE_FREE]
            w.i[NODE_FREE] = w.n[node, N_NEXT]
            w.n[node, N_REQUEST] = request
            w.n[node, N_FLIGHT] = flight
            w.n[node, N_OTHER] = w.r[request, R_NODE]
            w.r[request, R_NODE] = node
            last = w.fl[flight, F_LAST]
            w.n[node, N_PREV] = last
            w.n[node, N_NEXT] = NONE
            if last == NONE:
                w.fl[flight, F_FIRST] = node
            else:
                w.n[last, N_NEXT] = node
            w.fl[flight, F_LAST] = node
        head = w.i[WAIT_FIRST]
        w.r[request, R_WAIT_NEXT] = head
        w.r[request, R_WAIT_PREV] = NONE
        if head != NONE:
            w.r[head, R_WAIT_PREV] = request
        w.i[WAIT_FIRST] = request
        w.f[NEXT_DEADLINE] = min(w.f[NEXT_DEADLINE], w.rf[request, R_DEADLINE])

    @compiled
    def _segments_size(w: World) -> int:
        """Blocks of the flights in the segments, each counted once."""
        size = 0
        for s in range(w.i[N_SEGMENTS]):
            known = False
            for earlier in range(s):
                if w.s[S_FLIGHT, earlier] == w.s[S_FLIGHT, s]:
                    known = True
            if not known:
                size += w.fl[w.s[S_FLIGHT, s], F_LENGTH]
        return size

    @compiled
    def _no_longer_waits(w: World, request: int) -> None:
        before, after = w.r[request, R_WAIT_PREV], w.r[request, R_WAIT_NEXT]
        if before == NONE:
            w.i[WAIT_FIRST] = after
        else:
            w.r[before, R_WAIT_NEXT] = after
        if after != NONE:
            w.r[after, R_WAIT_PREV] = before

    @compiled
    def _end_flight(w: World, flight: int) -> None:
        _unlist(w, flight)
        before, after = w.fl[flight, F_PREV], w.fl[flight, F_NEXT]
        if before == NONE:
            w.i[FLIGHT_FIRST] = after
        else:
            w.fl[before, F_NEXT] = after
        if after == NONE:
            w.i[FLIGHT_LAST] = before
        else:
            w.fl[after, F_PREV] = before
        w.i[IN_AIR] -= 1

    @compiled
    def _release(w: World, request: int, charged: int, late: bool) -> None:
        """The request falls back, and the rules carry it out."""
        node = w.r[request, R_NODE]
        while node != NONE:
            flight, before, after = w.n[node, N_FLIGHT], w.n[node, N_PREV], w.n[node, N_NEXT]
            if before == NONE:
                w.fl[flight, F_FIRST] = after
            else:
                w.n[before, N_NEXT] = after
            if after == NONE:
                w.fl[flight, F_LAST] = before
            else:
                w.n[after, N_PREV] = before
            other = w.n[node, N_OTHER]
            w.n[node, N_NEXT] = w.i[NODE_FREE]
            w.i[NODE_FREE] = node
            node = other
        w.r[request, R_NODE] = NONE
        _no_longer_waits(w, request)
        w.r[request, R_HANDOVERS] += charged
        # Rules._carry_out
        if w.recompute if late else not _may_join(w, request, w.f[NOW]):
            w.r[request, R_NO_LOAD] = 1
        if w.mode == ATTACH:
            w.r[request, R_STARTS_AGAIN] = 1
        _touch(w, request)

    @compiled
    def _expire(w: World, now: float) -> None:
        _judge_flights(w, now)
        if now < w.f[NEXT_DEADLINE]:
            return
        request = w.i[WAIT_FIRST]
        while request != NONE:
            after = w.r[request, R_WAIT_NEXT]
            if w.rf[request, R_DEADLINE] <= now:
                _release(w, request, 1, True)
            request = after
        due = math.inf
        request = w.i[WAIT_FIRST]
        while request != NONE:
            due = min(due, w.rf[request, R_DEADLINE])
            request = w.r[request, R_WAIT_NEXT]
        flight = w.i[FLIGHT_FIRST]
        while flight != NONE:
            if w.fl[flight, F_STATE] == LOADING:
                due = min(due, _outlived_at(w, flight))
            flight = w.fl[flight, F_NEXT]
        w.f[NEXT_DEADLINE] = due

    # -- modes -------------------------------------------------------------------------------------------

    @compiled
    def _touch(w: World, request: int) -> None:
        """In attach mode `touched`, in park mode those that may be asked again."""
        if w.r[request, R_TOUCHED] == 0:
            w.r[request, R_TOUCHED] = 1
            w.q[Q_TOUCHED, w.i[N_TOUCHED]] = request
            w.i[N_TOUCHED] += 1

    @compiled
    def _stands_on_published(w: World, request: int) -> bool:
        start = w.r[request, R_LOAD_START]
        return start == 0 or w.u[w.names[w.r[request, R_FIRST] + start - 1], U_FIRST] != NONE

    @compiled
    def _land_flight(w: World, request: int) -> None:
        """Rules._land, PendingBlockTable.land, Attach._publish."""
        flight = w.r[request, R_FLIGHT]
        _end_flight(w, flight)
        took = w.rf[request, R_LOAD_ENDED] - w.f_started[flight]
        w.f[SLOWEST] = max(took, w.f[SLOWEST] * w.forgetting)
        if w.fl[flight, F_WORK] != NONE and len(w.t) > 1:
            _observe(w, w.fl[flight, F_WORK], took)
        if w.mode == ATTACH:
            for k in range(w.r[request, R_LOAD_START], w.r[request, R_LOAD_STOP]):
                _cache(w, w.held[w.r[request, R_HELD] + k], w.names[w.r[request, R_FIRST] + k])
        node = w.fl[flight, F_FIRST]
        while node != NONE:
            after, follower = w.n[node, N_NEXT], w.n[node, N_REQUEST]
            before, each = NONE, w.r[follower, R_NODE]
            while each != node:
                before, each = each, w.n[each, N_OTHER]
            if before == NONE:
                w.r[follower, R_NODE] = w.n[node, N_OTHER]
            else:
                w.n[before, N_OTHER] = w.n[node, N_OTHER]
            w.n[node, N_NEXT] = w.i[NODE_FREE]
            w.i[NODE_FREE] = node
            if w.r[follower, R_NODE] == NONE:
                w.r[follower, R_MEMBER] = 0
                _no_longer_waits(w, follower)
                if w.mode == PARK:
                    w.r[follower, R_SERVED] = 1
                _touch(w, follower)
            node = after
        w.fl[flight, F_FIRST] = w.fl[flight, F_LAST] = NONE

    @compiled
    def _fail_flight(w: World, request: int) -> None:
        flight = w.r[request, R_FLIGHT]
        _end_flight(w, flight)
        node = w.fl[flight, F_FIRST]
        while node != NONE:
            after = w.n[node, N_NEXT]
            _release(w, w.n[node, N_REQUEST], 0, False)
            node = after

    @compiled
    def _land_in_order(w: World) -> None:
        while True:
            n = 0
            request = w.i[EARLY_FIRST]
            while request != NONE:
                if _stands_on_published(w, request) or w.r[request, R_NODE] == NONE:
                    w.q[Q_OVER, n] = request
                    n += 1
                request = w.r[request, R_EARLY_NEXT]
            if n == 0:
                return
            for k in range(n):
                request = w.q[Q_OVER, k]
                _touch(w, request)
                before, after = w.r[request, R_EARLY_PREV], w.r[request, R_EARLY_NEXT]
                if before == NONE:
                    w.i[EARLY_FIRST] = after
                else:
                    w.r[before, R_EARLY_NEXT] = after
                if after == NONE:
                    w.i[EARLY_LAST] = before
                else:
                    w.r[after, R_EARLY_PREV] = before
                w.r[request, R_EARLY] = 0
                if _stands_on_published(w, request):
                    _land_flight(w, request)
                else:
                    _fail_flight(w, request)

    @compiled
    def _match(w: World, request: int, local: int) -> tuple[int, int]:
        """Returns external and, of these, adopted blocks; -1: ask again. The segments are those joined."""
        if w.mode == STOCK:
            return _ask(w, request, local), 0
        if w.mode == PARK and w.r[request, R_NODE] != NONE:
            return ASK_AGAIN, 0
        if w.r[request, R_NO_LOAD]:
            return 0, 0
        if w.mode == PARK and w.r[request, R_SERVED]:
            w.r[request, R_SERVED] = 0
            if local >= w.r[request, R_ASKED]:
                return 0, 0
        if w.i[PENDING] == 0:
            return _ask(w, request, local), 0
        now = w.f[NOW]
        _judge_flights(w, now)
        stop, shared = w.r[request, R_ASKED], 0
        w.i[N_SEGMENTS] = 0
        may = _may_join(w, request, now)
        if may and w.mode == PARK:
            may = now < w.rf[request, R_PARK_DEADLINE]
        if may:
            shared = _find_run(w, request, local, stop)
        if shared == 0:
            return _ask(w, request, local), 0
        if not _allows(w, now):
            if w.recompute:
                return 0, 0
            return _ask(w, request, local), 0
        end, own = local + shared, 0
        last = w.i[N_SEGMENTS] - 1
        flight = w.s[S_FLIGHT, last]
        known_miss = (
            end < stop
            and w.s[S_START, last] + w.s[S_LENGTH, last] == w.fl[flight, F_LENGTH]
            and w.fl[flight, F_MISS] == w.names[w.r[request, R_FIRST] + end]
        )
        if (end < stop and not known_miss) or not _worth_joining(w, shared, now, 0):
            alone = _ask(w, request, local)
            if alone == ASK_AGAIN:
                return ASK_AGAIN, 0
            own = max(alone - shared, 0)
            after = own if w.mode == PARK else 0
            if alone >= shared and not _worth_joining(w, alone, now, after):
                return alone, 0
        if w.mode == PARK:
            w.rf[request, R_ANSWER_AT] = -1.0
            if w.rf[request, R_PARK_DEADLINE] == math.inf:
                w.rf[request, R_PARK_DEADLINE] = now + _budget_s(w, _segments_size(w))
            _table_attach(w, request, now, w.rf[request, R_PARK_DEADLINE])
            return ASK_AGAIN, 0
        if own == 0:
            w.rf[request, R_ANSWER_AT] = -1.0
        w.f[MADE_AT] = now
        return shared + own, shared

    @compiled
    def _allocated(w: World, request: int, external: int, adopted: int, start: int, stop: int) -> None:
        if w.mode == STOCK:
            return
        now = w.f[NOW]
        if w.mode == PARK:
            w.rf[request, R_PARK_DEADLINE] = math.inf
        elif external == 0:
            return
        else:
            w.r[request, R_PENDING] = 1
            if adopted > 0:
                now = w.f[MADE_AT]
                _table_attach(w, request, now, -1.0)
        if stop > start:
            miss = NONE
            if stop < w.r[request, R_ASKED]:
                miss = w.names[w.r[request, R_FIRST] + stop]
            w.r[request, R_LOAD] = 1
            w.r[request, R_LOAD_START] = start
            w.r[request, R_LOAD_STOP] = stop
            w.rf[request, R_LOAD_STARTED] = now
            w.r[request, R_FLIGHT] = _table_lead(w, request, start, stop, now, miss)

    @compiled
    def _output(w: World, tick: bool) -> None:
        """Row Q_ENDED has the requests, in order; afterwards row Q_TOUCHED has those that have left."""
        now = w.f[NOW]
        for k in range(w.i[N_ENDED]):
            request = w.q[Q_ENDED, k]
            w.r[request, R_LOAD] = 0
            if now - w.rf[request, R_LOAD_STARTED] < _budget_s(
                w, w.r[request, R_LOAD_STOP] - w.r[request, R_LOAD_START]
            ):
                _landed_in_time(w)
            w.rf[request, R_LOAD_ENDED] = now
            if w.mode == ATTACH:
                _touch(w, request)
            if w.r[request, R_FLIGHT] == NONE:
                continue
            if w.mode == PARK or _stands_on_published(w, request):
                _land_flight(w, request)
            else:
                last = w.i[EARLY_LAST]
                w.r[request, R_EARLY] = 1
                w.r[request, R_EARLY_PREV] = last
                w.r[request, R_EARLY_NEXT] = NONE
                if last == NONE:
                    w.i[EARLY_FIRST] = request
                else:
                    w.r[last, R_EARLY_NEXT] = request
                w.i[EARLY_LAST] = request
        if w.mode == ATTACH:
            _land_in_order(w)
        if tick:
            _expire(w, w.f[ASKED_AT])
            if w.mode == ATTACH:
                _land_in_order(w)

    # -- engine ------------------------------------------------------------------------------------------

    @compiled
    def _compute(w: World, request: int) -> None:
        computed = w.r[request, R_COMPUTED]
        tokens = min(w.r[request, R_PROMPT] - computed, w.i[BUDGET])
        w.i[BEFORE] += computed
        w.i[PAIRS] += tokens * computed + tokens * (tokens + 1) // 2
        before = computed // w.size
        computed += tokens
        w.r[request, R_COMPUTED] = computed
        w.r[request, R_COMPUTED_TOKENS] += tokens
        w.i[TOKENS] += tokens
        w.i[BUDGET] -= tokens
        for k in range(before, min(computed // w.size, w.r[request, R_NAMED])):
            name = w.names[w.r[request, R_FIRST] + k]
            _cache(w, w.held[w.r[request, R_HELD] + k], name)
            w.step_computed[w.i[N_COMPUTED]] = name
            w.i[N_COMPUTED] += 1
        if computed == w.r[request, R_PROMPT]:
            w.q[Q_STEP_FIRST, w.i[N_FIRST]] = request
            w.i[N_FIRST] += 1
        else:
            w.i[CUT] = request

    @compiled
    def _seat(w: World, request: int) -> None:
        first = w.r[request, R_HELD]
        for k in range(w.r[request, R_N_HELD], w.r[request, R_FOOTPRINT]):
            w.held[first + k] = _take(w)
        w.r[request, R_N_HELD] = w.r[request, R_FOOTPRINT]
        if math.isnan(w.rf[request, R_ADMITTED]):
            w.rf[request, R_ADMITTED] = w.f[NOW]
        w.i[SEATS] += 1
        _compute(w, request)

    @compiled
    def _allocate(w: World, request: int, local: int, external: int, adopted: int) -> bool:
        n = local
        for s in range(w.i[N_SEGMENTS] if adopted > 0 else 0):
            flight = w.s[S_FLIGHT, s]
            theirs = w.r[w.fl[flight, F_LEADER], R_HELD] + w.fl[flight, F_START] + w.s[S_START, s]
            for k in range(w.s[S_LENGTH, s]):
                w.s[S_HIT, n] = w.held[theirs + k]
                n += 1
        idle = 0
        for k in range(n):
            idle += w.b[w.s[S_HIT, k], B_HOLDERS] == 0
        own = external - adopted
        rest = w.r[request, R_FOOTPRINT] - n
        if rest + idle > w.i[FREE]:
            return False
        if external > 0 and own + idle > w.i[FREE] - w.i[RESERVED]:
            return False
        first = w.r[request, R_HELD]
        for k in range(n):
            _hold(w, w.s[S_HIT, k])
            w.held[first + k] = w.s[S_HIT, k]
        w.r[request, R_N_HELD] = n
        w.r[request, R_LOCAL] = local
        w.r[request, R_COMPUTED] = (local + external) * w.size
        if external > 0:
            w.r[request, R_ADOPTED] += adopted
            for k in range(own):
                w.held[first + n + k] = _take(w)
            w.r[request, R_N_HELD] = n + own
            w.i[RESERVED] += rest - own
            w.r[request, R_PLACE] = w.i[HOLDING]
            w.i[HOLDING] += 1
            w.i[N_LOADING] += 1
        _allocated(w, request, external, adopted, n, n + own)
        if own > 0:
            w.r[request, R_LOADED] += own
            get = w.i[N_GETS]
            w.i[N_GETS] += 1
            w.g[get, G_REQUEST] = request
            w.g[get, G_BLOCKS] = own
            for k in range(n, n + own):
                name = w.names[w.r[request, R_FIRST] + k]
                if w.u[name, U_LOADING_BY] == NONE:
                    w.u[name, U_LOADING_BY] = request
                elif w.u[name, U_LOADING_BY] != request:
                    w.r[request, R_REMOVABLE] += 1
        if w.mode != STOCK:
            w.f[NOW] += w.per_lookup + external * w.per_block
        if external == 0:
            _seat(w, request)
        return True

    @compiled
    def _admit(w: World) -> None:
        n_requests = len(w.r)
        if w.i[CUT] != NONE:
            request = w.i[CUT]
            w.i[CUT] = NONE
            _compute(w, request)
        while w.i[N_READY] > 0 and w.i[BUDGET] > 0 and w.i[SEATS] < w.max_num_seqs:
            request = w.q[Q_READY, 0] % n_requests
            for k in range(w.r[request, R_COMPUTED] // w.size):
                _cache(w, w.held[w.r[request, R_HELD] + k], w.names[w.r[request, R_FIRST] + k])
            rest = w.r[request, R_FOOTPRINT] - w.r[request, R_N_HELD]
            if rest > w.i[FREE]:
                return
            _pop(w.q[Q_READY], w.i[N_READY])
            w.i[N_READY] -= 1
            w.i[RESERVED] -= rest
            _seat(w, request)
        n_later = 0
        while w.i[N_WAITING] > 0 and w.i[BUDGET] > 0 and w.i[SEATS] < w.max_num_seqs:
            if w.i[N_GETS] == len(w.g):
                w.i[FULL] = 1  # the caller gives more room and starts again
                return
            key = w.q[Q_WAITING, 0]
            request = key % n_requests
            local = _hit(w, request)
            external, adopted = _match(w, request, local)
            if external != ASK_AGAIN and not _allocate(w, request, local, external, adopted):
                break
            _pop(w.q[Q_WAITING], w.i[N_WAITING])
            w.i[N_WAITING] -= 1
            if external == ASK_AGAIN and not (w.mode == PARK and w.r[request, R_NODE] != NONE):
                w.q[Q_LATER, n_later] = key
                n_later += 1
        for k in range(n_later):
            _push(w.q[Q_WAITING], w.i[N_WAITING], w.q[Q_LATER, k])
            w.i[N_WAITING] += 1

    @compiled
    def _finish(w: World, request: int) -> None:
        for k in range(w.r[request, R_PROMPT] // w.size, w.r[request, R_FULL]):
            _cache(w, w.held[w.r[request, R_HELD] + k], UNASKED)
        _give_back(w, request)
        w.r[request, R_MEMBER] = 0
        w.rf[request, R_PARK_DEADLINE] = math.inf
        w.i[SEATS] -= 1

    @compiled
    def _start_loads(w: World) -> None:
        while w.i[QUEUE_TAIL] < w.i[N_GETS]:
            _advance(w, w.f[NOW])
            w.gf[w.i[QUEUE_TAIL], G_QUEUED] = w.f[NOW]
            w.i[QUEUE_TAIL] += 1
            _take_gets(w, w.f[NOW])

    @compiled
    def _end_step(w: World, decoding: int) -> None:
        now, key_of = w.f[NOW], len(w.r) + 1
        for k in range(w.i[N_COMPUTED]):
            name = w.step_computed[k]
            if w.stored_from[name] > now:
                w.stored_from[name] = now
        w.i[CONTEXT] += decoding
        while w.i[N_ENDS] > 0 and w.q[Q_ENDS, 0] // key_of == w.i[STEPS]:
            request = w.q[Q_SEAT_REQUEST, _pop(w.q[Q_ENDS], w.i[N_ENDS]) % key_of]
            w.i[N_ENDS] -= 1
            w.i[DECODING] -= 1
            w.i[CONTEXT] -= w.r[request, R_PROMPT] + w.r[request, R_OUTPUT]
            _finish(w, request)
        for k in range(w.i[N_FIRST]):
            request = w.q[Q_STEP_FIRST, k]
            w.rf[request, R_FIRST_TOKEN] = now
            if w.r[request, R_OUTPUT] == 1:
                _finish(w, request)
            else:
                w.i[DECODING] += 1
                w.i[CONTEXT] += w.r[request, R_PROMPT] + 1
                w.q[Q_SEAT_REQUEST, w.i[SEATED]] = request
                last = w.i[STEPS] + w.r[request, R_OUTPUT] - 1
                _push(w.q[Q_ENDS], w.i[N_ENDS], last * key_of + w.i[SEATED])
                w.i[N_ENDS] += 1
                w.i[SEATED] += 1

    @compiled
    def _report(w: World, tick: bool) -> None:
        now, n_requests = w.f[NOW], len(w.r)
        _advance(w, now)
        n = w.i[N_ENDED]
        for k in range(n):
            get = w.q[Q_ENDED, k]
            w.gf[get, G_REPORTED] = now
            request = w.g[get, G_REQUEST]
            first = w.r[request, R_FIRST]
            for j in range(w.r[request, R_NAMED]):
                if w.u[w.names[first + j], U_LOADING_BY] == request:
                    w.u[w.names[first + j], U_LOADING_BY] = NONE
            w.q[Q_ENDED, k] = request
        if n == 0 and not tick and (w.mode != ATTACH or w.i[N_TOUCHED] == 0):
            return
        if n > 1:
            w.q[Q_ENDED, :n].sort()
        if w.mode != STOCK:
            _output(w, tick)
        if w.mode != ATTACH:
            for k in range(n):
                w.i[N_LOADING] -= 1
                _push(
                    w.q[Q_READY], w.i[N_READY], w.r[w.q[Q_ENDED, k], R_PLACE] * n_requests + w.q[Q_ENDED, k]
                )
                w.i[N_READY] += 1
        again = 0
        for k in range(w.i[N_TOUCHED]):
            request = w.q[Q_TOUCHED, k]
            w.r[request, R_TOUCHED] = 0
            if w.mode == PARK:
                _push(w.q[Q_WAITING], w.i[N_WAITING], n_requests + request)
                w.i[N_WAITING] += 1
                continue
            if (
                w.r[request, R_PENDING] == 0
                or w.r[request, R_LOAD]
                or w.r[request, R_EARLY]
                or w.r[request, R_NODE] != NONE
            ):
                continue
            w.r[request, R_PENDING] = 0
            w.i[N_LOADING] -= 1
            if w.r[request, R_STARTS_AGAIN] == 0:
                _push(w.q[Q_READY], w.i[N_READY], w.r[request, R_PLACE] * n_requests + request)
                w.i[N_READY] += 1
                continue
            w.r[request, R_STARTS_AGAIN] = 0
            w.i[RESERVED] -= w.r[request, R_FOOTPRINT] - w.r[request, R_N_HELD]
            w.q[Q_OVER, again] = request
            again += 1
        # In the order of the requests, as `sorted` has it: it decides which blocks are free first.
        if again > 1:
            w.q[Q_OVER, :again].sort()
        for k in range(again):
            request = w.q[Q_OVER, k]
            _give_back(w, request)
            w.r[request, R_COMPUTED] = 0
            w.i[FELL_BACK] += 1
            _push(w.q[Q_WAITING], w.i[N_WAITING], request)
            w.i[N_WAITING] += 1
        w.i[N_TOUCHED] = w.i[N_ENDED] = 0

    @compiled
    def _step(w: World) -> None:
        w.i[TOKENS] = w.i[PAIRS] = w.i[BEFORE] = w.i[N_COMPUTED] = w.i[N_FIRST] = 0
        w.f[LOOKUP_SHARE] = 1.0
        decoding, context = w.i[DECODING], w.i[CONTEXT]
        w.i[BUDGET] = w.max_tokens - decoding
        _admit(w)
        tick = False
        if w.mode != STOCK:
            if w.mode == ATTACH:
                _land_in_order(w)
            w.f[ASKED_AT] = w.f[NOW]
            tick = w.f[NOW] >= w.f[NEXT_DEADLINE]
        busy = decoding > 0 or w.i[TOKENS] > 0
        if not w.synchronous_launch:
            _start_loads(w)
        if busy:
            seconds = (
                w.step_overhead
                + w.i[TOKENS] / w.prefill_rate
                + w.i[PAIRS] * w.attention
                + w.i[BEFORE] * w.prefill_context
                + decoding * w.decode_per_request
                + context * w.decode_context
            )
            _advance(w, w.f[NOW])
            if w.i[ACTIVE] > 0:
                seconds *= w.loading_slowdown
            _slow(w, w.computing_slowdown)
            w.f[NOW] += seconds
            _advance(w, w.f[NOW])
            _slow(w, 1.0)
            w.i[STEPS] += 1
            _end_step(w, decoding)
        if w.synchronous_launch:
            _start_loads(w)
        _report(w, tick)
        if not busy:
            w.f[NOW] += w.idle_step

    @compiled
    def _run(w: World) -> bool:
        n = len(w.r)
        while w.i[FULL] == 0:
            due = w.f[NOW]
            while w.i[ARRIVED] < n and w.rf[w.i[ARRIVED], R_AT_ENGINE] <= due:
                _push(w.q[Q_WAITING], w.i[N_WAITING], n + w.i[ARRIVED])
                w.i[N_WAITING] += 1
                w.f[NOW] += w.rf[w.i[ARRIVED], R_TAKING]
                w.i[ARRIVED] += 1
            if w.i[SEATS] > 0 or w.i[N_WAITING] > 0 or w.i[N_LOADING] > 0 or w.i[N_READY] > 0:
                _step(w)
            elif w.i[ARRIVED] < n:
                w.f[NOW] = w.rf[w.i[ARRIVED], R_AT_ENGINE]
            else:
                return True
        return False


def _world(
    arrivals: Arrivals, prompts: Prompts, figures: Figures, instance: Instance, mode: Mode, gets: int
) -> World:
    """Everything at its start, with room for so many Gets."""
    policy = instance.rules
    n, names = arrivals.n_requests, len(arrivals.stored_from)
    pool, threads = room(prompts, instance), instance.receive_threads
    nodes = int(prompts.named.sum()) + 1

    def table(rows: int, columns: int) -> NDArray[np.int64]:
        return np.zeros((rows, columns), np.int64)

    singles = np.zeros(FULL + 1, np.int64)
    singles[[FLIGHT_FIRST, FLIGHT_LAST, WAIT_FIRST, EARLY_FIRST, EARLY_LAST, CUT]] = NONE
    singles[FREE] = pool
    times = np.zeros(MADE_AT + 1)
    times[NEXT_DEADLINE] = math.inf
    times[SLOWDOWN] = 1.0
    held = np.concatenate([np.zeros(1, np.int64), np.cumsum(prompts.footprint)])

    r, rf = table(n, R_LOOKUPS + 1), np.full((n, R_ADMITTED + 1), math.nan)
    r[:, [R_NODE, R_WAIT_NEXT, R_WAIT_PREV, R_FLIGHT, R_EARLY_NEXT, R_EARLY_PREV]] = NONE
    r[:, R_FIRST], r[:, R_HELD] = arrivals.offsets[:-1], held[:-1]
    r[:, R_PROMPT], r[:, R_OUTPUT] = arrivals.prompts, arrivals.outputs
    r[:, R_NAMED], r[:, R_ASKED] = prompts.named, prompts.asked
    r[:, R_FOOTPRINT], r[:, R_FULL] = prompts.footprint, prompts.full
    rf[:, R_AT_ENGINE], rf[:, R_TAKING] = prompts.at_engine, prompts.taking_s
    rf[:, R_ANSWER_AT], rf[:, R_PARK_DEADLINE] = -1.0, math.inf

    u = np.full((names, U_LOADING_BY + 1), NONE, np.int64)
    b = np.full((pool + 1, B_SAME_PREV + 1), NONE, np.int64)
    ring = np.arange(pool + 1)
    b[:, B_NEXT], b[:, B_PREV], b[:, B_HOLDERS] = np.roll(ring, -1), np.roll(ring, 1), 0
    b[:, B_NAME] = NOTHING
    node = table(nodes, N_OTHER + 1)
    node[:, N_NEXT] = np.arange(1, nodes + 1)
    stored_from = np.zeros(names) if instance.store == "warm" else arrivals.stored_from.copy()
    rate = float(figures.load_bandwidth.value)
    return World(
        mode=MODE[mode],
        lookup_async=instance.lookup_async,
        recompute=instance.on_deadline == "recompute",
        synchronous_launch=instance.synchronous_launch,
        size=instance.block_tokens,
        max_num_seqs=instance.max_num_seqs,
        max_tokens=instance.max_num_batched_tokens,
        latency=float(figures.load_latency.value),
        block_bytes=float(figures.kv_bytes_per_token.value * instance.block_tokens),
        rate=rate,
        total=float(rate * figures.parallel_loads.value),
        lookup_latency=float(figures.lookup_latency.value),
        lookup_per_block=float(figures.lookup_per_block.value),
        lookup_again=float(figures.lookup_again.value),
        prefill_rate=float(figures.prefill_rate.value),
        attention=float(figures.attention.value),
        step_overhead=float(figures.step_overhead.value),
        decode_per_request=float(figures.decode_per_request.value),
        prefill_context=float(figures.prefill_context.value),
        loading_slowdown=float(figures.loading_slowdown.value),
        computing_slowdown=float(figures.computing_slowdown.value),
        decode_context=float(figures.decode_context.value),
        idle_step=float(figures.idle_step.value),
        per_lookup=float(figures.coordination_per_lookup.value),
        per_block=float(figures.coordination_per_block.value),
        base_s=float(policy.deadline_base_s),
        per_block_s=float(policy.deadline_per_block_s),
        learned_factor=float(policy.deadline_learned_factor),
        max_handovers=policy.max_handovers,
        max_blocks=policy.max_blocks,
        patience=float(policy.join_patience),
        breaker_failures=policy.breaker_failures,
        breaker_pause=float(policy.breaker_pause_s),
        enough=ENOUGH,
        outlier=OUTLIER,
        window=WINDOW,
        forgetting=FORGETTING,
        f=times,
        i=singles,
        r=r,
        rf=rf,
        u=u,
        b=b,
        t=table(threads, T_GET + 1),
        tf=np.zeros((threads, T_COMPLETE_AT + 1)),
        g=table(gets, G_BLOCKS + 1),
        gf=np.zeros((gets, G_REPORTED + 1)),
        fl=table(gets, F_LAST + 1),
        n=node,
        q=table(Q_STEP_FIRST + 1, n + 1),
        s=table(S_LENGTH + 1, int(prompts.named.max()) + 1),
        names=arrivals.blocks.astype(np.int64),
        stored_from=stored_from,
        f_started=np.zeros(gets),
        held=np.zeros(int(held[-1]), np.int64),
        step_computed=np.zeros(nodes, np.int64),
    )


def simulate(arrivals: Arrivals, figures: Figures, instance: Instance, mode: Mode) -> Outcome:
    """As `model.simulate` does; raises as it does."""
    prompts = Prompts.of(arrivals, figures, instance)
    gets = 2 * arrivals.n_requests
    while not _run(w := _world(arrivals, prompts, figures, instance, mode, gets)):
        gets *= 2
    whole, seconds = w.r.T.copy(), w.rf.T.copy()
    made = int(w.i[N_GETS])
    return Outcome(
        ttft_s=seconds[R_FIRST_TOKEN] - arrivals.times,
        admitted_s=seconds[R_ADMITTED] - arrivals.times,
        local_blocks=whole[R_LOCAL],
        adopted_blocks=whole[R_ADOPTED],
        loaded_blocks=whole[R_LOADED],
        removable_blocks=whole[R_REMOVABLE],
        computed_tokens=whole[R_COMPUTED_TOKENS],
        lookups=whole[R_LOOKUPS],
        gets=Gets(*w.g[:made].T.copy(), *w.gf[:made].T.copy()),
        block_bytes=w.block_bytes,
        steps=int(w.i[STEPS]),
        fell_back=int(w.i[FELL_BACK]),
    )
