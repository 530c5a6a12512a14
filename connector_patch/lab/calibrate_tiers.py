"""Where a Mooncake store has its objects, and how probe keys get to where a measurement wants them.

An SSD tier (`mooncake_master --enable_offload=true`, and store nodes that offload) writes every object to
disk beside its copy in memory, and reads the disk only once that copy is gone. Filling the pool until it
evicts would evict what others keep there, so the probe keys' own copies are cleared instead.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from enum import Enum
from typing import Any

WRITTEN_S = 90.0
"""How long writing the probe keys to disk may take: owners ask for work every 10 s by default."""
MORE_AFTER_S = 15.0
"""How long to wait before more keys are put: owners write whole buckets, and can lose the rest of one."""
MOST_KEYS = 512
"""Keys put in all: an owner's bucket holds 500 by default."""
CLEARED_S = 60.0
"""How long clearing their copies in memory may take: it waits for leases, 10 s by default."""
AGAIN_S = 1.0


class StoreError(RuntimeError):
    """The store cannot be measured; one sentence."""


class Tier(Enum):
    """Where loads come from."""

    MEMORY = "memory"
    SSD = "ssd"


def tiers_of(store: Any, keys: list[str]) -> dict[str, Tier | None]:
    """Key -> the tier a Get reads it from: memory if there is a copy, otherwise a disk; None if neither."""
    found: dict[str, Tier | None] = {}
    for key, replicas in store.batch_get_replica_desc(keys).items():
        whole = [each for each in replicas if _is_whole(each)]
        if any(each.is_memory_replica() for each in whole):
            found[key] = Tier.MEMORY
        else:
            found[key] = Tier.SSD if any(map(_is_on_disk, whole)) else None
    return {key: found.get(key) for key in keys}


def to_ssd(store: Any, put: Callable[[int], list[str]], wanted: int, say: Callable[[str], None]) -> list[str]:
    """Have so many keys on disk only: put them, wait until they are written, clear the copies in memory.

    Args:
        put: puts so many new keys and returns them.

    Raises:
        StoreError: they do not get to a disk in time, or their copies do not go.
    """
    say("measuring the store: waiting for the probe keys to be written to disk")
    keys = put(wanted)
    now = time.monotonic()
    limit, more = now + WRITTEN_S, now + MORE_AFTER_S
    while len(written := _on_disk(store, keys)) < wanted:
        now = time.monotonic()
        if now > limit:
            raise StoreError(
                f"{len(written)} of {len(keys)} probe keys were written to disk within {WRITTEN_S:.0f} s, and"
                f" {wanted} are needed; give mooncake_master and the store nodes --enable_offload=true, and"
                " on an otherwise idle store the nodes MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT=16: they write"
                " whole buckets"
            )
        if now > more and len(keys) < MOST_KEYS:
            keys += put(min(len(keys), MOST_KEYS - len(keys)))
            more = now + MORE_AFTER_S
        time.sleep(AGAIN_S)
    keys = written[:wanted]
    say("measuring the store: clearing the copies in memory, once their leases have ended")
    copies = defaultdict(list)
    for key, replicas in store.batch_get_replica_desc(keys).items():
        for each in replicas:
            if each.is_memory_replica():
                place = each.get_memory_descriptor().buffer_descriptor.transport_endpoint
                copies[place].append(key)
    limit = time.monotonic() + CLEARED_S
    for place, left in copies.items():
        # Asking for descriptors would renew the leases; this call answers with what it has cleared.
        while left := sorted({*left} - {*store.batch_replica_clear(left, place)}):
            if time.monotonic() > limit:
                raise StoreError(
                    f"{len(left)} of {len(keys)} probe keys still have their copy in memory"
                    f" after {CLEARED_S:.0f} s, so Gets would not read the disk; is the master's lease"
                    " longer than that?"
                )
            time.sleep(AGAIN_S)
    return keys


def _on_disk(store: Any, keys: list[str]) -> list[str]:
    found = store.batch_get_replica_desc(keys)
    return [k for k in keys if any(_is_whole(each) and _is_on_disk(each) for each in found.get(k, ()))]


def _is_whole(replica: Any) -> bool:
    return str(replica.status).endswith("COMPLETE")


def _is_on_disk(replica: Any) -> bool:
    return bool(replica.is_local_disk_replica() or replica.is_disk_replica())
