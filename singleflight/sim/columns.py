"""A trace as arrays, and its split over instances."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from singleflight.sim.config import Routing, steady_from
from singleflight.traces.request import Request


@dataclass(frozen=True)
class Columns:
    """A trace of R requests with L block lookups over U distinct blocks.

    Attributes:
        times: (R,) int64, arrival, ms, not decreasing (R1).
        offsets: (R + 1,) int64, request r has the lookups offsets[r] to offsets[r + 1].
        blocks: (L,) int32, a dense id for each distinct hash, numbered by first appearance.
        hashes: (U,) uint64, the hash behind each dense id; 64-bit ids stay distinct.
    """

    times: NDArray[np.int64]
    offsets: NDArray[np.int64]
    blocks: NDArray[np.int32]
    hashes: NDArray[np.uint64]

    @property
    def n_requests(self) -> int:
        return len(self.times)

    @property
    def n_lookups(self) -> int:
        return len(self.blocks)

    @classmethod
    def from_requests(cls, requests: Iterable[Request]) -> Columns:
        """Collect requests, in one pass.

        Raises:
            ValueError: no request, not in timestamp order, or a request without blocks.
        """
        times, sizes, hashes = array("q"), array("q"), array("Q")
        for request in requests:
            times.append(request.timestamp_ms)
            sizes.append(len(request.hashes))
            hashes.extend(request.hashes)
        if not times:
            raise ValueError("the trace has no request")
        at = np.frombuffer(times, np.int64)
        size = np.frombuffer(sizes, np.int64)
        if (size == 0).any():
            raise ValueError(f"request {int((size == 0).argmax())} has no blocks")
        if (np.diff(at) < 0).any():
            raise ValueError(
                f"request {int((np.diff(at) < 0).argmax()) + 1} is earlier than the one before it"
            )
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(size)])
        distinct, first, inverse = np.unique(
            np.frombuffer(hashes, np.uint64), return_index=True, return_inverse=True
        )
        order = np.argsort(first)
        dense = np.empty(len(order), np.int32)
        dense[order] = np.arange(len(order), dtype=np.int32)
        return cls(at, offsets, dense[inverse], distinct[order])

    def steady(self, warmup: tuple[int, int]) -> NDArray[np.uint8]:
        """(R,) 1 where the request is steady, 0 where it is warmup (R2)."""
        border = steady_from(int(self.times[0]), int(self.times[-1]), warmup)
        return (self.times >= border).view(np.uint8)

    def instance_of(self, instances: int, routing: Routing) -> NDArray[np.int64]:
        """(R,) the instance that serves each request (R3)."""
        if routing == "round_robin":
            return np.arange(self.n_requests) % instances
        first = self.hashes[self.blocks[self.offsets[:-1]]]
        return (first % np.uint64(instances)).astype(np.int64)


@dataclass(frozen=True)
class Layout:
    """A trace regrouped by instance, the form the kernel runs over: nothing crosses instances (R4), so each
    is a run of consecutive requests, in trace order, with block ids of its own that start at 0. Small ids
    keep its state in cache.

    Attributes:
        starts: (N + 1,) int64, instance i has the requests starts[i] to starts[i + 1] of this order.
        source: (R,) int64, the trace index of each request.
        times, steady, offsets: as in `Columns`, in this order.
        blocks: (L,) int32, ids local to the instance, in this order.
        sizes: (N,) int64, distinct blocks each instance sees.
        dense: (sum of sizes,) int32, instance after instance, the trace-wide dense id behind each local id.
    """

    starts: NDArray[np.int64]
    source: NDArray[np.int64]
    times: NDArray[np.int64]
    steady: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    blocks: NDArray[np.int32]
    sizes: NDArray[np.int64]
    dense: NDArray[np.int32]
