"""Shadow mode: what it counts, that nothing stays behind, and that vLLM cannot tell it from stock.

Both arms go through the scenarios of `watched.py` in processes of their own.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from connector_patch import metrics
from connector_patch.shadow import GIVEN_UP_S, Shadow
from singleflight.stack.arms import OURS, STOCK
from singleflight.stack.embedded import spawned, tail
from singleflight.traces import recording
from singleflight.traces.reader import Options, read
from singleflight.traces.request import Lengths, Request

if TYPE_CHECKING:
    from singleflight.stack.arms import Arm
    from singleflight.stack.embedded import Stack

K = 4
"""Blocks of the prefix in most scenarios."""


def watched(stack: Stack, connector: str, extra: dict[str, Any]) -> dict[str, Any]:
    out, log = stack.folder / f"{connector}.json", stack.folder / f"watched-{connector}.log"
    argv = [sys.executable, "-m", "tests.connector.watched", str(stack.model), str(out), connector]
    env = stack.env(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
        PYTHONPATH=str(Path(__file__).parents[2]),
    )
    with spawned([*argv, json.dumps(extra)], env=env, log=log) as process:
        assert process.wait(240) == 0, tail(log)
    told: dict[str, Any] = json.loads(out.read_text())
    return told


@pytest.fixture(scope="module")
def stock(stack: Stack) -> dict[str, Any]:
    return watched(stack, STOCK, {})


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded") / "trace.jsonl"


@pytest.fixture(scope="module")
def shadow(stack: Stack, stock: dict[str, Any], trace: Path) -> dict[str, Any]:
    """After stock: both use the store, and empty it first. It records, too."""
    return watched(stack, OURS, {"singleflight": {"mode": "shadow", "record": {"path": str(trace)}}})


@pytest.mark.engine
class TestOnARealEngine:
    @pytest.mark.parametrize(
        "scenario",
        ["same_prefix", "partial_overlap", "one_after_the_other", "aborted", "failed", "reset"],
    )
    @pytest.mark.parametrize("what", ["answers", "loaded", "tokens", "blocks_lost"])
    def test_the_scheduler_is_answered_as_by_stock(
        self, stock: dict[str, Any], shadow: dict[str, Any], scenario: str, what: str
    ) -> None:
        """Every answer to every question about every request, every load and its metadata (the class, too),
        every lookup, Get, byte and GPU block, every token."""
        assert stock[scenario][what] is not None
        assert shadow[scenario][what] == stock[scenario][what]

    def test_eight_requests_for_one_prefix_load_eight_times_and_seven_are_counted(
        self, shadow: dict[str, Any], reference: Arm
    ) -> None:
        from tests.connector.watched import SALT, tails
        from tests.support import blocks

        burst = shadow["same_prefix"]
        assert burst["loaded"]["gets"] == 8
        assert burst["counted"] == {
            "loads": 8,
            "attempts": 8 * K,
            "cohorts": K,
            "dup_cohorts": K,
            "dup_attempts": 8 * K,
            "removable": 7 * K,
            "fan_in_8": K,
        }
        prompts = tails(blocks(1, 2, 3, 4, salt=SALT), *"abcdefgh")
        assert burst["tokens"] == reference.ask("burst", prompts=prompts)["tokens"]

    def test_only_the_blocks_that_overlap_count(self, shadow: dict[str, Any]) -> None:
        burst = shadow["partial_overlap"]
        assert burst["loaded"]["bytes"] == 12 * shadow["block_bytes"]
        assert burst["counted"] == {
            "loads": 2,
            "attempts": 12,
            "cohorts": 8,
            "dup_cohorts": 4,
            "dup_attempts": 8,
            "removable": 4,
            "fan_in_1": 4,
            "fan_in_2": 4,
        }

    def test_loads_that_do_not_overlap_are_not_removable(self, shadow: dict[str, Any]) -> None:
        counted = shadow["one_after_the_other"]["counted"]
        assert counted == {"loads": 2, "attempts": 2 * K, "cohorts": 2 * K, "fan_in_1": 2 * K}

    def test_an_aborted_requests_load_runs_on_and_counts(self, shadow: dict[str, Any]) -> None:
        """As in attach mode, where it would have been everybody's."""
        assert shadow["aborted"]["counted"]["removable"] == 3 * K

    def test_behind_a_failed_load_nothing_is_removable(self, shadow: dict[str, Any]) -> None:
        counted = shadow["failed"]["counted"]
        assert counted == {"loads": 2, "failed_loads": 1, "attempts": 2 * K, "lost": 2 * K}

    def test_across_a_reset_nothing_is_removable(self, shadow: dict[str, Any]) -> None:
        assert shadow["reset"]["counted"] == {"loads": 3, "attempts": 3 * K, "lost": 3 * K}

    def test_nothing_is_left_of_aborts_failures_and_resets(self, shadow: dict[str, Any]) -> None:
        assert shadow["left"] == 0

    def test_windows_are_those_of_loads_that_opened_a_cohort(self, shadow: dict[str, Any]) -> None:
        """1 + 2 + 2 + 1, and none of loads that failed, joined, or were in the air at a reset."""
        assert shadow["windows"] == 6


