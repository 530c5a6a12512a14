"""The gate: does coalescing pay for this trace on this deployment? Simulation and costs to a verdict.

The answer is "yes" only if it is yes in the whole neighbourhood of what was stated: window halved and
doubled, both lookups, time ties kept and spread.
"""

from __future__ import annotations

import datetime
import itertools
import platform
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata

import numpy as np

from singleflight import __version__
from singleflight.quantity import Origin, Quantity
from singleflight.sim import cost, kernel, ties
from singleflight.sim.columns import Columns
from singleflight.sim.config import DEFAULT_WARMUP, LOOKUPS, MAX_MS, Config, Lookup, Routing, steady_from
from singleflight.sim.cost import Costs, Figures, Load, Traffic
from singleflight.sim.counts import Counts

SENSITIVITY = (0.5, 1.0, 2.0)
"""Times the stated window."""
STATED_LOOKUP: Lookup = "contiguous_prefix"
"""vLLM's."""
LONGEST_MS = 3_600_000
"""Where the search for a window that flips the verdict ends, real ms."""


@dataclass(frozen=True)
class Deployment:
    """What the verdict is for.

    Attributes:
        instances, capacity, routing: as in `sim.config.Config`.
        scale: how many times faster than recorded the trace runs, above 0.
        block_tokens: tokens a block.
        window_s: how long a load takes, s, if somebody knows; None: from the cost model.
    """

    instances: int
    capacity: int
    routing: Routing
    scale: float
    block_tokens: int
    window: Quantity | None = None


@dataclass(frozen=True)
class Point:
    """One simulated configuration and its balance.

    Attributes:
        window_s: real seconds. lookup: see `Config`. spread: whether time ties were spread.
        counts: of the steady phase. traffic, costs: see `cost`.
    """

    window_s: float
    lookup: Lookup
    spread: bool
    counts: Counts
    traffic: Traffic
    costs: Costs


