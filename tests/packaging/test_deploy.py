"""docs/deploy: the examples are what their formats, vLLM's version here and our own configuration accept."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from connector_patch import config, matrix
from connector_patch.plugin import NAME
from singleflight.cli.doctor import CONFIG_KEYS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docs" / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
KUBERNETES = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
CHECKS = {
    "hadolint": ["hadolint", "Dockerfile"],
    "compose": ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml"],
    "kubernetes": ["kubernetes-validate", "--strict", "kubernetes.yaml"],
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_linter_that_knows_the_format_has_nothing_to_say(name: str) -> None:
    tool, *arguments = CHECKS[name]
    command = [str(Path(sys.executable).parent / tool), *arguments]
    done = subprocess.run(command, cwd=DEPLOY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def objects(kind: str) -> dict[str, Any]:
    return {found["metadata"]["name"]: found for found in KUBERNETES if found["kind"] == kind}


def containers() -> dict[str, Any]:
    found = [*objects("Deployment").values(), *objects("StatefulSet").values()]
    return {c["name"]: c for each in found for c in each["spec"]["template"]["spec"]["containers"]}


def serve_lines() -> dict[str, list[str]]:
    lines = {name: COMPOSE["services"][name]["command"] for name in ("engine-0", "engine-1")}
    return {**lines, "kubernetes": containers()["engine"]["args"]}


def transfer_configs() -> dict[str, str]:
    """Every --kv-transfer-config that a reader may copy."""
    found = {name: line[line.index("--kv-transfer-config") + 1] for name, line in serve_lines().items()}
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for i, text in enumerate(re.findall(r"--kv-transfer-config '([^']*)'", page.read_text())):
            found[f"{page.name} {i}"] = text
    return found


@pytest.mark.parametrize("where", transfer_configs())
def test_the_connector_accepts_what_the_serve_line_says(where: str) -> None:
    given = json.loads(transfer_configs()[where])
    extra = given["kv_connector_extra_config"]
    if given["kv_connector"] == "SingleFlightConnector":
        assert extra["connector"]["kv_connector"] in matrix.CHILDREN
    else:
        assert given["kv_connector"] == NAME
    assert given["kv_role"] == "kv_both"
    assert config.parse(extra["singleflight"]) != config.Config()


def test_the_readme_and_the_install_page_have_a_serve_line() -> None:
    assert {"README.md 0", "install.md 0"} <= set(transfer_configs())


@pytest.mark.parametrize("where", ["compose", "kubernetes"])
def test_the_mooncake_json_names_the_master_of_the_example(where: str) -> None:
    if where == "compose":
        text = COMPOSE["configs"]["mooncake"]["content"]
        host, flags = "master", COMPOSE["services"]["master"]["command"]
    else:
        text = objects("ConfigMap")["mooncake"]["data"]["mooncake.json"]
        host, flags = "mooncake-master", containers()["master"]["args"]
        ports = {port["port"] for port in objects("Service")[host]["spec"]["ports"]}
        assert ports == {50051, 8080}
    given = json.loads(text)
    assert set(given) <= CONFIG_KEYS
    assert given["master_server_address"] == f"{host}:50051"
    assert given["metadata_server"] == f"http://{host}:8080/metadata"
    assert {"--rpc_port=50051", "--http_metadata_server_port=8080"} <= set(flags)


def test_a_pod_asks_the_port_that_the_server_has() -> None:
    engine = containers()["engine"]
    assert [(port["name"], port["containerPort"]) for port in engine["ports"]] == [("http", 8000)]
    assert "--port=8000" in engine["args"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert engine[probe]["httpGet"] == {"path": "/health", "port": "http"}
    annotations = objects("StatefulSet")["engine"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == "8000"


def test_an_engine_gets_longer_to_end_than_vllm_takes() -> None:
    """vLLM drains for --shutdown-timeout and kills what is left (docs/failure-modes.md)."""
    pod = objects("StatefulSet")["engine"]["spec"]["template"]["spec"]
    grace = {"kubernetes": pod["terminationGracePeriodSeconds"]}
    grace |= {
        name: int(COMPOSE["services"][name]["stop_grace_period"].rstrip("s"))
        for name in ("engine-0", "engine-1")
    }
    for where, line in serve_lines().items():
        [drain] = [int(flag.partition("=")[2]) for flag in line if flag.startswith("--shutdown-timeout=")]
        assert grace[where] >= drain + 15


def test_the_image_has_the_vllm_that_the_package_asks_for() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [version] = {
        wish.partition("==")[2] for name in ("gpu", "gpu-cuda13") for wish in extras[name] if "vllm" in wish
    }
    assert f"FROM vllm/vllm-openai:v{version}\n" in (DEPLOY / "Dockerfile").read_text()
    image = f"kv-singleflight:{tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['version']}"
    assert {c["image"] for c in containers().values()} == {image}
    assert {service["image"] for service in COMPOSE["services"].values()} == {image}