@pytest.mark.engine
class TestTheRecording:
    """Of the same run: 21 requests, and 6 that have filled the store."""

    @pytest.fixture
    def rows(self, trace: Path, shadow: dict[str, Any]) -> list[Request]:
        return read(str(trace), Options(block_size=32, recording=True))

    def test_every_arrival_is_there(self, rows: list[Request]) -> None:
        assert len(rows) == 21 + 6
        lengths = Counter(row.lengths for row in rows)
        # Those who ran to the end; and the two that were aborted while they waited.
        assert lengths[Lengths(K * 32 + 4, 4)] == 8 + 2 + 2 + 2 + 3
        assert lengths[Lengths(K * 32 + 4, 0)] == 2

    def test_who_shares_blocks_shares_ids_and_nobody_shares_a_block_that_is_not_full(
        self, rows: list[Request]
    ) -> None:
        eight = [row for row in rows if row.lengths.input == K * 32 + 4][:8]
        assert len({tuple(row.hashes[:K]) for row in eight}) == 1
        assert len({row.hashes[K] for row in eight}) == 8

    def test_the_header_says_what_the_rows_do_not(
        self, stack: Stack, trace: Path, rows: list[Request], shadow: dict[str, Any]
    ) -> None:
        header = recording.header_of(str(trace))
        assert header is not None
        assert (header.block_size_tokens, header.model) == (32, str(stack.model))
        windows = header.load_windows_ms
        assert windows is not None
        assert windows["count"] == shadow["windows"]
        assert 0 < windows["p50"] <= windows["p99"] <= windows["max"]
        assert (header.mode, header.max_num_seqs, header.max_num_batched_tokens) == ("shadow", 128, 8192)
        assert header.kv_bytes_per_token == 2048
        # vLLM's default is 1; the shared engine of this process sets another for all that start after it.
        assert header.receive_threads == int(os.environ.get("VLLM_MOONCAKE_LOAD_RECV_THREADS", "1"))
        assert header.capacity_blocks is not None

    def test_what_became_of_each_request_is_in_its_row(self, rows: list[Request]) -> None:
        """Of those that have loaded and ran to the end: looked up, loaded, prefilled, answered, in order."""
        seen = [row.observed for row in rows if row.observed is not None and row.observed.loaded_blocks]
        whole = [each for each in seen if each.landed_ms is not None and each.first_token_ms is not None]
        assert len(whole) >= 8
        for each in whole:
            times = (
                each.looked_up_ms,
                each.admitted_ms,
                each.landed_ms,
                each.prefill_ms,
                each.first_token_ms,
            )
            assert all(time is not None for time in times), each
            assert list(times) == sorted(times), each  # type: ignore[type-var]
        for row in rows:
            if row.observed in whole and row.observed.loaded_blocks == K:
                assert row.observed.prefill_tokens == row.lengths.input - K * 32


