"""What the layer costs the scheduler, what loads and engine steps take: measured, for the twin.

`python -m connector_patch.lab.calibrate --out FILE` runs in a process of its own (`singleflight calibrate` is
the other end) and writes a calibration file.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from singleflight.gate.calibration import Calibration
from singleflight.stack.demo import environment
from singleflight.twin.figures import Figures

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

BLOCK = 16
"""Tokens a block, vLLM's usual size."""
IN_FLIGHT = 16
"""Requests whose loads are in the air together."""
RUNS = (1, 256)
"""Blocks a request: their difference is the cost of a block, and the rest of the short one a lookup's."""
PASSES = 101


class FullStore:
    """Stands in for the stock scheduler side: a store that has every block and answers at once.

    What is measured is what our layer adds to it, so its own time, the same in both arms, drops out.
    """

    def __init__(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import LoadSpec

        self._spec = LoadSpec
        self._block_size = self._hash_block_size = BLOCK
        self.load_specs: dict[str, Any] = {}
        self.client = SimpleNamespace(futures={}, discard=lambda request_id: None)

    def get_num_new_matched_tokens(self, request: Request, num_local: int) -> tuple[int, bool]:
        end = (request.num_tokens - 1) // BLOCK * BLOCK
        self.load_specs[request.request_id] = self._spec(num_local, end, False)
        return end - num_local, True

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external: int) -> None:
        self.load_specs[request.request_id].can_load = True


def manager() -> KVCacheManager:
    """vLLM's own, large enough for all requests in flight."""
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float16)
    blocks = 2 * IN_FLIGHT * max(RUNS)
    config = KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return KVCacheManager(
        config, max_model_len=blocks * BLOCK, scheduler_block_size=BLOCK, hash_block_size=BLOCK
    )


def requests(run: int) -> list[Request]:
    """Prompts of `run` blocks and one token, no block in common."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    sampling = SamplingParams(max_tokens=1)
    sampling.update_from_generation_config({}, eos_token_id=0)
    return [
        Request(f"r{i}", [i + 1] * (run * BLOCK + 1), sampling, None, block_hasher=hasher)
        for i in range(IN_FLIGHT)
    ]


class Stock:
    """What vLLM's scheduler does with loads from a store, in the order it does it."""

    def __init__(self) -> None:
        self.manager = manager()
        self.side: Any = FullStore()

    def one_pass(self, batch: list[Request]) -> None:
        """All requests are looked up and allocated; all their loads end; all are freed."""
        for request in batch:
            external, _ = self.match(request)
            self.manager.allocate_slots(
                request,
                0,
                num_new_computed_tokens=0,
                new_computed_blocks=self.manager.empty_kv_cache_blocks,
                num_external_computed_tokens=external,
                delay_cache_blocks=True,
            )
            self.allocated(request, external)
        self.landed(batch)
        for request in batch:
            self.manager.cache_blocks(request, request.num_tokens - 1)
            self.manager.free(request)

    def match(self, request: Request) -> tuple[int, bool]:
        return self.side.get_num_new_matched_tokens(request, 0)  # type: ignore[no-any-return]

    def allocated(self, request: Request, external: int) -> None:
        self.side.update_state_after_alloc(request, self.manager.get_blocks(request.request_id), external)

    def landed(self, batch: list[Request]) -> None:
        pass


class Ours(Stock):
    """The same with attach mode between: the real AttachScheduler, table and allocation wrapper."""

    def __init__(self) -> None:
        from ..attach import AttachScheduler
        from ..config import Config
        from ..mooncake import MooncakeStore

        super().__init__()
        self.attach = AttachScheduler(MooncakeStore(self.side), self.manager, Config())

    def match(self, request: Request) -> Any:
        answer = self.attach.match(request, 0)
        self.attach.chosen(request.request_id)
        return answer

    def allocated(self, request: Request, external: int) -> None:
        self.attach.allocated(request, self.manager.get_blocks(request.request_id), external)

    def landed(self, batch: list[Request]) -> None:
        from vllm.v1.outputs import KVConnectorOutput

        self.attach.acknowledgements()
        self.attach.output(KVConnectorOutput(finished_recving={request.request_id for request in batch}))
        for request in batch:
            self.attach.finished(request.request_id)


def coordination() -> dict[str, float]:
    """What attach mode adds, as figures of the twin: s a request, and s a block.

    The median over passes of (ours - stock), which take turns; a line through two lengths of run. Every
    request leads a load of its own, the dearest thing that can become of one.
    """
    stock, ours = Stock(), Ours()
    gc.collect()
    gc.freeze()  # a collection over all that vLLM has imported would be longer than a pass
    added = []
    for run in RUNS:
        batch = requests(run)
        differences = []
        for number in range(PASSES + 1):
            took = [_timed(arm, batch) for arm in (stock, ours)]
            if number:  # the first warms up
                differences.append((took[1] - took[0]) / IN_FLIGHT)
        added.append(statistics.median(differences))
    if ours.attach.table.stats.landed != len(RUNS) * (PASSES + 1) * IN_FLIGHT:
        raise RuntimeError("not every request led a load that landed, so this measured something else")
    per_block = max(0.0, (added[1] - added[0]) / (RUNS[1] - RUNS[0]))
    return {
        "coordination_per_lookup": max(0.0, added[0] - per_block * RUNS[0]),
        "coordination_per_block": per_block,
    }


def _timed(arm: Stock, batch: list[Request]) -> float:
    started = time.perf_counter()
    arm.one_pass(batch)
    return time.perf_counter() - started


def say(doing: str) -> None:
    """For whoever started this process, and passes it on."""
    print(f"progress: {doing}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mooncake-config", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tier", default="memory")
    parser.add_argument("--model")
    parser.add_argument("--engine-args", type=json.loads, default={})
    args = parser.parse_args()
    figures, notes = Figures(), []
    if args.mooncake_config is not None:  # first, since it may not be there
        from . import calibrate_store
        from .calibrate_tiers import StoreError

        try:
            store = calibrate_store.measure(args.mooncake_config, args.threads, args.tier, say)
        except StoreError as fault:
            print(f"error: {fault}", flush=True)
            return 1
        figures, notes = figures.measured(**store.figures()), [store.note()]
    if args.model is not None:
        from . import calibrate_engine

        try:
            engine = calibrate_engine.measure(args.model, args.engine_args, say)
        except calibrate_engine.EngineError as fault:
            print(f"error: {fault}", flush=True)
            return 1
        figures = figures.measured(**engine.figures())
        notes.append(engine.note())
    say("measuring the coordination cost")
    figures = figures.measured(**coordination())
    notes.append(
        f"Coordination: attach mode less stock, median of {PASSES} passes of {IN_FLIGHT} requests with runs"
        f" of {RUNS[0]} and {RUNS[1]} blocks, each leading a load of its own."
    )
    made_at = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    Calibration(figures, made_at, environment(), notes).write(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
