"""`singleflight calibrate` on a real store, and what `gate` makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from singleflight import calibration
from singleflight.quantity import Origin

if TYPE_CHECKING:
    from singleflight.embedded import Stack

COMMAND = [str(Path(sys.executable).parent / "singleflight"), "calibrate"]


def run(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, env=env, timeout=280
    )


@pytest.mark.engine
def test_it_measures_the_layer_and_the_store_and_leaves_nothing_in_it(stack: Stack, tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    before = _keys(stack)
    done = run(
        "--out", out, "--mooncake-config", stack.config_path, "--threads", 2, "--json", env=stack.env()
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(out.read_text())
    found = calibration.read(out)
    figures = found.figures
    measured = {name for name, each in figures.as_dict().items() if each.origin is Origin.MEASURED}
    assert measured == {
        "coordination_per_lookup",
        "coordination_per_block",
        "load_latency",
        "load_bandwidth",
        "parallel_loads",
    }
    # Orders of magnitude that any machine meets: a lookup is no second, loopback no modem.
    assert 0 < figures.coordination_per_lookup.value + figures.coordination_per_block.value < 0.1
    assert figures.load_latency.value < 1
    assert figures.load_bandwidth.value > 1e6
    assert 1 <= figures.parallel_loads.value <= 2
    assert found.machine["cores"]
    assert _keys(stack) == before
    assert [path.name for path in tmp_path.iterdir()] == ["calibration.json"]


def _keys(stack: Stack) -> int:
    """How many objects the master knows."""
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{stack.ports.metrics}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return int(float(next(line for line in lines if line.startswith("master_key_count ")).split()[1]))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"master_server_address"', "give the JSON that MOONCAKE_CONFIG_PATH names"),
        (
            json.dumps(
                {
                    "metadata_server": "http://127.0.0.1:1/metadata",
                    "master_server_address": "127.0.0.1:1",
                    "protocol": "tcp",
                    "local_buffer_size": 1 << 20,
                }
            ),
            "no Mooncake master answers at 127.0.0.1:1",
        ),
    ],
)
def test_a_store_that_is_not_there_is_one_sentence(tmp_path: Path, content: str, says: str) -> None:
    config = tmp_path / "mooncake.json"
    config.write_text(content)
    done = run(
        "--out",
        tmp_path / "c.json",
        "--mooncake-config",
        config,
        env={**os.environ, "VLLM_HOST_IP": "127.0.0.1"},
    )
    assert done.returncode == 1
    assert done.stderr.strip().startswith("error: ")
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "c.json").exists()


def test_a_config_that_is_not_there_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    done = run("--out", tmp_path / "c.json", "--mooncake-config", tmp_path / "no.json")
    assert done.returncode == 2
    assert done.stderr == f"--mooncake-config: {tmp_path / 'no.json'} does not exist; give one that does\n"
