"""The load: `vllm bench serve`, called in this process.

Its `timed_trace` data set takes Mooncake's format and sends token ids at given times, so a burst is a trace
whose timestamps agree, and every workload goes through the one client that the field uses.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Sequence
from typing import Any

from bench.ab.servers import Server
from singleflight.stack.embedded import tail


class LoadError(RuntimeError):
    """A request failed, so that the round measures nothing."""


@functools.cache
def _parser() -> Any:
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    return parser


def drive(server: Server, load: Sequence[str]) -> list[float]:
    """Send one load, given as arguments of `vllm bench serve`; every request's TTFT in seconds.

    TTFT runs from when the client begins to send a request to its first streamed token. LoadError if any
    request failed.
    """
    return list(send(server, load)["ttfts"])


def send(server: Server, load: Sequence[str]) -> dict[str, Any]:
    """The same; all that `vllm bench serve` has to say. `ttfts`, and `itls` (the times between a request's
    streamed tokens), are in the order of the rows."""
    from vllm.benchmarks.serve import main

    arguments = ["--base-url", server.url, "--model", str(server.model), "--tokenizer", str(server.model)]
    # A readiness check would send the first prompt, and so make its prefix warm.
    arguments += ["--ready-check-timeout-sec", "0", "--ignore-eos", "--temperature", "0"]
    arguments += ["--disable-tqdm", "--save-detailed", *load]
    with contextlib.redirect_stdout(io.StringIO()):
        result: dict[str, Any] = main(_parser().parse_args(arguments))
    if result["failed"] or not result["completed"]:
        raise LoadError(
            f"{result['failed']} requests to arm {server.arm} failed; the server said: {tail(server.log, 5)}"
        )
    return result
