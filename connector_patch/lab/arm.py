"""One arm of a comparison: an engine in a process of its own, driven by JSON lines over a socket.

`python -m connector_patch.lab.arm --fd N --model DIR --connector NAME` answers {"ready": ...} and then one
line for each command, until the other end closes. `singleflight.stack.arms` is the other end.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from dataclasses import asdict
from typing import Any

from .. import compat
from . import lmcache_bed
from .engine import of_the_store


class Arm:
    """Commands, by name."""

    def __init__(
        self, model: str, connector: str | None, extra: dict[str, Any], engine: dict[str, Any]
    ) -> None:
        from ..plugin import NAME
        from .engine import Engine

        if connector == NAME and (reason := compat.missing_feature()):
            raise RuntimeError(reason)
        self.engine = Engine(model, connector, extra, **engine)
        if connector is not None and (reason := getattr(self._coalescing(), "passes_through", None)):
            raise RuntimeError(reason)

    def _coalescing(self) -> Any:
        """Our connector, if the engine has one: vLLM's, or a child of its MultiConnector."""
        connector = self.engine.connector
        return connector if lmcache_bed.lmcache_of(connector) is not None else of_the_store(connector)

    def mode(self) -> dict[str, Any]:
        """What our connector came to at start-up."""
        return {"mode": self._coalescing().mode.value}

    def cold(self) -> dict[str, Any]:
        """Nothing is left to do and nothing in the prefix cache; says how many blocks are free then."""
        self.engine.cold()
        return {"free_blocks": self.engine.free_blocks()}

    def fill(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Have their whole blocks in the store and nowhere else."""
        self.engine.fill(prompts)
        return {}

    def burst(
        self,
        prompts: dict[str, list[int]],
        max_tokens: int = 4,
        barrier: bool = False,
        bytes_per_s: float | None = None,
    ) -> dict[str, Any]:
        if self.engine.connector is None:
            return asdict(self.engine.burst(prompts, max_tokens))
        self.engine.gate.bytes_per_s = bytes_per_s
        self.engine.recorder.take()
        burst = self.engine.burst(prompts, max_tokens, barrier)
        counts = self.engine.recorder.take().as_json()
        self.engine.settle()
        return {"counts": counts, **asdict(burst)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited socket")
    parser.add_argument("--model", required=True)
    parser.add_argument("--connector", required=True, help='its name, or "none"')
    parser.add_argument("--extra", type=json.loads, default={}, help="kv_connector_extra_config, JSON")
    parser.add_argument("--engine", type=json.loads, default={}, help="more of `Engine`'s arguments, JSON")
    args = parser.parse_args()
    with socket.socket(fileno=args.fd) as sock, sock.makefile("rw") as wire:

        def say(answer: dict[str, Any]) -> None:
            wire.write(json.dumps(answer) + "\n")
            wire.flush()

        try:
            connector = None if args.connector == "none" else args.connector
            arm = Arm(args.model, connector, args.extra, args.engine)
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})
            raise
        say({"ready": True})
        for line in wire:
            command = json.loads(line)
            name = command.pop("command")
            try:
                say(getattr(arm, name)(**command))
            except Exception as error:
                say({"error": f"{type(error).__name__}: {error}"})
                raise
    arm.engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
