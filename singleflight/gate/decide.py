"""The gate: does coalescing pay for this traffic on this deployment? The twin's predicted TTFT to an answer.

The answer is "yes" only if it is yes in the whole neighbourhood of what was stated: latency and bandwidth
halved and doubled, lookups that the scheduler waits for and asynchronous ones, time ties kept and spread.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from singleflight.sim import ties
from singleflight.sim.columns import Columns
from singleflight.sim.config import Config, Routing
from singleflight.traces.reader import FEW, LONG_GAP
from singleflight.traces.request import Request
from singleflight.twin import arrivals
from singleflight.twin.arrivals import Arrivals
from singleflight.twin.figures import Figures
from singleflight.twin.instance import Instance, Mode
from singleflight.twin.kernel import simulate
from singleflight.twin.quantity import Quantity

LEAST_MEAN = 0.05
"""By how much the mean TTFT must improve, of stock's. Two engines of one mode, started one after the other,
differ by 5 to 10 %: a smaller gain is none that anybody sees."""
LEAST_P99 = -0.01
"""p99 must not get worse. A hundredth is the layer's own microseconds on requests that share nothing."""
WARMUP = 10
"""The first of so many requests are warm-up: caches fill. A share of the requests and not of the span, which
one stray timestamp can stretch."""
LEAST_STEADY = 100
"""Of fewer requests the 99th percentile is the longest."""
CROWDED = 0.5
"""Share of requests that may find more waiting before them than the instance runs at once."""
PATHS = ((1.0, 1.0), *itertools.product((2.0, 0.5), (0.5, 2.0)))
"""Latency and bandwidth, times the stated."""
DOUBLINGS = 6
"""How far the search for a load path that flips the verdict goes."""


class NotJudged(ValueError):
    """Traffic that the gate refuses to judge: one sentence, what is wrong and what is accepted."""


@dataclass(frozen=True)
class Traffic:
    """One trace.

    Attributes:
        path, name, sha256: of its file, for messages and the verdict.
        columns: its R requests. prompts, outputs: (R,) tokens, see `arrivals.lengths`.
        clock_is_fine: its timestamps are real milliseconds, so requests at the same one were together.
    """

    path: str
    name: str
    sha256: str
    columns: Columns
    prompts: NDArray[np.int64]
    outputs: NDArray[np.int64]
    clock_is_fine: bool

    @classmethod
    def of(
        cls, requests: Sequence[Request], path: str, name: str, sha256: str, clock_is_fine: bool = False
    ) -> Traffic:
        """Raises ValueError as `Columns.from_requests`."""
        lengths = arrivals.lengths(requests)
        return cls(path, name, sha256, Columns.from_requests(requests), *lengths, clock_is_fine)

    @property
    def requests(self) -> int:
        return self.columns.n_requests

    @property
    def first_steady(self) -> int:
        """The number of the first request after the warm-up."""
        return self.requests // WARMUP

    @property
    def span_s(self) -> float:
        """From the first to the last request, s of trace time."""
        return float(self.columns.times[-1] - self.columns.times[0]) / 1000


@dataclass(frozen=True)
class Deployment:
    """What the verdict is for.

    Attributes:
        instance: each of them.
        instances, routing: how many one trace is dealt out over, and how; of several traces each has one
            instance to itself.
        scale: how many times faster than recorded the traces run, above 0.
        attach_refused: why the recorded server could not obey a yes, half a sentence; None if it could.
    """

    instance: Instance
    instances: int = 1
    routing: Routing = "round_robin"
    scale: float = 1.0
    attach_refused: str | None = None


@dataclass(frozen=True)
class Point:
    """The stated deployment, or one near it.

    Attributes:
        latency, bandwidth: of the load path, times the stated.
        lookup_async: see `Instance`. spread: whether time ties are spread, see `sim.ties`.
    """

    latency: float = 1.0
    bandwidth: float = 1.0
    lookup_async: bool = False
    spread: bool = False

    def __str__(self) -> str:
        said = [
            f"{name} {'halved' if times == 0.5 else 'doubled' if times == 2 else f'x {times:g}'}"
            for name, times in (("latency", self.latency), ("bandwidth", self.bandwidth))
            if times != 1
        ]
        said += ["asynchronous lookups"] * self.lookup_async + ["time ties spread"] * self.spread
        return ", ".join(said) or "what was stated"


