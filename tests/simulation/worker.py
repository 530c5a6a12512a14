"""One worker: the store's real worker, whose threads take turns in virtual time instead of running."""

from __future__ import annotations

import dataclasses
import queue
import threading
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import worker as real
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import KeyMetadata

from . import releases
from .memory import Memory
from .store import Get, RankStore, Store

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from .setup import Setup

SAVE_S = 0.01
"""A save on its thread. Its length hardly matters: it holds a reference to the blocks it reads."""
MODEL = "tiny"


@dataclasses.dataclass
class Lane:
    """One receive thread."""

    thread: real.KVCacheStoreRecvingThread
    get: Get | None = None
    meta: Any = None
    dead: bool = False
    """What it raised ends a thread."""


class Worker(real.MooncakeStoreWorker):
    """Rank `rank` of `setup.workers`; pipeline stages hold other layers and load for themselves."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        setup: Setup,
        rank: int,
        store: Store,
        right: Callable[[bytes, int], list[int]],
        log: Callable[[str], None],
    ) -> None:
        self.setup, self.rank, self.log = setup, rank, log
        self.memory = Memory(setup.blocks + 1, setup.block_size)
        self.shared = store
        self.store = RankStore(store, self.memory, rank, right, strict=setup.mode != "stock")
        self.attempts: dict[str, int] = {}
        self.forward: Any = None
        """The batch being launched: saves wait for it."""
        self._attributes(vllm_config, kv_cache_config)
        self._threads()
        self.lanes = [Lane(thread) for thread in self.kv_recv_threads]
        self.queued: list[Get] = []
        self.now = 0.0
        self.holding = setup.hold
        self._saves: list[tuple[float, Any]] = []
        self.lost_saves = 0
        self.beside: Any = None
        """The worker side of the other connector, if there is one."""

    def _attributes(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        """What the real constructor sets, without the store's connection."""
        setup = self.setup
        self.dp_rank = 0
        self.tp_size, self.tp_rank = setup.ranks, self.rank % setup.ranks
        self.pcp_size, self.pcp_rank = setup.pcp, self.rank // setup.ranks % setup.pcp
        self.pp_size, self.pp_rank = setup.stages, self.rank // setup.ranks % setup.stages
        self.dcp_size, self.dcp_rank = setup.dcp, self.tp_rank % setup.dcp
        self.kv_role = setup.role
        self.can_put = setup.role != "kv_consumer" or setup.save_decode
        self.load_async = setup.load_async
        self._capacity_only = False
        self.cache_config = vllm_config.cache_config
        self._is_hma_required = len(kv_cache_config.kv_cache_groups) > 1
        self.block_size = self.hash_block_size = setup.block_size
        self.num_layers, self.num_kv_head = 1, 6
        self.enable_kv_events = setup.events
        self.lookup_server = None
        self.kv_send_thread = None
        self.kv_recv_threads = []
        self.num_recv_threads = setup.lanes
        self.recv_request_queue = queue.Queue()
        self.finished_store_req = set()
        self._kv_connector_stats_lock = threading.Lock()
        self.kv_connector_stats = real.MooncakeStoreConnectorStats()
        self._kv_cache_config = kv_cache_config
        self.coord = releases.coordinator(kv_cache_config, vllm_config, self.block_size, self.hash_block_size)
        self._kv_cache_groups = list(self.coord.kv_cache_groups)
        self.store_tp_size = None
        self._group_tp_replication_factors = self._compute_group_tp_replication_factors()
        metadata = KeyMetadata(MODEL, self.tp_rank, self.pcp_rank, self.dcp_rank, self.pp_rank)
        self.token_dbs = releases.token_databases(self, metadata)
        for database in self.token_dbs:
            database.set_kv_caches_base_addr([0])
            database.set_block_len([setup.block_size])
        self._init_lookup_key_prefixes()

    def _threads(self) -> None:
        """The real threads, never started: their `_handle_request` is called."""
        common = (self.store, self.coord, self.token_dbs, self.block_size, self.tp_rank)
        if self.can_put:
            self.kv_send_thread = real.KVCacheStoreSendingThread(
                *common,
                self._group_tp_replication_factors,
                self.kv_role,
                threading.Event(),
                self.enable_kv_events,
            )
        self.kv_recv_threads = [
            real.KVCacheStoreRecvingThread(
                *common,
                threading.Event(),
                request_queue=self.recv_request_queue,
                **releases.known(real.KVCacheStoreRecvingThread, is_hma_required=self._is_hma_required),
            )
            for _ in range(self.num_recv_threads)
        ]

    # -- what the connector calls ------------------------------------------------------------------------

    def start_load_kv(self, metadata: Any) -> None:
        for meta in metadata.requests:
            if meta.load_spec is not None and meta.load_spec.can_load:
                get = self._get(meta)
                self.memory.queue_load(get.request, get.blocks)
                self.queued.append(get)
        super().start_load_kv(metadata)

    def _get(self, meta: Any) -> Get:
        """What the receive thread will ask for, in the order of the prompt: of windowed groups the window at
        the end."""
        first, end = meta.load_spec.vllm_cached_tokens, meta.load_spec.kvpool_cached_tokens
        get = Get(meta.req_id, self.rank, end - first, [], [])
        masks = self.coord.load_mask(meta.block_hashes, end)
        for database, mask, blocks in zip(self.token_dbs, masks, meta.block_ids, strict=True):
            for i in range(first // self.block_size, end // self.block_size):
                if mask[i]:
                    get.keys.append(database.key_for(meta.block_hashes[i]))
                    get.blocks.append(blocks[i])
        return get

    def wait_for_save(self, metadata: Any) -> None:
        if self.kv_send_thread is None:
            return
        for meta in metadata.requests:
            if meta.can_save:
                meta.current_event = self.forward
                self.kv_send_thread.add_request(meta)
                self._saves.append((self.now + SAVE_S, meta))

    def get_finished(self, finished_req_ids: set[str], meta: Any) -> tuple[set[str], set[str]]:
        finished = super().get_finished(finished_req_ids, meta)
        for lane in self.lanes:
            if lane.get is not None and lane.get.late and lane.get.due <= self.now:
                self._end(lane)
        return finished

    def close(self) -> None:
        """There is no store to disconnect from."""

    # -- time --------------------------------------------------------------------------------------------

    def pump(self, now: float) -> None:
        """Let the threads do what they would have done until `now`."""
        self.now = now
        for lane in self.lanes:
            while not lane.dead:
                free_at = now
                if lane.get is not None:
                    if lane.get.due > now or lane.get.late:
                        break
                    free_at = lane.get.due
                    self._end(lane)
                if self.recv_request_queue.empty():
                    break
                if not lane.dead:
                    self._start(lane, free_at)
        while self._saves and self._saves[0][0] <= now and self._saves[0][1].current_event.done:
            _, meta = self._saves.pop(0)
            assert self.kv_send_thread is not None
            got = self.kv_send_thread.request_queue.get_nowait()
            assert got is meta
            self._save(meta)
            if self.store.violation is not None:
                raise self.store.violation

    def _save(self, meta: Any) -> None:
        assert self.kv_send_thread is not None
        try:
            self.kv_send_thread._handle_request(meta)
        except AssertionError:
            if not self.setup.drafts:
                raise
            self.lost_saves += 1  # known.PADDING_SAVED
            self.log(f"the save of {meta.req_id} raises out of its thread on rank {self.rank}, which goes on")

    def next_event(self) -> float:
        """When something ends by itself; infinity if nothing does."""
        times = [lane.get.due for lane in self.lanes if lane.get is not None and not lane.dead]
        times += [due for due, meta in self._saves[:1] if meta.current_event.done]
        if self.beside is not None:
            times.append(self.beside.next_event())
        return min(times, default=float("inf"))

    def in_air(self) -> list[Get]:
        """Loads that have not ended, those queued included."""
        return [lane.get for lane in self.lanes if lane.get is not None and not lane.dead] + self.queued

    def _start(self, lane: Lane, now: float) -> None:
        lane.meta = self.recv_request_queue.get_nowait()
        get = lane.get = self.queued.pop(0)
        assert get.request == lane.meta.req_id
        setup = self.setup
        attempt = self.attempts[get.request] = self.attempts.get(get.request, 0) + 1
        draw = zlib.crc32(f"{setup.timing} {get.request} {attempt} {self.rank}".encode())
        get.due = now + setup.load_s * (1 + draw % 3) + setup.load_block_s * len(get.blocks)
        get.fault = self.shared.fault_of(get.request, self.rank)
        if draw % 4:
            get.found = {key: self.shared.held[key] for key in get.keys if key in self.shared.held}
        get.late = draw % 7 == 0 and get.fault not in (None, "hang")
        if self.holding or get.fault == "hang":
            get.due = float("inf")
        self.memory.start_load(get.blocks)
        self.log(
            f"Get of {get.request} starts on rank {self.rank}: {len(get.blocks)} blocks into {get.blocks}"
            + (f", fault: {get.fault}" if get.fault else "")
        )

    def _end(self, lane: Lane) -> None:
        get, meta = lane.get, lane.meta
        assert get is not None
        self.store.get = get
        try:
            lane.thread._handle_request(meta)
        except Exception:
            self.log(f"Get of {get.request} on rank {self.rank} raises out of its thread, which goes on")
        except BaseException:
            lane.dead = True
            self.log(f"Get of {get.request} ends its thread on rank {self.rank}")
        self.store.get = lane.get = lane.meta = None
        self.memory.end_load(get.blocks)
        self.log(f"Get of {get.request} ends on rank {self.rank}" + (", failed" if get.failed else ""))
        self.ended(get)

    def ended(self, get: Get) -> None:
        """Told of each load's end; the world sets it."""
