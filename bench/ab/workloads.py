"""The matrix: what is sent, over which link, to servers started how, and why it is in.

A load is Mooncake-format rows for `timed_trace` (seconds, input length, hash ids of 64-token chunks), or the
arguments of another data set of `vllm bench serve`. A prefix is stored once, before any round; what follows
it is shorter than a KV block (32 tokens), so that no round changes what the next one finds in the store.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.ab.servers import Setup

CHUNK = 64
"""Tokens a hash id stands for."""
OWN = 8
"""Tokens of each request's own, after everything that can be shared."""
PREFIX = 4096
OUTPUT = 4
"""Tokens generated: TTFT is what is measured, and a few more make the stream a stream."""
SLOW = 0.4
"""Gbit/s: a 4,096-token prefix of the tiny model (2 KiB a token, 8.4 MB) takes 0.17 s, about what that of a
70B model (320 KiB a token, 1.3 GB) takes at 64 Gbit/s."""
RATES = (SLOW, 1.0, 4.0, None)
FAN_INS = (1, 2, 4, 8, 16, 32, 64)
TRACE_SCALE = 8
"""A trace's tokens are divided by this: its 512-token blocks become chunks, its prompts fit the model."""
TRACE_TOKENS = 7936
_OWN_IDS = 1_000_000_000
"""Hash ids from here on are of chunks that nobody shares."""


@dataclass(frozen=True)
class Load:
    """Attributes: name: also of its file; rows: Mooncake format, or () where `args` say everything;
    args: arguments of `vllm bench serve` for another data set."""

    name: str
    rows: tuple[dict[str, Any], ...] = ()
    args: tuple[str, ...] = ()

    def arguments(self, folder: Path) -> list[str]:
        """For `vllm bench serve`; the rows are written to `folder`."""
        if not self.rows:
            return list(self.args)
        path = folder / f"{self.name}.jsonl"
        if not path.exists():
            path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        return [
            "--dataset-name", "timed_trace", "--dataset-path", str(path),
            "--num-prompts", str(len(self.rows)), "--timed-trace-chunk-hash-size", str(CHUNK),
        ]  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One workload over one link.

    Attributes:
        name: unique.
        why: the reason that it is in the matrix.
        gbit_s: the link's rate; None: unshaped.
        latency_s: added to every Get, in the process (tc cannot delay here).
        warm: the prefix cache keeps what a first, unrecorded round has brought; all others start cold.
        alone: the burst's first request by itself, where the lower bound is measured too.
        quick: part of the short run.
    """

    name: str
    why: str
    load: Load
    gbit_s: float | None = SLOW
    latency_s: float = 0.0
    setup: Setup = field(default_factory=Setup)
    warm: bool = False
    alone: Load | None = None
    quick: bool = False


def _row(at_s: float, shared: Iterable[int], own: int, tokens: int = OWN) -> dict[str, Any]:
    ids = list(shared)
    return {
        "timestamp": at_s,
        "input_length": len(ids) * CHUNK + tokens,
        "output_length": OUTPUT,
        "hash_ids": [*ids, _OWN_IDS + own],
    }


def _ids(prefix: int, tokens: int = PREFIX) -> range:
    """The chunks of one prefix; different prefixes share none."""
    return range(prefix * 1000, prefix * 1000 + tokens // CHUNK)


def burst(fan_in: int) -> Load:
    """Requests at one moment that share a prefix."""
    return Load(f"burst-{fan_in}", tuple(_row(0.0, _ids(1), own) for own in range(fan_in)))


def partial(requests: int = 16) -> Load:
    """1k tokens shared, then 3k of each request's own, all of it in the store."""
    shared, own = _ids(2, 1024), PREFIX - 1024
    return Load("partial", tuple(_row(0.0, [*shared, *_ids(100 + i, own)], i) for i in range(requests)))


def agents(prompts: int = 5, children: int = 8, every_s: float = 0.4, tokens: int = 2048) -> Load:
    """One prompt after another, each asked by all of its children at once."""
    rows = (_row(p * every_s, _ids(200 + p, tokens), c) for p in range(prompts) for c in range(children))
    return Load("agents", tuple(rows))


def spaced(requests: int = 24, every_s: float = 0.05) -> Load:
    """One prefix, one request after another, each alone on the server: what a request costs, and not how a
    burst happened to be cut into batches."""
    return Load("spaced", tuple(_row(i * every_s, _ids(1), i) for i in range(requests)))


def distinct(requests: int = 16) -> Load:
    return Load("distinct", tuple(_row(0.0, _ids(300 + i), i) for i in range(requests)))


def pressure(requests: int = 16, prefixes: int = 4) -> Load:
    return Load("pressure", tuple(_row(0.0, _ids(400 + i % prefixes), i) for i in range(requests)))