class TestCounting:
    """The counting alone, with a clock."""

    def made(self, max_blocks: int = 100) -> tuple[Shadow, dict[str, Any]]:
        specs: dict[str, Any] = {}
        store = SimpleNamespace(planned=specs.pop)
        self.now = 0.0
        return Shadow(cast(Any, store), max_blocks, lambda: self.now), specs

    def load(self, made: tuple[Shadow, dict[str, Any]], name: str, hashes: list[bytes]) -> None:
        shadow, specs = made
        specs[name] = range(len(hashes))
        request = SimpleNamespace(request_id=name, block_hashes=hashes)
        ids = SimpleNamespace(get_block_ids=lambda: ([*range(len(hashes))],))
        shadow.allocated(cast(Any, request), cast(Any, ids))

    def report(self, made: tuple[Shadow, dict[str, Any]], *names: str) -> None:
        out = SimpleNamespace(finished_recving=set(names), failed_recving=set(), invalid_block_ids=set())
        made[0].output(cast(Any, out))

    def test_the_window_does_not_slide(self) -> None:
        """The simulator's first worked example: a load at 0 that ends at 10, a second at 9, a third at 18."""
        made = self.made()
        for now, name in ((0, "a"), (9, "b")):
            self.now = now
            self.load(made, name, [b"7"])
        self.now = 10
        self.report(made, "a")
        assert (made[0].stats.cohorts, made[0].stats.removable) == (1, 1)
        assert made[0].take_windows() == [10]
        self.now = 18
        self.load(made, "c", [b"7"])
        self.now = 19
        self.report(made, "b")  # closes nothing: it only joined
        assert (made[0].stats.cohorts, made[0].stats.removable) == (1, 1)
        self.report(made, "c")
        assert (made[0].stats.cohorts, made[0].stats.removable) == (2, 1)
        assert made[0].take_windows() == [1]

    def test_at_the_bound_loads_are_left_out_and_said_to_be(self) -> None:
        made = self.made(max_blocks=3)
        self.load(made, "a", [b"1", b"2"])
        self.load(made, "b", [b"1", b"2"])
        stats = made[0].stats
        assert (stats.loads, stats.unregistered_loads, stats.attempts) == (2, 1, 2)
        self.report(made, "a", "b")
        assert (stats.cohorts, stats.removable) == (2, 0)

    def test_a_load_that_is_never_reported_does_not_keep_its_blocks(self) -> None:
        """Its receive thread is dead. Ten minutes later its blocks open cohorts again, and there is room for
        them; a report that comes after all counts nothing."""
        made = self.made(max_blocks=2)
        self.load(made, "dead", [b"1", b"2"])
        self.now = GIVEN_UP_S - 1
        self.load(made, "early", [b"1", b"2"])
        assert made[0].stats.unregistered_loads == 1
        self.now = GIVEN_UP_S
        self.load(made, "late", [b"1", b"2"])
        self.report(made, "dead", "late")
        stats = made[0].stats
        assert (stats.attempts, stats.cohorts, stats.removable, stats.lost, stats.failed_loads) == (
            4,
            2,
            0,
            2,
            1,
        )

    def test_a_load_that_vllm_has_thrown_away_is_closed_by_the_next_one_of_its_request(self) -> None:
        """A preempted request loads again; of the first load nobody hears any more."""
        made = self.made()
        self.load(made, "a", [b"1", b"2"])
        self.load(made, "a", [b"1"])
        self.report(made, "a")
        stats = made[0].stats
        assert (stats.attempts, stats.cohorts, stats.lost) == (3, 1, 2)
        assert not made[0]._fan_in

    def test_metrics_name_every_fan_in_and_the_bytes(self) -> None:
        made = self.made()
        for name in ("a", "b", "c"):
            self.load(made, name, [b"1", b"2"])
        self.load(made, "d", [b"3"])
        self.report(made, "a", "b", "c", "d")
        counts = {name: n for name, n in metrics.flat_shadow(made[0], 1000).items() if n}
        assert counts == {
            "shadow_loads": 4,
            "shadow_attempts": 7,
            "shadow_dup_attempts": 6,
            "shadow_removable": 4,
            "shadow_attempts_bytes": 7000,
            "shadow_removable_bytes": 4000,
            "shadow_fan_in_1": 1,
            "shadow_fan_in_3-4": 2,
        }
