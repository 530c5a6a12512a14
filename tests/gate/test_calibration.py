"""The calibration file: what is written is read, and bad input is one sentence."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from singleflight.files.strict import Refused
from singleflight.gate import calibration
from singleflight.gate.calibration import Calibration, CalibrationError
from singleflight.twin.figures import Figures
from singleflight.twin.quantity import Origin

FIGURES = Figures().given(load_latency=0.1, load_bandwidth=1000.0, prefill_rate=50.0)


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
            (
                {"parallel_loads": {"value": 0.001, "unit": "ratio", "origin": "given"}},
                "give a number from 0.01",
            ),
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
