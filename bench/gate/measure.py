"""Measure one part of the workloads: stock and attach in turns, on several engines, one after the other.

    python -m bench.gate.measure first --traces FOLDER --out bench/results/gate/first.json

Needs root, `ip` and `tc` for the link, and a machine that does nothing else. What it writes is all that
`bench.gate.compare` needs, but the traces.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.ab.link import Link, shaped_link
from bench.ab.results import environment
from bench.ab.servers import TCP_QUEUE
from bench.ab.statistics import order
from bench.gate import workloads
from bench.gate.workloads import Setup, Workload
from singleflight.stack.demo import replace_file
from singleflight.stack.embedded import EmbeddedError, Stack, spawned, tail
from singleflight.terminal.console import orderly

MODES = ("stock", "attach")
LIMIT_S = 300.0
"""An engine and its rounds."""
SEGMENT_MB = 3072


def by_setup(chosen: Sequence[Workload]) -> list[tuple[Setup, list[Workload]]]:
    """Those that can share an engine, together."""
    setups = list(dict.fromkeys(workload.setup for workload in chosen))
    return [(setup, [w for w in chosen if w.setup == setup]) for setup in setups]


def rounds(names: Sequence[str], start: int, pairs: int) -> list[tuple[str, str]]:
    """(workload, mode) of one engine: each workload `pairs` times in both modes, A-B-B-A over everything, and
    the next engine begins with the other mode."""
    return [
        (name, mode)
        for number, name in itertools.product(range(pairs), names)
        for mode in order(MODES, start + number)
    ]


def jobs(chosen: Sequence[Workload], starts: int, pairs: int, traces: Path) -> Iterator[dict[str, Any]]:
    """One for each engine that is started; engines of different setups take turns, too.

    Raises:
        OSError: a workload's trace is not there.
    """
    arrivals = {w.name: _apart(number, w, traces) for number, w in enumerate(chosen)}
    for start, (setup, group) in itertools.product(range(starts), by_setup(chosen)):
        of = {
            w.name: {"gbit_s": w.gbit_s, "latency_s": w.latency_s, "arrivals": arrivals[w.name]}
            for w in group
        }
        yield {
            "setup": asdict(setup),
            "start": start,
            "links": list(dict.fromkeys((w.gbit_s, w.latency_s) for w in group)),
            "workloads": of,
            "store": of if start == 0 else {},
            "rounds": rounds(list(of), start, pairs),
        }


def _apart(number: int, workload: Workload, traces: Path) -> list[dict[str, Any]]:
    """Its arrivals, with block names that no other workload has."""
    return [
        {**asdict(each), "blocks": [1_000_000 * (1 + number) + block for block in each.blocks]}
        for each in workload.arrivals(traces)
    ]


def run(stack: Stack, link: Link, job: dict[str, Any], number: int) -> dict[str, Any]:
    """One engine's results. EmbeddedError if it fails or takes too long."""
    path, out, log = (stack.folder / f"engine-{number}.{end}" for end in ("job", "out", "log"))
    path.write_text(json.dumps({**job, "model": str(stack.model), "out": str(out), "link": asdict(link)}))
    env = stack.env(
        PYTHONPATH=os.pathsep.join(sys.path),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_MOONCAKE_LOAD_RECV_THREADS=str(job["setup"]["threads"]),
        # The model computes on one core; with two, its threads would wait for each other, spinning, while
        # receive threads and store node want a core (docs/benchmarks.md).
        OMP_NUM_THREADS="1",
        **TCP_QUEUE,
    )
    with spawned([sys.executable, "-m", "bench.gate.replay", str(path)], env=env, log=log) as process:
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise EmbeddedError(f"engine {number} did not end in {LIMIT_S:.0f} s: {tail(log, 3)}") from None
    if code:
        raise EmbeddedError(f"engine {number} ended with {code}: {tail(log, 8)}")
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=list(workloads.PARTS))
    parser.add_argument("--traces", type=Path, required=True, help="folder with the two public traces")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--starts", type=int, default=3, help="engines of each setup")
    parser.add_argument("--pairs", type=int, default=2, help="rounds of each mode on each engine")
    parser.add_argument("--minutes", type=float, default=30.0, help="no engine is started after this")
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    args = parser.parse_args()
    chosen = [w for w in workloads.PARTS[args.part] if args.only in w.name]
    document: dict[str, Any] = {
        "part": args.part,
        "made_at": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": " ".join(["python -m bench.gate.measure", *sys.argv[1:]]).replace(
            str(args.traces), "FOLDER"
        ),
        "environment": {**environment(), "load average": f"{os.getloadavg()[0]:.2f} before"},
        "engines": [],
        "failed": [],
    }
    started = time.monotonic()
    todo = list(jobs(chosen, args.starts, args.pairs, args.traces))
    with (
        orderly(),
        shaped_link() as link,
        Stack(segment_mb=SEGMENT_MB, host=link.near, node_host=link.far, node_enter=link.enter) as stack,
    ):
        for number, job in enumerate(todo):
            if time.monotonic() - started > 60 * args.minutes:
                document["failed"].append(
                    f"{len(todo) - number} engines: the {args.minutes:g} minutes were over"
                )
                break
            try:
                document["engines"].append(run(stack, link, job, number))
            except EmbeddedError as error:
                document["failed"].append(str(error))
                print(f"error: {error}", file=sys.stderr, flush=True)
            document["minutes"] = round((time.monotonic() - started) / 60, 2)
            write(args.out, document)
            print(f"engine {number + 1} of {len(todo)} after {document['minutes']:.1f} min", flush=True)
        write(args.out, document)
    print(f"Written: {args.out}")


def write(out: Path, document: dict[str, Any]) -> None:
    """One line for each round: small, and still a diff that can be read."""
    text = json.dumps(document, separators=(",", ":")).replace('{"workload"', '\n{"workload"') + "\n"
    replace_file(out, lambda scratch: scratch.write_text(text))


if __name__ == "__main__":
    main()
