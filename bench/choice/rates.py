"""What link and core do alone, measured over HTTP; the rates of the links follow from it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.ab.client import drive
from bench.ab.rounds import Bench
from bench.ab.servers import STOCK
from bench.ab.workloads import Load
from bench.choice import bound, workloads
from bench.choice.workloads import PREFIX, SHARES, SIZES, WIDE, Workload

BYTES_PER_TOKEN = 2048
ALONE = ("--max-concurrency", "1")
LEAST_SHARE = 0.25
"""The wire's part of a load is at least so much of it, however fast the link would have to be."""
TIMES = 3


@dataclass
class Rates:
    """Medians, seconds.

    Attributes:
        warm_s: TTFT of a request alone whose prefix is local: HTTP, and a step.
        prefill_s: tokens of the prefix -> what it takes longer if that is computed.
        load_s: link -> tokens -> what it takes longer if that is loaded.
        gbit_s: link -> its rate; WIDE has none.
    """

    warm_s: float
    prefill_s: dict[int, float]
    load_s: dict[str, dict[int, float]] = field(default_factory=dict)
    gbit_s: dict[str, float | None] = field(default_factory=dict)

    def jobs(self, workload: Workload) -> list[bound.Jobs]:
        loads = self.load_s[workload.link]
        return [
            bound.Jobs(count, loads[tokens], self.prefill_s[tokens], waiting)
            for count, tokens, waiting in workload.jobs
        ]

    def bound_s(self, workload: Workload) -> float:
        """The least mean TTFT of its burst: link and core at once."""
        return self.warm_s + bound.least_mean_s(self.jobs(workload))

    def loads_only_s(self, workload: Workload) -> float:
        """The same where nothing is computed."""
        return self.warm_s + bound.loads_only_s(self.jobs(workload))


def wire_gbit_s(share: float, prefill_s: float, unshaped_s: float) -> float:
    """The rate at which the load of a prefix takes this share of its prefill. `unshaped_s` is what it takes
    where the wire takes nothing."""
    whole_s = share * prefill_s
    on_the_wire_s = max(whole_s - unshaped_s, LEAST_SHARE * whole_s)
    return PREFIX * BYTES_PER_TOKEN * 8 / 1e9 / on_the_wire_s


def measure(bench: Bench, links: Sequence[str], say: Callable[[str], None]) -> Rates:
    """Measure the core on every server (which also teaches those that learn), then every link on stock."""

    def alone(arm: str, load: Load) -> list[float]:
        return drive(bench.servers[arm], [*load.arguments(bench.folder), *ALONE])

    bench.set_link(None, 0.0)
    say("measuring: storing prefixes")
    sizes = [*SIZES] * TIMES
    store = workloads.stored(sizes)
    alone(STOCK, store)
    warm, prefills = [], []
    for arm, server in bench.servers.items():
        say(f"measuring: lone prefills, {arm}")
        alone(arm, workloads.new(SIZES))  # the first of each size is slower
        prefills.append(alone(arm, workloads.new(sizes)))
        server.cold()
        warm += alone(arm, workloads.again(1 + 2 * TIMES))[1:]
    warm_s = statistics.median(warm)
    found = Rates(warm_s, _by_size(prefills, sizes, warm_s))

    def lone_loads(link: str) -> None:
        say(f"measuring: lone loads, link {link}")
        bench.set_link(found.gbit_s[link], 0.0)
        bench.servers[STOCK].cold()
        found.load_s[link] = _by_size([alone(STOCK, store)], sizes, warm_s)

    found.gbit_s[WIDE] = None
    lone_loads(WIDE)
    for link in links:
        unshaped_s = found.load_s[WIDE][PREFIX]
        found.gbit_s[link] = wire_gbit_s(SHARES[link], found.prefill_s[PREFIX], unshaped_s)
        lone_loads(link)
    return found


def _by_size(rounds: Sequence[Sequence[float]], sizes: Sequence[int], less_s: float) -> Mapping[int, float]:
    return {
        size: max(
            0.0,
            statistics.median(
                ttft_s for each in rounds for ttft_s, of in zip(each, sizes, strict=True) if of == size
            )
            - less_s,
        )
        for size in SIZES
    }
