"""Each metric as Prometheus would read it: at 0 before anything happens, and moved by what it names alone.

The table, its statistics and vLLM's metric classes are the real ones; what travels between the scheduler's
process and the front end's is encoded and decoded as vLLM does it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess
from prometheus_client.parser import text_string_to_metric_families

from connector_patch.catalogue import INFO_LABELS, METRICS, PREFIX, SECONDS, Kind
from connector_patch.health import Health
from singleflight.core.estimate import Forecast
from singleflight.core.flight import Flight
from singleflight.core.policy import Policy
from singleflight.core.stats import Reason, Stats
from singleflight.core.table import PendingBlockTable

BLOCK_BYTES = 1000
ENGINES = (0, 1)
Moved = dict[str, float]


class Endpoint:
    """The front end: what `/metrics` of a server with two engines says of ours."""

    def __init__(self) -> None:
        from connector_patch.prom import SingleFlightPromMetrics

        self.registry = CollectorRegistry()
        kinds = {kind: partial(kind, registry=self.registry) for kind in (Gauge, Counter, Histogram)}
        config = SimpleNamespace(kv_transfer_config=None)
        values = {engine: ["tiny", str(engine)] for engine in ENGINES}
        self.prom = SingleFlightPromMetrics(
            cast(Any, config), cast(Any, kinds), ["model_name", "engine"], cast(Any, values)
        )

    def take(self, told: Any, engine: int = 0) -> None:
        """A step's statistics arrive, through vLLM's encoder."""
        import msgspec

        if told is not None:
            self.prom.observe(msgspec.msgpack.decode(msgspec.msgpack.encode(told.to_dict())), engine)

    def samples(self, engine: int = 0) -> dict[str, float]:
        """Series without prefix and engine labels -> value. Of histograms, only `_count` and `_sum`."""
        found = {}
        for family in text_string_to_metric_families(generate_latest(self.registry).decode()):
            for sample in family.samples:
                labels = dict(sample.labels)
                if not sample.name.startswith(PREFIX) or labels.pop("engine", None) != str(engine):
                    continue
                assert labels.pop("model_name") == "tiny"
                if sample.name.endswith(("_bucket", "_created")):
                    continue
                own = ",".join(f"{name}={value}" for name, value in labels.items())
                name = sample.name.removeprefix(PREFIX)
                found[f"{name}{{{own}}}" if own else name] = sample.value
        return found


class World:
    """A table, a clock, and both ends of the metrics."""

    def __init__(self) -> None:
        from connector_patch.metrics import Deltas, OfTheTable

        self.table = PendingBlockTable(Policy(deadline_base_s=8, max_handovers=0, max_blocks=8), Forecast(4))
        self.now = 100.0
        self.health = Health(Policy(breaker_failures=2), self.table.stats)
        self.deltas = Deltas(OfTheTable(self.table, BLOCK_BYTES))
        self.endpoint = Endpoint()

    def lead(self, request: str, blocks: str) -> Flight:
        flight = self.table.lead(request, blocks, blocks, self.now)
        assert flight is not None
        return flight

    def join(self, request: str, blocks: str) -> None:
        self.table.attach(request, self.table.run(blocks, 0, len(blocks)), self.now)

    def moved(self, story: Callable[[World], None]) -> Moved:
        """What the story changes at the endpoint: series -> by how much (of gauges: to what)."""
        self.endpoint.take(self.deltas.take())
        before = self.endpoint.samples()
        story(self)
        self.endpoint.take(self.deltas.take())
        after = self.endpoint.samples()
        assert after.keys() == before.keys(), "no series appears with its first event"
        return {name: after[name] - before[name] for name in after if after[name] != before[name]}


@pytest.fixture
def world() -> World:
    return World()


LED = {"flights_total{event=led}": 1, "blocks_total{role=led}": 3, "bytes_total{role=led}": 3000}
JOINED = {"requests_total{event=attached}": 1, "blocks_total{role=adopted}": 2}
ENDED = {"fan_in_count": 1, "flight_blocks_count": 1, "flight_blocks_sum": 3}


def led(world: World) -> None:
    world.lead("a", "xyz")


def joined(world: World) -> None:
    led(world)
    world.join("b", "xy")


def landed(world: World) -> None:
    joined(world)
    world.now += 0.5
    world.table.land(1, world.now)


def failed(world: World) -> None:
    joined(world)
    world.now += 0.5
    world.table.fail(1, world.now)


def failed_in_part(world: World) -> None:
    """One block of three is there; the follower needs two."""
    joined(world)
    world.now += 0.5
    world.table.cut(1, 1, world.now)
    world.table.land(1, world.now)


def unreadable(world: World) -> None:
    """A load failed because of one block; policy: two failures in a row open the breaker."""
    world.health.unreadable(b"x", world.now)
    world.health.failed(in_time=True, now=world.now)


def opened(world: World) -> None:
    unreadable(world)
    world.health.failed(in_time=True, now=world.now)


def alone(world: World) -> None:
    """Who fell back and is out of hand-overs leads no flight."""
    failed(world)
    assert world.table.lead("b", "xyz", "xyz", world.now) is None


def chose(world: World) -> None:
    """The rules count it (test_choice.py)."""
    world.table.stats.chose_join += 3
    world.table.stats.chose_load += 2
    world.table.stats.chose_compute += 1


def cancelled(world: World) -> None:
    joined(world)
    world.table.leave("b", world.now)


def orphaned(world: World) -> None:
    led(world)
    world.table.leave("a", world.now)


def too_late(world: World) -> None:
    joined(world)
    world.now += 9
    world.table.expire(world.now)


def reset(world: World) -> None:
    joined(world)
    world.table.reset(world.now)


def unregistered(world: World) -> None:
    assert world.table.lead("a", "123456789", "123456789", world.now) is None


def stale(world: World) -> None:
    world.table.land(17, world.now)


def overtook(world: World) -> None:
    """A short load that should land before the long one that has just begun takes its block over."""
    world.table.forecast.times = cast(Any, SimpleNamespace(seconds=float))
    world.lead("a", "xyz")
    world.lead("b", "x")


STORIES: dict[Callable[[World], None], Moved] = {
    led: {**LED, "pending_blocks": 3, "flights_in_air": 1},
    joined: {**LED, **JOINED, "pending_blocks": 3, "flights_in_air": 1, "followers": 1},
    landed: {
        **LED,
        **JOINED,
        **ENDED,
        "fan_in_sum": 2,
        "flights_total{event=landed}": 1,
        "requests_total{event=ready}": 1,
        "blocks_total{role=spared}": 2,
        "bytes_total{role=spared}": 2000,
        "follower_wait_seconds_count{outcome=ready}": 1,
        "follower_wait_seconds_sum{outcome=ready}": 0.5,
        "flight_duration_seconds_count{outcome=landed}": 1,
        "flight_duration_seconds_sum{outcome=landed}": 0.5,
    },
    failed: {
        **LED,
        **JOINED,
        **ENDED,
        "fan_in_sum": 2,
        "flights_total{event=failed}": 1,
        "requests_total{event=fell_back_leader_failed}": 1,
        "follower_wait_seconds_count{outcome=fell_back}": 1,
        "follower_wait_seconds_sum{outcome=fell_back}": 0.5,
        "flight_duration_seconds_count{outcome=failed}": 1,
        "flight_duration_seconds_sum{outcome=failed}": 0.5,
    },
    failed_in_part: {
        **LED,
        **JOINED,
        "fan_in_count": 1,
        "fan_in_sum": 2,
        "flight_blocks_count": 1,
        "flight_blocks_sum": 1,
        "flights_total{event=cut}": 1,
        "flights_total{event=landed}": 1,
        "blocks_total{role=lost}": 2,
        "requests_total{event=fell_back_leader_failed}": 1,
        "follower_wait_seconds_count{outcome=fell_back}": 1,
        "follower_wait_seconds_sum{outcome=fell_back}": 0.5,
        "flight_duration_seconds_count{outcome=landed}": 1,
        "flight_duration_seconds_sum{outcome=landed}": 0.5,
    },
    unreadable: {"blocks_total{role=broken}": 1},
    opened: {"blocks_total{role=broken}": 1, "breaker_open": 1},
    cancelled: {
        **LED,
        **JOINED,
        "pending_blocks": 3,
        "flights_in_air": 1,
        "requests_total{event=cancelled}": 1,
        "follower_wait_seconds_count{outcome=cancelled}": 1,
    },
    orphaned: {**LED, "flights_total{event=orphaned}": 1, "pending_blocks": 3, "flights_in_air": 1},
    too_late: {
        **LED,
        **JOINED,
        "flights_in_air": 1,
        "flights_total{event=overdue}": 1,
        "requests_total{event=fell_back_deadline}": 1,
        "follower_wait_seconds_count{outcome=fell_back}": 1,
        "follower_wait_seconds_sum{outcome=fell_back}": 9,
    },
    reset: {
        **LED,
        **JOINED,
        "flights_in_air": 1,
        "flights_total{event=discarded}": 1,
        "requests_total{event=fell_back_reset}": 1,
        "follower_wait_seconds_count{outcome=fell_back}": 1,
    },
    unregistered: {"flights_total{event=unregistered}": 1},
    chose: {"chose_total{what=join}": 3, "chose_total{what=load}": 2, "chose_total{what=compute}": 1},
    stale: {"flights_total{event=stale_report}": 1},
    overtook: {
        "flights_total{event=led}": 2,
        "flights_total{event=overtook}": 1,
        "blocks_total{role=led}": 4,
        "bytes_total{role=led}": 4000,
        "pending_blocks": 3,
        "flights_in_air": 2,
    },
}
"""What happens -> every series that it moves, and so also what it does not move."""
STORIES[alone] = {**STORIES[failed], "requests_total{event=alone}": 1}


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_what_happens_in_attach_mode_moves_its_series_and_no_other(
    world: World, story: Callable[[World], None]
) -> None:
    assert world.moved(story) == STORIES[story]


def test_a_step_in_which_nothing_happened_says_nothing(world: World) -> None:
    world.moved(landed)
    assert world.deltas.take() is None


def test_gauges_are_at_zero_again_when_all_is_over(world: World) -> None:
    world.moved(joined)
    world.table.land(1, world.now)
    world.endpoint.take(world.deltas.take())
    samples = world.endpoint.samples()
    assert [samples[name] for name in ("pending_blocks", "flights_in_air", "followers")] == [0, 0, 0]


def test_each_engine_of_a_data_parallel_group_has_its_own_series(world: World) -> None:
    """Two engines that have lived through other things, on one endpoint."""
    other = World()
    other.endpoint = world.endpoint
    landed(world)
    failed(other)
    for engine, told in enumerate((world.deltas.take(), other.deltas.take())):
        world.endpoint.take(told, engine)
    ends = ("flights_total{event=landed}", "flights_total{event=failed}")
    assert [[world.endpoint.samples(engine)[end] for end in ends] for engine in (0, 1)] == [[1, 0], [0, 1]]


def test_the_breaker_is_a_gauge_that_goes_down_again_and_of_one_engine_alone(world: World) -> None:
    world.moved(opened)
    assert world.endpoint.samples(engine=1)["breaker_open"] == 0
    world.now += 1000

    def later(world: World) -> None:
        assert world.health.waiting_pays(world.now)

    assert world.moved(later) == {"breaker_open": -1}


class Shadowed:
    """Shadow mode, told of loads and reports."""

    def __init__(self) -> None:
        from connector_patch.metrics import Deltas, OfTheShadow
        from connector_patch.shadow import Shadow

        self.planned: dict[str, range] = {}
        self.now = 0.0
        store = SimpleNamespace(planned=self.planned.get)
        self.shadow = Shadow(cast(Any, store), 8, lambda: self.now)
        self.deltas = Deltas(OfTheShadow(self.shadow, BLOCK_BYTES))
        self.endpoint = Endpoint()
        self.before = self.endpoint.samples()

    def load(self, request: str, blocks: str) -> None:
        self.planned[request] = range(len(blocks))
        asked = SimpleNamespace(request_id=request, block_hashes=[block.encode() for block in blocks])
        ids = SimpleNamespace(get_block_ids=lambda: ([*range(len(blocks))],))
        self.shadow.allocated(cast(Any, asked), cast(Any, ids))

    def report(self, *requests: str, failed: bool = False) -> None:
        out = SimpleNamespace(
            finished_recving=set(requests),
            failed_recving=set(requests) if failed else set(),
            invalid_block_ids=set(),
        )
        self.shadow.output(cast(Any, out))

    def moved(self) -> Moved:
        self.endpoint.take(self.deltas.take())
        after = self.endpoint.samples()
        assert after.keys() == self.before.keys()
        return {name: after[name] - n for name, n in self.before.items() if after[name] != n}


LOADED = {
    "shadow_loads_total{event=allocated}": 2,
    "shadow_blocks_total{kind=loaded}": 4,
    "shadow_bytes_total{kind=loaded}": 4000,
}


@pytest.fixture
def shadowed() -> Shadowed:
    return Shadowed()


class TestShadowMode:
    def test_two_loads_of_one_prefix(self, shadowed: Shadowed) -> None:
        shadowed.load("a", "xy")
        shadowed.load("b", "xy")
        shadowed.now = 0.25
        shadowed.report("a", "b")
        assert shadowed.moved() == {
            **LOADED,
            "shadow_blocks_total{kind=duplicate}": 4,
            "shadow_blocks_total{kind=removable}": 2,
            "shadow_bytes_total{kind=removable}": 2000,
            "shadow_cohorts_total{fan_in=2}": 2,
            "shadow_load_window_seconds_count": 1,
            "shadow_load_window_seconds_sum": 0.25,
        }
        assert shadowed.deltas.take() is None

    def test_two_loads_of_which_the_first_fails(self, shadowed: Shadowed) -> None:
        shadowed.load("a", "xy")
        shadowed.load("b", "xy")
        shadowed.report("a", failed=True)
        assert shadowed.moved() == {
            **LOADED,
            "shadow_loads_total{event=failed}": 1,
            "shadow_blocks_total{kind=lost}": 4,
        }

    def test_a_load_beyond_the_bound(self, shadowed: Shadowed) -> None:
        shadowed.load("a", "123456789")
        assert shadowed.moved() == {
            "shadow_loads_total{event=allocated}": 1,
            "shadow_loads_total{event=unregistered}": 1,
        }

    @pytest.mark.parametrize(
        ("members", "label"),
        [(1, "1"), (2, "2"), (4, "3-4"), (5, "5-8"), (16, "9-16"), (17, "17-32"), (64, "33-64"), (65, "65+")],
    )
    def test_every_class_of_fan_in(self, shadowed: Shadowed, members: int, label: str) -> None:
        for i in range(members):
            shadowed.load(str(i), "x")
        shadowed.report("0")
        cohorts = {name: n for name, n in shadowed.moved().items() if name.startswith("shadow_cohorts")}
        assert cohorts == {f"shadow_cohorts_total{{fan_in={label}}}": 1}

    def test_what_would_have_been_chosen(self, shadowed: Shadowed) -> None:
        """A block takes a second to load, and half of one to compute: with a load before it, who has two
        would compute them, and loads."""
        from connector_patch.choice import Chooser
        from singleflight.core.fit import ENOUGH
        from singleflight.core.prefill import Work

        chooser = shadowed.shadow.chooser = Chooser(Policy(), 4, 1, 64, pretends=True)
        for _ in range(ENOUGH):
            chooser.queue._prices.observe(2, 1, 2.0)
            chooser.steps.speed.observe(Work.of(0, 16), 0, 2.0)
        chooser.queue.add("other", 1, 0.0)
        chooser._policy = Policy(compute_patience=9.0)
        for request, blocks in (("a", "vw"), ("b", "xy")):
            asked = SimpleNamespace(request_id=request, num_tokens=9)
            shadowed.shadow.asked(cast(Any, asked), 0, (8, True))
            shadowed.load(request, blocks)
            chooser._policy = Policy()
        assert shadowed.moved() == {
            **LOADED,
            "shadow_chose_total{what=load}": 1,
            "shadow_chose_total{what=compute}": 1,
        }


SHADOW = {
    *("shadow_loads_total", "shadow_blocks_total", "shadow_bytes_total", "shadow_cohorts_total"),
    "shadow_load_window_seconds",
    "shadow_chose_total",
}
"""Moved by TestShadowMode."""


class TestTheCatalogue:
    def test_every_series_is_there_at_zero_for_every_engine_before_anything_happens(self) -> None:
        endpoint = Endpoint()
        for engine in ENGINES:
            samples = endpoint.samples(engine)
            assert set(samples.values()) == {0}
            for metric in METRICS:
                suffix = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_count"}[metric.kind]
                for value in metric.figures.values():
                    label = f"{{{metric.label}={value}}}" if metric.label else ""
                    assert f"{metric.short}{suffix}{label}" in samples

    def test_every_reason_to_fall_back_is_a_series(self) -> None:
        events = next(metric.figures.values() for metric in METRICS if metric.short == "requests")
        assert {f"fell_back_{reason.value}" for reason in Reason} <= set(events)

    def test_every_count_of_the_table_is_a_series(self) -> None:
        """A new count without a series would be a KeyError in the front end."""
        from connector_patch.metrics import flat

        stats = Stats()
        stats.fell_back.update(Reason)
        named = {kind: {f for m in METRICS if m.kind is kind for f in m.figures} for kind in Kind}
        assert set(flat(stats, BLOCK_BYTES)) <= named[Kind.COUNTER]
        told_apart = {"fell_back", "fan_in"}  # by reason; as a histogram
        known = named[Kind.COUNTER] | named[Kind.GAUGE]
        assert {field.name for field in fields(Stats)} - told_apart <= known

    def test_every_series_is_moved_by_a_test_here(self) -> None:
        """But for reasons to fall back: a story gives each of those that the table gives by itself."""
        moved = {name for story in STORIES.values() for name in story}
        names = {re.sub(r"(_count|_sum)?(\{.*)?$", "", name) for name in moved}
        assert names | SHADOW == {
            metric.short + ("_total" if metric.kind is Kind.COUNTER else "") for metric in METRICS
        }
        events = {
            f"{metric.short}_total{{event={value}}}"
            for metric in METRICS
            if metric.short in ("flights", "requests")
            for value in metric.figures.values()
        }
        assert events - moved <= {f"requests_total{{event=fell_back_{reason.value}}}" for reason in Reason}

    def test_figures_are_told_apart(self) -> None:
        names = [figure for metric in METRICS for figure in metric.figures]
        assert len(names) == len(set(names))

    def test_waits_have_the_buckets_of_the_time_to_first_token(self) -> None:
        """So that they can be laid beside each other; vLLM's last one is 43 minutes."""
        from vllm.v1.metrics.buckets import TIME_TO_FIRST_TOKEN_BUCKETS

        assert TIME_TO_FIRST_TOKEN_BUCKETS[:-1] == SECONDS

    def test_the_last_finite_bucket_is_past_the_deadline_of_a_long_prompt(self) -> None:
        assert SECONDS[-1] > Policy().budget_s(131072 // 16)


class TestWhatTheEngineCameTo:
    INFO: ClassVar = {
        "asked": "auto",
        "mode": "shadow",
        "reason": "no verdict",
        "attach_refused": "",
        "verdict": "",
        "version": "0.1.0",
        "store": "mooncake",
    }

    def test_is_told_once_and_the_prediction_with_it(self) -> None:
        from connector_patch.metrics import Deltas

        endpoint, deltas = Endpoint(), Deltas(None, self.INFO, 0.4)
        endpoint.take(deltas.take(), engine=1)
        assert deltas.take() is None
        fresh = endpoint.samples(1).items() - endpoint.samples(0).items()
        labels = ",".join(f"{name}={self.INFO[name]}" for name in sorted(INFO_LABELS))
        assert fresh == {(f"info{{{labels}}}", 1), ("predicted_redundancy", 0.4)}

    def test_makes_no_empty_line_in_the_log(self) -> None:
        """vLLM would print "KV Transfer metrics: " and nothing behind it."""
        from connector_patch.metrics import Deltas, SingleFlightStats

        told = Deltas(None, self.INFO, 0.4).take()
        assert told is not None
        assert not told.is_empty(), "or the scheduler would not send it"
        assert SingleFlightStats(data=told.to_dict()).is_empty()

    def test_without_a_verdict_there_is_no_prediction(self) -> None:
        """A 0 would be read as one."""
        from connector_patch.metrics import Deltas

        endpoint = Endpoint()
        endpoint.take(Deltas(None, self.INFO, None).take())
        assert "predicted_redundancy" not in endpoint.samples()


class TestVllmsOwnMerging:
    """Between scheduler and front end, vLLM merges the statistics of workers and of several steps."""

    def test_a_workers_statistics_come_through_beside_ours(self, world: World) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.metrics import (
            MooncakeStoreConnectorStats,
        )

        from connector_patch.metrics import SingleFlightStats

        worker = MooncakeStoreConnectorStats()
        worker.record_operation("load_get", 0.5, 3, num_bytes=3000)
        landed(world)
        both = worker.aggregate(cast(Any, world.deltas.take()))
        world.endpoint.take(both)
        assert world.endpoint.samples()["flights_total{event=landed}"] == 1
        calls = world.endpoint.registry.get_sample_value(
            "vllm:mooncake_store_operation_total",
            {"engine": "0", "model_name": "tiny", "operation": "load_get", "status": "ok"},
        )
        assert calls == 1
        reduced = SingleFlightStats(data=both.to_dict()).reduce()
        assert (reduced["load_get_count"], reduced["singleflight_flights"]) == (1, 1)
        assert not SingleFlightStats(data=both.to_dict()).is_empty()

    def test_steps_add_up_and_of_a_gauge_the_last_one_counts(self, world: World) -> None:
        joined(world)
        first = world.deltas.take()
        world.table.land(1, world.now)
        second = world.deltas.take()
        assert first is not None
        assert second is not None
        world.endpoint.take(first.aggregate(second))
        samples = world.endpoint.samples()
        assert (samples["flights_total{event=led}"], samples["flights_total{event=landed}"]) == (1, 1)
        assert samples["followers"] == 0
        json.dumps(first.to_dict())

    def test_engines_are_told_apart(self, world: World) -> None:
        landed(world)
        world.endpoint.take(world.deltas.take(), engine=1)
        assert world.endpoint.samples(1)["flights_total{event=landed}"] == 1
        assert set(world.endpoint.samples(0).values()) == {0}


class TestSeveralApiServers:
    """`--api-server-count`: Prometheus' multiprocess mode, in which each of them has files of its own."""

    def test_counts_add_up_and_the_gauge_set_last_counts(self, tmp_path: Path) -> None:
        """The third starts when the others have been told things."""
        env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
        subprocess.run([sys.executable, "-c", SERVERS], env=env, check=True)
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry, str(tmp_path))

        def found(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(PREFIX + name, {"model_name": "tiny", "engine": "0", **labels})

        assert found("flights_total", event="led") == 3
        assert found("flights_total", event="failed") == 0
        assert found("followers") == 1
        assert (found("fan_in_count"), found("fan_in_sum")) == (2, 6)


SERVERS = """
import os
from types import SimpleNamespace
from prometheus_client import Counter, Gauge, Histogram
from connector_patch.prom import SingleFlightPromMetrics

def server(records):
    if not (pid := os.fork()):
        kinds = {kind: kind for kind in (Gauge, Counter, Histogram)}
        config = SimpleNamespace(kv_transfer_config=None)
        prom = SingleFlightPromMetrics(config, kinds, ["model_name", "engine"], {0: ["tiny", "0"]})
        prom.observe({"singleflight": records})
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

server([{"add": {"flights": 2}, "set": {"now_waiting": 3}, "saw": {"flight_members": [2]}}])
server([{"add": {"flights": 1}, "set": {"now_waiting": 1}, "saw": {"flight_members": [4]}}])
server([])
"""
