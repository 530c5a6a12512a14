"""A small real vLLM engine in this process, with its connector within reach.

The environment must be set before vLLM is imported: see `singleflight.stack.embedded.Stack.env`. Scheduler
and worker share the process (VLLM_ENABLE_V1_MULTIPROCESSING=0), so a caller decides when a step runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ..plugin import NAME, register
from . import lmcache_bed, platform
from .instrument import instrument

STOCK = "MooncakeStoreConnector"
BLOCK_SIZE = 32
"""Tokens a block; vLLM on CPU wants a multiple of 32."""
FILL_S = 90.0
"""Seconds that storing something may take. On a loaded machine the first contact with a store node can time
out, and what the master has begun to take then blocks its key for 30 s."""
IDLE_S = 60.0
"""How long draining may take before it counts as stuck."""
_closed: list[Any] = []


@dataclass
class Burst:
    """What became of requests that arrived together.

    Attributes:
        tokens: request id -> generated token ids.
        ttft_s: request id -> seconds from the burst's start to its first token.
        wall_s: seconds from the burst's start to the last token.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    ttft_s: dict[str, float] = field(default_factory=dict)
    wall_s: float = 0.0


def of_the_store(connector: Any) -> Any:
    """The connector itself, or the child of a MultiConnector that is Mooncake's store's."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import MooncakeStoreConnector

    children = getattr(connector, "sub_connectors", [connector])
    return next(child for child in children if isinstance(child, MooncakeStoreConnector))


class Engine:
    """`MooncakeStoreConnector` ("stock"), LMCache's, one of ours, or no connector, on the tiny model in
    float32."""

    lmcache: lmcache_bed.Bed | None = None
    """Where the store is LMCache."""

    def __init__(
        self,
        model: str,
        connector: str | None,
        extra: Mapping[str, Any] | None = None,
        **engine_args: Any,
    ) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        register()
        transfer = None
        if connector is not None:
            settings = dict(extra or {})
            if connector == NAME:
                settings.setdefault("singleflight", {"mode": "attach"})
            transfer = {
                "kv_connector": connector,
                "kv_role": "kv_both",
                "kv_connector_extra_config": settings,
                **engine_args.pop("kv_transfer", {}),
            }
        arguments: dict[str, Any] = {
            "model": model,
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "block_size": BLOCK_SIZE,
            "max_model_len": 8192,
            "max_num_batched_tokens": 8192,
            "max_num_seqs": 128,
            "kv_transfer_config": transfer,
            **platform.engine_arguments(),
            **engine_args,
        }
        self.llm = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self.core: Any = self.llm.engine_core.engine_core  # type: ignore[attr-defined]
        self.scheduler: Any = self.core.scheduler
        self.connector: Any = self.scheduler.connector
        if connector is not None and self.llm.vllm_config.parallel_config.world_size == 1:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            # In the same process, so it is the worker's own.
            self.worker_connector = cast(Any, get_kv_transfer_group())
            if (scheduler_side := lmcache_bed.lmcache_of(self.connector)) is not None:
                worker_side = lmcache_bed.lmcache_of(self.worker_connector)
                assert worker_side is not None
                self.lmcache = lmcache_bed.instrument(self.connector, scheduler_side, worker_side)
                self.recorder, self.gate = self.lmcache.recorder, self.lmcache.gate
            else:
                self.recorder, self.gate = instrument(
                    of_the_store(self.connector), of_the_store(self.worker_connector)
                )

    # -- requests ----------------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int = 4,
        priority: int = 0,
        **sampling: Any,
    ) -> None:
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **sampling)
        self.llm.add_request(request_id, {"prompt_token_ids": list(prompt)}, parameters, priority=priority)

    def step(self) -> list[Any]:
        """One engine step; the outputs it made."""
        return self.llm.step()

    def collect(self, started: float, burst: Burst) -> Iterator[None]:
        """Step until no request is unfinished, filling `burst`; yields after every step."""
        while self.llm.has_unfinished_requests():
            for output in self.step():
                burst.ttft_s.setdefault(output.request_id, time.perf_counter() - started)
                if output.finished:
                    burst.tokens[output.request_id] = list(output.outputs[0].token_ids)
            yield
        burst.wall_s = time.perf_counter() - started

    def burst(
        self, prompts: Mapping[str, Sequence[int]], max_tokens: int = 4, barrier: bool = False
    ) -> Burst:
        """Run requests that arrive together. With `barrier`, no Get starts before all are scheduled.

        Raises TimeoutError if they are not all scheduled in time.
        """
        if barrier:
            self.gate.open.clear()
        started, burst = time.perf_counter(), Burst()
        try:
            for request_id, prompt in prompts.items():
                self.add(request_id, prompt, max_tokens)
            steps = self.collect(started, burst)
            while barrier and len(self.recorder.waiting) < len(prompts):
                ended = next(steps, "ended") == "ended"
                if ended or time.perf_counter() - started > IDLE_S:
                    raise TimeoutError(
                        f"only {len(self.recorder.waiting)} of {len(prompts)} requests were scheduled"
                    )
        finally:
            if barrier:
                self.gate.open.set()
        for _ in steps:
            pass
        return burst

    def fill(self, prompts: Iterable[Sequence[int]]) -> None:
        """Have the whole blocks of these prompts in the store and nowhere else: computed, saved, and dropped.

        Proved by the store's own lookup. TimeoutError if it does not get them.
        """
        limit = time.monotonic() + FILL_S
        missing = list(prompts)
        while missing:
            for i, prompt in enumerate(missing):
                self.burst({f"fill-{i}": prompt}, max_tokens=1)
            self.cold()  # not before the last put has ended
            missing = [prompt for prompt in missing if not self.stored(prompt)]
            if missing and time.monotonic() > limit:
                raise TimeoutError(f"the store did not take {len(missing)} prompts in {FILL_S:.0f} s")

    def stored(self, prompt: Sequence[int]) -> bool:
        """Whether the store has all whole blocks (LMCache: chunks) of the prompt that a lookup asks for."""
        if self.lmcache is not None:
            return self.lmcache.stored(prompt)
        from vllm import SamplingParams
        from vllm.v1.request import Request

        hasher = self.core.request_block_hasher
        request = Request("stored", list(prompt), SamplingParams(max_tokens=1), None, block_hasher=hasher)
        lookup = of_the_store(self.connector).connector_scheduler.client.lookup
        hits: int = lookup(request.request_id, request.num_tokens, request.block_hashes).hit_length
        return hits >= (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE

    # -- the caches --------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Step until nothing is left to do: requests, delayed frees, store jobs. TimeoutError if stuck."""
        limit = time.monotonic() + IDLE_S
        while self.scheduler.has_requests():
            self.step()
            if time.monotonic() > limit:
                raise TimeoutError("the engine still has work that does not end")

    def cold(self) -> None:
        """Empty the local prefix cache; the store keeps what it has. RuntimeError if vLLM refuses."""
        self.settle()
        if not self.scheduler.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: blocks are still in use")

    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def close(self) -> None:
        """End the engine; what it has of vLLM's connector stays in memory until the process ends."""
        # Nobody in vLLM closes the sockets of the lookup server and client, and a zmq context that is
        # collected waits for them for ever: a later garbage collection would hang the process.
        _closed.append((self.connector, getattr(self, "worker_connector", None)))
        self.llm.engine_core.shutdown()
