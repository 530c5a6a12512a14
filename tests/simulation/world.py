"""A simulated engine that a test drives step by step. How to use it: `tests/simulation/__init__.py`."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import Mock

import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.kv_cache_utils import tensor_data
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request

from . import known, ours
from .asked import Asked
from .content import in_group
from .groups import group_of
from .loop import Loop
from .setup import Setup
from .store import Fault
from .violation import Failure, Stuck, Violation

PLACEHOLDER = 7
"""The token that vLLM has where an image is."""
MAX_STEPS = 1500
"""Steps to the end of a run; one that needs more is stuck. The longest of thousands that are not: 254."""


class ScriptedStore:
    """`world.store`: what is in the store, and what is wrong with it."""

    def __init__(self, world: World) -> None:
        self._world = world

    def put(self, prompt: Sequence[int], salt: str | None = None) -> None:
        """Have the whole blocks of this prompt in the store."""
        if self._world.loop.tier is not None:
            self._world.loop.tier.put(self._blocks(prompt, salt))
            return
        for block_hash, contents in self._blocks(prompt, salt).items():
            for key in self._keys(block_hash):
                self._world.loop.store.put(key, in_group(contents, group_of(key)))

    def lend(self, prompt: Sequence[int]) -> None:
        """Have the whole blocks of this prompt where the other connector finds them."""
        self._world.loop.shelf.held.update(self._blocks(prompt, None))

    def evict(
        self, prompt: Sequence[int], block: int, salt: str | None = None, group: int | None = None
    ) -> None:
        """Lose this block of the prompt, on all ranks, in one KV-cache group or in all."""
        for key in self._keys(list(self._blocks(prompt, salt))[block]):
            if group in (None, group_of(key)):
                self._world.loop.store.held.pop(key, None)

    def fail(self, prompt: Sequence[int], block: int, kind: str = "error", salt: str | None = None) -> None:
        """From now on every Get of this block fails: `error` or `short`."""
        self._world.loop.store.broken[list(self._blocks(prompt, salt))[block].hex()] = kind

    def mend(self) -> None:
        self._world.loop.store.broken.clear()

    def has(self, prompt: Sequence[int], block: int, salt: str | None = None) -> bool:
        held = self._world.loop.store.held
        return all(key in held for key in self._keys(list(self._blocks(prompt, salt))[block]))

    def _blocks(self, prompt: Sequence[int], salt: str | None) -> dict[bytes, list[int]]:
        return self._world.loop.hashes.of_prompt(prompt, salt, self._world.setup.block_size)

    def _keys(self, block_hash: bytes) -> list[str]:
        of_groups = self._world.loop.workers[0]._lookup_key_prefixes
        return [f"{prefix}@{block_hash.hex()}" for prefixes in of_groups for prefix in prefixes]


class World:
    """An engine with its store and its clients.

    Attributes:
        setup: what it is like.
        now: virtual seconds; each step takes `setup.step_s`.
        store: see `ScriptedStore`.
        events: what has happened so far: (time, sentence), if `verbose`.
    """

    def __init__(
        self, setup: Setup | None = None, *, verbose: bool = True, beside: World | None = None
    ) -> None:
        """`beside`: another engine over the same store, with a clock of its own; all else is not shared."""
        self.setup = setup or Setup()
        self.events: list[tuple[float, str]] = []
        self._verbose = verbose
        self.loop = Loop(self.setup, self._log, beside.loop.store if beside is not None else None)
        self.store = ScriptedStore(self)
        self.requests: dict[str, Asked] = {}
        self.scheduler, self.workers = self.loop.scheduler, self.loop.workers

    # -- clients -----------------------------------------------------------------------------------------

    def prompt(self, letters: str, tail: int = 1, mark: int = 0) -> list[int]:
        """A block for each letter and `tail` more tokens; another `mark`, another tail."""
        size = self.setup.block_size
        blocks = [1000 * ord(letter) + i for letter in letters for i in range(size)]
        return blocks + [500 + 10 * mark + i for i in range(tail)]

    def add(
        self,
        prompt: Sequence[int],
        *,
        name: str | None = None,
        tokens: int = 1,
        priority: int = 0,
        salt: str | None = None,
        read_cache: bool = True,
        resumable: bool = False,
        images: Mapping[str, range] | None = None,
        embeds: bool = False,
        pooling: bool = False,
        adapter: str | None = None,
        structured: bool = False,
    ) -> str:
        """A request arrives; returns its name.

        Args:
            read_cache: no: it must compute all (prompt logprobs).
            resumable: it is fed in chunks, see `feed` and `close`.
            images: name -> where it is in the prompt.
            embeds: the prompt is given as embeddings.
            pooling: it wants no tokens.
            adapter: LoRA.
            structured: it waits until its grammar is there, see `grammar_ready`.
        """
        name = name or f"r{len(self.requests) + 1}"
        self.requests[name] = Asked([(list(prompt), tokens * (not pooling))], adapter or salt, not resumable)
        self.loop.salts[name] = adapter or salt
        more: dict[str, Any] = {"cache_salt": salt}
        if adapter:
            more["lora_request"] = LoRARequest(adapter, 1 + zlib.crc32(adapter.encode()), f"/{adapter}")
        if images:
            prompt = self._with_placeholders(name, prompt, images)
            more["mm_features"] = [
                MultiModalFeatureSpec(None, "image", image, PlaceholderRange(where.start, len(where)))
                for image, where in images.items()
            ]
        if embeds:
            more["prompt_embeds"] = self._embedded(name, prompt)
        if pooling:
            self.loop.runner.pooling.add(name)
            more["pooling_params"] = PoolingParams(task="embed")
        sampling: dict[str, Any] = {"skip_reading_prefix_cache": not read_cache}
        if structured:
            sampling["structured_outputs"] = StructuredOutputsParams(regex="(yes|no)*")
        self._arrive(name, prompt, tokens, priority, sampling, **more)
        self._log(f"{name} arrives: {len(prompt)} tokens, wants {tokens}")
        return name

    def _with_placeholders(self, name: str, prompt: Sequence[int], images: Mapping[str, range]) -> list[int]:
        tokens = list(prompt)
        self.loop.runner.prompts[name] = list(prompt)
        for image, where in images.items():
            self.loop.hashes.images[image] = tokens[where.start : where.stop]
            tokens[where.start : where.stop] = [PLACEHOLDER] * len(where)
        return tokens

    def _embedded(self, name: str, prompt: Sequence[int]) -> torch.Tensor:
        size = self.setup.block_size
        embeds = torch.tensor(prompt, dtype=torch.float64)[:, None]
        self.loop.runner.prompts[name] = list(prompt)
        for start in range(0, len(prompt) + size, size):  # blocks of generated tokens have one too
            digest = hashlib.sha256(tensor_data(embeds[start : start + size])).digest()  # as vLLM
            self.loop.hashes.embeds[digest] = list(prompt[start : start + size])
        return embeds

    def grammar_ready(self, request: str) -> None:
        """The grammar of a `structured` request has been compiled; it takes any token."""
        asked = self.scheduler.requests[request].structured_output_request
        assert asked is not None
        asked.grammar = Mock(accept_tokens=lambda _request, _tokens: True, is_terminated=lambda: False)

    def feed(self, request: str, prompt: Sequence[int], *, tokens: int = 1) -> None:
        """The next chunk of a resumable request."""
        self.requests[request].chunks.append((list(prompt), tokens))
        self._arrive(request, prompt, tokens)
        self._log(f"{request} gets {len(prompt)} tokens more, wants {tokens}")

    def close(self, request: str) -> None:
        """A resumable request has had its last chunk."""
        asked = self.requests[request]
        asked.closed = True
        self._log(f"{request} gets no more")
        if asked.answered == len(asked.chunks):
            asked.ended = asked.ended or "length"
        self._arrive(request, [0], 1)

    def _arrive(
        self,
        name: str,
        prompt: Sequence[int],
        tokens: int,
        priority: int = 0,
        sampling: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        asked, pooling = self.requests[name], more.pop("pooling_params", None)
        parameters = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, **(sampling or {}))
        request = Request(
            name,
            list(prompt) if "prompt_embeds" not in more else None,
            parameters if pooling is None else None,
            pooling,
            arrival_time=self.now + len(self.requests) * 1e-6,
            priority=priority,
            block_hasher=self.loop.hashes.hasher,
            resumable=not asked.closed,
            **more,
        )
        self.scheduler.add_request(request)

    def abort(self, request: str, *, in_step: bool = False) -> None:
        """The client leaves; `in_step`: while the next batch is on its way."""
        if self.requests[request].ended is None:
            self._log(f"{request} is aborted" + (" during the next step" if in_step else ""))
            self.requests[request].ended = "abort"
            if in_step:
                self.loop.aborting.append(request)
            else:
                self.loop.abort(request)

    def status(self, request: str) -> str:
        """vLLM's status, or how it has ended."""
        found = self.scheduler.requests.get(request)
        ended = self.requests[request].ended
        return ended or (found.status.name if found is not None else "gone")

    def said(self, request: str) -> list[int]:
        """Tokens so far."""
        return self.requests[request].said

    def tokens_computed(self, request: str) -> int:
        """Tokens scheduled for it, decoding included; what is computed twice counts twice."""
        return self.loop.computed[request]

    def tokens_loaded(self, request: str) -> int:
        """Tokens that its own Gets have brought (on rank 0)."""
        return self.loop.loaded[request]

    def tokens_borrowed(self, request: str) -> int:
        """Tokens that the other connector's loads have brought (on rank 0)."""
        return self.loop.shelf.loaded[request]

    def layer_counters(self) -> dict[str, Any]:
        """The layer's own counters; empty without a layer."""
        return ours.counters(self.loop.connector)

    # -- loads -------------------------------------------------------------------------------------------

    @property
    def loads(self) -> list[str]:
        """Requests with a load in the air or queued, each once."""
        return list(dict.fromkeys(get.request for worker in self.workers for get in worker.in_air()))

    @property
    def gets(self) -> int:
        """Gets started so far (on rank 0)."""
        return sum(self.workers[0].attempts.values())

    @property
    def failed_gets(self) -> Any:
        """Request -> its loads that have failed, each rank's counted."""
        return self.loop.failed_gets

    @property
    def lost_saves(self) -> int:
        """Saves that ended in an assertion (on rank 0), see `known.PADDING_SAVED`."""
        return self.workers[0].lost_saves

    @property
    def lookups(self) -> int:
        """Lookups that the store has been asked for."""
        return self.loop.lookup.count

    def fault(self, kind: str, rank: int | None = None) -> None:
        """The next request to start a Get meets this (`store.KINDS`), on one rank or all."""
        self._log(f"the next Get meets: {kind}" + ("" if rank is None else f" on rank {rank}"))
        self.loop.store.faults.append(Fault(kind, rank))

    def hang(self, request: str) -> None:
        """This request's Get, in the air or to come, does not end until `land`."""
        self.loop.store.faults.append(Fault("hang", None, request))
        self._due(request, float("inf"))

    def land(self, request: str | None = None) -> None:
        """Held and hanging Gets end now (all, if no request is named); their reports are on the way."""
        store = self.loop.store
        store.faults = [f for f in store.faults if f.kind != "hang" or request not in (None, f.request)]
        self._due(request, self.now)
        self.loop.pump()

    def _due(self, request: str | None, due: float) -> None:
        for worker in self.workers:
            for lane in worker.lanes:
                if lane.get is not None and request in (None, lane.get.request):
                    lane.get.due = min(due, lane.get.due) if due == self.now else due
            for load in worker.beside.in_air if worker.beside is not None else ():
                if request in (None, load.request):
                    load.due = min(due, load.due) if due == self.now else due

    # -- operators and time ------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self.loop.now

    def advance(self, seconds: float) -> None:
        self.loop.now += seconds

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            try:
                outputs = self.loop.step()
            except Failure as failure:
                raise self._explained(failure) from failure.__cause__
            for output in outputs:
                self._heard(output)

    def reset(self, *, running: bool = False, connector: bool = False) -> bool:
        """reset_prefix_cache; False where vLLM refuses, or says that it has not worked."""
        self._log(f"reset: running {running}, connector {connector}")
        self.loop.reset_running |= running
        try:
            return self.scheduler.reset_prefix_cache(running, connector)
        except RuntimeError:
            return False
        except AssertionError:
            # The caller of OffloadingConnector's second reset in a row is told so; the engine goes on.
            if self.setup.store != "offloading":
                raise
            self._log("the connector refuses to be reset twice within a step")
            return False

    def pause(self, *, everything: bool = False) -> None:
        """No new requests are scheduled, or none at all."""
        self._log("paused" + (" altogether" if everything else ""))
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL if everything else PauseState.PAUSED_NEW)

    def sleep(self, mode: str = "abort") -> bool:
        """As `EngineCore.sleep(level=1, mode)`: pause, let what goes on come to its end, reset all caches.

        Returns False where vLLM raises because blocks are in use; the engine stays paused then.
        """
        self._log(f"sleep, mode {mode}")
        if mode == "abort":
            for request in self.requests:
                self.abort(request)
        self.pause(everything=mode == "keep")
        self._until_idle()
        return self.reset(running=True, connector=True)

    def _until_idle(self) -> None:
        steps = 0
        while self.scheduler.has_requests() or self.loop.pending:
            self.step()
            steps += 1
            if steps > MAX_STEPS:
                raise self._explained(Stuck(self._who_waits(steps)))

    def resume(self) -> None:
        """Also what `wake_up` does to the scheduler."""
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def run(self, max_steps: int = MAX_STEPS) -> None:
        """To the end: what is held, hung or paused goes on; then nothing may be wrong, lost or left over."""
        self.resume()
        for worker in self.workers:
            worker.holding = False
        self.land()
        steps, idle = 0, self.setup.step_s
        while self.scheduler.has_requests() or self.loop.pending:
            self.step()
            steps += 1
            idle = self.setup.step_s if self.loop.busy else min(idle * 2, 1.0)
            if not self.loop.busy:
                self.loop.now = max(self.now, min(self.loop.next_event(), self.now + idle))
            if steps > max_steps:
                raise self._explained(Stuck(self._who_waits(steps)))
        try:
            self.check_end()
        except Failure as failure:
            raise self._explained(failure) from None

    def check_end(self) -> None:
        """Nothing is wrong, lost or left over, now that every request has ended. Raises Violation."""
        for name, asked in self.requests.items():
            if asked.ended == "abort":
                continue
            if asked.ended == "error":
                if self.setup.recompute or not (self.failed_gets[name] or self.loop.shelf.failed[name]):
                    raise Violation(f"{name} ends with an error, though no load of its own has failed")
                continue
            if asked.said != asked.right:
                raise Violation(f"{name} says {asked.said}, not {asked.right}, and ended: {asked.ended}")
        free = self.loop.pool.get_num_free_blocks()
        if free != self.setup.blocks:
            raise Violation(f"{self.setup.blocks - free} blocks are lost")
        if self.loop.tier is not None and (left := self.loop.tier.leftovers()):
            raise Violation(f"the connector to CPU memory remembers: {'; '.join(left)}")
        if left := ours.leftovers(self.loop.connector):
            raise Violation(f"the layer remembers: {'; '.join(left)}")
        if self.setup.check_events:
            self.loop.stream.events += self.loop.pool.take_events()
            self.loop.stream.check(self.loop.checks.copies())

    # -- stories -----------------------------------------------------------------------------------------

    def story(self) -> str:
        """What has happened so far, a line each."""
        return "\n".join(f"{when - 1000:8.2f}  {what}" for when, what in self.events)

    def _log(self, what: str) -> None:
        if self._verbose:
            self.events.append((self.loop.now if hasattr(self, "loop") else 1000.0, what))

    def _heard(self, output: Any) -> None:
        asked = self.requests[output.request_id]
        reason = str(output.finish_reason) if output.finish_reason is not None else None
        if reason is not None and asked.ended not in (None, "abort"):
            raise self._explained(Violation(f"{output.request_id} ends twice"))
        if asked.hear(output.new_token_ids, reason):
            self._log(f"{output.request_id} ends: {asked.ended}")

    def _explained(self, failure: Failure) -> Failure:
        failure.known = failure.known or known.explain(failure, self)
        return failure

    def _who_waits(self, steps: int) -> str:
        lines = [f"after {steps} steps and {self.now - 1000:.1f} s:"]
        for request in self.scheduler.requests.values():
            blocks = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
            lines.append(
                f"  {request.request_id}: {request.status.name}, {request.num_computed_tokens} of"
                f" {request.num_tokens} tokens, blocks {blocks}, preempted {request.num_preemptions} times"
            )
        lines += [f"  in the air on rank {get.rank}: {get}" for w in self.workers for get in w.in_air()]
        lines.append(f"  free blocks: {self.loop.pool.get_num_free_blocks()} of {self.setup.blocks}")
        lines.append(f"  {ours.waits_for(self.loop.connector)}")
        return "\n".join(lines)
