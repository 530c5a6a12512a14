"""A server that attach mode is not supported on says so, also where nothing but counting was asked for."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from connector_patch import compat
from connector_patch.matrix import PARK, SHADOW, Row
from singleflight.traces import recording
from tests.verdicts import yes

if TYPE_CHECKING:
    from .world import World

    Make = Callable[..., World]

REASON = "the moon is full"


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """This deployment has something that only attach mode does not support."""
    row = Row(name="Moon", asks=lambda *_: "full", on=(PARK, SHADOW), reason="the moon is {}", shown_by=())
    monkeypatch.setattr(compat, "DEPLOYMENT", (row,))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from connector_patch import layered

    lines: list[str] = []

    def say(line: str, *values: Any) -> None:
        lines.append(line % values)

    monkeypatch.setattr(layered, "logger", logging.getLogger("kv-singleflight-test"))
    for level in ("info", "warning"):
        monkeypatch.setattr(layered.logger, level, say)
    return lines


def info(world: World) -> dict[str, str]:
    """Labels of `vllm:singleflight_info`."""
    from connector_patch.metrics import KEY

    connector: Any = world.loop.connector
    told: dict[str, str] = connector._told().take().data[KEY][0]["info"]
    return told


def verdict(folder: Path, model: str) -> str:
    path = folder / "verdict.json"
    yes(datetime.datetime.now(datetime.UTC).isoformat(), model).write(path)
    return str(path)


@pytest.fixture
def model() -> str:
    from .engine import _plain

    return str(_plain().model_config.model)


@pytest.mark.usefixtures("refused")
def test_shadow_mode_counts_and_says_it(world: Make, said: list[str]) -> None:
    shadow = world(mode="shadow")
    assert info(shadow)["mode"] == "shadow"
    assert info(shadow)["reason"] == ""
    assert info(shadow)["attach_refused"] == REASON
    assert said == [f"kv-singleflight: shadow mode is on; attach mode would pass through here: {REASON}."]


@pytest.mark.usefixtures("refused")
def test_auto_mode_with_a_yes(world: Make, said: list[str], tmp_path: Path, model: str) -> None:
    auto = world(mode="shadow", block_size=32, options={"mode": "auto", "gate": verdict(tmp_path, model)})
    reason = f"the verdict says yes, but attach mode is not possible here: {REASON}"
    assert info(auto)["mode"] == "shadow"
    assert info(auto)["reason"] == reason
    assert said == [f"kv-singleflight: shadow mode is on (counts, changes nothing): {reason}."]


@pytest.mark.usefixtures("refused")
def test_auto_mode_that_still_waits_for_a_verdict(world: Make, said: list[str]) -> None:
    auto = world(mode="shadow", options={"mode": "auto"})
    assert info(auto)["reason"].startswith("no verdict is named; ")
    assert info(auto)["reason"].endswith(f"; and a yes could not be obeyed here: {REASON}")
    (line,) = said
    assert line.endswith(f"{REASON}.")


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("mode", ["shadow", "off"])
def test_a_recording_says_it(world: Make, tmp_path: Path, mode: str) -> None:
    trace = tmp_path / "trace.jsonl"
    recorder = world(mode=mode, options={"record": {"path": str(trace)}}).loop.connector.recorder
    recorder.close()
    header = recording.header_of(str(trace))
    assert header is not None
    assert header.attach_refused == REASON


def test_where_not_even_shadow_is_possible_both_reasons_are_told(
    world: Make, said: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str
) -> None:
    row = Row(name="Moon", asks=lambda *_: True, on=(), reason=REASON, shown_by=())
    monkeypatch.setattr(compat, "DEPLOYMENT", (row,))
    auto = world(mode="off", block_size=32, options={"mode": "auto", "gate": verdict(tmp_path, model)})
    assert info(auto)["mode"] == "off"
    assert info(auto)["reason"].startswith("the verdict says yes, but attach mode is not possible here: ")
    assert [line.partition(":")[0] for line in said] == [
        "kv-singleflight passes through to the stock connector",
        "kv-singleflight",
    ]


def test_where_attach_is_possible_nothing_is_added(world: Make, said: list[str]) -> None:
    shadow = world(mode="shadow")
    assert info(shadow)["attach_refused"] == ""
    assert said == ["kv-singleflight: shadow mode is on."]
