"""The engine that the twin stands for, as it is configured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from singleflight.core.policy import Policy

Mode = Literal["stock", "attach", "park"]
MODES: tuple[Mode, ...] = get_args(Mode)

Stored = Literal["computed", "warm"]
MAX_THREADS = 1024
OnDeadline = Literal["recompute", "load"]


def policy_for(block_tokens: int) -> Policy:
    """The connector's default policy where a block has so many tokens: `Policy`'s is for 16."""
    default = Policy()
    return replace(default, deadline_per_block_s=default.deadline_per_block_s / 16 * block_tokens)


@dataclass(frozen=True)
class Instance:
    """One vLLM engine.

    Attributes:
        block_tokens: tokens a block, of the trace and of the cache; at least 1.
        gpu_blocks: blocks that requests can have: vLLM's `num_gpu_blocks` less its null block.
        receive_threads: VLLM_MOONCAKE_LOAD_RECV_THREADS.
        max_num_seqs: requests that run at once. max_num_batched_tokens: of a step; at least `max_num_seqs`.
        lookup_async: the connector's setting; False: the scheduler waits for the store's answer.
        store: what the store holds. ``computed``: what this instance has computed, from the end of that
            step on, and what others have (`Arrivals.stored_from`). ``warm``: every block from the start.
        policy: of attach and park mode; None: the connector's default for these blocks.
        on_deadline: the connector's setting, where a follower goes whose deadline has passed.
        synchronous_launch: a step's loads start when it has computed, not when it begins. vLLM 0.32 starts
            them after the launch (`KVConnectorModelRunnerMixin`), which returns at once on a GPU, and on a
            CPU when all is computed.
        in_process: the engine's own thread takes requests, before each step all that are due, as in offline
            inference (`vllm.LLM`). False: the front end is a process of its own, as in a server.

    Raises:
        ValueError: a value out of range; says which, and what is accepted.
    """

    block_tokens: int
    gpu_blocks: int
    receive_threads: int = 1
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    lookup_async: bool = False
    store: Stored = "computed"
    policy: Policy | None = None
    on_deadline: OnDeadline = "recompute"
    synchronous_launch: bool = False
    in_process: bool = False

    def __post_init__(self) -> None:
        for name in ("block_tokens", "gpu_blocks", "receive_threads", "max_num_seqs"):
            most = MAX_THREADS if name == "receive_threads" else 2**31 - 1
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} {getattr(self, name)}; accepted: 1 to {most}")
        if not self.max_num_seqs <= self.max_num_batched_tokens < 2**31:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens};"
                f" accepted: max_num_seqs ({self.max_num_seqs}) to 2147483647"
            )
        for name, accepted in (("store", get_args(Stored)), ("on_deadline", get_args(OnDeadline))):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} {getattr(self, name)!r}; accepted: {', '.join(accepted)}")

    @property
    def rules(self) -> Policy:
        """The policy that applies."""
        return self.policy or policy_for(self.block_tokens)