@dataclass(frozen=True)
class Predicted:
    """One mode at one point, over the steady requests of all instances.

    Attributes:
        ttft_s: (S,) s.
        gets, blocks: loads, and block loads. removable: of these, those that repeat one in flight.
        fell_back: followers whose deadline has passed, warm-up included.
        crowded: share of the requests that, when they arrive, find more requests without a first token
            than the instance runs at once.
    """

    ttft_s: NDArray[np.float64]
    gets: int
    blocks: int
    removable: int
    fell_back: int
    crowded: float

    @property
    def mean_s(self) -> float:
        return float(self.ttft_s.mean())

    def quantile_s(self, share: float) -> float:
        """Nearest rank: the smallest TTFT that at least this share of the requests does not exceed."""
        return float(np.quantile(self.ttft_s, share, method="inverted_cdf"))


@dataclass(frozen=True)
class Difference:
    """By how much attach is better than stock at a point, as shares of stock."""

    point: Point
    mean: float
    p99: float

    @property
    def pays(self) -> bool:
        return self.mean >= LEAST_MEAN and self.p99 >= LEAST_P99


class Gate:
    """Some traffic, one deployment, one set of figures.

    Raises:
        NotJudged: too few requests after the warm-up, a span that is mostly one gap, or a request that no
            instance has room for.
        ValueError: several traces and several instances, or an unknown routing or number of instances.
    """

    def __init__(self, traffic: Sequence[Traffic], deployment: Deployment, figures: Figures) -> None:
        Config(1, deployment.instances, 1, deployment.routing)  # raises
        if len(traffic) > 1 and deployment.instances > 1:
            raise ValueError(
                f"{deployment.instances} instances with {len(traffic)} traces; accepted: 1, since each trace"
                " is that of an instance"
            )
        self.traffic, self.deployment, self.figures = traffic, deployment, figures
        self.steady_requests = sum(each.requests - each.first_steady for each in traffic)
        if self.steady_requests < LEAST_STEADY:
            raise NotJudged(
                f"{traffic[0].path}: {self.steady_requests} requests after the warm-up, which is the first"
                f" tenth of them; accepted: at least {LEAST_STEADY}, since of fewer the 99th percentile is"
                " a single request"
            )
        for each in traffic:
            if (sentence := _gap(each) or _no_room(each, deployment.instance)) is not None:
                raise NotJudged(sentence)
        self.spreads = [False] if all(each.clock_is_fine for each in traffic) else [False, True]
        self._sent: dict[bool, list[tuple[Traffic, Arrivals]]] = {}
        self._predicted: dict[tuple[Point, Mode], Predicted] = {}

    # -- one point ---------------------------------------------------------------------------------------

    def predicted(self, point: Point, mode: Mode) -> Predicted:
        """What the twin says; simulated once."""
        if (point, mode) not in self._predicted:
            self._predicted[point, mode] = self._simulated(point, mode)
        return self._predicted[point, mode]

    def _simulated(self, point: Point, mode: Mode) -> Predicted:
        figures = dataclasses.replace(
            self.figures,
            load_latency=self._times("load_latency", point.latency),
            load_bandwidth=self._times("load_bandwidth", point.bandwidth),
        )
        instance = dataclasses.replace(self.deployment.instance, lookup_async=point.lookup_async)
        return _pooled(self._instances(point.spread), figures, instance, mode)

    def _times(self, name: str, factor: float) -> Quantity:
        quantity: Quantity = getattr(self.figures, name)
        return dataclasses.replace(quantity, value=quantity.value * factor)

    def _instances(self, spread: bool) -> list[tuple[Traffic, Arrivals]]:
        """What each instance is sent, and of which trace that is."""
        if spread not in self._sent:
            at = self.deployment
            self._sent[spread] = [
                (each, one)
                for each in self.traffic
                for one in arrivals.split(
                    ties.spread(each.columns) if spread and not each.clock_is_fine else each.columns,
                    each.prompts,
                    each.outputs,
                    at.instances,
                    at.routing,
                    at.scale,
                )
            ]
        return self._sent[spread]

    def difference(self, point: Point) -> Difference:
        stock, attach = self.predicted(point, "stock"), self.predicted(point, "attach")

        def better(before: float, after: float) -> float:
            return (before - after) / before

        return Difference(
            point,
            better(stock.mean_s, attach.mean_s),
            better(stock.quantile_s(0.99), attach.quantile_s(0.99)),
        )

    # -- the answer --------------------------------------------------------------------------------------

    @cached_property
    def stated(self) -> Point:
        """As the deployment is, with the trace's own timestamps."""
        return Point(lookup_async=self.deployment.instance.lookup_async)

    @cached_property
    def neighbours(self) -> list[Point]:
        """The stated point, and all around it."""
        around = itertools.product(PATHS, (False, True), self.spreads)
        points = [Point(*path, lookup_async, spread) for path, lookup_async, spread in around]
        return sorted(points, key=lambda point: point != self.stated)

    def run(self) -> Iterator[tuple[Point, Mode]]:
        """Simulate all that the answer needs, on all cores; yields each that is done, for who shows progress.

        If it is interrupted, what has begun is waited for: a simulation takes seconds.
        """
        modes: tuple[Mode, ...] = ("stock", "attach")
        wanted: list[tuple[Point, Mode]] = [
            (self.stated, "park"),
            *itertools.product(self.neighbours, modes),
        ]
        for spread in self.spreads:
            self._instances(spread)  # once, and not in each thread
        # Threads: the kernel lets go of the GIL.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            running = {pool.submit(self._simulated, *each): each for each in wanted}
            try:
                for done in as_completed(running):
                    self._predicted[running[done]] = done.result()
                    yield running[done]
            finally:
                pool.shutdown(cancel_futures=True)

    @property
    def runs(self) -> int:
        """How many `run` yields."""
        return 1 + 2 * len(self.neighbours)

    @property
    def differences(self) -> list[Difference]:
        return [self.difference(point) for point in self.neighbours]

    @property
    def crowded(self) -> bool:
        """Whether more arrives than the instance admits, even with fewer loads: a batch, or an overload."""
        return self.predicted(self.stated, "attach").crowded > CROWDED

    @property
    def enable(self) -> bool:
        return not self.crowded and all(each.pays for each in self.differences)

    def flip(self) -> float | None:
        """How many times as slow (below 1: as fast) the load path must be for another answer; None if no
        power of two up to `DOUBLINGS` gives one.

        Whether it pays at a factor is asked there, at half and at twice as much.
        """
        pays = self._pays_at(0)
        for power in range(1, DOUBLINGS + 1):
            for signed in (-power, power):
                if self._pays_at(signed) != pays:
                    return 2.0**signed
        return None

    def _pays_at(self, power: int) -> bool:
        near = (2.0**each for each in (power - 1, power, power + 1))
        points = [Point(slow, 1 / slow, self.stated.lookup_async, self.spreads[-1]) for slow in near]
        return all(self.difference(point).pays for point in points)


