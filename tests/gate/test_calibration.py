"""The cost model against sums done by hand, and the calibration file's bad input."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from singleflight import calibration
from singleflight.calibration import Calibration, CalibrationError
from singleflight.quantity import Origin
from singleflight.sim.cost import Figures, Load, Traffic, costs, load
from singleflight.strict import Refused

FIGURES = Figures().given(
    load_latency=0.1,
    load_bandwidth=1000.0,
    parallel_loads=1.0,
    kv_bytes_per_token=10.0,
    coordination_per_lookup=0.001,
    coordination_per_block=0.0001,
    stalled_requests=10.0,
    follower_wait=0.02,
    timeout_probability=0.01,
    timeout_wait=5.0,
    owner_failure_probability=0.1,
)
# 3 requests a second, 20 cold block loads of which 4 are removable, 5 blocks a load.
TRAFFIC = Traffic(3.0, 20.0, 4.0, 5.0)


class TestLoad:
    def test_an_idle_store_is_latency_and_bytes_over_bandwidth(self) -> None:
        # 5 blocks of 2 tokens of 10 bytes: 100 bytes at 1000 a second.
        assert load(FIGURES, 5, 2, 0.0) == Load(pytest.approx(0.2), 0.0, 0.0)

    def test_a_busy_one_adds_the_queue_of_md1(self) -> None:
        found = load(FIGURES, 5, 2, 2.5)  # utilization 0.5: 0.5 x 0.2 / (2 x 0.5)
        assert found.utilization == pytest.approx(0.5)
        assert found.wait_s == pytest.approx(0.1)
        assert found.window_s == pytest.approx(0.3)

    def test_threads_in_parallel_shorten_the_queue_and_not_the_load(self) -> None:
        one, two = load(FIGURES, 5, 2, 2.5), load(FIGURES.given(parallel_loads=2.0), 5, 2, 2.5)
        assert two.service_s == one.service_s
        assert two.wait_s < one.wait_s / 2

    def test_a_saturated_one_is_cut_off_and_says_so(self) -> None:
        found = load(FIGURES, 5, 2, 50.0)
        assert found.utilization == pytest.approx(10.0)
        assert found.wait_s == pytest.approx(0.95 * 0.2 / (2 * 0.05))


class TestCosts:
    def test_the_balance_by_hand(self) -> None:
        found = costs(FIGURES, TRAFFIC, 0.2)
        assert found.avoidable == pytest.approx(4 * 0.2 / 5)
        assert found.lost_parallelism == 0
        assert found.coordination == pytest.approx((3 * 0.001 + 20 * 0.0001) * 10)
        assert found.waits == pytest.approx(3 * (0.02 + 0.01 * 5 + 0.1 * 0.2))  # at most 3 followers
        assert found.margin == pytest.approx(0.16 - 0.05 - 0.27)

    def test_of_two_loads_in_parallel_half_is_not_saved(self) -> None:
        found = costs(FIGURES.given(parallel_loads=2.0), TRAFFIC, 0.2)
        assert found.lost_parallelism == pytest.approx(0.08)
        assert found.saving == pytest.approx(0.08)

    def test_where_nothing_is_removable_only_coordination_is_left(self) -> None:
        found = costs(FIGURES, dataclasses.replace(TRAFFIC, removable_per_s=0.0), 0.2)
        assert (found.saving, found.waits) == (0, 0)
        assert found.margin == -found.coordination < 0


class TestFigures:
    def test_every_default_says_that_it_is_one(self) -> None:
        assert Figures().defaults() == [each.name for each in dataclasses.fields(Figures)]
        assert "load_latency" not in Figures().measured(load_latency=1.0).defaults()
        assert Figures().measured(load_latency=1.0).load_latency.origin is Origin.MEASURED

    def test_a_value_out_of_range(self) -> None:
        with pytest.raises(Refused, match=r"load_latency.value: -1 is not accepted; give a number from 0"):
            Figures().given(load_latency=-1.0)


class TestCalibrationFile:
    def test_what_is_written_is_read(self, tmp_path: Path) -> None:
        made = Calibration(FIGURES, "2026-11-29T21:00:00Z", {"cpu": "one"}, ["a note"])
        made.write(tmp_path / "c.json")
        assert calibration.read(tmp_path / "c.json") == made

    def test_one_by_hand_may_leave_out_what_it_does_not_know(self, tmp_path: Path) -> None:
        figure = {"value": 2, "unit": "s", "origin": "given"}
        document = {"schema": calibration.SCHEMA, "figures": {"load_latency": figure}}
        (tmp_path / "c.json").write_text(json.dumps(document))
        assert calibration.read(tmp_path / "c.json").figures == Figures().given(load_latency=2.0)

    @pytest.mark.parametrize(
        ("figures", "says"),
        [
            ({"load_latency": {"value": 1, "unit": "ms", "origin": "given"}}, 'load_latency.unit: "ms" is'),
            (
                {"load_latency": {"value": -1, "unit": "s", "origin": "given"}},
                "load_latency.value: -1 is",
            ),
            ({"load_latency": {"value": "1", "unit": "s", "origin": "given"}}, 'value: "1" is not accepted'),
            ({"load_latency": {"value": 1, "unit": "s", "origin": "me"}}, 'origin: "me" is not accepted'),
            ({"load_latency": {"value": 1, "unit": "s"}}, "load_latency.origin: is missing"),
            ({"load_latency": 1}, "load_latency: 1 is not accepted; give an object"),
            ({"latency": {}}, "figures.latency: unknown key; accepted are load_latency"),
            ({"parallel_loads": {"value": 0.5, "unit": "ratio", "origin": "given"}}, "give a number from 1"),
            ([], "figures: [] is not accepted; give an object"),
        ],
    )
    def test_a_bad_one_is_one_sentence(self, tmp_path: Path, figures: Any, says: str) -> None:
        path = tmp_path / "c.json"
        path.write_text(json.dumps({"schema": calibration.SCHEMA, "figures": figures}))
        with pytest.raises(CalibrationError) as raised:
            calibration.read(path)
        assert str(raised.value).startswith(f"{path}: figures")
        assert says in str(raised.value)
        assert "\n" not in str(raised.value)
