"""`OffloadingConnector` with its CPU tier: the real connector, manager and worker over simulated copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import (
    OffloadingWorker,
    ReqContext,
    TransferResult,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)

from .content import in_group
from .offload import LOAD, STORE, OffloadWorker, Slot

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

    from .setup import Setup


class Copies(OffloadingWorker):
    """Stands for `CPUOffloadingWorker`, whose `transfer_async` it follows."""

    def __init__(self, worker: OffloadWorker, connector_worker: Any, blocks_per_chunk: int) -> None:
        self._worker, self._connector_worker = worker, connector_worker
        self._blocks_per_chunk = blocks_per_chunk

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        self._worker.submit(STORE, job_id, self._pairs(src_spec, dst_spec), self._worker.before_this())
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        pairs = self._pairs(dst_spec, src_spec)
        whose = [(self._connector_worker._load_jobs[job_id], [block for block, _ in pairs])]
        self._worker.submit(LOAD, job_id, pairs, self._worker.before_this(), whose)
        return True

    def _pairs(self, gpu: GPULoadStoreSpec, cpu: Any) -> list[tuple[int, Slot]]:
        """The first and the last chunk of a group may be used in part."""
        blocks, chunks = [int(b) for b in gpu.block_ids], [int(c) for c in cpu.block_ids]
        pairs: list[tuple[int, Slot]] = []
        first_chunk = 0
        for count, index in zip(gpu.group_sizes, gpu.block_indices, strict=True):
            if not count:
                continue
            skipped = index % self._blocks_per_chunk
            for i in range(skipped, skipped + count):
                slot = (chunks[first_chunk + i // self._blocks_per_chunk], i % self._blocks_per_chunk)
                pairs.append((blocks[len(pairs)], slot))
            first_chunk += -(-(skipped + count) // self._blocks_per_chunk)
        assert len(pairs) == len(blocks)
        assert first_chunk == len(chunks)
        return pairs

    def get_finished(self) -> list[TransferResult]:
        self._worker.asked()
        ended = [*self._worker.reported(STORE), *self._worker.reported(LOAD)]
        return [TransferResult(transfer.number, True, len(transfer.copies), 0.001) for transfer in ended]

    def wait(self, job_ids: set[int]) -> None:
        self._worker.wait(lambda transfer: transfer.number in job_ids)


class NativeTier:
    """What the real `CPUOffloadingManager` says is in CPU memory."""

    def __init__(self, connector: Any, setup: Setup, workers: Sequence[OffloadWorker]) -> None:
        self._scheduler = connector.connector_scheduler
        self._manager = self._scheduler.manager
        self._setup, self._workers = setup, workers

    def put(self, blocks: dict[bytes, list[int]]) -> None:
        size, context = self._setup.chunk, ReqContext("put")
        hashes, contents = list(blocks), list(blocks.values())
        for first in range(0, len(hashes) // size * size, size):
            for config in self._scheduler.config.kv_group_configs:
                group = config.group_idx
                key = make_offload_key(hashes[first + size - 1], group)
                stored = self._manager.prepare_store([key], context)
                if stored is None:
                    return
                for chunk in stored.store_spec.block_ids:
                    for worker in self._workers:
                        for i in range(size):
                            worker.cpu[int(chunk), i] = in_group(contents[first + i], group)
                self._manager.complete_store(stored.keys_to_store, context)
        self._manager.on_request_finished(context)

    def entries(self) -> Iterator[tuple[bytes, int, Slot]]:
        for key, chunk in self._manager._policy.chunks.items():
            if chunk.is_ready:
                slot = (chunk.chunk_id, self._setup.chunk - 1)
                yield get_offload_block_hash(key), get_offload_group_idx(key), slot

    def leftovers(self) -> list[str]:
        names = ("_req_status", "_jobs", "_chunks_being_loaded", "_block_id_to_pending_jobs")
        left = [f"{name} = {value}" for name in names if (value := getattr(self._scheduler, name))]
        pinned = [c.chunk_id for c in self._manager._policy.chunks.values() if c.ref_cnt != 0]
        return left + [f"chunks {pinned} are pinned"] * bool(pinned)


def join(connector: Any, worker: OffloadWorker) -> None:
    """Have this connector's worker side copy in the simulation."""
    side = connector.connector_worker
    side.worker = Copies(worker, side, side.spec.blocks_per_chunk)
