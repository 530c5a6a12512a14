"""A run as a list of things that happen: made from a seed, told in words, and run.

Each action names what it acts on, and does nothing where that is not there: so any of them may be left out
(`shrink.py`) and the rest still makes sense.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .setup import Setup

if TYPE_CHECKING:
    from .world import World


@dataclass(frozen=True)
class Put:
    """The store has the first blocks of this prompt."""

    letters: str


@dataclass(frozen=True)
class Lend:
    """The other connector has the first blocks of this prompt."""

    letters: str


@dataclass(frozen=True)
class Evict:
    letters: str
    block: int
    group: int | None = None
    """KV-cache group; None: all."""


@dataclass(frozen=True)
class Break:
    """Every Get of this block fails from now on."""

    letters: str
    block: int
    kind: str = "error"


@dataclass(frozen=True)
class Mend:
    """No key is broken any more."""


@dataclass(frozen=True)
class Add:
    name: str
    letters: str
    tail: int = 1
    mark: int = 0
    tokens: int = 1
    priority: int = 0
    salt: str | None = None
    read_cache: bool = True


@dataclass(frozen=True)
class Abort:
    name: str
    in_step: bool = False


@dataclass(frozen=True)
class Fault:
    """The next Get to start meets this."""

    kind: str
    rank: int | None = None


@dataclass(frozen=True)
class Land:
    """What hangs is let go."""


@dataclass(frozen=True)
class Reset:
    running: bool = False
    connector: bool = False


@dataclass(frozen=True)
class Pause:
    everything: bool = False


@dataclass(frozen=True)
class Resume:
    pass


@dataclass(frozen=True)
class Wait:
    seconds: float


@dataclass(frozen=True)
class Step:
    count: int = 1


Action = (
    Put | Lend | Evict | Break | Mend | Add | Abort | Fault | Land | Reset | Pause | Resume | Wait | Step
)  # fmt: skip


@dataclass(frozen=True)
class Story:
    """One engine and what happens to it; after the last action the world is run to its end."""

    setup: Setup
    actions: tuple[Action, ...]

    def run(self, *, verbose: bool = False) -> World:
        """The world at its end; raises Failure."""
        world = start(self.setup, verbose)
        self.play(world)
        return world

    def play(self, world: World) -> None:
        for action in self.actions:
            act(world, action)
        world.run()

    def with_setup(self, **changes: object) -> Story:
        return replace(self, setup=replace(self.setup, **changes))  # type: ignore[arg-type]

    def __str__(self) -> str:
        return "\n".join([repr(self.setup), *(f"  {action!r}" for action in self.actions)])


def start(setup: Setup, verbose: bool = False) -> World:
    from .world import World

    return World(setup, verbose=verbose)


def act(world: World, action: Action) -> None:
    """Do one thing."""
    match action:
        case Put(letters):
            world.store.put(world.prompt(letters))
        case Lend(letters):
            world.store.lend(world.prompt(letters))
        case Evict(letters, block, group):
            world.store.evict(world.prompt(letters), block, group=group)
        case Break(letters, block, kind):
            world.store.fail(world.prompt(letters), block, kind)
        case Mend():
            world.store.mend()
        case Add(name, letters, tail, mark, tokens, priority, salt, read_cache):
            prompt = world.prompt(letters, tail, mark)
            world.add(
                prompt, name=name, tokens=tokens, priority=priority, salt=salt, read_cache=read_cache
            )  # fmt: skip
        case Abort(name, in_step):
            if name in world.requests:
                world.abort(name, in_step=in_step)
        case Fault(kind, rank):
            world.fault(kind, rank)
        case Land():
            world.land()
        case Reset(running, connector):
            world.reset(running=running, connector=connector)
        case Pause(everything):
            world.pause(everything=everything)
        case Resume():
            world.resume()
        case Wait(seconds):
            world.advance(seconds)
            world.step()
        case Step(count):
            world.step(count)