class Gate:
    """One trace, one deployment, one set of figures.

    Args:
        columns: the trace.
        clock_is_fine: its timestamps are real milliseconds, so requests at the same one were together.

    Raises:
        ValueError: the deployment cannot be simulated, or the trace spans no time; says what is accepted.
    """

    def __init__(
        self, columns: Columns, deployment: Deployment, figures: Figures, clock_is_fine: bool = False
    ) -> None:
        self.deployment = deployment
        self.figures = figures
        first, last = int(columns.times[0]), int(columns.times[-1])
        steady_ms = last - steady_from(first, last, DEFAULT_WARMUP)
        if steady_ms <= 0:
            raise ValueError(f"all requests within {last - first} ms; accepted: a trace that spans some time")
        self.steady_s = steady_ms / 1000 / deployment.scale
        Config(1, deployment.instances, deployment.capacity, deployment.routing)  # raises
        variants = [False] if clock_is_fine else [False, True]
        self.spreads = variants
        self._kernels = {
            spread: kernel.Kernel(
                kernel.lay_out(
                    ties.spread(columns) if spread else columns,
                    deployment.instances,
                    deployment.routing,
                    DEFAULT_WARMUP,
                )
            )
            for spread in variants
        }
        self._simulated: dict[tuple[int, Lookup, bool], tuple[Counts, float]] = {}

    # -- one point ---------------------------------------------------------------------------------------

    def w_eff_ms(self, window_s: float) -> int:
        """The window in ms of trace time, W x scale, as the simulator takes it."""
        return min(max(1, round(window_s * 1000 * self.deployment.scale)), MAX_MS)

    def point(
        self, window_s: float, lookup: Lookup = STATED_LOOKUP, spread: bool = False, service_s: float = 0.0
    ) -> Point:
        """Simulate a window and weigh it; `service_s`: what one load costs, the window unless given."""
        counts, run = self._counts(self.w_eff_ms(window_s), lookup, spread)
        traffic = Traffic(
            counts.requests / self.steady_s,
            counts.attempts / self.steady_s,
            counts.removable / self.steady_s,
            run,
        )
        balance = cost.costs(self.figures, traffic, service_s or window_s)
        return Point(window_s, lookup, spread, counts, traffic, balance)

    def _counts(self, w_eff_ms: int, lookup: Lookup, spread: bool) -> tuple[Counts, float]:
        """Steady counts, and the mean blocks of a leader's load (1 where nothing is loaded)."""
        key = w_eff_ms, lookup, spread
        if key not in self._simulated:
            engine, at = self._kernels[spread], self.deployment
            config = Config(w_eff_ms, at.instances, at.capacity, at.routing, lookup)
            outcome = kernel.outcome(
                config, *engine.run_arrays(w_eff_ms, at.capacity, lookup == "contiguous_prefix")
            )
            led = np.diff(engine.load_first)[engine.layout.steady == 1]
            led = led[led > 0]
            self._simulated[key] = outcome.phase("steady"), float(led.mean()) if len(led) else 1.0
        return self._simulated[key]

    # -- the stated window -------------------------------------------------------------------------------

    @cached_property
    def load(self) -> Load:
        """How long a load takes: given, or the window at which simulation and cost model agree.

        The run of blocks a load brings depends on what is cached, and so, a little, on the window.
        """
        if self.deployment.window is not None:
            return Load(self.deployment.window.value / 1000)
        window_s, seen = 0.0, set[int]()
        while True:
            at = self.point(window_s).traffic
            loads_per_s = at.cold_per_s / at.run_blocks / self.deployment.instances
            found = cost.load(self.figures, at.run_blocks, self.deployment.block_tokens, loads_per_s)
            window_s = found.window_s
            if self.w_eff_ms(window_s) in seen:  # settled, or going round a small circle
                return found
            seen.add(self.w_eff_ms(window_s))

    @cached_property
    def stated(self) -> Point:
        return self.point(self.load.window_s, service_s=self.load.service_s)

    @cached_property
    def neighbourhood(self) -> list[Point]:
        """The stated point and all around it."""
        return [
            self.point(self.load.window_s * times, lookup, spread, self.load.service_s * times)
            for times, lookup, spread in itertools.product(SENSITIVITY, LOOKUPS, self.spreads)
        ]

    @property
    def enable(self) -> bool:
        return self._pays(self.neighbourhood)

    @staticmethod
    def _pays(points: list[Point]) -> bool:
        return all(point.costs.margin > 0 for point in points)

    # -- what would flip it ------------------------------------------------------------------------------

    def curve(self) -> list[list[Point]]:
        """For windows doubling from 1 ms to an hour, the points of both lookups and ties."""
        n = LONGEST_MS.bit_length()
        return [self._at(2.0**i / 1000) for i in range(n)]

    def flip_s(self) -> float | None:
        """The shortest window from which on the verdict would be yes, s; None if none up to an hour.

        The margin need not rise everywhere; this is the upper end of the last "no", by bisection in steps of
        1 ms of trace time or a hundredth, whichever is more.
        """

        def pays(window_s: float) -> bool:
            return self._pays([p for times in SENSITIVITY for p in self._at(window_s * times)])

        windows = [points[0].window_s for points in self.curve()]
        answers = [pays(window_s) for window_s in windows]
        if not answers[-1]:
            return None
        if all(answers):
            return windows[0]
        last_no = len(answers) - 1 - answers[::-1].index(False)
        no, yes = windows[last_no], windows[last_no + 1]
        while yes / no > 1.01 and self.w_eff_ms(yes) - self.w_eff_ms(no) > 1:
            middle = (no * yes) ** 0.5
            no, yes = (no, middle) if pays(middle) else (middle, yes)
        return yes

    def _at(self, window_s: float) -> list[Point]:
        return [
            self.point(window_s, lookup, spread)
            for lookup, spread in itertools.product(LOOKUPS, self.spreads)
        ]


def versions() -> dict[str, str]:
    """Of this package and what ran the simulation."""
    return {
        "kv-singleflight": __version__,
        "python": platform.python_version(),
        "numba": metadata.version("numba"),
        "numpy": metadata.version("numpy"),
    }


def window_figure(gate: Gate) -> Quantity:
    """The stated window, ms; made by the cost model, its origin is the worst of what it was made of."""
    figures = gate.figures
    made_of = (
        figures.load_latency,
        figures.load_bandwidth,
        figures.parallel_loads,
        figures.kv_bytes_per_token,
    )
    worst = max((each.origin for each in made_of), key=list(Origin).index)
    return gate.deployment.window or Quantity(gate.load.window_s * 1000, "ms", worst)


def now() -> str:
    """UTC, as verdicts are dated."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
