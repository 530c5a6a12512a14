"""What `pip install` gives: wheel and sdist are built, and the wheel installed into an empty environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
CLEAN = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VLLM_PLUGINS")}


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**CLEAN, **env}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment(folder: Path) -> Path:
    """A new virtual environment's Python."""
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Wheel and sdist, by the build back end of pyproject.toml."""
    folder = tmp_path_factory.mktemp("built")
    python = environment(folder / "builder")
    run(python, "-m", "pip", "install", "--quiet", "hatchling>=1.27", cwd=folder)
    run(python, "-m", "hatchling", "build", "-d", folder / "dist", cwd=ROOT)
    [wheel], [sdist] = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return wheel, sdist


def packaged(names: list[str]) -> set[str]:
    return {name for name in names if name.startswith(("singleflight/", "connector_patch/"))}


def in_tree() -> set[str]:
    listed = run("git", "ls-files", "singleflight", "connector_patch", cwd=ROOT).split()
    return {name for name in listed if (ROOT / name).exists()}


def test_wheel_and_sdist_have_both_packages_typed_and_whole(built: tuple[Path, Path]) -> None:
    wheel, sdist = built
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = packaged(archive.namelist())
    with tarfile.open(sdist) as archive:
        in_sdist = packaged([name.partition("/")[2] for name in archive.getnames()])
    assert {"singleflight/py.typed", "connector_patch/py.typed"} <= in_wheel
    assert in_wheel >= in_tree()
    assert in_sdist >= in_wheel


def test_in_an_empty_environment_doctor_says_what_is_missing(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    python = environment(tmp_path / "empty")
    run(python, "-m", "pip", "install", "--quiet", built[0], cwd=tmp_path)
    command = python.parent / "singleflight"
    done = subprocess.run(
        [command, "doctor", "--json"], cwd=tmp_path, env=CLEAN, capture_output=True, text=True
    )
    found = {finding["what"]: (finding["grade"], finding["says"]) for finding in json.loads(done.stdout)}
    assert (done.returncode, done.stderr) == (1, "")
    assert {what for what, (grade, _) in found.items() if grade == "bad"} == {"vLLM", "mooncake"}
    assert "kv_singleflight is installed" in found["vLLM plug-in"][1]
    assert "pip install 'kv-singleflight[cpu]'" in found["mooncake"][1]


LOADER = """
import json, sys
from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group
load_plugins_by_group(DEFAULT_PLUGINS_GROUP)["kv_singleflight"]()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from connector_patch.plugin import NAME
found = KVConnectorFactory.get_connector_class_by_name(NAME)
from singleflight.cli import doctor
print(json.dumps([found.__name__, sys.modules[found.__module__].__file__, doctor.plugin().says]))
"""


def test_vllms_plug_in_loader_finds_the_installed_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Beside the vLLM of this environment, before the checkout that is installed there."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    run(*pip, tmp_path / "site", built[0], cwd=tmp_path)
    said = run(sys.executable, "-c", LOADER, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    name, file, doctor = json.loads(said.splitlines()[-1])
    assert name == "SingleFlightMooncakeStoreConnector"
    assert Path(file) == tmp_path / "site" / "connector_patch" / "connector.py"
    assert doctor == "kv_singleflight makes SingleFlightMooncakeStoreConnector known to vLLM"
