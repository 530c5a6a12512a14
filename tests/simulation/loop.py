"""The engine's loop: schedule, launch, forward, output; as `EngineCore.step_with_batch_queue` does it."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

from . import engine, groups, known, offload, ours, releases
from .checks import Checks
from .content import Hashes
from .events import Stream
from .lookup import Lookup
from .offload import OffloadWorker
from .other import Shelf
from .runner import Batch, Runner
from .store import Get, Store
from .violation import Crash, Failure, Violation
from .worker import Worker

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutput

    from .setup import Setup


class Loop:
    """One engine, step by step."""

    def __init__(self, setup: Setup, log: Callable[[str], None], store: Store | None = None) -> None:
        self.setup, self.log = setup, log
        self.now = 1000.0
        self.steps = 0
        self.hashes = Hashes(setup.block_size)
        self.store = store or Store(setup.block_size)
        self.shelf = Shelf(setup, self.hashes.of, log)
        self.salts: dict[str, str | None] = {}
        self.lookup = Lookup(lambda: self.now)
        self.workers: list[Any] = []
        self.computed: Counter[str] = Counter()
        self.loaded: Counter[str] = Counter()
        self.failed_gets: Counter[str] = Counter()
        self.short_reads = self.reset_running = False
        self.aborting: list[str] = []
        """Aborts that come while a batch is on its way: carried out before its output."""
        self.busy = False
        """The last step has scheduled or reported something."""
        with (
            ours.no_refusal(setup.unsupported),
            ours.beside("OtherConnector"),
            ours.asked_first(setup.asked_first),
        ):
            self.scheduler, self._connectors = engine.build(setup, self._worker, self.lookup, self.shelf)
        self.connector: Any = engine.child(self.scheduler.connector, *engine.STORES)
        self.tier = engine.tier(setup, self.scheduler, self.workers)
        """What is in CPU memory, where the store is that."""
        if setup.mode != "stock":
            on = self.connector.mode.value == setup.mode
            assert on is not setup.refused, self.connector.passes_through
        self._depth = engine.batches_in_flight(setup)
        self._batches: deque[Batch] = deque()
        self._aggregator = KVOutputAggregator(setup.workers) if setup.workers > 1 else None
        memories = [worker.memory for worker in self.workers]
        lookahead = self.scheduler.num_lookahead_tokens
        self.runner = Runner(memories, self.salts, groups.attended(setup), setup.drafts, lookahead)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.checks = Checks(self.pool, memories, self.hashes)
        self.checks.unwritten = self._unwritten
        self.stream = Stream()
        self._late: dict[str, int] = {}
        """Who waits beyond its deadline -> passes since then."""
        self._finish_set_up()

    def _worker(self, vllm_config: Any, kv_cache_config: Any, rank: int) -> Any:
        worker: Any
        if self.setup.store == "mooncake":
            worker = Worker(
                vllm_config, kv_cache_config, self.setup, rank, self.store, self.hashes.of, self.log
            )  # fmt: skip
        else:
            worker = OffloadWorker(self.setup, rank, self.store, self.log)
            worker.drain = self._drain
        worker.ended = self._ended
        self.workers.append(worker)
        return worker

    def _finish_set_up(self) -> None:
        for worker, connector in zip(self.workers, self._connectors, strict=True):
            worker.beside = engine.child(connector, "OtherConnector")
            if worker.beside is not None:
                worker.beside.worker = worker
        self.lookup.worker, self.lookup.wipe = self.workers[0], self._wipe
        ours.set_clock(self.connector, lambda: self.now)
        if self.setup.warm:
            ours.warm(self.connector, self.setup)
        if self.tier is not None:
            child: Any = engine.child(self.scheduler.connector, *engine.OFFLOADING.values())
            stock_reset = child.reset_cache

            def reset_cache() -> Any:
                self._wipe()
                return stock_reset()

            child.reset_cache = reset_cache
        if self.setup.heal:
            known.heal(self.scheduler)
        outermost: Any = self.scheduler.connector
        stock_output = outermost.update_connector_output

        def update_connector_output(out: KVConnectorOutput) -> None:
            stock_output(out)
            # In one order in every process: the order of a set of strings is not.
            out.finished_recving = sorted(out.finished_recving or ()) or None  # type: ignore[assignment]

        outermost.update_connector_output = update_connector_output
        if self.scheduler.use_eagle_block_drop:
            self._watch_hits()
        self.scheduler.kv_event_publisher.publish = self.stream.take

    def _watch_hits(self) -> None:
        """With EAGLE, whoever starts behind blocks from outside starts behind one less than the store has: a
        drafter's last slot of a block is right only if the next block is the same."""
        stock_match = self.connector.get_num_new_matched_tokens
        stock_allocated = self.connector.update_state_after_alloc
        local: dict[str, int] = {}

        def match(request: Any, num_local_tokens: int) -> Any:
            local[request.request_id] = num_local_tokens
            return stock_match(request, num_local_tokens)

        def allocated(request: Any, blocks: Any, num_external_tokens: int) -> None:
            stock_allocated(request, blocks, num_external_tokens)
            hit = local.pop(request.request_id, 0) + num_external_tokens
            following = request.block_hashes[hit // self.setup.block_size :][:1]
            if num_external_tokens and not any(h.hex() in self.store.known for h in following):
                raise Violation(f"{request.request_id} starts behind {hit} tokens, the last not proved")

        self.connector.get_num_new_matched_tokens = match
        self.connector.update_state_after_alloc = allocated

    # -- a step ------------------------------------------------------------------------------------------

    def step(self) -> list[EngineCoreOutput]:
        """One turn of the engine's loop; time passes after it."""
        try:
            outputs = self._step()
        except Failure:
            raise
        except Exception as error:
            raise Crash(f"{type(error).__name__}: {error}") from error
        self.now += self.setup.step_s
        return outputs

    def _step(self) -> list[EngineCoreOutput]:
        self.steps += 1
        self.busy = False
        self.pump()
        if self.scheduler.has_requests():
            complete = self.checks.cached()
            output = self.scheduler.schedule()
            wrong = ours.wrong_waits(self.connector)
            late = ours.late(self.connector, self.now)
            self._late = {request: self._late.get(request, 0) + 1 for request in late}
            # The worker is asked once at a time, and its answer comes with the oldest batch in flight: who is
            # late just after it was asked is heard in the round after that.
            most = 2 * self._depth + 1
            wrong += [f"{r} waits beyond its deadline" for r, n in self._late.items() if n > most]
            if wrong:
                raise Violation(f"{'; '.join(wrong)}: {ours.waits_for(self.connector)}")
            batch = self._launch(output)
            batch.complete = complete
            self._batches.append(batch)
            if not self.setup.late_forwards:
                self._forward(batch)
            if len(self._batches) < self._depth and (batch.shares or self.scheduler.has_requests()):
                return []
        elif not self._batches:
            return []
        return self._output(self._batches.popleft())

    def pump(self) -> None:
        for worker in self.workers:
            worker.pump(self.now)

    def _launch(self, output: SchedulerOutput) -> Batch:
        if output.num_scheduled_tokens:
            self.busy = True
            self.computed.update(output.num_scheduled_tokens)
            self.log("computes " + ", ".join(f"{r} {n}" for r, n in output.num_scheduled_tokens.items()))
        if output.preempted_req_ids:
            self.log(f"preempted: {', '.join(sorted(output.preempted_req_ids))}")
        batch = self.runner.launch(output)
        if self.setup.token_s and output.total_num_scheduled_tokens:
            self.now += self.setup.token_s * output.total_num_scheduled_tokens
            self.pump()
        for worker, connector in zip(self.workers, self._connectors, strict=True):
            metadata = output.kv_connector_metadata
            if self.tier is not None and self.setup.workers > 1:
                metadata = pickle.loads(pickle.dumps(metadata))  # each is a process, and changes its own
            connector.handle_preemptions(metadata)
            worker.forward = batch
            batch.reports.append(self._ask(connector, output, metadata))
        return batch

    def _ask(self, connector: Any, output: SchedulerOutput, metadata: Any) -> KVConnectorOutput:
        connector.bind_connector_metadata(metadata)
        connector.start_load_kv(None)
        connector.wait_for_save()
        out = releases.report(connector, output.finished_req_ids)
        connector.clear_connector_metadata()
        return out

    def _forward(self, batch: Batch) -> None:
        if not batch.done:
            self._not_again(batch)
            self.runner.forward(batch)
            self.checks.cache()

    def _drain(self, batches: Sequence[Batch]) -> None:
        """A worker waits for these forwards, in the midst of the launch of the next."""
        for batch in batches:
            if not batch.done:
                self._not_again(batch)
                self.runner.forward(batch)

    def _not_again(self, batch: Batch) -> None:
        """No forward writes once more to a block that others use and that was in the prefix cache before this
        pass: what is adopted is complete. The blocks of a failed load that were not there are computed, and
        may be shared in that very pass, as any that vLLM computes."""
        if self.setup.mode not in ("attach", "park"):
            return
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        for share in batch.shares:
            for group, block in self.runner.rewritten(share):
                tables = managers[group].req_to_blocks
                users = [r for r, blocks in tables.items() if any(b.block_id == block for b in blocks)]
                if len(users) > 1 and block in batch.complete:
                    raise Violation(f"{share.request} computes into block {block} again, which {users} share")

    def _output(self, batch: Batch) -> list[EngineCoreOutput]:
        self._forward(batch)
        aborting, self.aborting = self.aborting, []
        for request in aborting:
            self.abort(request)
        answer = self._answer(batch)
        out = answer.kv_connector_output
        if out is not None and (out.finished_recving or releases.failed(out)):
            self.busy = True
            self.log(f"reported: {sorted(out.finished_recving or ())}, failed: {releases.failed(out)}")
        found = self.scheduler.update_from_output(batch.output, answer)
        if self.tier is not None:
            offload.check(self.tier, self.workers, self.hashes.of)
        if batch.proposed and not self.setup.async_scheduling:
            drafts = DraftTokenIds(list(batch.proposed), list(batch.proposed.values()))
            self.scheduler.update_draft_token_ids(drafts)
        self.checks.cache()
        return list(itertools.chain.from_iterable(o.outputs for o in found.values()))

    def _answer(self, batch: Batch) -> ModelRunnerOutput:
        requests = list(batch.output.num_scheduled_tokens)
        answers = []
        for report in batch.reports:
            assert isinstance(report, KVConnectorOutput)
            answers.append(
                ModelRunnerOutput(
                    req_ids=requests,
                    req_id_to_index={request: i for i, request in enumerate(requests)},
                    sampled_token_ids=[batch.sampled.get(request, []) for request in requests],
                    pooler_output=[torch.ones(1) if r in batch.pooled else None for r in requests],
                    kv_connector_output=None if not requests and report.is_empty() else report,
                )
            )
        if self._aggregator is None:
            return answers[0]
        answer = self._aggregator.aggregate(answers)
        assert answer is not None
        return answer

    # -- what else happens -------------------------------------------------------------------------------

    def abort(self, request: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request, RequestStatus.FINISHED_ABORTED)

    @property
    def pending(self) -> bool:
        """Batches are on their way."""
        return bool(self._batches)

    def next_event(self) -> float:
        return min(worker.next_event() for worker in self.workers)

    def _ended(self, get: Get) -> None:
        if get.rank == 0 and not get.failed:
            self.loaded[get.request] += get.tokens
        if get.failed:
            self.failed_gets[get.request] += 1
            self.short_reads |= get.fault == "short"
        if not any(get.request == other.request for worker in self.workers for other in worker.in_air()):
            self.store.over(get.request)

    def _wipe(self) -> bool:
        """The connector is told to reset: the store is emptied, and what is in the air is out of date."""
        self.store.held.clear()
        if self.setup.mode == "attach":  # in the other modes a leader goes on, as in stock vLLM
            for worker in self.workers:
                for get in worker.in_air():
                    get.stale = True
        return True

    def _unwritten(self) -> set[int]:
        size = self.setup.block_size
        coming = [batch for batch in self._batches if not batch.done]
        computed = [share.written(size) for batch in coming for share in batch.shares]
        loaded = [blocks for batch in coming for blocks, _ in batch.before]
        return set(itertools.chain.from_iterable([*computed, *loaded]))
