"""Is the prediction true? Slices of traces on the real engine, beside what the simulator and the gate say.

    python -m bench.gate.measure --traces FOLDER --out bench/results/gate.json

Every slice is replayed in shadow and in attach mode, each in an engine of its own on an embedded stack, in
two settings: loads that take a fixed time and run in parallel, and loads that take turns on a slow link.

- Counts: the simulator gets the arrivals as they were and the median load window that shadow mode observed,
  as a recording would give them, and predicts the removable attempts; shadow mode has counted them.
- Sign: the gate predicts a margin from the cost model with the setting's figures; measured is the mean over
  requests of the TTFT in shadow less that in attach mode.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from singleflight.demo import environment, replace_file
from singleflight.embedded import Stack, spawned, tail
from singleflight.gate import Deployment, Gate
from singleflight.sim import kernel
from singleflight.sim.columns import Columns
from singleflight.sim.config import Config
from singleflight.sim.cost import Figures
from singleflight.traces.reader import Options, TraceReader
from singleflight.traces.request import Lengths, Request
from singleflight.traces.synth import Synth, generate

BLOCK_TOKENS = 32
KV_BYTES_PER_TOKEN = 2048
CAPACITY = 16_000
"""Blocks of the engine's pool, 1 GiB: nothing is evicted."""
LONGEST = 48
"""Blocks of the longest request kept in a slice; the tiny model on a CPU is no place for longer ones."""
THREADS = 32


@dataclass(frozen=True)
class Setting:
    """How loads are slowed: each by `delay_s`, `threads` of them at once, or by a link they share."""

    threads: int
    delay_s: float
    bytes_per_s: float | None

    def figures(self) -> Figures:
        return Figures().given(
            load_latency=self.delay_s,
            load_bandwidth=self.bytes_per_s or 1e9,
            parallel_loads=float(self.threads),
            kv_bytes_per_token=float(KV_BYTES_PER_TOKEN),
        )


SETTINGS = {"latency": Setting(THREADS, 3.6, None), "link": Setting(1, 0.0, 8e6)}


def slices(folder: Path) -> dict[str, list[tuple[float, list[int]]]]:
    """name -> [(seconds, block names)]: of each public trace 150 requests, faster than recorded so that
    several loads are in the air at once; and two synthesized ones, of which one shares nothing."""
    found = {}
    for name, first, count, scale in (("conversation", 2000, 150, 2.0), ("synthetic", 1000, 150, 2.0)):
        reader = TraceReader(str(folder / f"{name}_trace.jsonl"), Options())
        rows = [row for row in reader if len(row.hashes) <= LONGEST][first : first + count]
        found[name] = [((row.timestamp_ms - rows[0].timestamp_ms) / 1000 / scale, row.hashes) for row in rows]
    for name, what in (
        ("agents", Synth("agents", 85, fan_in=16, rate=0.2, think_ms=6000, own_blocks=6)),
        ("poisson", Synth("poisson", 75, rate=5.0, own_blocks=12)),
    ):
        # Names of their own, or a block would be stored, and cached, under another slice's prompts.
        found[name] = [
            (row.timestamp_ms / 1000, [10**6 + 10**5 * (name == "poisson") + each for each in row.hashes])
            for row in generate(what)
        ]
    return {name: [(at, list(names)) for at, names in rows] for name, rows in found.items()}


