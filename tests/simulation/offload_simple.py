"""`SimpleCPUOffloadConnector`: the real connector, manager and worker over simulated copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .content import in_group
from .offload import LOAD, STORE, OffloadWorker, Slot, Transfer

if TYPE_CHECKING:
    from .setup import Setup


class Event:
    """Stands for the CUDA event behind a copy."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


class Copies:
    """Stands for `DmaCopyBackend`."""

    def __init__(self, worker: OffloadWorker, whose: Any) -> None:
        self._worker, self._whose = worker, whose
        self._events: dict[tuple[str, int], Event] = {}

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
        wait_event: object = None,
    ) -> None:
        direction = STORE if is_store else LOAD
        gpu, cpu = (src_blocks, dst_blocks) if is_store else (dst_blocks, src_blocks)
        copies = [(block, (slot, 0)) for block, slot in zip(gpu, cpu, strict=True)]
        after = self._worker.with_this() if is_store else []
        self._worker.submit(direction, event_idx, copies, after, () if is_store else self._whose(event_idx))
        event = self._events[direction, event_idx] = Event()
        events_list.append((event_idx, event))

    def poll(self) -> None:
        for direction in (STORE, LOAD):
            for transfer in self._worker.reported(direction):
                self._events.pop((direction, transfer.number)).done = True


def join(connector: Any, worker: OffloadWorker, scheduler_side: Any) -> None:
    """Have this connector's worker side copy in the simulation."""
    side, manager = connector.worker_handler, scheduler_side.scheduler_manager

    def whose(event: int) -> list[tuple[str, list[int]]]:
        """The worker knows which requests an event is for, not which of its blocks are whose."""
        loads = [*manager._reqs_to_load.items(), *manager._abandoned_reqs_to_load.items()]
        return [
            (request, list(s.transfer_meta.gpu_block_ids)) for request, s in loads if s.load_event == event
        ]

    copies = side._backend = Copies(worker, whose)

    def wait_for_save() -> None:
        """The real one, without the compute-done event: `Copies` waits for this step's forward."""
        metadata = side._connector_metadata
        if metadata is not None and metadata.store_gpu_blocks:
            copies.launch_copy(
                metadata.store_gpu_blocks,
                metadata.store_cpu_blocks,
                is_store=True,
                event_idx=metadata.store_event,
                events_list=side._store_events,
            )

    stock_finished = side.get_finished

    def get_finished(finished: set[str]) -> Any:
        worker.asked()
        copies.poll()
        return stock_finished(finished)

    def flush() -> None:
        """As `_flush_and_sync_all`, which waits for the events of each direction."""
        worker.wait(_all)
        copies.poll()
        for events, mark in ((side._load_events, "_load_hwm"), (side._store_events, "_store_hwm")):
            if events:
                setattr(side, mark, events[-1][0])
            events.clear()

    side.wait_for_save, side.get_finished, side._flush_and_sync_all = wait_for_save, get_finished, flush


def _all(_transfer: Transfer) -> bool:
    return True


class SimpleTier:
    """What the real `SimpleCPUOffloadScheduler` says is in CPU memory."""

    def __init__(self, connector: Any, setup: Setup, workers: Sequence[OffloadWorker]) -> None:
        self._manager = connector.scheduler_manager
        self._setup, self._workers = setup, workers

    def put(self, blocks: dict[bytes, list[int]]) -> None:
        from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

        pool = self._manager.cpu_block_pool
        for number, (block_hash, contents) in enumerate(blocks.items(), 1):
            for group in self._manager.prefix_cacheable_group_ids:
                key = make_block_hash_with_group_id(BlockHash(block_hash), group)
                if pool.cached_block_hash_to_block.get_one_block(key) is not None:
                    continue
                if not pool.get_num_free_blocks():
                    return
                (block,) = pool.get_new_blocks(1)
                pool._insert_block_hash(key, block, num_tokens=number * self._setup.block_size)
                for worker in self._workers:
                    worker.cpu[block.block_id, 0] = in_group(contents, group)
                pool.free_blocks([block])

    def entries(self) -> Iterator[tuple[bytes, int, Slot]]:
        for key, found in self._manager.cpu_block_pool.cached_block_hash_to_block._cache.items():
            for block in found.values() if isinstance(found, dict) else (found,):
                yield key[:-4], int.from_bytes(key[-4:], "big"), (block.block_id, 0)

    def leftovers(self) -> list[str]:
        names = (
            "_reqs_to_load",
            "_abandoned_reqs_to_load",
            "_load_event_to_reqs",
            "_pending_cpu_hits",
            "_store_event_to_blocks",
            "_abandoned_store_event_to_blocks",
            "_reqs_to_store",
            "_store_event_to_reqs",
            "_in_flight_store_gpu_blocks",
            "_pending_finished_stores",
            "_store_event_pending_counts",
        )
        left = [f"{name} = {value}" for name in names if (value := getattr(self._manager, name))]
        pinned = [b.block_id for b in self._manager.cpu_block_pool.blocks if b.ref_cnt > 0 and not b.is_null]
        return left + [f"CPU blocks {pinned} are pinned"] * bool(pinned)
