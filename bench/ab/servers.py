"""One OpenAI server for each arm, all against one stack; all are alive, and all but the one measured idle.

On the CPU wheel `vllm serve` does not start; `python -m vllm.entrypoints.openai.api_server` is the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.ab import counted, limited
from connector_patch.config import Mode
from connector_patch.lab import platform
from singleflight.stack import arms, embedded

REPOSITORY = Path(__file__).parents[2]
START_TIMEOUT_S = 240.0
RESET_TIMEOUT_S = 60.0
STOCK = "stock"
TCP_QUEUE = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "120000",
}
"""For all arms alike. With what Mooncake 0.3.13 has by default (1,024), stock's Gets fail (-800) as soon as
several receive threads load at once; later versions have these: github.com/kvcache-ai/Mooncake/pull/3710."""
FEW_CORES = 4
"""vLLM wants a core of its own for each of scheduler and connector beside those that compute."""
VARIANTS: dict[str, dict[str, object]] = {"compute": {"mode": "attach", "load_or_compute": "on"}}
"""Arms that are a mode with more settings; only `bench.choice` has them."""
CHOICES = ("join", "load", "compute")
COUNTERS = {
    "gets": ("vllm:mooncake_store_operation_total", "load_get"),
    "get_bytes": ("vllm:mooncake_store_operation_bytes_total", "load_get"),
    "put_bytes": ("vllm:mooncake_store_operation_bytes_total", "save_put"),
    "get_s": ("vllm:mooncake_store_operation_time_seconds_sum", "load_get"),
    "external_tokens": ("vllm:external_prefix_cache_hits_total", ""),
    "local_tokens": ("vllm:prefix_cache_hits_total", ""),
    **{f"chose_{what}": ("vllm:singleflight_chose_total", f'what="{what}"') for what in CHOICES},
    "attached": ("vllm:singleflight_requests_total", 'event="attached"'),
}
"""What a server's own /metrics say: our name -> the series' name, and a text its labels contain."""


def names() -> list[str]:
    """Every arm this version has: stock, and ours in each of its modes (but `auto`, which is one of them)."""
    return [STOCK, *(mode.value for mode in Mode if mode.value != "auto")]


@dataclass(frozen=True)
class Setup:
    """What servers are started with; cells that agree in it share their servers.

    Attributes:
        recv_threads: VLLM_MOONCAKE_LOAD_RECV_THREADS; vLLM's default is 1.
        kv_blocks: size of the KV cache in blocks of 32 tokens (64 KiB). The default has room for the burst of
            64, each request with a copy of its own, and not more: five servers share this machine's memory.
        limited: with the in-process limiter in the connector (`limited.py`).
        counted: with the CPU time of the scheduler's thread counted, and receive threads that give way to
            the model (`counted.py`).
        gate: a verdict file that ours is told of.
    """

    recv_threads: int = 1
    kv_blocks: int = 64 * (4096 // 32 + 2) + 1
    limited: bool = False
    counted: bool = False
    gate: str = ""


class Server:
    """Attributes: `arm`, `url`, `model` (its folder), `log` (what it has said), `cpu` (`counted.py`)."""

    def __init__(self, arm: str, host: str, port: int, stack: arms.Serves) -> None:
        self.arm = arm
        self.url = f"http://{host}:{port}"
        self.model = stack.model
        self.log = stack.folder / f"server-{arm}-{port}.log"
        self.cpu = stack.folder / f"cpu-{arm}-{port}"

    def ask(self, path: str, body: bytes | None = None) -> str:
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(answer.read().decode())

    def answers(self) -> bool:
        try:
            self.ask("/health")
        except OSError:
            return False
        return True

    def cold(self) -> None:
        """Empty the local prefix cache; the store keeps what it has. TimeoutError if vLLM keeps refusing.

        vLLM refuses while store jobs still read blocks, so that success also says: every put is done.
        """
        limit = time.monotonic() + RESET_TIMEOUT_S
        while not json.loads(self.ask("/reset_prefix_cache", b""))["success"]:
            if time.monotonic() > limit:
                raise TimeoutError(f"the server of arm {self.arm} did not reset its prefix cache")
            time.sleep(0.02)

    def counters(self) -> dict[str, float]:
        """COUNTERS as they stand; 0 for a series that does not exist yet."""
        counts = dict.fromkeys(COUNTERS, 0.0)
        for line in self.ask("/metrics").splitlines():
            for name, (series, label) in COUNTERS.items():
                if line.startswith(series + "{") and label in line:
                    counts[name] += float(line.rpartition(" ")[2])
        return counts


def _transfer(arm: str, setup: Setup) -> dict[str, object]:
    ours = {**VARIANTS.get(arm, {"mode": arm}), **({"gate": setup.gate} if setup.gate else {})}
    transfer: dict[str, object] = {
        "kv_connector": arms.STOCK if arm == STOCK else arms.OURS,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {} if arm == STOCK else {"singleflight": ours},
    }
    if setup.limited or setup.counted:
        transfer["kv_connector_module_path"] = counted.MODULE if setup.counted else limited.MODULE
    return transfer


def compute_cores() -> str:
    """VLLM_CPU_OMP_THREADS_BIND: where there are few cores, the last one computes, alone.

    vLLM would bind a computing thread to each, and these wait for each other at barriers, spinning: whenever
    client, HTTP server or scheduler has a core, all wait. What takes 0.2 s took up to 1 s, at random.
    """
    cores = os.sched_getaffinity(0)
    return "auto" if len(cores) > FEW_CORES else str(max(cores))


def flags(setup: Setup) -> list[str]:
    """What every server is told, whatever its connector."""
    told = ["--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "8192"]
    told += ["--max-num-batched-tokens", "8192", "--max-num-seqs", "128", "--disable-uvicorn-access-log"]
    return [*told, "--num-gpu-blocks-override", str(setup.kv_blocks), *platform.server_flags()]


def stands(server: Server, process: subprocess.Popen[bytes], what: str) -> None:
    """Wait until it answers. EmbeddedError if it does not, or if our connector passes through in it."""
    embedded.wait_until(server.answers, process, what, server.log, START_TIMEOUT_S)
    if "passes through to the stock connector" in server.log.read_text(errors="replace"):
        raise embedded.EmbeddedError(f"{what} passes through to stock: {embedded.tail(server.log)}")


@contextlib.contextmanager
def serving(stack: embedded.Stack, chosen: Sequence[str], setup: Setup) -> Iterator[dict[str, Server]]:
    """A server for each chosen arm, ready. EmbeddedError, with the log's last lines, if one does not start
    or ours passes through to stock."""
    settings = flags(setup)
    running: dict[str, Server] = {}
    started: list[tuple[Server, subprocess.Popen[bytes]]] = []
    with contextlib.ExitStack() as processes:
        for arm, port in zip(chosen, embedded.free_ports(stack.host, len(chosen)), strict=True):
            argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(stack.model)]
            argv += ["--host", stack.host, "--port", str(port), *settings]
            argv += ["--kv-transfer-config", json.dumps(_transfer(arm, setup))]
            server = Server(arm, stack.host, port, stack)
            env = stack.env(
                PYTHONPATH=str(REPOSITORY),
                VLLM_SERVER_DEV_MODE="1",
                **TCP_QUEUE,
                VLLM_MOONCAKE_LOAD_RECV_THREADS=str(setup.recv_threads),
                VLLM_CPU_OMP_THREADS_BIND=compute_cores(),
                **{limited.VARIABLE: str(stack.folder), counted.VARIABLE: str(server.cpu)},
                **{counted.NICE: "0" if compute_cores() == "auto" else "10"},
            )
            started.append((server, processes.enter_context(embedded.spawned(argv, env=env, log=server.log))))
        for server, process in started:
            stands(server, process, f"the server of arm {server.arm}")
            running[server.arm] = server
        yield running
