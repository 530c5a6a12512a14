"""Measure the simulator: one core against libCacheSim's LRU, the sweep from the command line, and growth.

    python bench/sim/measure.py TRACE… [--out FILE] [--repeats N] [--skip-sweep]

Prints a table and writes it, with the machine it was measured on, as JSON (default:
bench/sim/results/<date>.json). Needs `pip install libcachesim` for the comparison, which the package itself
never uses. Everything is repeated and the median reported, the fastest and slowest beside it: run it on a
machine that does nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from singleflight.sim import kernel
from singleflight.sim.columns import Columns
from singleflight.sim.config import Config
from singleflight.sweep.grid import Grid, code_version, tasks
from singleflight.sweep.work import run
from singleflight.traces.reader import TraceReader
from singleflight.traces.synth import Synth, generate

RESULTS = Path(__file__).parent / "results"
SWEEP = "import typer; from singleflight.cli.simulate import register; a = typer.Typer(); register(a); a()"
WINDOW_MS = 1000


def environment() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    names = ("numba", "numpy", "llvmlite", "joblib", "pyarrow", "matplotlib", "libcachesim")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in names},
        "code_version": code_version(),
        "load_average_before": os.getloadavg()[0],
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def timed(repeats: int, work: Callable[[], object]) -> dict[str, float]:
    """Seconds of `work`: median, fastest and slowest of `repeats`."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}


def rate(lookups: int, seconds: dict[str, float]) -> dict[str, float]:
    return {**seconds, "lookups": lookups, "million_lookups_per_s": lookups / seconds["median_s"] / 1e6}


def whole_grid(columns: Columns, repeats: int) -> dict[str, float]:
    """The published grid on one core, as a worker runs it: layouts included."""
    grid = Grid().configs()
    todo = list(tasks(0, grid, columns.n_lookups))
    seconds = timed(repeats, lambda: [run(task, columns) for task in todo])
    return rate(len(grid) * columns.n_lookups, seconds)


def against_libcachesim(columns: Columns, capacity: int, repeats: int) -> dict[str, Any]:
    """The same keys in the same order, one LRU of the same capacity, alternating, loops in C on either side.

    libCacheSim inserts on a miss and has no loads in flight, so it does less and its hits are not ours; its
    hash table is sized to be fast here (its default of 2**24 buckets is slower); only
    `process_trace` is timed.
    """
    import libcachesim

    engine = kernel.Kernel(kernel.lay_out(columns, 1, "round_robin", (0, 1)))
    engine.run_arrays(WINDOW_MS, capacity, False)
    row = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
    stream = np.zeros(columns.n_lookups, row)
    stream["id"] = columns.blocks + np.uint64(1)
    stream["size"] = 1
    stream["next"] = -1
    ours, theirs = [], []
    with tempfile.NamedTemporaryFile(suffix=".oracleGeneral.bin") as file:
        stream.tofile(file.name)
        param = libcachesim.ReaderInitParam(ignore_obj_size=True)
        for _ in range(repeats):
            start = time.perf_counter()
            engine.run_arrays(WINDOW_MS, capacity, False)
            ours.append(time.perf_counter() - start)
            reader = libcachesim.TraceReader(file.name, libcachesim.TraceType.ORACLE_GENERAL_TRACE, param)
            cache = libcachesim.LRU(capacity, hashpower=18)
            start = time.perf_counter()
            miss_ratio, _ = cache.process_trace(reader)
            theirs.append(time.perf_counter() - start)
    pairs = [b / a for a, b in zip(ours, theirs, strict=True)]
    counts, _ = engine.run_arrays(WINDOW_MS, capacity, False)
    return {
        "capacity": capacity,
        "lookups": columns.n_lookups,
        "ours_million_per_s": columns.n_lookups / statistics.median(ours) / 1e6,
        "libcachesim_million_per_s": columns.n_lookups / statistics.median(theirs) / 1e6,
        "speedup_median": statistics.median(pairs),
        "speedup_min": min(pairs),
        "speedup_max": max(pairs),
        "ours_hit_ratio": int(counts[..., kernel.HITS].sum()) / columns.n_lookups,
        "libcachesim_hit_ratio": 1 - miss_ratio,
    }