def run(stack: Stack, mode: str, setting: Setting, of: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One engine's results, per slice; those it had when it failed, if it failed."""
    job, out, log = (folder / f"{mode}-{setting.threads}.{end}" for end in ("job", "out", "log"))
    work = {"model": str(stack.model), "mode": mode, "out": str(out), "slices": of}
    job.write_text(json.dumps({**work, "delay_s": setting.delay_s, "bytes_per_s": setting.bytes_per_s}))
    env = stack.env(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_MOONCAKE_LOAD_RECV_THREADS=str(setting.threads),
    )
    with spawned([sys.executable, "-m", "bench.gate.replay", str(job)], env=env, log=log) as process:
        if code := process.wait():
            print(f"{mode}, {setting}: the engine ended with {code}: {tail(log, 8)}", file=sys.stderr)
    return json.loads(out.read_text()) if out.exists() else {}


def compared(
    setting: Setting, rows: list[Any], shadow: dict[str, Any], attach: dict[str, Any]
) -> dict[str, Any]:
    """Prediction beside measurement, for one slice in one setting."""
    arrivals = zip(shadow["arrived_s"], rows, strict=True)
    columns = Columns.from_requests(
        Request(round(1000 * at), names, Lengths(len(names) * BLOCK_TOKENS, 1)) for at, (_, names) in arrivals
    )
    window_ms = 1000 * statistics.median(shadow["windows_s"])
    config = Config(round(window_ms), 1, CAPACITY, warmup=(0, 1))
    predicted = kernel.simulate(columns, config).phase("steady")
    live = shadow["counters"]
    gate = Gate(columns, Deployment(1, CAPACITY, "round_robin", 1.0, BLOCK_TOKENS), setting.figures(), True)
    ttft = {
        mode: np.array([token - due for token, (due, _) in zip(result["first_token_s"], rows, strict=True)])
        for mode, result in (("shadow", shadow), ("attach", attach))
    }
    saved = ttft["shadow"] - ttft["attach"]
    low, high = stats.bootstrap((saved,), np.mean, rng=np.random.default_rng(0)).confidence_interval
    return {
        "requests": len(rows),
        "observed_window_ms": window_ms,
        "failed_loads_blocks": live["lost"],
        "attempts": {"predicted": predicted.attempts, "shadow": live["attempts"]},
        "removable": {
            "predicted": predicted.removable,
            "shadow": live["removable"],
            "relative_error": _error(predicted.removable, live["removable"]),
            "adopted_in_attach": attach["counters"]["blocks_adopted"],
        },
        "bytes_loaded": {"shadow": shadow["store"]["bytes"], "attach": attach["store"]["bytes"]},
        "gate": {
            "window_ms": 1000 * gate.load.window_s,
            "utilization": gate.load.utilization,
            "costs": asdict(gate.stated.costs),
            "margin": gate.stated.costs.margin,
            "enable": gate.enable,
        },
        "mean_ttft_s": {mode: float(each.mean()) for mode, each in ttft.items()},
        "mean_ttft_saved_s": {"mean": float(saved.mean()), "low": float(low), "high": float(high)},
        # None: the 95 % interval over requests (bootstrap, BCa) has both signs.
        "sign_agrees": bool((gate.stated.costs.margin > 0) == (low > 0)) if low * high > 0 else None,
    }


def _error(predicted: int, live: int) -> float | None:
    return (predicted - live) / live if live else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder with the two public traces")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--settings", default=",".join(SETTINGS))
    args = parser.parse_args()
    of = slices(args.traces)
    results: dict[str, Any] = {}
    with Stack(segment_mb=2048) as stack:
        for name in args.settings.split(","):
            setting = SETTINGS[name]
            shadow, attach = (run(stack, mode, setting, of, stack.folder) for mode in ("shadow", "attach"))
            results[name] = {
                "setting": asdict(setting),
                "slices": {
                    each: compared(setting, of[each], shadow[each], attach[each])
                    for each in of
                    if each in shadow and each in attach and shadow[each]["windows_s"]
                },
            }
            document = {
                "made_at": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "command": "python -m bench.gate.measure " + f"--settings {args.settings}",
                "environment": environment(),
                "results": results,
            }
            text = json.dumps(document, indent=1) + "\n"
            replace_file(args.out, lambda scratch, text=text: scratch.write_text(text))
            print(json.dumps(results[name], indent=1))
    print(f"Written: {args.out}")


if __name__ == "__main__":
    main()
