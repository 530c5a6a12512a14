"""`python -m bench.ab --store lmcache`: LMCache's connector alone against the same in ours, bursts over
HTTP.

Stock is LMCache alone. It has its own results (`lmcache.json`) and its own section in the folder's report,
beside what Mooncake's run has put there, or a report of its own where there is none.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.ab import lmcache_limited, report, servers, workloads
from bench.ab.client import LoadError
from bench.ab.results import CellResult, Results
from bench.ab.rounds import Bench
from bench.ab.servers import STOCK, Server
from singleflight.stack import embedded
from singleflight.stack.demo import replace_file
from singleflight.stack.lmcache_server import LMCacheStack

ATTACH = "attach"
FAN_INS = (8, 32)
MEMORY_GB = 2
YOUNG_S = 20.0
LINK = (
    "Store: one LMCache server; stock is LMCacheMPConnector alone, attach is the same in"
    f" SingleFlightConnector. A link of {workloads.SLOW} Gbit/s that loads share by taking turns is made in"
    " the process, in both alike."
)
RESULTS = "lmcache.json"


@dataclass(frozen=True)
class Plan:
    """As `run.Plan`, but for the cells: bursts. `only`: a part of the workload's name."""

    pairs: int
    most: int
    minutes: float
    only: str = ""


class OnLMCache(Server):
    """Its loads are counted by LMCache's server, which every arm shares: rounds do not overlap."""

    def __init__(self, arm: str, port: int, stack: LMCacheStack) -> None:
        super().__init__(arm, stack.host, port, stack)
        self._metrics_url = stack.metrics_url

    def counters(self) -> dict[str, float]:
        counts = super().counters()
        with urllib.request.urlopen(self._metrics_url, timeout=30) as answer:
            lines = answer.read().decode().splitlines()

        def total(series: str) -> float:
            return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(series + "{"))

        counts["gets"] = total("lmcache_mp_num_finished_retrieves_total")
        counts["get_bytes"] = total("lmcache_mp_num_chunks_loaded_total") * workloads.CHUNK * BYTES_PER_TOKEN
        return counts


BYTES_PER_TOKEN = 2048
"""Of the tiny model's KV."""


def _transfer(arm: str, stack: LMCacheStack) -> dict[str, Any]:
    alone = stack.alone()
    alone["kv_connector_module_path"] = lmcache_limited.MODULE
    if arm == STOCK:
        return alone
    ours = stack.wrapped({"mode": arm})
    ours["kv_connector_extra_config"]["connector"] = alone
    return ours


@contextlib.contextmanager
def serving(stack: LMCacheStack, arms: list[str]) -> Iterator[dict[str, Server]]:
    """A server for each arm, ready. EmbeddedError if one does not start or ours passes through."""
    started: list[tuple[OnLMCache, subprocess.Popen[bytes]]] = []
    setup = servers.Setup()
    with contextlib.ExitStack() as processes:
        for arm, port in zip(arms, embedded.free_ports(stack.host, len(arms)), strict=True):
            server = OnLMCache(arm, port, stack)
            argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(stack.model)]
            argv += ["--host", stack.host, "--port", str(port), *servers.flags(setup)]
            argv += ["--kv-transfer-config", json.dumps(_transfer(arm, stack))]
            env = stack.env(
                PYTHONPATH=str(servers.REPOSITORY),
                VLLM_SERVER_DEV_MODE="1",
                VLLM_CPU_OMP_THREADS_BIND=servers.compute_cores(),
                **{lmcache_limited.VARIABLE: str(workloads.SLOW * 1e9 / 8)},
            )
            started.append((server, processes.enter_context(embedded.spawned(argv, env=env, log=server.log))))
        for server, process in started:
            servers.stands(server, process, f"the server of arm {server.arm} on LMCache")
        yield {server.arm: server for server, _ in started}


def cells(only: str) -> list[workloads.Cell]:
    """ValueError if none has that in its name."""
    bursts = [
        workloads.Cell(
            f"LMCache, burst of {n}",
            "one cold prefix, n requests at one moment",
            workloads.burst(n),
            quick=True,
        )
        for n in FAN_INS
    ]
    return workloads.choose(bursts, only, quick=True)


def measure(plan: Plan, run: Results, console: Console) -> None:
    """Fill `run`. A cell that fails is left out, with the reason."""
    started = time.monotonic()
    run.link = LINK
    with (
        LMCacheStack(memory_gb=MEMORY_GB) as stack,
        console.status("starting two servers") as status,
        serving(stack, [STOCK, ATTACH]) as running,
    ):
        bench = Bench(running, lambda gbit_s, latency_s: None, stack.folder, set(), status.update)
        for cell in cells(plan.only):
            if time.monotonic() - started > plan.minutes * 60:
                run.left_out[cell.name] = f"the {plan.minutes:g} minutes of --minutes were over"
                continue
            try:
                rounds = bench.measure(cell, plan.pairs, plan.most, YOUNG_S)
            except (LoadError, OSError) as error:
                run.failed, run.left_out[cell.name] = True, str(error)
                continue
            run.cells.append(CellResult(cell, rounds))
            run.minutes = (time.monotonic() - started) / 60
            console.print(run.cells[-1].line(), highlight=False, markup=False)
    run.finished = True


def write(run: Results, folder: Path) -> None:
    """The figures, and the section of the report."""
    run.write(folder / RESULTS)
    section = report.section("LMCache", run)
    replace_file(folder / report.SECTION, lambda scratch: scratch.write_text(section))
    page = folder / "report.html"
    text = report.with_section(page.read_text(), section) if page.exists() else report.page_of(section)
    replace_file(page, lambda scratch: scratch.write_text(text))
