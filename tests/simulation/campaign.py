"""Many seeds of one configuration, and what came of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from . import seeds
from .setup import Setup
from .story import Story, start
from .violation import Failure


@dataclass
class Tally:
    """What so many runs have shown."""

    mode: str
    stories: int = 0
    steps: int = 0
    cpu_s: float = 0.0
    gets: int = 0
    tokens_loaded: int = 0
    tokens_computed: int = 0
    borrowed: int = 0
    """Tokens that the other connector has loaded, where there is one."""
    layer: Counter[str] = field(default_factory=Counter)
    """The layer's own counters, summed."""
    known: dict[str, list[int]] = field(default_factory=dict)
    """Known bug of vLLM's or the stock connector's -> seeds that met it."""
    failures: list[tuple[int, Failure]] = field(default_factory=list)
    """Seeds with a failure that nothing known explains."""

    def of(self, story: Story, seed: int) -> Failure | None:
        """Run one story and count it; returns the failure that nothing known explains."""
        began = time.process_time()
        world = start(story.setup)
        failure = None
        try:
            story.play(world)
        except Failure as caught:
            failure = caught
        self.cpu_s += time.process_time() - began
        self.stories += 1
        self.steps += world.loop.steps
        self.gets += world.gets
        self.tokens_loaded += sum(world.loop.loaded.values())
        self.tokens_computed += sum(world.loop.computed.values())
        self.borrowed += sum(world.loop.shelf.loaded.values())
        self.layer.update({k: v for k, v in world.layer_counters().items() if isinstance(v, int)})
        if failure is not None and failure.known is not None:
            self.known.setdefault(failure.known, []).append(seed)
            return None
        if failure is not None:
            self.failures.append((seed, failure))
        return failure

    def __str__(self) -> str:
        stories, steps = self.stories / self.cpu_s, self.steps / self.cpu_s
        lines = [
            f"{self.mode}: {self.stories} stories, {self.steps} steps ({stories:.0f} and {steps:,.0f} a CPU"
            f" second); {self.gets} Gets, {self.tokens_loaded} tokens loaded, {self.tokens_computed}"
            f" computed; failed: {len(self.failures)}"
        ]
        lines += [f"  known, {len(found)} (seed {found[0]}): {what}" for what, found in self.known.items()]
        return "\n".join(lines)


def run(
    mode: str,
    numbers: Iterable[int],
    *,
    stop_at_failure: bool = False,
    told: Callable[[Tally], None] = lambda _tally: None,
    **fixed: object,
) -> Tally:
    """The stories of these seeds; `fixed` fields of the set-up are as given. `told` hears of each."""
    tally = Tally(mode)
    start(Setup(mode="stock"))  # imports and vLLM's configuration, once: not part of the speed
    for seed in numbers:
        failure = tally.of(seeds.story(seed, mode, **fixed), seed)
        told(tally)
        if failure is not None and stop_at_failure:
            break
    return tally
