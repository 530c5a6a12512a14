"""The command line as a person meets it: output, exit codes, one sentence for what is wrong."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [str(Path(sys.executable).parent / "singleflight")]


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, env={**os.environ, **env}, timeout=120
    )


def test_doctor_is_content_here_and_prints_a_line_a_question() -> None:
    done = run("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 7
    assert [line.split()[0] for line in lines[:5]] == ["ok"] * 5


def test_doctor_json_is_nothing_but_json() -> None:
    done = run("doctor", "--json")
    assert {finding["what"] for finding in json.loads(done.stdout)} >= {"vLLM", "mooncake", "Python"}


def test_doctor_fails_and_says_why_where_mooncake_does_not_import(tmp_path: Path) -> None:
    broken = tmp_path / "mooncake"
    broken.mkdir()
    (broken / "__init__.py").write_text("")
    (broken / "store.py").write_text("raise ImportError('libibverbs.so.1: cannot open shared object file')")
    done = run("doctor", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "libibverbs.so.1" in done.stdout
    assert "apt-get install libibverbs1" in done.stdout


def test_doctor_fails_and_says_why_where_vllm_is_too_old(tmp_path: Path) -> None:
    """A stand-in for an old vLLM: the package is there, the connector is not."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    done = run("doctor", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "does not import: ModuleNotFoundError" in done.stdout


@pytest.mark.parametrize("command", ["demo", "probe"])
def test_a_taken_port_is_one_sentence_and_no_traceback(command: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run(command, "--rpc-port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert done.stderr.strip().startswith("error: port ")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_an_unwritable_model_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("probe", KVSF_CACHE=str(tmp_path / "file"))
    assert done.returncode == 1
    assert done.stderr.strip().startswith("error: the model folder ")


def test_pypis_singleflight_in_our_place_is_one_sentence(tmp_path: Path) -> None:
    """PyPI has an unrelated distribution with the same import name; it may stand first on the path."""
    (tmp_path / "singleflight").mkdir()
    (tmp_path / "singleflight" / "__init__.py").write_text("class SingleFlight: ...\n")
    done = run("doctor", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "finds another package" in done.stderr
    assert "pip uninstall singleflight" in done.stderr
    assert "Traceback" not in done.stderr
