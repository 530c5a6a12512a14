"""N coroutines fetch overlapping block runs from a real Mooncake store; each block leaves the store once.

    python docs/examples/async_store_fetch.py                          # starts a store of its own on loopback
    python docs/examples/async_store_fetch.py --config mooncake.json   # uses yours
    python docs/examples/async_store_fetch.py --backend trio --callers 200

`StoreFetcher` is the part to take along: an async loader over MooncakeDistributedStore, whose calls block,
in worker threads. The rest writes blocks, lets the callers loose, once without and once with single-flight,
checks every byte, and prints what the store was asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from singleflight.aio import FlightGroup

BLOCK_BYTES = 64 << 10


class StoreFetcher:
    """`await fetcher(keys)`: the blocks, in one Get, off the event loop's thread. Counts what it asks."""

    def __init__(self, store: Any, threads: int = 4) -> None:
        self.store = store
        self.gets = 0
        self.blocks = 0
        self._threads = anyio.CapacityLimiter(threads)

    async def __call__(self, keys: Sequence[str]) -> dict[str, bytes]:
        self.gets += 1
        self.blocks += len(keys)
        # Not abandoned on cancellation: the store writes into memory of its own until the call returns.
        blocks = await anyio.to_thread.run_sync(self.store.get_batch, list(keys), limiter=self._threads)
        missing = [key for key, block in zip(keys, blocks, strict=True) if not block]
        if missing:
            raise LookupError(
                f"the store does not have {len(missing)} of {len(keys)} blocks: {missing[0]}, …"
            )
        return dict(zip(keys, blocks, strict=True))


@contextlib.contextmanager
def connected(config_path: Path) -> Iterator[Any]:
    """A client of the store that the Mooncake JSON names."""
    os.environ.setdefault("GLOG_minloglevel", "2")  # read at import
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    from mooncake.store import MooncakeDistributedStore

    config = json.loads(config_path.read_text())
    store = MooncakeDistributedStore()
    code = store.setup(
        "127.0.0.1",
        config["metadata_server"],
        int(config.get("global_segment_size", 0)),
        int(config.get("local_buffer_size", 64 << 20)),
        config.get("protocol", "tcp"),
        config.get("device_name", ""),
        config["master_server_address"],
    )
    if code != 0:
        raise SystemExit(f"cannot join {config['master_server_address']}: Mooncake's code {code}")
    try:
        yield store
    finally:
        store.close()


@contextlib.contextmanager
def a_store(config_path: Path | None) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        if config_path is None:
            from singleflight.stack.embedded import Stack

            config_path = stack.enter_context(Stack()).config_path
        yield stack.enter_context(connected(config_path))


def content(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest() * (BLOCK_BYTES // 32)


def block_runs(callers: int, shared: int, own: int) -> list[list[str]]:
    """What each caller needs: a prefix that all share, to a varying depth, and blocks of its own."""
    namespace = f"kv-singleflight-example/{uuid.uuid4().hex}"
    runs = []
    for caller in range(callers):
        depth = shared - (caller % 4) * (shared // 4)
        runs.append(
            [f"{namespace}/prefix/{block}" for block in range(depth)]
            + [f"{namespace}/caller-{caller}/{block}" for block in range(own)]
        )
    return runs


async def fetch_all(fetch: Any, runs: list[list[str]]) -> float:
    """Every caller at once, each checking what it got. Returns seconds."""

    async def caller(keys: list[str]) -> None:
        blocks = await fetch(keys)
        for key in keys:
            if blocks[key] != content(key):
                raise SystemExit(f"wrong bytes for {key}")

    start = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for keys in runs:
            tasks.start_soon(caller, keys)
    return time.perf_counter() - start


async def compare(store: Any, runs: list[list[str]]) -> None:
    asked, distinct = sum(map(len, runs)), len({key for keys in runs for key in keys})
    print(f"{len(runs)} callers ask for {asked} blocks, {distinct} distinct\n")
    print(f"{'':22}{'Gets':>8}{'blocks read':>14}{'MiB':>8}{'seconds':>10}")

    alone = StoreFetcher(store)
    seconds = await fetch_all(alone, runs)
    report("each for itself", alone, seconds)

    together = StoreFetcher(store)
    async with FlightGroup(together) as flights:
        seconds = await fetch_all(functools.partial(flights.load, deadline=60), runs)
        report("with single-flight", together, seconds)
        counts = flights.snapshot()
    print(
        f"\n{counts['flights']} flights, {counts['attached']} callers attached,"
        f" {counts['blocks_adopted']} block reads saved, largest fan-in {max(map(int, counts['fan_in']))};"
        f" every byte checked, table empty: {counts['pending'] == 0}"
    )


def report(name: str, fetcher: StoreFetcher, seconds: float) -> None:
    mib = fetcher.blocks * BLOCK_BYTES / (1 << 20)
    print(f"{name:22}{fetcher.gets:>8}{fetcher.blocks:>14}{mib:>8.1f}{seconds:>10.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", type=Path, help="Mooncake JSON; without it a store is started on loopback"
    )
    parser.add_argument("--callers", type=int, default=32)
    parser.add_argument("--shared", type=int, default=32, help="blocks of the common prefix")
    parser.add_argument("--own", type=int, default=2, help="blocks that each caller alone needs")
    parser.add_argument("--backend", choices=["asyncio", "trio"], default="asyncio")
    args = parser.parse_args()
    runs = block_runs(args.callers, args.shared, args.own)
    with a_store(args.config) as store:
        keys = list(dict.fromkeys(key for run in runs for key in run))
        code = store.put_batch(keys, [content(key) for key in keys])
        if code != 0:
            raise SystemExit(f"cannot write the blocks: Mooncake's code {code}")
        try:
            anyio.run(compare, store, runs, backend=args.backend)
        finally:
            if args.config is not None:  # a store that outlives this program
                store.remove_by_regex(f"^{keys[0].split('/prefix')[0]}/.*", True)


if __name__ == "__main__":
    main()