def growth(repeats: int) -> list[dict[str, Any]]:
    """The same kind of trace, 1, 4 and 16 times as long: one configuration, and building the arrays."""
    found = []
    for times in (1, 4, 16):
        what = Synth("shared", requests=12_000 * times, prompts=200 * times, own_blocks=16, rate=3.4)
        requests = list(generate(what))
        start = time.perf_counter()
        columns = Columns.from_requests(requests)
        built = time.perf_counter() - start
        del requests
        config = Config(WINDOW_MS, 4, 10_000, "affinity", "contiguous_prefix")
        engine = kernel.Kernel(kernel.lay_out(columns, config.instances, config.routing, config.warmup))
        seconds = timed(repeats, lambda e=engine: e.run_arrays(WINDOW_MS, 10_000, True))  # type: ignore[misc]
        found.append({"times": times, "arrays_s": built, **rate(columns.n_lookups, seconds)})
    return found


def sweep(traces: list[str], repeats: int) -> dict[str, Any]:
    """The command, from process start to exit, tables and plots included."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "out")
        command = [sys.executable, "-c", SWEEP, "sweep", *traces, "--out", str(out)]

        def once(**env: str) -> None:
            subprocess.run(command, check=True, capture_output=True, env={**os.environ, **env})

        cold = timed(1, lambda: once(NUMBA_CACHE_DIR=str(Path(scratch, "cache"))))
        once()  # warm the usual cache, whatever state it is in
        warm = timed(repeats, once)
        memory = peak_memory(command)
    configurations = 420 * len(traces)
    return {
        "configurations": configurations,
        "first_run_s": cold["median_s"],
        "warm": warm,
        "peak_pss_mib": memory,
    }


def peak_memory(command: list[str]) -> float:
    """Largest proportional set size, MiB, of a command and all it starts, sampled every 50 ms."""
    quiet = subprocess.DEVNULL
    running = subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True)
    peak = 0.0
    done = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.05):
            peak = max(peak, sum(_pss_mib(pid) for pid in _session(running.pid)))

    sampler = threading.Thread(target=sample)
    sampler.start()
    running.wait()
    done.set()
    sampler.join()
    return round(peak, 1)


def _session(leader: int) -> list[str]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[3]) == leader:
                found.append(stat.parent.name)
        except OSError:  # it has ended
            continue
    return found


def _pss_mib(pid: str) -> float:
    try:
        lines = Path("/proc", pid, "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--skip-sweep", action="store_true")
    options = parser.parse_args()
    result: dict[str, Any] = {"environment": environment(), "repeats": options.repeats, "traces": {}}
    for path in options.traces:
        reader = TraceReader(path)
        columns = Columns.from_requests(reader)
        grid = whole_grid(columns, max(3, options.repeats // 2))
        print(f"{reader.name}: grid on one core, {grid['million_lookups_per_s']:.1f} M lookups/s")
        rows = [against_libcachesim(columns, c, 4 * options.repeats) for c in Grid().capacities]
        for row in rows:
            print(
                f"  capacity {row['capacity']:>6}: ours {row['ours_million_per_s']:6.1f} M/s, "
                f"libCacheSim LRU {row['libcachesim_million_per_s']:6.1f} M/s, x{row['speedup_median']:.2f} "
                f"({row['speedup_min']:.2f} to {row['speedup_max']:.2f})"
            )
        result["traces"][reader.name] = {"sha256": reader.sha256, "grid": grid, "libcachesim": rows}
    result["growth"] = growth(options.repeats)
    for row in result["growth"]:
        print(
            f"{row['times']:>3}x: {row['lookups']:>9,} lookups in {1000 * row['median_s']:7.1f} ms, "
            f"{row['million_lookups_per_s']:.1f} M/s"
        )
    if not options.skip_sweep:
        result["sweep"] = sweep(options.traces, options.repeats)
        swept, warm = result["sweep"], result["sweep"]["warm"]
        print(
            f"sweep, {swept['configurations']} configurations: warm {warm['median_s']:.2f} s "
            f"({warm['min_s']:.2f} to {warm['max_s']:.2f}), first run {swept['first_run_s']:.2f} s, "
            f"peak memory {swept['peak_pss_mib']} MiB"
        )
    result["environment"]["load_average_after"] = os.getloadavg()[0]
    out = options.out or RESULTS / f"{datetime.date.today()}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {out}")


if __name__ == "__main__":
    main()
