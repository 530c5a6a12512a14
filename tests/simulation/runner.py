"""The model runner: which tokens and blocks a batch has, and what its forward reads, writes and says.

With speculative decoding a forward also computes tokens that a drafter has proposed, and keeps those that are
what the model says. A drafter with KV of its own (EAGLE, MTP) runs ahead in the slots that follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .content import after, describe, extend, in_group, next_token, root
from .violation import Violation

PADDING = -1
"""Where the scheduler does not know the drafts: the runner has them (asynchronous scheduling), or nobody."""

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from .groups import Attended
    from .memory import Memory


@dataclass
class Known:
    """A request, as the workers know it."""

    tokens: list[int]
    blocks: list[list[int]]
    """Of each KV-cache group."""
    contents: list[int]
    """What should be in the slots of `tokens`, in the first group; made as needed."""
    root: int
    drafts: list[int] = field(default_factory=list)
    """What the drafter proposes after the last of `tokens`."""


@dataclass
class Share:
    """One request's part of a batch."""

    request: str
    known: Known
    blocks: list[list[int]]
    first: int
    count: int
    drafts: list[int] = field(default_factory=list)
    """The last tokens of the share, as the scheduler knows them."""
    early: int = 0
    """At most so many tokens before `first` it may begin, if drafts that were counted in are rejected."""

    def written(self, block_size: int) -> list[int]:
        first = max(self.first - self.early, 0)
        span = slice(first // block_size, -(-(self.first + self.count) // block_size))
        return [block for group in self.blocks for block in group[span]]


@dataclass
class Batch:
    """A step on its way: launched, then done."""

    output: SchedulerOutput
    shares: list[Share] = field(default_factory=list)
    sampled: dict[str, list[int]] = field(default_factory=dict)
    proposed: dict[str, list[int]] = field(default_factory=dict)
    """Drafts to follow what has been sampled."""
    pooled: set[str] = field(default_factory=set)
    """Requests whose pooling is complete."""
    done: bool = False
    complete: set[int] = field(default_factory=set)
    """Blocks that were in the prefix cache before its pass."""
    before: list[tuple[list[int], Callable[[], None]]] = field(default_factory=list)
    """Loads within the step, before its forward: into which blocks, and what to do."""
    reports: list[object] = field(default_factory=list)
    """What each rank's connector has said at the launch."""

    def synchronize(self) -> None:
        """A save thread waits for the forward, as on a CUDA event."""
        assert self.done, "a save has been taken off the queue before its forward"


class Runner:
    """One for all ranks: they do the same, each in its own memory."""

    def __init__(
        self,
        memories: list[Memory],
        salt_of: dict[str, str | None],
        attended: list[Attended],
        drafts: int = 0,
        lookahead: int = 0,
    ) -> None:
        """`drafts`: the most that are proposed; `lookahead`: slots that the drafter writes to."""
        self.memories = memories
        self.attended = attended
        """Of each KV-cache group."""
        self._drafts, self._lookahead = drafts, lookahead
        self.prompts: dict[str, list[int]] = {}
        """Request -> its prompt with the images in it, or its embeddings: vLLM has placeholders there."""
        self.pooling: set[str] = set()
        """Requests that say nothing: their prompt is all there is."""
        self.strict = True
        """Raise at a wrong read; else go on with what was read."""
        self._salt_of = salt_of
        self.known: dict[str, Known] = {}

    def launch(self, output: SchedulerOutput) -> Batch:
        """The CPU's part: bring the requests up to date."""
        batch = Batch(output)
        for request_id in output.finished_req_ids:
            self.known.pop(request_id, None)
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            tokens = list(new.prefill_token_ids or new.prompt_token_ids or ())
            self._know(new.req_id, tokens, [list(blocks) for blocks in new.block_ids])
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            new_blocks = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                assert new_blocks is not None
                self._know(
                    request_id, cached.all_token_ids[request_id], [list(blocks) for blocks in new_blocks]
                )
            elif new_blocks is not None:
                for held, more in zip(self.known[request_id].blocks, new_blocks, strict=True):
                    held += more
            starts[request_id] = cached.num_computed_tokens[i]
        for request_id, count in output.num_scheduled_tokens.items():
            known = self.known[request_id]
            drafts = list(output.scheduled_spec_decode_tokens.get(request_id, ()))
            blocks = [list(group) for group in known.blocks]
            batch.shares.append(
                Share(request_id, known, blocks, starts[request_id], count, drafts, 2 * self._drafts)
            )
        return batch

    def forward(self, batch: Batch) -> None:
        """The GPU's part: read all that is before the new tokens, write them, say the next one."""
        for _, load in batch.before:
            load()
        for share in batch.shares:
            self._settle(share)
            known, first, end = share.known, share.first, share.first + share.count - len(share.drafts)
            assert len(known.tokens) >= end, f"{share.request}: {end} tokens scheduled of {len(known.tokens)}"
            self._expect(known, end)
            written, says = known.contents[first:end], []
            written += extend(written[-1], share.drafts)
            for rank, memory in enumerate(self.memories):
                mine = written
                for group, (attended, blocks) in enumerate(zip(self.attended, share.blocks, strict=True)):
                    start = attended(first)
                    seen = memory.read(blocks, start, first)
                    right = in_group(known.contents[start:first], group)
                    if seen != right:
                        mine = self._misread(share, rank, group, start, seen, right)
                for group, blocks in enumerate(share.blocks):
                    memory.write(blocks, first, in_group(mine, group), share.request)
                    if self._lookahead:
                        ahead = first + share.count
                        memory.scribble(blocks, ahead, ahead + self._lookahead, share.request)
                if not says or mine is not written:
                    says = _accepted(mine[end - first - 1 :], share.drafts)
            if end == len(known.tokens) and share.request in self.pooling:
                batch.pooled.add(share.request)
            elif end == len(known.tokens):
                known.tokens += says
                batch.sampled[share.request] = list(says)
                batch.proposed[share.request] = self._propose(known)
        batch.done = True

    def _settle(self, share: Share) -> None:
        """With batches in flight, the scheduler has taken all drafts for accepted and does not know the next
        ones; the runner knows."""
        known = share.known
        if self._drafts and share.first >= len(known.tokens):
            share.first = len(known.tokens) - 1
        if PADDING in share.drafts:
            share.drafts = [*known.drafts, *share.drafts][: len(share.drafts)]

    def _propose(self, known: Known) -> list[int]:
        """Drafts after what has been said: some are right. Which, and how many there are where that is not
        fixed, depends on the text alone."""
        self._expect(known, len(known.tokens))
        content = known.contents[-1]
        count = self._drafts if self._lookahead else content % (self._drafts + 1)
        known.drafts = []
        for _ in range(count):
            right = next_token(content)
            known.drafts.append(right if content % 3 else right + 1)
            content = after(content, known.drafts[-1])
        return known.drafts

    def rewritten(self, share: Share) -> list[tuple[int, int]]:
        """(group, block) where the first slot that it is about to write holds exactly that already."""
        self._settle(share)
        self._expect(share.known, share.first + 1)
        size, right = self.memories[0].block_size, share.known.contents[share.first : share.first + 1]
        blocks = [(group, blocks[share.first // size]) for group, blocks in enumerate(share.blocks)]
        held = self.memories[0].blocks
        return [(g, b) for g, b in blocks if held[b][share.first % size] == in_group(right, g)[0]]

    def _expect(self, known: Known, end: int) -> None:
        while len(known.contents) < end:
            before = known.contents[-1] if known.contents else known.root
            known.contents.append(after(before, known.tokens[len(known.contents)]))

    def _know(self, request_id: str, tokens: list[int], blocks: list[list[int]]) -> None:
        prompt = self.prompts.get(request_id, [])
        seen = [*prompt, *tokens[len(prompt) :]]
        self.known[request_id] = Known(seen, blocks, [], root(self._salt_of[request_id]))

    def _misread(
        self, share: Share, rank: int, group: int, start: int, seen: list[int], right: list[int]
    ) -> list[int]:
        """Wrong KV has been read: what is computed from it is wrong too, to the last token."""
        slot = next(i for i, (a, b) in enumerate(zip(seen, right, strict=True)) if a != b)
        size, where = self.memories[rank].block_size, f" of group {group}" if group else ""
        if self.strict:
            raise Violation(
                f"{share.request} reads a wrong slot on rank {rank}: token {start + slot}{where}, in block"
                f" {share.blocks[group][(start + slot) // size]}, is {describe(seen[slot])}, not"
                f" {describe(right[slot])}"
            )
        tokens = share.known.tokens[share.first : share.first + share.count - len(share.drafts)]
        return extend(hash(tuple(seen)), [*tokens, *share.drafts])


def _accepted(contents: list[int], drafts: list[int]) -> list[int]:
    """What the model says: the drafts that are right, and the token after them. `contents` are those of the
    token before the first draft, and of the drafts."""
    says: list[int] = []
    for content, draft in zip(contents, [*drafts, None], strict=True):
        says.append(next_token(content))
        if says[-1] != draft:
            break
    return says
