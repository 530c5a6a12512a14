"""Mode auto, the default: the verdict file decides, and no verdict file ever stops a server."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from connector_patch import auto, config
from singleflight.stack import probe
from singleflight.stack.arms import OURS, arm
from tests.verdicts import yes

if TYPE_CHECKING:
    from singleflight.stack.embedded import Stack

NOW = datetime.datetime(2026, 11, 29, 21, tzinfo=datetime.UTC)
REQUESTS = 4


def objection(path: Path | None, **changes: Any) -> str | None:
    return auto.objection(
        config.Config(gate=path), **{"block_size": 32, "model": "tiny", "now": NOW, **changes}
    )


class TestWhatTheFileSays:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "verdict.json"
        yes("2026-11-28T21:00:00Z").write(path)
        return path

    def test_yes_and_made_for_this_deployment(self, path: Path) -> None:
        assert objection(path) is None

    def test_none_named(self) -> None:
        assert str(objection(None)).startswith("no verdict is named; record traffic")

    def test_no(self, path: Path) -> None:
        replace(yes("2026-11-28T21:00:00Z"), enable=False, reasons=["It costs."]).write(path)
        assert objection(path) == f"{path} says no (It costs); gate again when the workload changes"

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"block_size": 16}, "made for blocks of 32 tokens, this engine's have 16"),
            ({"model": "large"}, "made for the model tiny, this engine serves large"),
            ({"now": NOW + datetime.timedelta(days=30)}, "31.0 days old, older than max_age_days 30"),
        ],
    )
    def test_made_for_another(self, path: Path, changes: dict[str, Any], sentence: str) -> None:
        assert sentence in str(objection(path, **changes))

    def test_a_file_of_an_earlier_version_is_to_be_made_again(self, path: Path) -> None:
        path.write_text(path.read_text().replace("verdict/2", "verdict/1"))
        assert objection(path) == (
            f'the verdict cannot be used: {path}: schema: "kv-singleflight/verdict/1" is of another version;'
            " run `singleflight gate` again"
        )

    @pytest.mark.parametrize(
        "spoil",
        [
            Path.unlink,
            lambda path: path.write_text(path.read_text()[:-50]),
            lambda path: path.write_bytes(b"\xff\x00"),
            lambda path: path.write_text(path.read_text().replace("verdict/2", "other/2")),
            lambda path: path.write_text(json.dumps([])),
            lambda path: (path.unlink(), path.mkdir()),
        ],
        ids=["missing", "cut off", "binary", "another schema", "a list", "a folder"],
    )
    def test_a_file_that_cannot_be_used(self, path: Path, spoil: Callable[[Path], object]) -> None:
        spoil(path)
        sentence = str(objection(path))
        assert sentence.startswith(f"the verdict cannot be used: {path}")
        assert "; give " in sentence


@pytest.mark.engine
class TestOnARealEngine:
    """What it does is told by what a burst of four on one cold block loads."""

    def gets(self, stack: Stack, extra: dict[str, Any]) -> tuple[int, list[str]]:
        """Gets of the burst, and our lines in the log."""
        with arm(stack, OURS, extra, log_level="INFO") as engine:
            engine.answer()
            asked = probe.prompts(REQUESTS)
            engine.ask("fill", prompts=[[*asked["probe-0"][: probe.BLOCK_SIZE], 3]])
            gets = engine.ask("burst", prompts=asked, barrier=True)["counts"]["gets"]
            said = engine.log.read_text().splitlines()
            return gets, [line for line in said if re.search("kv-singleflight(:| passes)", line)]

    def test_by_default_it_is_shadow_and_says_why_once(self, stack: Stack) -> None:
        gets, (line,) = self.gets(stack, {"singleflight": {}})
        assert gets == REQUESTS
        assert "shadow mode is on (counts, changes nothing): no verdict is named; record traffic" in line

    def test_a_yes_for_this_deployment_coalesces(self, stack: Stack, tmp_path: Path) -> None:
        path = tmp_path / "verdict.json"
        yes(datetime.datetime.now(datetime.UTC).isoformat(), str(stack.model)).write(path)
        gets, (line,) = self.gets(stack, {"singleflight": {"gate": str(path)}})
        assert gets == 1
        assert f"attach mode is on, as {path} says" in line

    def test_a_broken_file_stops_nobody(self, stack: Stack, tmp_path: Path) -> None:
        path = tmp_path / "verdict.json"
        path.write_text("{")
        gets, (line,) = self.gets(stack, {"singleflight": {"gate": str(path)}})
        assert gets == REQUESTS
        assert f"shadow mode is on (counts, changes nothing): the verdict cannot be used: {path}:1" in line


def test_where_attach_is_not_possible_a_yes_is_shadow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On vLLM's scheduler over simulated workers: no engine is needed to see what it comes to."""
    from connector_patch import compat
    from connector_patch.config import Mode
    from tests.simulation.setup import Setup
    from tests.simulation.world import World

    def unsupported(config: object, cache: object, mode: Mode) -> str | None:
        return "the moon is full" if mode is Mode.ATTACH else None

    monkeypatch.setattr(compat, "unsupported_setup", unsupported)
    plain = World(Setup(mode="shadow", block_size=32))
    path = tmp_path / "verdict.json"
    yes(
        datetime.datetime.now(datetime.UTC).isoformat(), plain.scheduler.vllm_config.model_config.model
    ).write(path)
    w = World(Setup(mode="shadow", block_size=32, options={"mode": "auto", "gate": str(path)}))
    prompt = w.prompt("ab")
    w.store.put(prompt)
    for _ in range(REQUESTS):
        w.add(prompt)
    w.run()
    assert w.gets == REQUESTS
    objection = w.loop.connector.objection
    assert objection == "the verdict says yes, but attach mode is not possible here: the moon is full"