def poisson(requests: int = 30, rate: float = 5.0) -> Load:
    args = (
        "--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "1",
        "--prefix-repetition-prefix-len", str(PREFIX), "--prefix-repetition-suffix-len", "24",
        "--prefix-repetition-output-len", str(OUTPUT), "--num-prompts", str(requests),
        "--request-rate", str(rate), "--seed", "7",
    )  # fmt: skip
    return Load("poisson", args=args)


def trace(path: Path, seconds: float, speed: float = 1.0) -> Load:
    """The start of a Mooncake trace, so many seconds of it, token counts divided by TRACE_SCALE; its pace is
    its own, or so many times faster."""
    rows = []
    with path.open() as lines:
        for number, line in enumerate(lines):
            row = json.loads(line)
            if row["timestamp"] >= seconds * 1000:
                break
            tokens = min(TRACE_TOKENS, max(1, row["input_length"] // TRACE_SCALE))
            whole, rest = divmod(tokens - 1, CHUNK)
            # The last chunk is cut shorter than the trace has it, so it is the request's own.
            shared = row["hash_ids"][:whole]
            own = rest + 1 + (whole - len(shared)) * CHUNK
            rows.append(_row(row["timestamp"] / 1000 / speed, shared, number, own))
    return Load(path.stem if speed == 1 else f"{path.stem}-{speed:g}", tuple(rows))


def matrix(traces: Path) -> tuple[list[Cell], dict[str, str]]:
    """Every cell, those with equal setups side by side; and what is left out, with the reason."""
    left_out = {}
    cells = [
        Cell(
            f"burst of {n}",
            "one cold prefix, n requests at one moment: what single-flight is for"
            + (" (alone: nothing to share, so pure overhead)" if n == 1 else ""),
            burst(n),
            quick=n in (8, 32),
            alone=burst(1) if n == 32 else None,
        )
        for n in FAN_INS
    ]
    cells += [
        Cell(
            f"burst of {n}, {f'{rate:g} Gbit/s' if rate else 'unshaped'}",
            "the faster the link, the less there is to save; where does it stop to pay",
            burst(n),
            gbit_s=rate,
        )
        for rate in RATES[1:]
        for n in (8, 32)
    ]
    cells += [
        Cell(
            "partial overlap",
            "16 x (1k shared, 3k own, all in the store): followers still have a load of their own, and one"
            " that waits for the shared part before it starts its own loses time",
            partial(),
            quick=True,
        ),
        Cell(
            "agent fan-out",
            "8 children of one 2k prompt at once, every 0.4 s another prompt: the densest natural cohort",
            agents(),
        ),
        Cell(
            "Poisson, shared system prompt",
            "5 requests a second, one 4k system prompt, after a restart: only the first second has anything"
            " to share (prefix_repetition)",
            poisson(),
        ),
        Cell("no sharing", "16 different 4k prefixes at once: pure overhead", distinct(), quick=True),
        Cell(
            "all warm",
            "24 requests, one every 50 ms, prefix in the local cache: pure overhead, no load at all",
            spaced(),
            warm=True,
            quick=True,
        ),
    ]
    for stem in ("conversation_trace", "synthetic_trace"):
        path = traces / f"{stem}.jsonl"
        if path.exists():
            why = (
                "a real mix of hits, loads and rare overlaps (start of the trace, tokens / 8): must not lose"
            )
            cells.append(Cell(stem.replace("_", " "), why, trace(path, 7.0)))
        else:
            left_out[stem] = f"no such file in the trace folder ({path.name})"
    cells += [
        Cell(
            f"0.3 s latency, {threads} receive threads" if threads > 1 else "0.3 s latency, 1 receive thread",
            "a far store: loads wait rather than use the link, so with threads they run side by side, and"
            " whoever waits for another's load first loses a whole round trip",
            partial(),
            gbit_s=None,
            latency_s=0.3,
            setup=Setup(recv_threads=threads, limited=True),
        )
        for threads in (1, 4, 16)
    ]
    cells.append(
        Cell(
            "KV pressure",
            "room for 3 prefixes, 16 requests for 4 different ones: allocation fails, blocks are evicted",
            pressure(),
            # 128 blocks a prefix, one for each request's end, and vLLM's null block.
            setup=Setup(kv_blocks=3 * (PREFIX // 32 + 2) + 1),
        )
    )
    return cells, left_out


def choose(cells: Sequence[Cell], wanted: str, quick: bool) -> list[Cell]:
    """Cells of the short run if `quick`, whose names contain `wanted` (ValueError if none does)."""
    found = [cell for cell in cells if wanted in cell.name and (cell.quick or not quick)]
    if not found:
        names = ", ".join(cell.name for cell in cells if cell.quick or not quick)
        raise ValueError(f"no workload's name contains {wanted!r}; they are: {names}")
    return found
