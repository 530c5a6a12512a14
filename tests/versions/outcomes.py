"""A pytest plug-in: tells the outcome of each test as it ends."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import child  # beside this file, which is found by its folder: vLLM's tests have a package `tests` too
import pytest

_ended: dict[str, str] = {}


def pytest_collection_finish(session: Any) -> None:
    # vLLM's tests collect garbage after each of them, a second over all that has been imported.
    if parallel_state := sys.modules.get("vllm.distributed.parallel_state"):
        parallel_state.gc = SimpleNamespace(collect=lambda: 0, unfreeze=lambda: None)
    child.say(collected=len(session.items))


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        child.say(test=report.nodeid, outcome="not collected", why=_why(report))


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: Any) -> None:
    """The worst of set-up, call and clean-up; the clean-up is the last word."""
    if report.failed:
        _ended[report.nodeid] = "failed"
        child.say(why=_why(report), of=report.nodeid)
    elif report.when == "call" or report.skipped:
        _ended.setdefault(report.nodeid, "passed" if report.passed else "skipped")
    if report.when == "teardown":
        child.say(test=report.nodeid, outcome=_ended.pop(report.nodeid, "skipped"))


def _why(report: Any) -> str:
    lines = [line for line in str(report.longrepr).splitlines() if line.strip()]
    said = [line[2:].strip() for line in lines if line.startswith("E ")]
    return (said or lines or [""])[0][:300]