def _gap(traffic: Traffic) -> str | None:
    """What is wrong with a trace that is mostly one gap, and where it is; None if it is none."""
    times = traffic.columns.times
    if len(times) < FEW:
        return None
    gaps = np.diff(times)
    at = int(gaps.argmax())
    gap_s = float(gaps[at]) / 1000
    if gap_s <= LONG_GAP * traffic.span_s:
        return None
    return (
        f"{traffic.path}: no request for {gap_s:,.0f} s of the {traffic.span_s:,.0f} s, after"
        f" request {at + 1:,} of {traffic.requests:,} (timestamp {times[at]} ms); accepted: a trace"
        " without a gap of more than half its span, so cut it there"
    )


def _no_room(traffic: Traffic, instance: Instance) -> str | None:
    """Which request is larger than the cache; None if none is."""
    needs = -(-(traffic.prompts + traffic.outputs - 1) // instance.block_tokens)
    at = int(needs.argmax())
    if needs[at] <= instance.gpu_blocks:
        return None
    return (
        f"{traffic.path}: request {at + 1:,} of {traffic.requests:,} needs {needs[at]:,} blocks of KV"
        f" cache; accepted: up to the {instance.gpu_blocks:,} of --capacity"
    )


def _pooled(
    sent: list[tuple[Traffic, Arrivals]], figures: Figures, instance: Instance, mode: Mode
) -> Predicted:
    """One mode over all instances; the steady requests count."""
    ttft: list[NDArray[np.float64]] = []
    gets = blocks = removable = fell_back = crowded = 0
    for of, arrived in sent:
        found = simulate(arrived, figures, instance, mode)
        steady = arrived.source >= of.first_steady
        ttft.append(found.ttft_s[steady])
        gets += int(steady[found.gets.request].sum())
        blocks += int(found.loaded_blocks[steady].sum())
        removable += int(found.removable_blocks[steady].sum())
        fell_back += found.fell_back
        crowded += int((_without_first_token(arrived, found.ttft_s)[steady] > instance.max_num_seqs).sum())
    seconds = np.concatenate(ttft)
    return Predicted(seconds, gets, blocks, removable, fell_back, crowded / len(seconds))


def _without_first_token(arrived: Arrivals, ttft_s: NDArray[np.float64]) -> NDArray[np.int64]:
    """(R,) how many of the requests before it wait for their first token when a request arrives."""
    answered = np.searchsorted(np.sort(arrived.times + ttft_s), arrived.times, side="right")
    waiting: NDArray[np.int64] = np.arange(arrived.n_requests) - answered
    return waiting
