"""What one simulated engine is like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

MODES = ("stock", "off", "attach", "park", "shadow")
STORES = ("mooncake", "offloading", "simple")


@dataclass(frozen=True)
class Setup:
    """One engine. Its defaults are the plainest one; a shrunk story says only what differs from them."""

    mode: str = "attach"
    """One of `MODES`; `stock` is MooncakeStoreConnector itself, `off` is ours doing nothing."""
    store: str = "mooncake"
    """One of `STORES`: MooncakeStoreConnector, or vLLM's OffloadingConnector or SimpleCPUOffloadConnector."""
    cpu_blocks: int = 64
    """Blocks that the CPU memory of the latter two has room for."""
    chunk: int = 1
    """OffloadingConnector's blocks_per_chunk."""
    lazy: bool = False
    """SimpleCPUOffloadConnector's lazy_offload."""
    block_size: int = 4
    blocks: int = 64
    """GPU blocks that requests can have."""
    spec: str = "full"
    """KV-cache groups (`groups.SPECS`): `full`; `mla` (one group, the same bytes on every rank); `window`
    (two sliding-window groups and a full one); `chunked` (chunked local attention and full)."""
    window: int = 9
    """Tokens of a sliding window, the new one included, or of a chunk."""
    retention: int | None = None
    """prefix_cache_retention_interval: None keeps every window in the prefix cache and the store; 0, vLLM's
    default, that at a prompt's end."""
    ranks: int = 1
    """Tensor parallelism."""
    stages: int = 1
    """Pipeline parallelism: so many batches in flight (one more with the v2 runner and async scheduling)."""
    pcp: int = 1
    """Prefill context parallelism: each of these has all of a block, under keys of its own."""
    dcp: int = 1
    """Decode context parallelism: so many ranks share a block; `block_size` is that of the whole."""
    drafts: int = 0
    """Tokens that a drafter proposes in each step; 0: no speculative decoding."""
    drafter: str = "ngram"
    """`ngram`, which has no KV of its own; `eagle` or `draft_model`, which have."""
    lanes: int = 1
    """Receive threads of each rank."""
    async_scheduling: bool = False
    late_forwards: bool = False
    """With batches in flight: the GPU gets to a batch only when its output is asked for."""
    v2_runner: bool = False
    lookup_async: bool = False
    load_async: bool = True
    wrapped: bool = False
    """Ours is SingleFlightConnector around the stock connector, of which it sees the calls alone."""
    asked_first: bool = False
    """The stock connector is taken for one that must be asked about each request, as LMCache's must."""
    other: str = ""
    """A second connector in vLLM's MultiConnector: `before` ours, or `after` it."""
    other_loads: str = "async"
    """How it loads: `async`, or `sync`, within the step."""
    other_fails: bool = False
    """Some of its loads fail."""
    role: str = "kv_both"
    """A `kv_consumer` stores nothing."""
    save_decode: bool = False
    recompute: bool = False
    """kv_load_failure_policy: `recompute`, not `fail`."""
    policy: str = "fcfs"
    watermark: float = 0.0
    """Part of the blocks that stays free where a waiting request is admitted beside running ones."""
    token_budget: int = 64
    max_seqs: int = 8
    long_prefill: int = 0
    """Largest chunk of a prefill; 0: as much as the token budget allows."""
    reserve_full: bool = True
    """scheduler_reserve_full_isl: a prompt is admitted only if there is room for all of it."""
    events: bool = True
    """Publish KV events."""
    check_events: bool = False
    """Check at the end that they make sense to who follows them."""
    load_or_compute: str = "off"
    """`on`: requests may compute what the store has."""
    warm: bool = False
    """It knows from the start what loads and prefills take."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """More of `kv_connector_extra_config.singleflight`."""
    unsupported: bool = False
    """Run it although compat.py refuses this configuration."""
    refused: bool = False
    """compat.py does refuse it: the connector passes through."""

    hold: bool = False
    """Loads stay in the air until they are landed by name."""
    step_s: float = 0.01
    token_s: float = 0.0
    """A step takes longer by this for each token, and loads are queued once it is computed, as on CPUs."""
    load_s: float = 0.05
    """Shortest load; each takes up to three times as long, and longer by `load_block_s` a block."""
    load_block_s: float = 0.005
    timing: int = 0
    """Another number: other durations."""
    heal: bool = True
    """Work round vLLM's own bugs that hide ours (`known.heal`)."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode: {self.mode!r} is none of {MODES}")
        if self.store not in STORES:
            raise ValueError(f"store: {self.store!r} is none of {STORES}")

    @property
    def workers(self) -> int:
        return self.ranks * self.stages * self.pcp

    def differs(self) -> dict[str, Any]:
        """Fields that are not the default."""
        plain = type(self)()
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name == "mode" or getattr(self, f.name) != getattr(plain, f.name)
        }

    def __repr__(self) -> str:
        return f"Setup({', '.join(f'{name}={value!r}' for name, value in self.differs().items())})"
